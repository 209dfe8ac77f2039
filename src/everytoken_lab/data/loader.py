"""The loader: a dataset, a transform and perhaps score maps become batches.

    loader = Loader(data, TrainTransform(224), batch_size=128, train=True, workers=4, maps=Maps("maps"))
    for batch in loader.epoch(3, start=120): ...
    for batch in loader: ...                      # the next epoch: 0 at first, here 4

What a sample looks like depends on (seed, epoch, key) alone: not on the number of workers, the order, the rank, or
where a run was resumed. An image that cannot be read raises, naming it, or is left out of its batch, counted and logged
(`BadImages`); it is never replaced by another one. Errors reach the main process as they are.

Which samples make up which batch (`BatchSampler`) is a function of (seed, epoch), divided among the ranks:
    training     the epoch's order is a permutation. Step t takes the next batch_size * world samples, and rank r takes
                 every world-th of them from the r-th on, so a step's samples do not depend on how many processes share
                 it. What does not fill a global batch is left out; every epoch leaves out other samples.
    evaluation   in order, every sample exactly once, nothing repeated to fill up; ranks may differ by one batch.
Repeated augmentation (Hoffer et al. 2020, as in DeiT): each sample is seen `repeats` times in a row with different
augmentation, on neighbouring ranks; an epoch has as many samples as before, so 1/repeats of the images.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, default_convert, get_worker_info

from everytoken import keyed
from everytoken.data.batch import Batch, tensors_in
from everytoken.errors import EverytokenError
from everytoken.files import append
from everytoken.functional import collate_maps
from everytoken.maps.store import Maps
from everytoken_lab.data.datasets import DataError, DataSet
from everytoken_lab.data.decode import ImageError

_FEW = 5  # bad images that are no reason to stop
_TIMEOUT = 600  # seconds without a batch
_SPARE = 4  # handles beside one for each tensor of a batch
_HANDLES = "too many open files for so many workers: raise the limit (ulimit -n 4096) or use fewer."
V = TypeVar("V")


class Request(NamedTuple):
    """One sample that a worker is asked for: the epoch travels along, so workers can live longer than an epoch."""

    epoch: int
    sample: int
    copy: int  # 0, or more for the repetitions of repeated augmentation


@dataclass
class BadImages:
    """What to do with images that cannot be read.

    Attributes:
        policy: "raise" stops at the first, naming it; "skip" leaves it out of its batch, counts it and logs it.
        quota: fraction of the dataset that may be bad before skipping stops too; up to five images, if one in ten.
        log: file to which skipped images are appended, one JSON object per line, each image once.
        seen: the skipped images so far: key -> reason.
    """

    policy: str = "raise"
    quota: float = 0.01
    log: Path | None = None
    seen: dict[str, str] = field(default_factory=dict)

    def note(self, skipped: Sequence[tuple[str, str]], total: int) -> None:
        """Count and log skipped images; raise when there are too many."""
        new = {key: reason for key, reason in skipped if key not in self.seen}
        self.seen.update(new)
        if new and self.log is not None:
            lines = "".join(json.dumps({"key": key, "reason": reason}) + "\n" for key, reason in new.items())
            append(self.log, lines.encode())
        if len(self.seen) > max(1, self.quota * total, min(_FEW, total / 10)):
            reasons = "\n  ".join(list(self.seen.values())[:5])
            where = f"They are listed in {self.log}. " if self.log else ""
            raise DataError(
                f"{len(self.seen)} of {total} images cannot be read, more than the quota of {self.quota:.1%}:\n"
                f"  {reasons}\n{where}Repair or remove them; `everytoken doctor` finds all such images."
            )


@dataclass
class BatchSampler(Sampler[list[Request]]):
    """Batches of requests for one rank of `world`; the arguments are those of `Loader`, `total` counts the samples."""

    total: int
    batch_size: int
    _: KW_ONLY
    train: bool
    seed: int = 0
    rank: int = 0
    world: int = 1
    repeats: int = 1
    epoch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.train and self.total < self.batch_size * self.world:
            raise DataError(
                f"{self.total} training images do not fill one batch of {self.batch_size} on {self.world} "
                f"process{'es' if self.world > 1 else ''}. Lower --batch-size."
            )

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        if self.train:
            return self.total // (self.batch_size * self.world)
        return -(-len(range(self.rank, self.total, self.world)) // self.batch_size)

    def __iter__(self) -> Iterator[list[Request]]:
        epoch, position = self.epoch, np.arange(self.rank, self.total, self.world)
        samples, copies = position, np.zeros_like(position)
        if self.train:
            order = keyed.generator(self.seed, epoch, "order").permutation(self.total)
            samples, copies = order[position // self.repeats], position % self.repeats
        for step in range(self.start, len(self)):
            span = slice(step * self.batch_size, (step + 1) * self.batch_size)
            yield [Request(epoch, i, c) for i, c in zip(samples[span].tolist(), copies[span].tolist(), strict=True)]


class BatchReader(Generic[V]):
    """Makes batches for the loader; lives in each of its workers. A task with targets of its own subclasses it.

    Args:
        data: the samples that the requests number.
        skip: leave out images that cannot be read, instead of raising.
    """

    advice = ""  # follows the error about an image

    def __init__(self, data: DataSet, skip: bool = False) -> None:
        self.data, self.skip = data, skip

    def view(self, request: Request, key: str) -> V:
        """One image as the network gets it."""
        raise NotImplementedError

    def collate(self, views: list[V]) -> tuple[np.ndarray, np.ndarray, Any]:
        """(images uint8 [B, 3, H, W], placement [B, 2, 3], targets) of a batch, which may be empty."""
        raise NotImplementedError

    def __getitems__(self, requests: list[Request]) -> Batch:
        views, kept, skipped = list[V](), list[int](), list[tuple[str, str]]()
        for request in requests:
            key = self.data.key(request.sample)
            try:
                views.append(self.view(request, key))
            except ImageError as error:
                if not self.skip:
                    raise type(error)(f"{error}{self.advice}") from error
                skipped.append((key, str(error)))
                continue
            kept.append(request.sample)
        images, placement, targets = self.collate(views)
        return Batch(
            images=torch.from_numpy(images),
            labels=torch.from_numpy(self.data.labels[kept]),
            placement=torch.from_numpy(placement.astype(np.float32).reshape(-1, 2, 3)),
            indices=torch.tensor(kept, dtype=torch.int64),
            keys=tuple(self.data.key(i) for i in kept),
            targets=targets,
            skipped=tuple(skipped),
        )


class _ImageReader(BatchReader[tuple[np.ndarray, np.ndarray]]):
    """Batches of a dataset's images, with their score maps; a view is (pixels uint8 [H, W, 3], placement [2, 3])."""

    advice = " (on_bad_image 'skip' leaves such images out; `everytoken doctor` finds them all.)"

    def __init__(self, data: DataSet, transform: Any, seed: int, train: bool, skip: bool, maps: Maps | None) -> None:
        super().__init__(data, skip)
        self.transform, self.seed, self.train, self.maps = transform, seed, train, maps

    def view(self, request: Request, key: str) -> tuple[np.ndarray, np.ndarray]:
        epoch, index, copy = request
        names = (epoch, key, "augment", *((copy,) if copy else ()))
        rng = keyed.generator(self.seed, *names) if self.train else None
        pixels, placement = self.transform(self.data.picture(index), rng)
        return pixels, placement

    def collate(self, views: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, None]:
        height, width = views[0][0].shape[:2] if views else (1, 1)
        images = np.empty((len(views), 3, height, width), dtype=np.uint8)
        for image, (pixels, _) in zip(images, views, strict=True):
            np.copyto(image, pixels.transpose(2, 0, 1))
        return images, np.array([placement for _, placement in views]), None

    def __getitems__(self, requests: list[Request]) -> Batch:
        batch = super().__getitems__(requests)
        if self.maps is None or not len(batch):
            return batch
        scores = [self.maps[key] for key in batch.keys]
        return replace(batch, maps=collate_maps(scores, num_classes=self.maps.num_classes))


