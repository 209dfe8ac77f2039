"""Verifying a store: every byte of every file, against the checksums that were made when it was written.

A file's SHA-256 says whether it is intact; for a shard that is not, the records' own CRC-32 name the
images. A single flipped bit is found wherever it is: scores, ids, sizes, keys, index, manifest.
(``runs.jsonl``, the diary of the runs, has no checksum and no effect.)

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
from everytoken.maps.keys import FILES, KeyTable
from everytoken.maps.manifest import MANIFEST, Manifest, ShardInfo
from everytoken.maps.scoremap import checksum
from everytoken.maps.shard import open_shard, read_sidecar, shard_name


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written. ``keys``: the images it concerns, when they can be told."""

    file: str
    what: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.keys[:5])) + (f" and {len(self.keys) - 5} more" if len(self.keys) > 5 else "")
        return f"{self.file}: {self.what}" + (f": {shown}" if shown else "")


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found. ``ok`` when there are no problems."""

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
    """Check every byte of the store at ``path``; ``progress(done, total)`` is called with bytes.

    An unfinished store is checked as far as it goes. A folder that is no store raises a StoreError.
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
        found = {i: _read_note(folder, manifest, i, problems) for i in range(manifest.num_shards)}
        shards = {i: info for i, info in found.items() if info is not None}
    elif len(shards) != manifest.num_shards:
        problems.append(Problem(MANIFEST, f"lists {len(shards)} of {manifest.num_shards} shards"))
    names = [*manifest.checksums, *(shard_name(i) for i in shards)]
    total = sum(_size(folder / name) for name in names)
    done = 0
    for file, steps in (
        *((name, _plain(folder, manifest, name)) for name in manifest.checksums),
        *((shard_name(i), _shard(folder, manifest, i, info)) for i, info in shards.items()),
    ):
        problems.extend(steps)
        done += _size(folder / file)
        if progress is not None:
            progress(done, total)
    records = sum(info.records for info in shards.values())
    skipped = sum(len(info.skipped) for info in shards.values())
    return Verdict(folder, manifest.total, records - skipped, skipped, total, manifest.complete, tuple(problems))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_note(folder: Path, manifest: Manifest, index: int, problems: list[Problem]) -> ShardInfo | None:
    """A shard's note in an unfinished store; a damaged one is a problem (the shard will be made again)."""
    info = read_sidecar(folder, manifest, index)
    note = folder / f"{shard_name(index)[:-4]}.json"
    if info is None and note.exists():
        problems.append(Problem(note.name, "is damaged or does not fit its shard, which will be made again"))
    return info


def _plain(folder: Path, manifest: Manifest, name: str) -> Iterator[Problem]:
    """Check a file that is not a shard; when it holds keys, try to say which are wrong."""
    path = folder / name
    if not path.exists():
        yield Problem(name, "is missing")
    elif files.sha256_of(path) != manifest.checksums[name]:
        wrong: list[str] = []
        if name in FILES:
            try:
                wrong = KeyTable(folder, manifest.total).damaged()
            except (StoreError, IndexError, ValueError, OverflowError):
                wrong = []
        yield Problem(name, "its bytes have changed" + (", which concerns" if wrong else ""), tuple(wrong))


def _shard(folder: Path, manifest: Manifest, index: int, info: ShardInfo) -> Iterator[Problem]:
    """Check a shard; when it is not intact, let the records' checksums name the images."""
    path = folder / shard_name(index)
    if path.exists() and files.sha256_of(path) == info.sha256:
        return
    span = manifest.shard_range(index)
    try:
        table = KeyTable(folder, manifest.total)
    except StoreError:
        yield Problem(path.name, f"its bytes have changed (images {span.start} to {span.stop - 1} of the plan)")
        return
    try:
        rows = open_shard(folder, manifest, index)
    except StoreDamagedError as error:
        what = str(error).split("\n")[0].removeprefix(f"{path} ")
        yield Problem(path.name, what.rstrip(".") + "; it holds", tuple(table.iterate(span.start, span.stop)))
        return
    stored = rows[:, :4].copy().view(np.dtype("<u4")).ravel().tolist()
    wrong = [
        table.key(position)
        for position, row, crc in zip(span, rows, stored, strict=True)
        if checksum(table.raw(position), row.data) != crc
    ]
    yield Problem(path.name, "damaged maps" if wrong else "its header has changed, its maps are intact", tuple(wrong))
