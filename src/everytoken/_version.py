"""The installed version, read when asked for."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version


def version() -> str:
    """Version of the installed package, or 'unknown' in a tree that was never installed."""
    try:
        return _version("everytoken")
    except PackageNotFoundError:
        return "unknown"
