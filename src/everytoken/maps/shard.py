"""One shard: a ``.npy`` file of fixed-size records, invisible until it is whole.

Life of a shard: records are written into a temporary file; when the last one is there the file is
flushed, renamed, and a sealed JSON note with its checksum (the sidecar) is put beside it. Only the note
makes the shard count. Whatever a killed process leaves before that is thrown away and done again.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everytoken import files
from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.manifest import Manifest, ShardInfo


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.npy"


def header(dtype: np.dtype[np.void], records: int) -> bytes:
    """The head of a shard's file: numpy's own, for a 1-D array of records."""
    from io import BytesIO

    buffer = BytesIO()
    content = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (records,)}
    np.lib.format.write_array_header_1_0(buffer, content)
    return buffer.getvalue()


def shard_bytes(manifest: Manifest, index: int) -> int:
    """Size of a shard's file."""
    records = len(manifest.shard_range(index))
    return len(header(manifest.record, records)) + records * manifest.record.itemsize


def open_shard(folder: Path, manifest: Manifest, index: int) -> NDArray[np.uint8]:
    """The records of a shard as bytes [records, record_bytes], memory-mapped, read-only."""
    path, records = folder / shard_name(index), len(manifest.shard_range(index))
    wanted = shard_bytes(manifest, index)
    try:
        size = path.stat().st_size
        if size != wanted:
            raise ValueError(f"it has {size:,} bytes instead of {wanted:,}")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype != manifest.record or array.shape != (records,):
            raise ValueError("its header does not fit the manifest")
    except FileNotFoundError as error:
        raise StoreDamagedError(f"{path} is missing.\n{way_out(path)}") from error
    except Exception as error:  # numpy raises whatever its parser meets in a damaged header
        raise StoreDamagedError(f"{path} is damaged: {error}.\n{way_out(path)}") from error
    return np.asarray(array).view(np.uint8).reshape(records, manifest.record.itemsize)


def way_out(path: Path) -> str:
    """What to do about a bad shard."""
    return (
        f"Restore {path.name} from a copy, or delete it and run the command that made the store once more: "
        "it makes only this shard again."
    )


def sidecar(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.json"


def write_sidecar(folder: Path, manifest: Manifest, index: int, info: ShardInfo, rank: int = 0) -> None:
    """Say that a shard is done."""
    content = info.to_json() | {"plan": manifest.plan_id()}
    files.write_atomically(sidecar(folder, index), files.seal(content), rank)


def read_sidecar(folder: Path, manifest: Manifest, index: int, plan_id: str | None = None) -> ShardInfo | None:
    """What is known about a finished shard; None when it is not finished (or belongs to another plan)."""
    try:
        content = files.unseal(sidecar(folder, index))
        if content["plan"] != (plan_id or manifest.plan_id()):
            return None
        size = (folder / shard_name(index)).stat().st_size
        return ShardInfo.from_json(content) if size == shard_bytes(manifest, index) else None
    except (FileNotFoundError, StoreDamagedError, KeyError, ValueError):
        return None


class ShardFile:
    """A shard while it is being written. Records may come in any order; ``commit`` when ``full``."""

    def __init__(self, folder: Path, manifest: Manifest, index: int, rank: int) -> None:
        self._folder, self._manifest, self.index, self._rank = folder, manifest, index, rank
        self.path = folder / shard_name(index)
        self._temporary = files.temporary_name(self.path, rank)
        self._first = manifest.shard_range(index).start
        self._filled = np.zeros(len(manifest.shard_range(index)), bool)
        self._skipped: dict[int, str] = {}
        head = header(manifest.record, len(self._filled))
        self._start = len(head)
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        files.write_all(self._fd, head, 0)

    @property
    def full(self) -> bool:
        return bool(self._filled.all())

    def write(self, positions: NDArray[np.int64], records: NDArray[np.void], reason: str | None = None) -> None:
        """Put records at positions of the plan; with a ``reason``, as skipped ones."""
        places = positions - self._first
        if self._filled[places].any() or len(np.unique(places)) < len(places):
            raise StoreError(f"a record of {self.path} was given twice; each position is written once.")
        breaks = np.flatnonzero(np.diff(places) != 1) + 1  # neighbours go out in one piece
        for run, block in zip(np.split(places, breaks), np.split(records, breaks), strict=True):
            offset = self._start + int(run[0]) * records.dtype.itemsize
            files.write_all(self._fd, block.view(np.uint8).data, offset)
        self._filled[places] = True
        if reason is not None:
            self._skipped |= {int(place): reason for place in places}

    def commit(self) -> ShardInfo:
        """Flush, rename, and write the note that makes the shard count."""
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        info = ShardInfo(
            self.path.name,
            len(self._filled),
            files.sha256_of(self._temporary),
            tuple(sorted(self._skipped.items())),
        )
        # An old note must not vouch for the new file, should we die between the next two lines.
        sidecar(self._folder, self.index).unlink(missing_ok=True)
        os.replace(self._temporary, self.path)
        files.sync_folder(self._folder)
        write_sidecar(self._folder, self._manifest, self.index, info, self._rank)
        return info

    def discard(self) -> None:
        """Forget everything that was written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temporary.unlink(missing_ok=True)
