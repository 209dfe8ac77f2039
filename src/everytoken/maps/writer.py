"""Filling a store: safe against kill -9, full disks, second runs, and with any number of processes.

The list of keys is fixed first and written into the store; shard i holds keys [i*S, (i+1)*S) of the sorted list. So
every shard's bytes follow from the plan and the annotator alone, and the finished store is the same byte for byte,
however often the job was killed and however many processes shared it.

Life of a shard: records are written into a temporary file; when the last one is there, the file is flushed and renamed,
and a sealed JSON note with its checksum (the sidecar) is put beside it. Only the note makes the shard count. Whatever a
killed process leaves before that is thrown away and done again.

Cost: memory does not grow with the dataset (the caller's list of keys apart). At most the shard in work is done again
after a kill. Packing, checking and writing an 18x18x5 map takes about 0.1 ms.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from everytoken import files
from everytoken.files import LOCK, Lock
from everytoken.maps.errors import StoreDamagedError, StoreError, StoreMismatchError, StoreUnfinishedError
from everytoken.maps.format import (
    KEY_FILES,
    MANIFEST,
    RUNS,
    SKIPPED_LIST,
    KeyTable,
    Manifest,
    ShardInfo,
    StoreMeta,
    decode_key,
    encode_keys,
    key_files,
    read_sidecar,
    shard_bytes,
    shard_header,
    shard_name,
    sidecar,
    write_sidecar,
)
from everytoken.maps.score_map import ScoreMap, pack, pack_skipped

log = logging.getLogger(__name__)
_ALSO_THERE = "annotator"  # an annotator that was trained for this store may be kept in its folder
_KEPT = "Nothing is lost: finished shards are kept and no torn file is left; the same command continues."


@dataclass(frozen=True)
class Skipped:
    """Stands for an image that has no map, and says why."""

    reason: str


class MapWriter:
    """Writes score maps into a store; a context manager. Opens a new store, or continues one that was begun with the
    same keys and the same `meta`.

    Example:
        >>> meta = StoreMeta(grid=(14, 14), top_k=5, class_names=names, annotator={"name": "my network"})
        >>> with MapWriter("maps", keys, meta) as writer:
        ...     for key in writer.pending_keys():                # after a crash: what is not finished
        ...         logits, size = my_network(key)               # [14, 14, K], (width, height)
        ...         writer.write({key: ScoreMap.from_logits(logits, 5, size)})
        ...     writer.finalize()

    With several processes (torchrun) each passes its `rank` and `world`; all open the writer, meet (a barrier), write
    their own `pending_keys()` or `pending_shards()`, meet again, and rank 0 calls `finalize()`.

    Args:
        path: the store's folder; made if it is not there.
        keys: all images' paths relative to the data folder, in any order.
        meta: what the maps look like and who makes them.
        shard_size: images per shard; by default up to 256 shards, and that of the store when it exists.
        rank, world: which of how many processes this is.
        retry_skipped: do the shards again in which images had been skipped (done by rank 0).
        patience: seconds to wait for the lock of a run that is just ending.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: Iterable[str],
        meta: StoreMeta,
        shard_size: int | None = None,
        rank: int = 0,
        world: int = 1,
        retry_skipped: bool = False,
        patience: float = 3.0,
    ) -> None:
        self.path, self.rank, self.world = Path(path), rank, world
        encoded = encode_keys(keys)
        if not encoded:
            raise StoreError(f"there are no images to annotate for {self.path}; check the data folder.")
        if not 0 <= rank < world:
            raise StoreError(f"rank {rank} of {world} processes does not exist.")
        if shard_size is not None and shard_size < 1:
            raise StoreError(f"shard size {shard_size} is not possible; use at least 1.")
        with files.disk_errors(self.path, "opening the store for writing", _KEPT):
            check_folder(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path, f"rank-{rank}", patience)
            try:
                with Lock(self.path, "setup", patience=600):
                    files.remove_temporary(self.path, rank, world)
                    self.manifest = _begin(self.path, encoded, meta, shard_size, rank)
                    if rank == 0:
                        self.manifest = _reopen(self.path, self.manifest, retry_skipped)
                self._keys = KeyTable(self.path, self.manifest.total)
                self._plan_id = self.manifest.plan_id()
                self._record = self.manifest.record
                self._open: dict[int, _ShardFile] = {}
                self._note("open", pending=len(self.pending_shards()))
            except BaseException:
                self._lock.release()
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

    def pending_keys(self) -> Iterator[str]:
        """Keys still to be written by this process, shard after shard."""
        for shard in self.pending_shards():
            yield from self.shard_keys(shard)

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

    def write(self, records: Mapping[str, ScoreMap | Skipped]) -> None:
        """Store the maps of some images by their keys, or say why an image has none.

        Keep to the order of `pending_keys`: a shard counts, and survives a kill, when it is full. Some 64 maps at a
        time are twice as fast as one by one.
        """
        positions = {key: self._keys.find(key) for key in records}
        if unknown := [key for key, position in positions.items() if position < 0]:
            raise StoreError(f"{unknown[0]!r} is not one of the keys that {self.path} was begun with.")
        maps = {positions[key]: record for key, record in records.items() if isinstance(record, ScoreMap)}
        if maps:
            names = ("scores", "classes", "size", "area")
            self.put(list(maps), *([getattr(score_map, name) for score_map in maps.values()] for name in names))
        for key, record in records.items():
            if isinstance(record, Skipped):
                self.skip(positions[key], record.reason)

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
        at = self._checked(positions)
        raw_keys = [self._keys.raw(position) for position in at.tolist()]
        records = pack(self._record, self.manifest.num_classes, raw_keys, scores, classes, sizes, areas)
        shards = at // self.manifest.shard_size
        for shard in np.unique(shards).tolist():
            self._write(shard, at[shards == shard], records[shards == shard])

    def skip(self, position: int, reason: str) -> None:
        """Say that an image has no map (unreadable, gone), and why. It is counted and listed."""
        at = self._checked([position])
        reason = " ".join(str(reason).split()) or "no reason given"
        record = pack_skipped(self._record, self._keys.raw(position))
        self._write(position // self.manifest.shard_size, at, record, reason)

    def finalize(self) -> Manifest:
        """Collect all shards' checksums and mark the store complete. For rank 0, at the end."""
        if self.rank != 0:
            raise StoreError(f"only rank 0 finalizes a store; this is rank {self.rank}.")
        manifest = self.manifest
        if not manifest.complete:
            sidecars = [read_sidecar(self.path, manifest, i, self._plan_id) for i in range(manifest.num_shards)]
            shards = tuple(info for info in sidecars if info is not None)
            if len(shards) < manifest.num_shards:
                raise StoreUnfinishedError(
                    f"{self.path} cannot be completed: {manifest.num_shards - len(shards)} of {manifest.num_shards} "
                    "shards are not written. Run the same command again; it makes the missing ones."
                )
            manifest = replace(manifest, shards=shards, complete=True)
            with files.disk_errors(self.path, "completing the store", _KEPT):
                if manifest.skipped:
                    files.write_atomically(self.path / SKIPPED_LIST, _skipped_csv(manifest, self._keys))
                    checksums = {**manifest.checksums, SKIPPED_LIST: files.sha256_of(self.path / SKIPPED_LIST)}
                    manifest = replace(manifest, checksums=checksums)
                files.write_atomically(self.path / MANIFEST, manifest.to_bytes())
        _tidy(self.path, manifest)
        self.manifest = manifest
        self._note("complete", maps=manifest.total - manifest.skipped, skipped=manifest.skipped)
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

    def _checked(self, positions: Sequence[int]) -> NDArray[np.int64]:
        at = np.asarray(positions, np.int64)
        if at.ndim != 1 or (at < 0).any() or (at >= self.manifest.total).any():
            raise StoreError(f"positions {at.tolist()} are not all in 0..{self.manifest.total - 1}.")
        return at

    def _write(
        self, index: int, positions: NDArray[np.int64], records: NDArray[np.void], reason: str | None = None
    ) -> None:
        with files.disk_errors(self.path, f"writing {shard_name(index)}", _KEPT):
            try:
                if index not in self._open:
                    if self.complete or read_sidecar(self.path, self.manifest, index, self._plan_id) is not None:
                        raise StoreError(f"{shard_name(index)} of {self.path} is already done; see pending_shards().")
                    self._open[index] = _ShardFile(self.path, self.manifest, index, self.rank)
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

    def _note(self, event: str, **details: int) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        note = {"time": now, "event": event, "host": socket.gethostname(), "pid": os.getpid()}
        note |= {"rank": self.rank, "world": self.world, **details}
        # A diary line is not worth a failed run; one small append is atomic between processes.
        with suppress(OSError, files.FileError):
            files.append(self.path / RUNS, json.dumps(note).encode() + b"\n")


class _ShardFile:
    """A shard while it is being written. Records may come in any order; `commit` when `full`."""

    def __init__(self, folder: Path, manifest: Manifest, index: int, rank: int) -> None:
        self._folder, self._manifest, self.index, self._rank = folder, manifest, index, rank
        self.path = folder / shard_name(index)
        self._temporary = files.temporary_name(self.path, rank)
        self._first = manifest.shard_range(index).start
        self._filled = np.zeros(len(manifest.shard_range(index)), bool)
        self._skipped: dict[int, str] = {}
        header = shard_header(manifest.record, len(self._filled))
        self._start = len(header)
        self._fd = files.open_new(self._temporary)
        try:
            files.write_all(self._fd, header)
        except BaseException:
            self.discard()
            raise

    @property
    def full(self) -> bool:
        return bool(self._filled.all())

    def write(self, positions: NDArray[np.int64], records: NDArray[np.void], reason: str | None = None) -> None:
        """Put records at positions of the plan; with a `reason`, as skipped ones."""
        places = positions - self._first
        if self._filled[places].any() or len(np.unique(places)) < len(places):
            raise StoreError(f"a record of {self.path} was given twice; each position is written once.")
        breaks = np.flatnonzero(np.diff(places) != 1) + 1  # neighbours are written in one piece
        for run, block in zip(np.split(places, breaks), np.split(records, breaks), strict=True):
            offset = self._start + int(run[0]) * records.dtype.itemsize
            files.write_all(self._fd, block.view(np.uint8).data, offset)
        self._filled[places] = True
        if reason is not None:
            self._skipped |= {int(place): reason for place in places}

    def commit(self) -> None:
        """Flush, rename, and write the note that makes the shard count."""
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        skipped = tuple(sorted(self._skipped.items()))
        info = ShardInfo(self.path.name, len(self._filled), files.sha256_of(self._temporary), skipped)
        # An old note must not vouch for the new file, should we die between the next two lines.
        sidecar(self._folder, self.index).unlink(missing_ok=True)
        os.replace(self._temporary, self.path)
        files.sync_folder(self._folder)
        write_sidecar(self._folder, self._manifest, self.index, info, self._rank)

    def discard(self) -> None:
        """Forget everything that was written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)


# The folder: before the first map and after the last


def default_shard_size(total: int) -> int:
    """Up to 256 shards (few open files in each data-loading worker), of at least 64 images (little to redo)."""
    return max(64, -(-total // (256 * 64)) * 64)


def check_folder(folder: Path) -> None:
    """Do not scatter files over a folder that holds something else."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; give the name of a folder for the store.")
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return
    ours = {*KEY_FILES, RUNS, _ALSO_THERE}
    foreign = [entry.name for entry in os.scandir(folder) if entry.name not in ours and not entry.name.startswith(".")]
    if foreign:
        raise StoreError(
            f"{folder} is not empty and not a store (it has {sorted(foreign)[0]!r}). Give a new folder for the store."
        )


