"""Reading and verifying a store of score maps: memory-mapped, checked, no pickle, no torch.

Shards are mapped when they are first needed and shared through the page cache by all data-loading workers. Every record
is compared with its checksum when it is read.

A key is found by its CRC-32 among those of all keys, which opening a store computes (0.3 µs each), and then compared
with the key in the shard.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np

from everytoken.files import FileError
from everytoken.maps.format import (
    Shard,
    StoreDamagedError,
    StoreError,
    StoreUnfinishedError,
    UnknownKeyError,
    damaged,
    decode_key,
    find_plan,
    list_shards,
    stays_inside,
)
from everytoken.maps.score_map import ScoreMap, class_dtype

_HEAD, _HALF = struct.Struct("<2I4d"), np.dtype("<f2")  # size and area; scores
_MAX_OPEN = 512  # each mapped shard holds a file handle; 1024 is a common limit per process


class Maps(Mapping[str, ScoreMap]):
    """A store of score maps, for reading: a mapping from keys (paths of images relative to the annotated folder) to
    score maps, in byte order of the keys.

    It can be handed to data-loading workers (fork, spawn, threads): it is pickled without what it has mapped, and
    reading is thread-safe.

    Example:
        >>> maps = Maps("maps")
        >>> len(maps), maps.num_classes, maps.grid
        (1281167, 1000, (18, 18))
        >>> score_map = maps["n01440764/n01440764_10026.JPEG"]
        >>> score_map.scores.shape, score_map.classes.shape      # float16 and uint16 [h, w, k]
        ((18, 18, 5), (18, 18, 5))
        >>> "no/such.jpg" in maps
        False

    Args:
        path: the store's folder.
        partial: open a store that is not finished; it has the maps that are finished.

    Attributes:
        path, partial: as given.
        meta: what the maps look like and who made them; with `num_classes`, `class_names` (empty if not known), `grid`
            (rows, columns) and `top_k` (classes kept per cell) also here.
        total: images of the store, with and without a map.
        complete: whether every image has a map or was skipped.
    """

    def __init__(self, path: str | os.PathLike[str], partial: bool = False) -> None:
        self.path, self.partial = Path(path), partial
        self._files = list_shards(self.path)
        if not self._files:
            raise StoreError(
                f"{self.path} is not a store of score maps: "
                + ("it has no finished shards." if self.path.is_dir() else "there is no such folder.")
                + " `everytoken annotate` makes one; `everytoken maps import` makes one of released .pt maps."
            )
        self._plan = Shard(self._files[0]).plan
        self.meta, self.total = self._plan.meta, self._plan.total
        self.num_classes, self.class_names = self.meta.num_classes, self.meta.class_names
        self.grid, self.top_k = self.meta.grid, self.meta.top_k
        self.complete = len(self._files) == self._plan.num_shards
        if not self.complete and not partial:
            raise StoreUnfinishedError(
                f"{self.path} is not finished: {len(self._files)} of {self._plan.num_shards} shards are there. Run the "
                "same command again: it makes the rest. (Maps(path, partial=True) opens what is there.)"
            )
        self._cells, self._id_type = (*self.grid, self.top_k), class_dtype(self.num_classes)
        self._scores_at = _HEAD.size + prod(self._cells) * self._id_type.itemsize
        self._shards: dict[int, Shard] = {}
        shards = map(self._opened, self._files)  # one after the other: none stays in memory
        hashes = [np.fromiter(map(zlib.crc32, shard.raw_keys()), np.uint32, shard.count) for shard in shards]
        self._ends = list(accumulate(map(len, hashes)))
        order = np.argsort(np.concatenate(hashes), kind="stable").astype(np.uint32)
        self._hashes, self._order = np.concatenate(hashes)[order], order.data

    @property
    def skipped(self) -> dict[str, str]:
        """Images without a map, with the reason."""
        pairs = (pair for file in self._files for pair in Shard(file).skipped)
        return {self._checked(key): reason for key, reason in pairs}

    def __len__(self) -> int:
        """Number of maps (skipped images do not count)."""
        return len(self._hashes)

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._files)):
            for raw in self._shard(number).raw_keys():
                yield self._checked(decode_key(raw))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key) is not None

    def __getitem__(self, key: str) -> ScoreMap:
        if found := self._find(key):
            return self._load(*found)
        raise self._unknown(str(key))

    def key(self, i: int) -> str:
        """The key of map i, 0 <= i < len(maps), in the order of iteration."""
        shard, row = self._locate(range(len(self))[i])
        return self._checked(decode_key(shard.raw_key(row)))

    def read(self, i: int) -> ScoreMap:
        """Map i, 0 <= i < len(maps), in the order of iteration."""
        shard, row = self._locate(range(len(self))[i])
        return self._load(shard, row, shard.raw_key(row))

    def _find(self, key: str) -> tuple[Shard, int, bytes] | None:
        try:
            raw = key.encode("utf-8", "surrogateescape")
        except (UnicodeEncodeError, AttributeError):
            return None
        hashed = zlib.crc32(raw)
        at = int(self._hashes.searchsorted(np.uint32(hashed)))
        while at < len(self) and self._hashes.data[at] == hashed:  # equal hashes stand side by side
            shard, row = self._locate(self._order[at])
            if shard.raw_key(row) == raw:
                return shard, row, raw
            at += 1
        return None

    def _locate(self, position: int) -> tuple[Shard, int]:
        number = bisect_right(self._ends, position)
        shard = self._shard(number)
        return shard, position - self._ends[number] + shard.count

    def _load(self, shard: Shard, row: int, raw: bytes) -> ScoreMap:
        record = shard.record(row)  # a private copy: writable, and safe whatever happens to the file
        width, height, x0, y0, x1, y1 = _HEAD.unpack_from(record)
        if not (shard.intact(row, raw, record) and 0 < x1 - x0 < inf and 0 < y1 - y0 < inf):
            raise damaged(shard.path, f"the map of {decode_key(raw)!r} is not what was written")
        return ScoreMap(
            np.ndarray(self._cells, _HALF, record, self._scores_at),
            np.ndarray(self._cells, self._id_type, record, _HEAD.size),
            (width, height),
            (x0, y0, x1, y1),
        )

    def _shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            if len(self._shards) >= _MAX_OPEN:
                self._shards.clear()
            try:
                shard = self._opened(self._files[number])
            except StoreDamagedError:
                raise
            except FileError:  # perhaps this process may not open more files
                self._shards.clear()
                shard = self._opened(self._files[number])
            self._shards[number] = shard
        return shard

    def _opened(self, file: Path) -> Shard:
        shard = Shard(file)
        if shard.plan != self._plan:
            raise damaged(file, "it belongs to another store")
        return shard

    def _checked(self, key: str) -> str:
        if not stays_inside(key):
            raise StoreDamagedError(f"{self.path} has the key {key!r}, which leads out of a folder. Do not use it.")
        return key

    def _unknown(self, key: str) -> UnknownKeyError:
        what = f"{self.path} has no map of {key!r}"
        if reason := self.skipped.get(key):
            return UnknownKeyError(f"{what}: the image was skipped ({reason}). Annotate it again (retry_skipped).")
        if not self.complete:
            return UnknownKeyError(f"{what}: the store is not finished.")
        such = f", such as {self.key(0)!r}" if len(self) else ""
        return UnknownKeyError(f"{what}. Keys are paths relative to the annotated folder{such}.")

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "" if self.complete else f" of {self.total:,}, not finished"
        h, w = self.grid
        cells = f"{h}x{w} cells, the best {self.top_k} of {self.num_classes:,} classes"
        return f"Maps({str(self.path)!r}: {len(self):,} maps{state}; {cells})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Maps, (self.path, self.partial)


# -- verifying ---------------------------------------------------------------------------------------------------------


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
    """Check every byte of a store: a flipped bit is found wherever it is, and the images that it concerns are named.

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
