"""Errors that are meant for a person: they name the file, the value and the way out.

The command line prints them without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable
from types import ModuleType


class EverytokenError(Exception):
    """An error that the user can fix; the message says how."""


class DataError(EverytokenError):
    """A dataset cannot be used as it is; the message says what to change."""


class MissingExtraError(EverytokenError, ImportError):
    """An optional dependency is not installed."""


_NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime; also keeps it from writing a device id
    "ORT_TELEMETRY_DISABLED": "1",  # the same in other versions
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub and hf_xet, which reports every transfer
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # to Sentry
}


def no_telemetry() -> None:
    """Keep other packages from reporting to their makers. Call it before they are imported; what is set stays."""
    for name, value in _NO_TELEMETRY.items():
        os.environ.setdefault(name, value)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A short ' Did you mean …?' clause, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


PUBLISHED = False  # True once a release is on the package index: messages then name the package, not a clone


def install_command(extra: str) -> str:
    """What brings an extra."""
    return f"pip install 'everytoken[{extra}]'" if PUBLISHED else f"pip install '.[{extra}]' in a clone of everytoken"


def need(module: str, extra: str, why: str) -> ModuleType:
    """Import an optional dependency, without its telemetry, or say which extra brings it.

    Args:
        module: import name, e.g. ``"matplotlib"``.
        extra: the extra of this package that installs it.
        why: what wants it, e.g. ``"labels show"``.
    """
    no_telemetry()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{why} needs the package that provides '{module}', which is not installed.\n"
            f"Install it with: {install_command(extra)}"
        ) from error
