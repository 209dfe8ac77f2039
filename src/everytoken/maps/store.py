"""Reading a store: memory-mapped, no pickle, no torch.

    store = Maps("maps")
    store["n01440764/n01440764_10026.JPEG"].scores      # float16 [h, w, k]

Opening reads the manifest only; keys and shards are mapped when they are first needed and shared through the
page cache by all data-loading workers. A store pickles as its path, so it can be handed to workers.

Cost: a random read takes about 10 µs, some 1/40 of torch.load on a released map.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken.maps.errors import StoreDamagedError, StoreUnfinishedError, UnknownKeyError
from everytoken.maps.keys import KeyTable
from everytoken.maps.manifest import Manifest, ShardInfo
from everytoken.maps.scoremap import HEAD, MAP, ScoreMap, checksum, class_dtype
from everytoken.maps.shard import open_shard, read_sidecar, shard_name, way_out

_HALF = np.dtype("<f2")
_MAX_OPEN = 512  # each mapped shard holds a file handle; 1024 is a common limit per process


class Maps(Mapping[str, ScoreMap]):
    """A read-only mapping from keys (relative paths) to score maps, in byte order of the keys.

    Args:
        path: the store's folder.
        check: verify the checksum of each record when it is read (about 5 µs for 18x18x5).
        partial: open a store that is not finished; it has the maps that are finished.
    """

    def __init__(self, path: str | os.PathLike[str], check: bool = False, partial: bool = False) -> None:
        self.path, self.check, self.partial = Path(path), check, partial
        self.manifest = Manifest.read(self.path)
        shards: dict[int, ShardInfo] = dict(enumerate(self.manifest.shards))
        if not self.manifest.complete:
            shards = self._finished()
            if not partial:
                done = sum(info.records for info in shards.values())
                raise StoreUnfinishedError(
                    f"{self.path} is not finished: {done:,} of {self.manifest.total:,} images are done. Run the same "
                    "command again to go on where it stopped, or open it as it is with Maps(path, partial=True)."
                )
        self._reset()
        self._lacking, self._reasons = self._gaps(shards)

    def _finished(self) -> dict[int, ShardInfo]:
        plan = self.manifest.plan_id()
        found = {i: read_sidecar(self.path, self.manifest, i, plan) for i in range(self.manifest.num_shards)}
        return {i: info for i, info in found.items() if info is not None}

    def _gaps(self, shards: dict[int, ShardInfo]) -> tuple[NDArray[np.bool_] | None, dict[int, str]]:
        """Which positions have no map (None: all have one), and the reasons of the skipped ones."""
        spans = {i: self.manifest.shard_range(i) for i in range(self.manifest.num_shards)}
        reasons = {spans[i].start + place: why for i, info in shards.items() for place, why in info.skipped}
        if not reasons and len(shards) == self.manifest.num_shards:
            return None, {}
        lacking = np.ones(self.manifest.total, bool)
        for i in shards:
            lacking[spans[i].start : spans[i].stop] = False
        lacking[list(reasons)] = True
        return lacking, reasons

    def _reset(self) -> None:
        manifest = self.manifest
        self._table: KeyTable | None = None
        self._shards: dict[int, NDArray[np.uint8]] = {}
        self._positions: NDArray[np.int64] | None = None
        self._shape = (*manifest.grid, manifest.top_k)
        self._id_type = class_dtype(manifest.num_classes)
        self._scores_at = HEAD.size + self._id_type.itemsize * int(np.prod(self._shape))

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
        return self.manifest.total - (0 if self._lacking is None else int(self._lacking.sum()))

    def __iter__(self) -> Iterator[str]:
        for position, key in enumerate(self._keys.iterate()):
            if self._lacking is None or not self._lacking[position]:
                yield key

    def __contains__(self, key: object) -> bool:
        position = self._keys.find(key) if isinstance(key, str) else -1
        return position >= 0 and (self._lacking is None or not self._lacking[position])

    def __getitem__(self, key: str) -> ScoreMap:
        position = self._keys.find(key)
        if position < 0 or (self._lacking is not None and self._lacking[position]):
            raise self._unknown(key, position)
        return self._load(position)

    def key(self, i: int) -> str:
        """The key of map i, 0 <= i < len(store), in the order of iteration."""
        return self._keys.key(self._position(i))

    def read(self, i: int) -> ScoreMap:
        """Map i, 0 <= i < len(store), in the order of iteration."""
        return self._load(self._position(i))

    def _position(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} maps; there is no number {i}.")
        if self._lacking is None:
            return i
        if self._positions is None:
            self._positions = np.flatnonzero(~self._lacking)
        return int(self._positions[i])

    def _load(self, position: int) -> ScoreMap:
        index, place = divmod(position, self.manifest.shard_size)
        shard = self._shards.get(index)
        if shard is None:
            if len(self._shards) >= _MAX_OPEN:
                self._shards.pop(next(iter(self._shards)), None)
            shard = self._shards[index] = open_shard(self.path, self.manifest, index)
        row = shard[place].copy()  # a private copy: writable, and safe whatever happens to the file
        crc, state, width, height, x0, y0, x1, y1 = HEAD.unpack_from(row)
        if state != MAP or (self.check and checksum(self._keys.raw(position), row.data) != crc):
            path = self.path / shard_name(index)
            raise StoreDamagedError(
                f"the map of {self._keys.key(position)!r} in {path} is damaged. `everytoken labels verify "
                f"{quote(str(self.path))}` "
                f"lists all that are.\n{way_out(path)}"
            )
        return ScoreMap(
            np.ndarray(self._shape, _HALF, row, self._scores_at),
            np.ndarray(self._shape, self._id_type, row, HEAD.size),
            (width, height),
            (x0, y0, x1, y1),
        )

    def _unknown(self, key: Any, position: int) -> UnknownKeyError:
        if position in self._reasons:
            return UnknownKeyError(
                f"{self.path} has no map of {key!r}: the image was skipped ({self._reasons[position]}). "
                "Mend the image and annotate again with --retry-skipped, or leave it out of training."
            )
        if position >= 0:
            return UnknownKeyError(f"{self.path} has no map of {key!r} yet: the store is not finished.")
        near = self._keys.near(str(key))
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        return UnknownKeyError(
            f"{self.path} has no map of {key!r}.{hint} Keys are paths relative to the annotated folder, such as "
            f"{self._keys.key(0)!r}; images that came later need a new store (`annotate "
            "--reuse` copies the maps that are here)."
        )

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        h, w = self.manifest.grid
        return f"Maps({str(self.path)!r}, {len(self):,} maps of {h}x{w}x{self.manifest.top_k})"

    def __getstate__(self) -> dict[str, Any]:
        mapped = ("_table", "_shards", "_positions")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
