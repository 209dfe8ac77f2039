"""Verifying a store: every record of every shard against its checksum, every header, every key.

A single flipped bit is found wherever it is, and the images that it concerns are named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.format import Shard, decode_key, find_plan, list_shards, stays_inside


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
    """Check every byte of the shards of the store at `path`.

    An unfinished store is checked as far as it goes. A folder without shards raises a StoreError.

    Args:
        path: the store's folder.
        progress: called with (bytes read, bytes in all).
    """
    folder = Path(path)
    shards = list_shards(folder)
    if not shards:
        raise StoreError(f"{folder} is not a store of score maps: it has no finished shards.")
    plan = find_plan(folder)
    sizes = [file.lstat().st_size for file in shards]
    maps = skipped = done = 0
    problems: list[Problem] = []
    for file, size in zip(shards, sizes, strict=True):
        try:
            shard = Shard(file)
            if shard.plan != plan:
                raise StoreDamagedError("it belongs to another store.")
            maps, skipped = maps + shard.count, skipped + len(shard.skipped)
            problems += _check(shard)
        except StoreDamagedError as error:
            what = str(error).split(" is damaged: ")[-1].split(". Restore")[0].rstrip(".")
            problems.append(Problem(file.name, what))
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    complete = plan is not None and len(shards) == plan.num_shards
    return Verdict(folder, plan.total if plan else 0, maps, skipped, done, complete, tuple(problems))


def _check(shard: Shard) -> Iterator[Problem]:
    keys = list(shard.raw_keys())
    if wrong := tuple(decode_key(raw) for row, raw in enumerate(keys) if not shard.intact(row, raw, shard.record(row))):
        yield Problem(shard.path.name, "damaged maps", wrong)
    named = [*map(decode_key, keys), *(key for key, _ in shard.skipped)]
    if outside := tuple(key for key in named if not stays_inside(key)):
        yield Problem(shard.path.name, "has keys that are not paths inside a folder; do not use this store", outside)
