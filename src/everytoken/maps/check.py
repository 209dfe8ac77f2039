"""Verifying a store: every byte of every file, against the checksums that were made when it was written.

A file's SHA-256 says whether it is intact; for a shard that is not, the records' own CRC-32 name the
images. A single flipped bit is found wherever it is: scores, ids, sizes, keys, index, manifest. Keys that lead out of
a folder are a problem, too, whatever their checksum says. (``runs.jsonl``, the diary of the runs, has no checksum and
no effect.)

Cost: one sequential read of the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everytoken import files
from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.format import (
    INDEX,
    KEY_FILES,
    KEYS,
    MANIFEST,
    KeyTable,
    Manifest,
    ShardInfo,
    open_shard,
    read_sidecar,
    shard_name,
    sidecar,
    stays_inside,
)
from everytoken.maps.score_map import checksum


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written. `keys`: the images it concerns, when they are known."""

    file: str
    what: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.keys[:5])) + (f" and {len(self.keys) - 5} more" if len(self.keys) > 5 else "")
        return f"{self.file}: {self.what}" + (f": {shown}" if shown else "")


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`; `ok` when there are no problems."""

    path: Path
    images: int
    maps: int
    skipped: int
    bytes: int
    complete: bool
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Check every byte of the store at `path`.

    An unfinished store is checked as far as it goes. A folder that is no store raises a StoreError.

    Args:
        path: the store's folder.
        progress: called with (bytes read, bytes in all).
    """
    folder = Path(path)
    try:
        manifest = Manifest.read(folder)
    except StoreDamagedError as error:
        problem = Problem(MANIFEST, str(error).split("\n")[0])
        return Verdict(folder, 0, 0, 0, 0, False, (problem,))
    shards: dict[int, ShardInfo] = dict(enumerate(manifest.shards))
    problems: list[Problem] = []
    if not manifest.complete:
        sidecars = {i: read_sidecar(folder, manifest, i) for i in range(manifest.num_shards)}
        shards = {i: info for i, info in sidecars.items() if info is not None}
        problems = [
            Problem(sidecar(folder, i).name, "is damaged or does not fit its shard, which will be made again")
            for i, info in sidecars.items()
            if info is None and sidecar(folder, i).exists()
        ]
    try:
        table = KeyTable(folder, manifest.total)
    except StoreError:  # which file it is follows from the checksums
        table = None
    checks = [(name, _check_file(folder, manifest, table, name)) for name in manifest.checksums]
    checks += [(shard_name(i), _check_shard(folder, manifest, table, i, info)) for i, info in shards.items()]
    total = sum(_size(folder / name) for name, _ in checks)
    done = 0
    for name, check in checks:
        problems.extend(check)
        done += _size(folder / name)
        if progress is not None:
            progress(done, total)
    if not any(problem.file in KEY_FILES for problem in problems):
        problems.extend(_check_keys(table))
    records = sum(info.records for info in shards.values())
    skipped = sum(len(info.skipped) for info in shards.values())
    return Verdict(folder, manifest.total, records - skipped, skipped, total, manifest.complete, tuple(problems))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _intact(path: Path, sha256: str) -> bool:
    with files.disk_errors(path, "reading"):
        return files.sha256_of(path) == sha256


def _check_file(folder: Path, manifest: Manifest, table: KeyTable | None, name: str) -> Iterator[Problem]:
    """Check a file that is not a shard; when it holds keys, try to say which are wrong."""
    path = folder / name
    if not path.exists():
        yield Problem(name, "is missing")
    elif not _intact(path, manifest.checksums[name]):
        wrong = table.damaged() if table is not None and name in KEY_FILES else []
        yield Problem(name, "its bytes have changed" + (", which concerns" if wrong else ""), tuple(wrong))


def _check_keys(table: KeyTable | None) -> Iterator[Problem]:
    """What may be wrong with keys whose files are as they were written."""
    if table is None:
        yield Problem(KEYS, "does not fit the other files of keys, or the manifest")
        return
    if outside := tuple(key for key in table.iterate(check=False) if not stays_inside(key)):
        yield Problem(KEYS, "has keys that are not paths inside a folder; do not use this store", outside)
    if unlisted := tuple(table.damaged()):
        yield Problem(INDEX, "does not fit the keys", unlisted)


def _check_shard(
    folder: Path, manifest: Manifest, table: KeyTable | None, index: int, info: ShardInfo
) -> Iterator[Problem]:
    """Check a shard; when it is not intact, let the records' checksums name the images."""
    path = folder / shard_name(index)
    if path.exists() and _intact(path, info.sha256):
        return
    span = manifest.shard_range(index)
    if table is None:
        yield Problem(path.name, f"its bytes have changed (images {span.start} to {span.stop - 1} of the plan)")
        return
    keys = tuple(table.iterate(span.start, span.stop, check=False))
    try:
        rows = open_shard(folder, manifest, index)
    except StoreDamagedError as error:
        what = str(error).split("\n")[0].removeprefix(f"{path} ")
        yield Problem(path.name, what.rstrip(".") + "; it holds", keys)
        return
    stored = rows[:, :4].copy().view(np.dtype("<u4")).ravel().tolist()
    wrong = [
        key
        for key, position, row, crc in zip(keys, span, rows, stored, strict=True)
        if checksum(table.raw(position), row.data) != crc
    ]
    yield Problem(path.name, "damaged maps" if wrong else "its header has changed, its maps are intact", tuple(wrong))