def _check_maps(data: DataSet, maps: Maps) -> None:
    """Every image has a score map; found out before the first batch, not in the middle of an epoch."""
    without = [key for key in data.keys() if key not in maps]  # noqa: SIM118
    if without:
        why = f"was skipped ({maps.skipped[without[0]]})" if without[0] in maps.skipped else "is not in it"
        raise DataError(
            f"{maps.path} has no map of {len(without):,} of the {len(data):,} images of {data.name}: {without[0]!r} "
            f"{why}. Its keys are paths relative to the annotated folder, such as {maps.key(0)!r}. New images, and "
            "those of another val_split, need a new store; --retry-skipped tries skipped ones again."
        )


# Worker processes ---------------------------------------------------------------------------------------------------


class WorkerError(EverytokenError):
    """A worker process has died, does not answer, or cannot send what it has read."""


def worker_error(error: RuntimeError) -> WorkerError | None:
    """What torch says about its workers, in a sentence; None if the error is about something else. (When a worker dies,
    torch raises in the main process, whatever it is doing.)"""
    text = f"{error.__cause__ or ''} {error}"
    if dead := re.search(r"DataLoader worker \(pid\S* ([\d, ]+)\) (.*)", text):
        return WorkerError(
            f"a process that loads images (pid {dead[1]}) {dead[2].split('.')[0].strip()}. Often memory is too small: "
            "use fewer workers or a smaller --batch-size."
        )
    if "DataLoader timed out" in text:
        return WorkerError(f"no batch for {_TIMEOUT} seconds. A slow disk? Workers 0 shows where it hangs.")
    if "ancdata" in text or "Too many open files" in text:
        return WorkerError(_HANDLES)
    return None


