"""Predictions kept in a file with a note of what they belong to, and used again while the note is the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from everytoken.evaluation.accuracy import Predictions

_FIELDS = tuple(field.name for field in fields(Predictions))


def keep(path: Path, predictions: Predictions, note: str, skipped: Mapping[str, str] | None = None) -> None:
    """Write predictions and unreadable images (key -> reason) to an .npz file, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.new")
    arrays: dict[str, Any] = {name: getattr(predictions, name) for name in _FIELDS}
    with work.open("wb") as file:
        np.savez_compressed(file, note=note, skipped=json.dumps(dict(skipped or {})), **arrays)
    work.replace(path)


def kept(path: Path, note: str) -> tuple[Predictions, dict[str, str]] | None:
    """Predictions and unreadable images; None if there is no whole file with this very note."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["note"]) != note:
                return None
            skipped: dict[str, str] = json.loads(str(arrays["skipped"]))
            return Predictions(**{name: arrays[name] for name in _FIELDS}), skipped
    except (OSError, KeyError, ValueError, EOFError, BadZipFile, zlib.error):
        return None  # torn or of an older version: it is made again
