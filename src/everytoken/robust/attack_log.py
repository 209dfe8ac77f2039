"""The log of an attack: one JSON line per image, appended batch by batch, from which a stopped attack goes on.

The first line says what was attacked and how; a log of something else is refused. A batch is appended by one write
after all of its attacks, and counts only if all its lines are there; what a kill left half-written is cut off. Batches
are the same in every run, so an attack that was stopped ends with the same log as one that was not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everytoken.errors import EverytokenError

Record = dict[str, Any]


class AttackLog:
    """A file of records; `batches` are the complete ones, from the first."""

    def __init__(self, path: Path, settings: Record, sizes: Sequence[int]) -> None:
        """
        Args:
            path: of the log; made if it is not there.
            settings: what decides the result.
            sizes: images in each batch.
        """
        self.path, self.batches = path, []  # type: Path, list[list[Record]]
        header = json.dumps(settings, sort_keys=True)
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        whole = lines[:-1]  # what follows the last newline was torn
        if whole:
            self._check(whole[0], settings)
        records = [_read(line) for line in whole[1:]]
        at, kept = 0, len(whole[0]) + 1 if whole else 0
        for size in sizes:
            part = records[at : at + size]
            if len(part) < size or any(r is None for r in part):
                break
            self.batches.append([r for r in part if r is not None])
            kept += sum(len(line) + 1 for line in whole[1 + at : 1 + at + size])
            at += size
        path.parent.mkdir(parents=True, exist_ok=True)
        if not whole:
            self._append(header.encode() + b"\n", fresh=True)
        elif kept < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(kept)

    def _check(self, line: bytes, settings: Record) -> None:
        there = _read(line) or {}
        if there != json.loads(json.dumps(settings)):
            other = [name for name in {**there, **settings} if there.get(name) != settings.get(name)]
            what = ", ".join(sorted(other)) or "its first line"
            raise EverytokenError(
                f"{self.path} is the log of another attack (it differs in {what}). "
                "Choose another --out, or delete the log."
            )

    def add(self, records: Sequence[Record]) -> None:
        """Append the records of the next batch."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        self._append(text.encode())
        self.batches.append(list(records))

    def _append(self, data: bytes, fresh: bool = False) -> None:
        with self.path.open("wb" if fresh else "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _read(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