class _Guarded:
    """A batch reader that returns its errors, which torch would wrap in a traceback. In a worker it puts batches into
    shared memory itself, and looks whether there are handles left to send them (one for each tensor, and a few): torch
    would do it in another thread, where an error is printed and the batch is lost."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getitems__(self, requests: Sequence[Any]) -> Any:
        try:
            batch = self.reader.__getitems__(requests)
        except (EverytokenError, OSError, MemoryError) as error:
            return error
        shared = list(tensors_in(batch)) if get_worker_info() is not None else []
        try:
            for tensor in shared:
                tensor.share_memory_()
            with ExitStack() as spare:
                for _ in range(len(shared) + _SPARE if shared else 0):
                    spare.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) or "Too many open files" in str(error):
                return WorkerError(_HANDLES)
            more = "Give the container more (docker run --shm-size 2g), or use fewer workers."
            return WorkerError(f"a batch does not fit into shared memory ({error}). {more}")
        return batch


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; only the main process should answer them, and end
    its workers (`close`). If it is gone, torch's own watchdog ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Workers:
    """Processes that read batches in advance; they live until `close`.

    Args:
        reader: with `__getitems__(request) -> batch`.
        requests: one for each batch; iterated anew at each pass.
        workers: processes; 0: this one reads, when asked for a batch.
        ahead: batches that each worker reads in advance.
    """

    def __init__(
        self, reader: Any, requests: Iterable[Sequence[Any]], workers: int, pin_memory: bool = False, ahead: int = 4
    ) -> None:
        self.loader: DataLoader[Any] = DataLoader(
            _Guarded(reader),  # type: ignore[arg-type]
            batch_sampler=requests,  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=default_convert,  # which leaves a batch as the reader has collated it
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=ahead if workers > 0 else None,
            timeout=_TIMEOUT if workers > 0 else 0,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else torch draws the workers' seeds, which nothing uses, globally
        )
        _alive.add(self)

    def __iter__(self) -> Iterator[Any]:
        """The batches. Errors of the readers are raised as they are."""
        batches: Iterator[Any] | None = None
        while True:
            try:
                batches = iter(self.loader) if batches is None else batches  # which asks workers of an earlier pass
                batch = next(batches, None)
            except RuntimeError as error:
                if told := worker_error(error):
                    raise told from error
                raise
            if batch is None:
                return
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def close(self) -> None:
        """End the processes; the next pass would start new ones."""
        iterator: Any = self.loader._iterator
        self.loader._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()
            for worker in iterator._workers:
                if worker.is_alive():  # stuck, perhaps in a read from a network disk
                    worker.kill()


_alive: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Python ends daemon processes by SIGTERM and waits for them, for ever if they ignore it: close them before."""
    for workers in list(_alive):
        workers.close()


# The loader of datasets ---------------------------------------------------------------------------------------------


class Loader:
    """Batches of a dataset.

    Args:
        data: the samples; or a `BatchReader` (`transform` and `maps` are then its own business).
        transform: `TrainTransform`, `EvalTransform`, or any callable (Picture, generator or None) -> (uint8 [H, W, 3],
            placement [2, 3]).
        batch_size: samples per step and process.
        train: shuffled and augmented, or in order, every sample once, without a generator.
        workers: processes that make batches; 0: this one.
        rank, world: this process and the number of processes; the top of this file says who gets what.
        maps: score maps by key; every image must have one.
    """

    def __init__(
        self,
        data: DataSet | BatchReader[Any],
        transform: Any = None,
        batch_size: int = 1,
        *,
        train: bool,
        seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        maps: Maps | None = None,
        bad_images: BadImages | None = None,
        repeats: int = 1,
        pin_memory: bool = False,
    ) -> None:
        self.train, self._upcoming = train, 0
        self.bad_images = bad_images or BadImages()
        if isinstance(data, DataSet):
            data = _ImageReader(data, transform, seed, train, self.bad_images.policy == "skip", maps)
        self.data = data.data
        self.sampler = BatchSampler(
            len(self.data), batch_size, train=train, seed=seed, rank=rank, world=world, repeats=repeats
        )
        if maps is not None:
            _check_maps(self.data, maps)
        self._workers = Workers(data, self.sampler, workers, pin_memory)

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on; those before it are not read."""
        self.sampler.epoch, self.sampler.start = epoch, start
        self._upcoming = epoch + 1
        for batch in self._workers:
            if batch.skipped:
                self.bad_images.note(batch.skipped, len(self.data))
            if len(batch):
                yield batch
            elif self.train:  # the position in the epoch counts batches, so one cannot just be left out
                raise DataError(f"None of a batch's {len(batch.skipped)} images can be read:\n  {batch.skipped[0][1]}")

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch: 0 at first, then the one after that which was begun last."""
        return self.epoch(self._upcoming)

    def close(self) -> None:
        """End the workers; done at exit too. The next epoch would start new ones."""
        self._workers.close()
