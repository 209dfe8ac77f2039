"""Reading a store of score maps: memory-mapped, checked, no pickle, no torch.

Shards are mapped when they are first needed and shared through the page cache by all data-loading workers. Every record
is compared with its checksum when it is read.

``index.safetensors`` has the CRC-32 of every key, sorted, and the number of the map that each belongs to; the keys
themselves are compared in the shards. It is made from the shards and carries the SHA-256 of their names, sizes and
headers; when that differs, or when the index is damaged, it is made again.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import struct
import threading
import unicodedata
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken.files import FileError
from everytoken.maps.errors import StoreDamagedError, StoreError, StoreUnfinishedError, UnknownKeyError
from everytoken.maps.format import (
    BROKEN,
    Shard,
    damaged,
    decode_key,
    list_shards,
    make_header,
    map_file,
    map_tensors,
    stays_inside,
    write_tensors,
)
from everytoken.maps.score_map import ScoreMap, class_dtype

INDEX = "index.safetensors"
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
        check: compare each record with its checksum when it is read.
        partial: open a store that is not finished; it has the maps that are finished.

    Attributes:
        path, check, partial: as given.
        meta: what the maps look like and who made them; with `num_classes`, `class_names` (empty if not known), `grid`
            (rows, columns) and `top_k` (classes kept per cell) also here.
        total: images of the store, with and without a map.
        complete: whether every image has a map or was skipped.
    """

    def __init__(self, path: str | os.PathLike[str], check: bool = True, partial: bool = False) -> None:
        self.path, self.check, self.partial = Path(path), check, partial
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
        self._opening = threading.Lock()
        self._hashes, order, counts = self._index()
        self._order, self._counts = order.data, counts.tolist()
        self._ends = list(accumulate(self._counts))

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
        found = self._find(key)
        if found is None:
            raise self._unknown(str(key))
        return self._load(*found)

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
        return self._shard(number), position - (self._ends[number] - self._counts[number])

    def _load(self, shard: Shard, row: int, raw: bytes) -> ScoreMap:
        record = shard.record(row)  # a private copy: writable, and safe whatever happens to the file
        width, height, x0, y0, x1, y1 = _HEAD.unpack_from(record)
        intact = not self.check or shard.intact(row, raw, record)
        if not (intact and 0 < x1 - x0 < inf and 0 < y1 - y0 < inf):
            raise damaged(shard.path, f"the map of {decode_key(raw)!r} is not what was written")
        return ScoreMap(
            np.ndarray(self._cells, _HALF, record, self._scores_at),
            np.ndarray(self._cells, self._id_type, record, _HEAD.size),
            (width, height),
            (x0, y0, x1, y1),
        )

    def _shard(self, number: int) -> Shard:
        return self._shards.get(number) or self._open(number)

    def _open(self, number: int) -> Shard:
        with self._opening:
            if number in self._shards:  # another thread opened it while this one waited
                return self._shards[number]
            if len(self._shards) >= _MAX_OPEN:
                del self._shards[next(iter(self._shards))]
            try:
                shard = Shard(self._files[number])
            except StoreDamagedError:
                raise
            except FileError:
                if not self._shards:
                    raise
                self._shards.clear()  # perhaps this process may not open more files
                shard = Shard(self._files[number])
            if shard.plan != self._plan:
                raise damaged(shard.path, "it belongs to another store")
            self._shards[number] = shard
            return shard

    def _index(self) -> tuple[NDArray[Any], ...]:
        """Hashes of all keys, sorted; the number of the map of each; the number of maps of each shard."""
        digest = hashlib.sha256()
        for file in self._files:
            header, buffer = map_file(file)
            digest.update(f"{file.name} {len(buffer)} ".encode() + header)
        shards, path = digest.hexdigest(), self.path / INDEX
        with suppress(FileError, *BROKEN):  # what is missing, damaged or of other shards is made again
            header, buffer = map_file(path)
            content = json.loads(header[8:])
            layout = {name: ("<u4", tuple(content[name]["shape"])) for name in ("hashes", "order", "counts")}
            hashes, order, counts = arrays = tuple(map_tensors(header, buffer, layout).values())
            fits = len(hashes) == len(order) == counts.sum() and len(counts) == len(self._files)
            whole = header == make_header(_index_metadata(shards, arrays), layout)
            if whole and fits and (order < len(order)).all():
                return arrays
        found = [[zlib.crc32(raw) for raw in self._shard(number).raw_keys()] for number in range(len(self._files))]
        unsorted = np.array([hashed for some in found for hashed in some], "<u4")
        order = np.argsort(unsorted, kind="stable").astype("<u4")
        arrays = (unsorted[order], order, np.array([len(some) for some in found], "<u4"))
        if self.complete:
            with suppress(OSError):  # a folder that may only be read
                tensors = dict(zip(("hashes", "order", "counts"), arrays, strict=True))
                write_tensors(path, _index_metadata(shards, arrays), tensors)
        return arrays

    def _checked(self, key: str) -> str:
        if not stays_inside(key):
            raise StoreDamagedError(
                f"{self.path} has the key {key!r}, which is not a path inside a folder. Do not use this store: it is "
                "damaged, or somebody wants files to be written elsewhere."
            )
        return key

    def _unknown(self, key: str) -> UnknownKeyError:
        what = f"{self.path} has no map of {key!r}"
        if reason := self.skipped.get(key):
            return UnknownKeyError(
                f"{what}: the image was skipped ({reason}). Fix the image and annotate it again (retry_skipped), or "
                "leave it out of training."
            )
        if not self.complete:
            return UnknownKeyError(f"{what}: the store is not finished.")
        near = self._near(key)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        such = f", such as {self.key(0)!r}" if len(self) else ""
        return UnknownKeyError(
            f"{what}.{hint} Keys are paths relative to the annotated folder{such}; images that were added later need a "
            "new store (annotating with `reuse` copies the maps that are here)."
        )

    def _near(self, key: str) -> list[str]:
        """Keys that were perhaps meant: other spellings of the same path, then neighbours in the order of keys."""
        parts = key.replace("\\", "/").split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]  # an absolute path instead of a relative one
        spellings = [unicodedata.normalize(form, tail) for tail in tails for form in ("NFC", "NFD")]
        matches = [spelling for spelling in dict.fromkeys(tails + spellings) if spelling in self]
        if not matches:
            positions = range(len(self))
            at = bisect_left(
                positions,
                key.encode("utf-8", "surrogatepass"),
                key=lambda i: self.key(i).encode("utf-8", "surrogateescape"),
            )
            around = [self.key(i) for i in positions[max(0, at - 16) : at + 16]]
            matches = difflib.get_close_matches(key, around, cutoff=0.8)  # further off is no help
        return matches[:3]

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "" if self.complete else f" of {self.total:,}, not finished"
        h, w = self.grid
        cells = f"{h}x{w} cells, the best {self.top_k} of {self.num_classes:,} classes"
        return f"Maps({str(self.path)!r}: {len(self):,} maps{state}; {cells})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Maps, (self.path, self.check, self.partial)


def _index_metadata(shards: str, arrays: Sequence[NDArray[Any]]) -> dict[str, str]:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array.data, crc)
    return {"format": "everytoken-index", "shards": shards, "crc32": str(crc)}
