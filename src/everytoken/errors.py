"""Errors that are meant for a person: they name the file, the value and the way out.

The command line prints them without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class EverytokenError(Exception):
    """An error that the user can fix; the message says how."""


class DataError(EverytokenError):
    """A dataset cannot be used as it is; the message says what to change."""


class MissingExtraError(EverytokenError, ImportError):
    """An optional dependency is not installed."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A short ' Did you mean …?' clause, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def need(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Args:
        module: import name, e.g. ``"matplotlib"``.
        extra: the extra of this package that installs it.
        why: what wants it, e.g. ``"labels show"``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{why} needs the package that provides '{module}', which is not installed.\n"
            f"Install it with: pip install 'everytoken[{extra}]'"
        ) from error