def mismatch(folder: Path, differences: Sequence[str], most: int = 3) -> StoreMismatchError:
    """The error about a store that was begun otherwise; names the first few differences, the most telling ones."""
    more = len(differences) - most
    lines = [*differences[:most], *([f"and {more} more difference{'s' if more > 1 else ''}"] if more > 0 else [])]
    return StoreMismatchError(
        f"{folder} was begun with other settings or images, so it cannot be continued:\n  "
        + "\n  ".join(lines)
        + "\nRun with the old settings, or give another folder for the new store (annotating new images with `reuse` "
        "copies the maps that are here)."
    )


def _begin(folder: Path, encoded: list[bytes], meta: StoreMeta, shard_size: int | None, rank: int) -> Manifest:
    """The store's manifest after checking that it is ours, or a new one."""
    blobs = key_files(encoded)
    checksums = {name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()}
    if not (folder / MANIFEST).exists():
        settings = {f.name: getattr(meta, f.name) for f in fields(StoreMeta)}
        size = shard_size or default_shard_size(len(encoded))
        manifest = Manifest(**settings, total=len(encoded), shard_size=size, checksums=checksums)
        _warn_if_full(folder, manifest)
        for name, blob in blobs.items():
            files.write_atomically(folder / name, blob, rank)
        files.write_atomically(folder / MANIFEST, manifest.to_bytes(), rank)  # the last: it makes the folder a store
        return manifest
    manifest = Manifest.read(folder)
    differences = manifest.differences(meta)
    if shard_size not in (None, manifest.shard_size):
        differences.append(f"shard size: {manifest.shard_size} in the store, {shard_size} now")
    for name in KEY_FILES:
        path = folder / name
        if not path.exists() or files.sha256_of(path) != manifest.checksums[name]:
            raise StoreDamagedError(f"{path} is missing or damaged. Restore it from a copy, or make the store again.")
    if any(manifest.checksums[name] != checksums[name] for name in KEY_FILES):
        differences[:0] = _key_differences(KeyTable(folder, manifest.total), encoded)
    if differences:
        raise mismatch(folder, differences)
    return manifest


