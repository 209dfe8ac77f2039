"""Filling a store: safe against kill -9, full disks, second runs, and with any number of processes.

The list of keys is fixed first and written into the store; shard i holds keys [i*S, (i+1)*S) of the sorted
list. So every shard's bytes follow from the plan and the annotator alone, and the finished store is the same
byte for byte, however often the job was killed and however many processes shared it.

    with MapWriter.create_or_resume("maps", keys, meta) as writer:
        for shard in writer.pending_shards():
            for position in writer.shard_range(shard):
                ...                                     # annotate writer.key(position)
                writer.put([position], scores, classes, sizes, areas)
        writer.finalize()

With several processes (torchrun) each passes its ``rank`` and ``world``; all call ``create_or_resume``, meet
(a barrier), write their own ``pending_shards()``, meet again, and rank 0 calls ``finalize()``.

Cost: memory does not grow with the data set (the caller's list of keys apart). At most the shard in work is
done again after a kill. Packing, checking and writing an 18x18x5 map takes about 0.1 ms.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from everytoken import files
from everytoken.locks import Lock
from everytoken.maps import keys as keys_module
from everytoken.maps import lifecycle
from everytoken.maps.errors import StoreError, StoreUnfinishedError
from everytoken.maps.keys import KeyTable
from everytoken.maps.manifest import MANIFEST, SKIPPED_LIST, Manifest, StoreMeta
from everytoken.maps.scoremap import ScoreMap, pack, pack_skipped
from everytoken.maps.shard import ShardFile, read_sidecar, shard_name


@dataclass(frozen=True)
class Skipped:
    """Stands for an image that has no map, and says why."""

    reason: str


class MapWriter:
    """Writes score maps into a store. Made by ``create_or_resume``; a context manager."""

    def __init__(self, path: Path, manifest: Manifest, lock: Lock, rank: int, world: int) -> None:
        self.path, self.manifest, self.rank, self.world = path, manifest, rank, world
        self._lock = lock
        self._keys = KeyTable(path, manifest.total)
        self._plan_id = manifest.plan_id()
        self._record = manifest.record
        self._open: dict[int, ShardFile] = {}

    @classmethod
    def create_or_resume(
        cls,
        path: str | os.PathLike[str],
        keys: Iterable[str],
        meta: StoreMeta,
        shard_size: int | None = None,
        rank: int = 0,
        world: int = 1,
        retry_skipped: bool = False,
        patience: float = 3.0,
    ) -> MapWriter:
        """Begin a store, or go on with one that was begun with the same keys and the same ``meta``.

        Args:
            path: the store's folder; made if it is not there.
            keys: all images' paths relative to the data folder, in any order.
            meta: what the maps look like and who makes them.
            shard_size: images per shard; by default up to 256 shards, and that of the store when it exists.
            rank, world: which of how many processes this is.
            retry_skipped: do the shards again in which images had been skipped (done by rank 0).
            patience: seconds to wait for the lock of a run that is just going away.
        """
        folder = Path(path)
        encoded = keys_module.plan(keys)
        if not encoded:
            raise StoreError(f"there are no images to annotate for {folder}; check the data folder.")
        if not 0 <= rank < world:
            raise StoreError(f"rank {rank} of {world} processes does not exist.")
        if shard_size is not None and shard_size < 1:
            raise StoreError(f"shard size {shard_size} is not possible; use at least 1.")
        with files.disk_trouble(folder, "opening the store for writing"):
            lifecycle.check_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder, f"rank-{rank}", patience)
            try:
                with Lock(folder, "setup", patience=600):
                    lifecycle.clean(folder, rank, world)
                    manifest = lifecycle.begin(folder, encoded, meta, shard_size, rank)
                    if rank == 0:
                        manifest = lifecycle.reopen(folder, manifest, retry_skipped)
                writer = cls(folder, manifest, lock, rank, world)
                writer._log("open", pending=len(writer.pending_shards()))
                return writer
            except BaseException:
                lock.release()
                raise

    @property
    def complete(self) -> bool:
        """Nothing is left to do: the store was finalized."""
        return self.manifest.complete

    def pending_shards(self, rank: int | None = None, world: int | None = None) -> list[int]:
        """Shards still to be written by one process (this one, if not given): shard i belongs to i % world."""
        rank, world = self.rank if rank is None else rank, self.world if world is None else world
        self.manifest = Manifest.read(self.path)  # another process may have reopened or completed the store
        if self.complete:
            return []
        mine = range(rank, self.manifest.num_shards, world)
        return [i for i in mine if read_sidecar(self.path, self.manifest, i, self._plan_id) is None]

    def shard_range(self, index: int) -> range:
        """Positions in the sorted list of keys that a shard holds."""
        return self.manifest.shard_range(index)

    def shard_keys(self, index: int) -> list[str]:
        """Keys of a shard, in order."""
        span = self.shard_range(index)
        return list(self._keys.iterate(span.start, span.stop))

    def key(self, position: int) -> str:
        """The key at a position."""
        return self._keys.key(position)

    def put(
        self, positions: Sequence[int], scores: ArrayLike, classes: ArrayLike, sizes: ArrayLike, areas: ArrayLike
    ) -> None:
        """Store a batch of maps; a shard that becomes full is committed at once.

        Batches may cross the border of two shards. Give positions in rising order, so that a kill costs no
        more than one shard.

        Args:
            positions: [n] in the sorted list of keys.
            scores: [n, h, w, k] logits, descending along k; stored as float16.
            classes: [n, h, w, k] integers, distinct within a cell.
            sizes: [n, 2] (width, height) of the upright images.
            areas: [n, 4] (x0, y0, x1, y1), see ScoreMap.
        """
        at = np.asarray(positions, np.int64)
        raw_keys = [self._keys.raw(int(position)) for position in self._checked(at)]
        records = pack(self._record, self.manifest.num_classes, raw_keys, scores, classes, sizes, areas)
        shards = at // self.manifest.shard_size
        for shard in np.unique(shards).tolist():
            self._write(shard, at[shards == shard], records[shards == shard])

    def put_maps(self, maps: Mapping[int, ScoreMap]) -> None:
        """Store maps by their positions, as `put` does."""
        names = ("scores", "classes", "size", "area")
        self.put(list(maps), *([getattr(one, name) for one in maps.values()] for name in names))

    def skip(self, position: int, reason: str) -> None:
        """Say that an image has no map (unreadable, gone), and why. It is counted and listed."""
        at = self._checked(np.asarray([position], np.int64))
        reason = " ".join(str(reason).split()) or "no reason given"
        record = pack_skipped(self._record, self._keys.raw(position))
        self._write(position // self.manifest.shard_size, at, record, reason)

    def write_shard(self, index: int, records: Iterable[ScoreMap | Skipped]) -> None:
        """Write a whole shard: one ScoreMap or Skipped per key of ``shard_keys(index)``, in order."""
        span, given = self.shard_range(index), iter(records)
        maps: dict[int, ScoreMap] = {}  # some at a time: packing one by one costs twice as much
        for position in span:
            record = next(given, None)
            if record is None:
                self._discard(index)
                raise StoreError(
                    f"shard {index} of {self.path} needs {len(span)} records, got {position - span.start}."
                )
            if isinstance(record, Skipped):
                self.skip(position, record.reason)
            else:
                maps[position] = record
            if maps and (len(maps) == 64 or position == span[-1]):
                self.put_maps(maps)
                maps.clear()

    def finalize(self) -> Manifest:
        """Close the books: collect all shards' checksums and mark the store complete. For rank 0, at the end."""
        if self.rank != 0:
            raise StoreError(f"only rank 0 finalizes a store; this is rank {self.rank}.")
        manifest = self.manifest
        if not manifest.complete:
            found = [read_sidecar(self.path, manifest, i, self._plan_id) for i in range(manifest.num_shards)]
            shards = tuple(info for info in found if info is not None)
            if len(shards) < manifest.num_shards:
                raise StoreUnfinishedError(
                    f"{self.path} cannot be completed: {manifest.num_shards - len(shards)} of {manifest.num_shards} "
                    "shards are not written. Run the same command again; it makes the missing ones."
                )
            manifest = replace(manifest, shards=shards, complete=True)
            with files.disk_trouble(self.path, "completing the store"):
                if manifest.skipped:
                    files.write_atomically(self.path / SKIPPED_LIST, lifecycle.skipped_csv(manifest, self._keys))
                    checksums = {**manifest.checksums, SKIPPED_LIST: files.sha256_of(self.path / SKIPPED_LIST)}
                    manifest = replace(manifest, checksums=checksums)
                files.write_atomically(self.path / MANIFEST, manifest.to_bytes())
        lifecycle.tidy(self.path, manifest)
        self.manifest = manifest
        self._log("complete", maps=manifest.total - manifest.skipped, skipped=manifest.skipped)
        return manifest

    def close(self) -> None:
        """Throw away an unfinished shard and let others write. Finished shards stay."""
        for index in list(self._open):
            self._discard(index)
        self._lock.release()

    def __enter__(self) -> MapWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        if positions.ndim != 1 or (positions < 0).any() or (positions >= self.manifest.total).any():
            raise StoreError(f"positions {positions.tolist()} are not all in 0..{self.manifest.total - 1}.")
        return positions

    def _write(self, index: int, positions: Any, records: Any, reason: str | None = None) -> None:
        with files.disk_trouble(self.path, f"writing {shard_name(index)}"):
            try:
                if index not in self._open:
                    if self.complete or read_sidecar(self.path, self.manifest, index, self._plan_id) is not None:
                        raise StoreError(f"{shard_name(index)} of {self.path} is already done; see pending_shards().")
                    self._open[index] = ShardFile(self.path, self.manifest, index, self.rank)
                shard = self._open[index]
                shard.write(positions, records, reason)
                if shard.full:
                    shard.commit()
                    del self._open[index]
            except OSError:
                self._discard(index)
                raise

    def _discard(self, index: int) -> None:
        if shard := self._open.pop(index, None):
            shard.discard()

    def _log(self, event: str, **what: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        note = {"time": now, "event": event, "host": socket.gethostname(), "pid": os.getpid()}
        note |= {"rank": self.rank, "world": self.world, **what}
        # A log line is not worth a failed run; one small append is atomic between processes.
        with suppress(OSError), (self.path / lifecycle.RUNS).open("ab", buffering=0) as file:
            file.write(json.dumps(note).encode() + b"\n")
