"""Filling a store: safe against kill -9, full disks, second runs, and with any number of processes.

The sorted list of keys is divided into shards, [i*S, (i+1)*S). A shard is filled in memory and written when it is
full; then it counts. So every shard follows from the keys and the annotator alone, and the finished store is the same,
however often the job was killed and however many processes shared it. To continue is to make the shards that are not
there. At most the shard in work is done again after a kill.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from everytoken import files
from everytoken.maps.format import (
    RECORD,
    Plan,
    Shard,
    StoreDamagedError,
    StoreError,
    StoreMeta,
    StoreMismatchError,
    StoreUnfinishedError,
    decode_key,
    encode_keys,
    find_plan,
    list_shards,
    shard_layout,
    write_shard,
)
from everytoken.maps.score_map import ScoreMap
from everytoken.maps.store import Maps

_ALSO_THERE = "annotator"  # an annotator that was trained for this store may be kept in its folder
_KEPT = "Nothing is lost: finished shards are kept and no torn file is left; the same command continues."


@dataclass(frozen=True)
class Skipped:
    """Stands for an image that has no map, and says why."""

    reason: str


@dataclass
class _Filling:
    """A shard that is being filled: which of its rows were given, their arrays, and reasons why there is none."""

    given: NDArray[np.bool_]
    arrays: dict[str, NDArray[Any]]
    reasons: dict[int, str] = field(default_factory=dict)


class MapWriter:
    """Writes score maps into a store; a context manager. Opens a new store, or continues one that was begun with the
    same keys and the same `meta`.

    Example:
        >>> meta = StoreMeta(grid=(14, 14), top_k=5, class_names=names, annotator={"name": "my network"})
        >>> with MapWriter("maps", keys, meta) as writer:
        ...     for key in writer.pending_keys():                # after a crash: what is not finished
        ...         logits, size = my_network(key)               # [14, 14, K], (width, height)
        ...         writer.write({key: ScoreMap.from_logits(logits, 5, size)})
        ...     maps = writer.finalize()

    With several processes (torchrun) each passes its `rank` and `world` and writes its own `pending_keys()` or
    `pending_shards()`; then they meet (a barrier), and rank 0 calls `finalize()`.

    Args:
        path: the store's folder; made if it is not there.
        keys: all images' paths relative to the data folder, in any order.
        meta: what the maps look like and who makes them.
        shard_size: images per shard; by default 64 to 4096, and that of the store when it exists.
        rank, world: which of how many processes this is.
        retry_skipped: do the shards again in which images had been skipped.
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
        patience: float = 8.0,
    ) -> None:
        self.path, self.rank, self.world = Path(path), rank, world
        self._keys = encode_keys(keys)
        if not self._keys:
            raise StoreError(f"there are no images to annotate for {self.path}; check the data folder.")
        if not 0 <= rank < world or (shard_size or 1) < 1:
            raise ValueError(f"rank {rank} of {world} with shards of {shard_size} images is not possible.")
        with files.disk_errors(self.path, "opening the store for writing", _KEPT):
            check_folder(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = files.Lock(self.path, f"rank-{rank}", patience)
            try:
                files.remove_temporary(self.path, rank, world)
                self.plan = _begin(self.path, self._keys, meta, shard_size)
                self._open: dict[int, _Filling] = {}
                mine = range(rank, self.plan.num_shards, world) if retry_skipped else ()
                self._again = {i for i in mine if (shard := self._done(i)) and shard.skipped}
            except BaseException:
                self._lock.release()
                raise

    def pending_shards(self, rank: int | None = None, world: int | None = None) -> list[int]:
        """Shards still to be written by one process (this one, if not given): shard i belongs to i % world."""
        rank, world = self.rank if rank is None else rank, self.world if world is None else world
        return [i for i in range(rank, self.plan.num_shards, world) if i in self._again or self._done(i) is None]

    def pending_keys(self) -> Iterator[str]:
        """Keys still to be written by this process, shard after shard."""
        for number in self.pending_shards():
            yield from self.shard_keys(number)

    def shard_range(self, number: int) -> range:
        """Positions in the sorted list of keys that a shard holds."""
        return self.plan.shard_range(number)

    def shard_keys(self, number: int) -> list[str]:
        """Keys of a shard, in order."""
        return [self.key(position) for position in self.shard_range(number)]

    def key(self, position: int) -> str:
        """The key at a position of the sorted list."""
        return decode_key(self._keys[position])

    def write(self, records: Mapping[str, ScoreMap | Skipped]) -> None:
        """Store the maps of some images by their keys, or say why an image has none; some 64 at a time are fast.

        Keep to the order of `pending_keys`: a shard counts, and survives a kill, when it is full.
        """
        positions = {key: self._position(key) for key in records}
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
        """Store a batch of maps; a shard that becomes full is written at once.

        Args:
            positions: [n] in the sorted list of keys; in rising order, a kill costs no more than one shard.
            scores: [n, h, w, k] logits, descending along k; stored as float16.
            classes: [n, h, w, k] integers, distinct within a cell.
            sizes: [n, 2] (width, height) of the upright images.
            areas: [n, 4] (x0, y0, x1, y1), see ScoreMap.
        """
        meta, keys = self.plan.meta, [self.key(position) for position in positions]
        arrays = check_maps(keys, meta.num_classes, (*meta.grid, meta.top_k), scores, classes, sizes, areas)
        shards, rows = np.divmod(np.array(positions, np.int64), self.plan.shard_size)
        for number in np.unique(shards).tolist():
            some = shards == number
            filling = self._begin_rows(number, rows[some])
            for name, array in filling.arrays.items():
                array[rows[some]] = arrays[name][some]
            self._finish_rows(number, rows[some])

    def skip(self, position: int, reason: str) -> None:
        """Say that an image has no map (unreadable, gone), and why. It is counted and listed."""
        number, row = divmod(position, self.plan.shard_size)
        self._begin_rows(number, np.array([row])).reasons[row] = " ".join(str(reason).split()) or "no reason given"
        self._finish_rows(number, np.array([row]))

    def finalize(self) -> Maps:
        """Check that nothing is missing and make the index; returns the store. For rank 0, at the end."""
        if missing := self.pending_shards(0, 1):
            raise StoreUnfinishedError(
                f"{self.path} cannot be completed: {len(missing)} of {self.plan.num_shards} shards are not written. "
                "Run the same command again; it makes the missing ones."
            )
        with files.disk_errors(self.path, "completing the store", _KEPT):
            files.remove_temporary(self.path)
            return Maps(self.path)

    def close(self) -> None:
        """Forget unfinished shards and let others write. Finished shards stay."""
        self._open.clear()
        self._lock.release()

    def __enter__(self) -> MapWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _done(self, number: int) -> Shard | None:
        """A shard of this store that is there and whole."""
        with suppress(StoreDamagedError):
            shard = Shard(self.path / self.plan.shard_name(number))
            return shard if shard.plan == self.plan else None
        return None

    def _position(self, key: str) -> int:
        raw = key.encode("utf-8", "surrogateescape")
        position = bisect_left(self._keys, raw)
        if self._keys[position : position + 1] != [raw]:
            raise StoreError(f"{key!r} is not one of the keys that {self.path} was begun with.")
        return position

    def _begin_rows(self, number: int, rows: NDArray[np.int64]) -> _Filling:
        """The shard that these rows go to."""
        if number not in self._open:
            if number not in self._again and self._done(number):
                raise StoreError(f"shard {number} of {self.path} is already done; see pending_shards().")
            count = len(self.shard_range(number))
            layout = shard_layout(self.plan, count)
            arrays = {name: np.empty(layout[name][1], layout[name][0]) for name in RECORD}
            self._open[number] = _Filling(np.zeros(count, bool), arrays)
        filling = self._open[number]
        if filling.given[rows].any() or len(np.unique(rows)) < len(rows):
            raise StoreError(f"{self.shard_keys(number)[int(rows[0])]!r} or another key with it was given twice.")
        return filling

    def _finish_rows(self, number: int, rows: NDArray[np.int64]) -> None:
        """Write the shard if it is full."""
        filling, plan = self._open[number], self.plan
        filling.given[rows] = True
        if not filling.given.all():
            return
        del self._open[number]
        first, reasons = plan.shard_range(number)[0], dict(sorted(filling.reasons.items()))
        skipped = [(self.key(first + row), reason) for row, reason in reasons.items()]
        kept = [row for row in range(len(filling.given)) if row not in reasons]
        arrays = {name: array[kept] for name, array in filling.arrays.items()} if reasons else filling.arrays
        with files.disk_errors(self.path, f"writing {plan.shard_name(number)}", _KEPT):
            write_shard(self.path, plan, number, [self._keys[first + row] for row in kept], arrays, skipped, self.rank)
        self._again.discard(number)


def check_maps(
    keys: Sequence[str],
    num_classes: int,
    shape: tuple[int, int, int],
    scores: ArrayLike,
    classes: ArrayLike,
    sizes: ArrayLike,
    areas: ArrayLike,
) -> dict[str, NDArray[np.generic]]:
    """Check a batch: scores and classes [n, h, w, k] of `shape` (h, w, k), sizes [n, 2], areas [n, 4]."""
    arrays = {"scores": np.asarray(scores), "classes": np.asarray(classes)}
    arrays |= {"size": np.asarray(sizes), "area": np.asarray(areas, np.float64)}
    for (name, array), wanted in zip(arrays.items(), (shape, shape, (2,), (4,)), strict=True):
        if array.shape != (len(keys), *wanted):
            raise ValueError(f"{name} must have shape {[len(keys), *wanted]}, got {list(array.shape)}.")
    ids, area, size = arrays["classes"], arrays["area"], arrays["size"]
    if ids.dtype.kind not in "iu" or size.dtype.kind not in "iu":
        raise ValueError(f"class ids and sizes must be integers, got {ids.dtype} and {size.dtype}.")
    with np.errstate(over="ignore"):  # an overflow becomes inf, which is refused below with the image's name
        half = arrays["scores"].astype("<f2")
    problems = (
        ("its scores are not finite in float16", ~np.isfinite(half)),
        ("its scores are not in descending order", half[..., 1:] > half[..., :-1]),
        (f"a class id is outside 0..{num_classes - 1}", (ids < 0) | (ids >= num_classes)),
        ("a class occurs twice in one cell", np.diff(np.sort(ids, axis=-1), axis=-1) == 0),
        ("its area is not x0 < x1, y0 < y1", ~((area[:, 2:] > area[:, :2]) & np.isfinite(area[:, 2:] - area[:, :2]))),
        ("its size is negative or too large", (size < 0) | (size >= 2**32)),
    )
    for what, wrong in problems:
        if wrong.any():
            first = int(np.argmax(wrong.reshape(len(keys), -1).any(axis=1)))
            raise StoreError(f"the map of {keys[first]!r} cannot be stored: {what}. Look at the annotator's output.")
    return arrays | {"scores": half}


def default_shard_size(total: int) -> int:
    """About 256 shards (few open files in each data-loading worker), of 64 (little to redo) to 3072 images (memory)."""
    return min(3072, max(64, -(-total // (256 * 64)) * 64))


def check_folder(folder: Path) -> None:
    """Do not scatter files over a folder that holds something else."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; give the name of a folder for the store.")
    if not folder.is_dir() or list_shards(folder):
        return
    names = (name for name in os.listdir(folder) if not name.startswith(".") and name != _ALSO_THERE)
    if foreign := min(names, default=""):
        raise StoreError(f"{folder} is not empty and not a store (it has {foreign!r}). Give a new folder.")


def mismatch(folder: Path, differences: Sequence[str]) -> StoreMismatchError:
    """The error about a store that was begun otherwise; names the first few differences."""
    return StoreMismatchError(
        f"{folder} was begun with other settings or images, so it cannot be continued:\n  "
        + "\n  ".join(differences[:3])
        + "\nRun with the old settings, or give another folder for the new store."
    )


def _begin(folder: Path, keys: list[bytes], meta: StoreMeta, shard_size: int | None) -> Plan:
    """The store's plan after checking that it is ours, or a new one."""
    begun = find_plan(folder)
    size = shard_size or (begun.shard_size if begun else default_shard_size(len(keys)))
    plan = Plan(meta, len(keys), size, hashlib.sha256(b"\0".join(keys)).hexdigest())
    if begun is None or begun == plan:
        return plan
    differences = begun.meta.differences(meta)
    if plan.keys_sha256 != begun.keys_sha256:
        differences.insert(0, f"images: {begun.total} in the store, {len(keys)} now")
    raise mismatch(folder, differences or [f"shard size: {begun.shard_size} in the store, {size} now"])