def _key_differences(old: KeyTable, encoded: list[bytes]) -> list[str]:
    new = {decode_key(raw) for raw in encoded}
    gone = [key for key in old.iterate() if key not in new]
    added = [key for key in sorted(new) if old.find(key) < 0]
    parts = [
        f"{len(those)} {what} (for example {those[0]!r})"
        for those, what in ((gone, "are gone"), (added, "are new"))
        if those
    ]
    return [f"images: {len(old)} in the store, {len(new)} now; " + ", ".join(parts)] if parts else []


def _warn_if_full(folder: Path, manifest: Manifest) -> None:
    needed = sum(shard_bytes(manifest, i) for i in range(manifest.num_shards))
    free = shutil.disk_usage(folder).free
    if needed > free:
        log.warning(f"the store {folder} will need {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left")


def _reopen(folder: Path, manifest: Manifest, retry_skipped: bool) -> Manifest:
    """Make shards pending again: those that are gone and, on request, those with skipped images."""

    def bad(index: int) -> bool:
        path = folder / shard_name(index)
        return not path.exists() or path.stat().st_size != shard_bytes(manifest, index)

    if manifest.complete:
        redo = [i for i, info in enumerate(manifest.shards) if bad(i) or (retry_skipped and info.skipped)]
        if not redo:
            _tidy(folder, manifest)
            return manifest
        checksums = {name: digest for name, digest in manifest.checksums.items() if name != SKIPPED_LIST}
        begun = replace(manifest, shards=(), complete=False, checksums=checksums)
        # Notes for the good shards come first: a kill here leaves a complete store with some notes too many.
        for index, info in enumerate(manifest.shards):
            if index not in redo:
                write_sidecar(folder, begun, index, info)
        for index in redo:
            sidecar(folder, index).unlink(missing_ok=True)
        files.write_atomically(folder / MANIFEST, begun.to_bytes())
        (folder / SKIPPED_LIST).unlink(missing_ok=True)
        return begun
    if retry_skipped:
        for index in range(manifest.num_shards):
            info_or_none = read_sidecar(folder, manifest, index)
            if info_or_none is not None and info_or_none.skipped:
                sidecar(folder, index).unlink()
    return manifest


def _tidy(folder: Path, manifest: Manifest) -> None:
    """Remove what only an unfinished store needs. Whatever is left by a kill here is removed the next time."""
    for index in range(manifest.num_shards):
        sidecar(folder, index).unlink(missing_ok=True)
    if SKIPPED_LIST not in manifest.checksums:  # a list from before skipped images were tried again
        (folder / SKIPPED_LIST).unlink(missing_ok=True)
    files.remove_temporary(folder)
    for path in folder.glob(f"{LOCK}rank-*"):
        if path.name != f"{LOCK}rank-0":
            with suppress(files.FileError):  # its process is still alive and removes it itself
                Lock(folder, path.name.removeprefix(LOCK), patience=0).release()


def _skipped_csv(manifest: Manifest, table: KeyTable) -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["key", "reason"])
    for index, shard in enumerate(manifest.shards):
        start = manifest.shard_range(index).start
        rows.writerows([table.key(start + place), reason] for place, reason in shard.skipped)
    return text.getvalue().encode("utf-8", "surrogateescape")
