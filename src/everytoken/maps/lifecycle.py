"""Beginning, reopening and tidying a store's folder: what the writer does before the first and after the last map."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from everytoken import files
from everytoken.locks import LOCK, Lock
from everytoken.maps import keys as keys_module
from everytoken.maps.errors import StoreDamagedError, StoreError, StoreMismatchError
from everytoken.maps.keys import KeyTable
from everytoken.maps.manifest import MANIFEST, SKIPPED_LIST, Manifest, StoreMeta
from everytoken.maps.shard import read_sidecar, shard_bytes, shard_name, sidecar, write_sidecar

RUNS = "runs.jsonl"  # who wrote when: the only file that differs between equal stores
_BESIDE = "annotator"  # an annotator that was trained for this store may be kept in its folder


def default_shard_size(total: int) -> int:
    """Up to 256 shards (few open files in each data-loading worker), of at least 64 images (little to redo)."""
    return max(64, -(-total // (256 * 64)) * 64)


def check_folder(folder: Path) -> None:
    """Do not scatter files over a folder that holds something else."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; give the name of a folder for the store.")
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return
    ours = {*keys_module.FILES, RUNS, _BESIDE}
    foreign = [entry.name for entry in os.scandir(folder) if entry.name not in ours and not entry.name.startswith(".")]
    if foreign:
        raise StoreError(
            f"{folder} is not empty and not a store (it has {sorted(foreign)[0]!r}). Give a new folder for the store."
        )


def clean(folder: Path, rank: int, world: int) -> None:
    """Remove what killed processes left: our rank's temporary files; rank 0 also those of ranks that are no more."""
    for path in folder.glob(f"{files.TEMPORARY}*"):
        owner = path.name.removeprefix(files.TEMPORARY).split("-")[0]
        if owner == str(rank) or (rank == 0 and owner.isdigit() and int(owner) >= world):
            path.unlink(missing_ok=True)


def begin(folder: Path, encoded: list[bytes], meta: StoreMeta, shard_size: int | None, rank: int) -> Manifest:
    """The store's manifest after checking that it is ours, or a new one."""
    blobs = keys_module.npy_files(encoded)
    checksums = {name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()}
    if not (folder / MANIFEST).exists():
        own = {f.name: getattr(meta, f.name) for f in fields(StoreMeta)}
        size = shard_size or default_shard_size(len(encoded))
        manifest = Manifest(**own, total=len(encoded), shard_size=size, checksums=checksums)
        _warn_if_full(folder, manifest)
        for name, blob in blobs.items():
            files.write_atomically(folder / name, blob, rank)
        files.write_atomically(folder / MANIFEST, manifest.to_bytes(), rank)  # the last: it makes the folder a store
        return manifest
    manifest = Manifest.read(folder)
    differences = manifest.differences(meta)
    if shard_size not in (None, manifest.shard_size):
        differences.append(f"shard size: {manifest.shard_size} in the store, {shard_size} now")
    for name in keys_module.FILES:
        path = folder / name
        if not path.exists() or files.sha256_of(path) != manifest.checksums[name]:
            raise StoreDamagedError(f"{path} is missing or damaged. Restore it from a copy, or make the store again.")
    if any(manifest.checksums[name] != checksums[name] for name in keys_module.FILES):
        differences[:0] = _key_differences(KeyTable(folder, manifest.total), encoded)
    if differences:
        raise mismatch(folder, differences)
    return manifest


def mismatch(folder: Path, differences: Sequence[str], most: int = 3) -> StoreMismatchError:
    """The error about a store that was begun otherwise; names the first few differences, the most telling ones."""
    more = len(differences) - most
    lines = [*differences[:most], *([f"and {more} more difference{'s' if more > 1 else ''}"] if more > 0 else [])]
    return StoreMismatchError(
        f"{folder} was begun with other settings or images, so it cannot be continued:\n  "
        + "\n  ".join(lines)
        + "\nRun with the old settings, or give another folder for the new store (for new images: with --reuse, "
        "which copies the maps that are here)."
    )


def _key_differences(old: KeyTable, encoded: list[bytes]) -> list[str]:
    new = {keys_module.decode(raw) for raw in encoded}
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
        warnings.warn(
            f"the store {folder} will need {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left.",
            stacklevel=4,
        )


def reopen(folder: Path, manifest: Manifest, retry_skipped: bool) -> Manifest:
    """Make shards pending again: those that are gone and, on request, those with skipped images."""

    def bad(index: int) -> bool:
        path = folder / shard_name(index)
        return not path.exists() or path.stat().st_size != shard_bytes(manifest, index)

    if manifest.complete:
        redo = [i for i, info in enumerate(manifest.shards) if bad(i) or (retry_skipped and info.skipped)]
        if not redo:
            tidy(folder, manifest)
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
            done = read_sidecar(folder, manifest, index)
            if done is not None and done.skipped:
                sidecar(folder, index).unlink()
    return manifest


def tidy(folder: Path, manifest: Manifest) -> None:
    """Remove what only an unfinished store needs. Whatever is left by a kill here goes the next time."""
    for index in range(manifest.num_shards):
        sidecar(folder, index).unlink(missing_ok=True)
    if SKIPPED_LIST not in manifest.checksums:  # a list from before skipped images were tried again
        (folder / SKIPPED_LIST).unlink(missing_ok=True)
    for path in [*folder.glob(f"{files.TEMPORARY}*"), *folder.glob(f"{LOCK}rank-*")]:
        if path.name.startswith(files.TEMPORARY):
            path.unlink(missing_ok=True)
        elif path != folder / f"{LOCK}rank-0":
            _remove_stale_lock(folder, path.name.removeprefix(LOCK))


def _remove_stale_lock(folder: Path, name: str) -> None:
    with suppress(StoreError):  # its process still lives and removes it itself
        Lock(folder, name, patience=0).release()


def skipped_csv(manifest: Manifest, table: KeyTable) -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["key", "reason"])
    for index, shard in enumerate(manifest.shards):
        start = manifest.shard_range(index).start
        rows.writerows([table.key(start + place), reason] for place, reason in shard.skipped)
    return text.getvalue().encode("utf-8", "surrogateescape")
