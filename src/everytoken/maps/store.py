"""Reading a store of score maps: memory-mapped, checked, no pickle, no torch.

Opening reads the manifest only; keys and shards are mapped when they are first needed and shared through the page cache
by all data-loading workers. Every record is compared with its checksum when it is read.

Cost: a random read of 18x18x5 takes 9 µs, 3 µs of them for the checksum; torch.load on a released map takes some 25
times as long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken import files
from everytoken.maps.errors import StoreDamagedError, StoreUnfinishedError, UnknownKeyError
from everytoken.maps.format import (
    INDEX,
    RESTORE,
    KeyTable,
    Manifest,
    ShardInfo,
    how_to_restore,
    open_shard,
    read_sidecar,
    shard_name,
)
from everytoken.maps.score_map import HEAD, MAP, ScoreMap, checksum, class_dtype

_HALF = np.dtype("<f2")
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
        check: compare each record with its checksum when it is read (3 µs for 18x18 cells).
        partial: open a store that is not finished; it has the maps that are finished.

    Attributes:
        path, check, partial: as given.
        manifest: everything that the store says about itself.
        num_classes: K.
        class_names: in the order of the class ids; empty if they are not known.
        grid: (rows, columns) of a map's cells.
        top_k: classes kept per cell.
        skipped: images without a map, with the reason.
    """

    def __init__(self, path: str | os.PathLike[str], check: bool = True, partial: bool = False) -> None:
        self.path, self.check, self.partial = Path(path), check, partial
        self.manifest = Manifest.read(self.path)
        self._finished: dict[int, ShardInfo] = dict(enumerate(self.manifest.shards))
        if not self.manifest.complete:
            plan = self.manifest.plan_id()
            sidecars = {i: read_sidecar(self.path, self.manifest, i, plan) for i in range(self.manifest.num_shards)}
            self._finished = {i: info for i, info in sidecars.items() if info is not None}
            if not partial:
                done = sum(info.records for info in self._finished.values())
                raise StoreUnfinishedError(
                    f"{self.path} is not finished: {done:,} of {self.manifest.total:,} images are done. Run the same "
                    "command again to complete it, or open it as it is with Maps(path, partial=True)."
                )
        self._prepare()

    def _prepare(self) -> None:
        """Everything that follows from manifest and finished shards, or is mapped on first use."""
        manifest = self.manifest
        self._table: KeyTable | None = None
        self._shards: dict[int, NDArray[np.uint8]] = {}
        self._opening = threading.Lock()
        self._shape = (*manifest.grid, manifest.top_k)
        self._id_type = class_dtype(manifest.num_classes)
        self._scores_at = HEAD.size + self._id_type.itemsize * int(np.prod(self._shape))
        spans = {i: manifest.shard_range(i) for i in self._finished}
        self._reasons = {
            spans[i].start + place: why for i, info in self._finished.items() for place, why in info.skipped
        }
        self._missing: NDArray[np.bool_] | None = None  # positions without a map; None: all have one
        self._positions: NDArray[np.int64] | None = None  # of the maps; None: all
        if self._reasons or len(spans) < manifest.num_shards:
            self._missing = np.ones(manifest.total, bool)
            for span in spans.values():
                self._missing[span.start : span.stop] = False
            self._missing[list(self._reasons)] = True
            self._positions = np.flatnonzero(~self._missing)

    @property
    def num_classes(self) -> int:
        return self.manifest.num_classes

    @property
    def class_names(self) -> Sequence[str]:
        return self.manifest.class_names

    @property
    def grid(self) -> tuple[int, int]:
        return self.manifest.grid

    @property
    def top_k(self) -> int:
        return self.manifest.top_k

    @property
    def skipped(self) -> dict[str, str]:
        """Images without a map, with the reason."""
        return {self._keys.key(position): reason for position, reason in self._reasons.items()}

    @property
    def _keys(self) -> KeyTable:
        if self._table is None:
            self._table = KeyTable(self.path, self.manifest.total)
        return self._table

    def __len__(self) -> int:
        """Number of maps (skipped images do not count)."""
        return self.manifest.total if self._positions is None else len(self._positions)

    def __iter__(self) -> Iterator[str]:
        for position, key in enumerate(self._keys.iterate()):
            if self._missing is None or not self._missing[position]:
                yield key

    def __contains__(self, key: object) -> bool:
        position = self._keys.find(key) if isinstance(key, str) else -1
        return position >= 0 and (self._missing is None or not self._missing[position])

    def __getitem__(self, key: str) -> ScoreMap:
        position = self._keys.find(key)
        if position < 0 or (self._missing is not None and self._missing[position]):
            raise self._unknown(str(key), position)
        return self._load(position)

    def planned(self) -> Iterator[str]:
        """All keys that the store was begun with: of maps, of skipped images, and of those still to be made."""
        return self._keys.iterate()

    def key(self, i: int) -> str:
        """The key of map i, 0 <= i < len(maps), in the order of iteration."""
        return self._keys.key(self._position(i))

    def read(self, i: int) -> ScoreMap:
        """Map i, 0 <= i < len(maps), in the order of iteration."""
        return self._load(self._position(i))

    def _position(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} maps; there is no number {i}.")
        return i if self._positions is None else int(self._positions[i])

    def _load(self, position: int) -> ScoreMap:
        index, place = divmod(position, self.manifest.shard_size)
        shard = self._shards.get(index)
        if shard is None:
            shard = self._open(index)
        row = shard[place].copy()  # a private copy: writable, and safe whatever happens to the file
        crc, state, width, height, x0, y0, x1, y1 = HEAD.unpack_from(row)
        if (
            state != MAP
            or (self.check and checksum(self._keys.raw(position), row.data) != crc)
            or not (0 < x1 - x0 < inf and 0 < y1 - y0 < inf)
        ):
            path = self.path / shard_name(index)
            raise StoreDamagedError(
                f"the map of {self._keys.key(position)!r} in {path} is damaged. `everytoken maps verify` lists all "
                f"that are.\n{how_to_restore(path)}"
            )
        return ScoreMap(
            np.ndarray(self._shape, _HALF, row, self._scores_at),
            np.ndarray(self._shape, self._id_type, row, HEAD.size),
            (width, height),
            (x0, y0, x1, y1),
        )

    def _open(self, index: int) -> NDArray[np.uint8]:
        with self._opening:
            if index in self._shards:  # another thread opened it while this one waited
                return self._shards[index]
            if len(self._shards) >= _MAX_OPEN:
                del self._shards[next(iter(self._shards))]
            try:
                shard = open_shard(self.path, self.manifest, index)
            except files.FileError:
                if not self._shards:
                    raise
                self._shards.clear()  # perhaps this process may not open more files
                shard = open_shard(self.path, self.manifest, index)
            self._shards[index] = shard
            return shard

    def _unknown(self, key: str, position: int) -> UnknownKeyError | StoreDamagedError:
        if position in self._reasons:
            return UnknownKeyError(
                f"{self.path} has no map of {key!r}: the image was skipped ({self._reasons[position]}). "
                "Fix the image and annotate it again (retry_skipped), or leave it out of training."
            )
        if position >= 0:
            return UnknownKeyError(f"{self.path} has no map of {key!r} yet: the store is not finished.")
        near = self._keys.near(key)
        if key in near:  # among the sorted keys, but not in the index
            return StoreDamagedError(f"{self.path / INDEX} is damaged: it does not list {key!r}. {RESTORE}")
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        return UnknownKeyError(
            f"{self.path} has no map of {key!r}.{hint} Keys are paths relative to the annotated folder, such as "
            f"{self._keys.key(0)!r}; images that were added later need a new store (annotating with `reuse` copies the "
            "maps that are here)."
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "" if self.manifest.complete else f" of {self.manifest.total:,}, not finished"
        h, w = self.grid
        cells = f"{h}x{w} cells, the best {self.top_k} of {self.num_classes:,} classes"
        return f"Maps({str(self.path)!r}: {len(self):,} maps{state}; {cells})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "check", "partial", "manifest", "_finished")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()
