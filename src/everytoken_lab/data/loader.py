"""The loader: a dataset, a transform and perhaps score maps become batches.

    loader = Loader(data, TrainTransform(224), batch_size=128, train=True, workers=4, maps=Maps("maps"))
    for batch in loader.epoch(3, start=120): ...
    for batch in loader: ...                      # the next epoch: 0 at first, here 4

What a sample looks like depends on (seed, epoch, key) alone: not on the number of workers, the order, the rank, or
where a run was resumed. Images stay bytes. Workers write samples straight into a batch and live as long as the loader.

An image that cannot be read raises, naming it, or is left out of its batch, counted and logged (`BadImages`); it is
never replaced by another one. Errors reach the main process as they are, whichever process they come from.

Which samples make up which batch (`BatchSampler`) is a function of (seed, epoch), divided among the ranks:
    training     the epoch's order is a permutation. Step t takes the next batch_size * world samples, and rank r takes
                 every world-th of them from the r-th on. The samples of a step therefore do not depend on how many
                 processes share it, as long as the global batch is the same, and a run resumes where it stopped by
                 naming a step. What does not fill a global batch is left out; every epoch leaves out other samples.
    evaluation   in order, every sample exactly once, nothing repeated to fill up; ranks may differ by one batch.
Repeated augmentation (Hoffer et al. 2020, as in DeiT): each sample is seen `repeats` times in a row with different
augmentation, on neighbouring ranks; an epoch has as many samples as before, so 1/repeats of the images.

Cost on one core, besides decoding and augmentation (see `augment`): 0.1 ms per image, 0.03 ms more for reading and
collating its 18x18x5 score map.
"""

from __future__ import annotations

import atexit
import json
import logging
import signal
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from everytoken import keyed
from everytoken.data.batch import Batch, tensors_in
from everytoken.errors import EverytokenError
from everytoken.files import append
from everytoken.functional import MapBatch, collate_maps
from everytoken.maps.store import Maps
from everytoken_lab.data.datasets import DataError, DataSet
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.machine import open_files, shared_memory

log = logging.getLogger(__name__)

_FEW = 5  # bad images that are no reason to stop
_TINY = 64 * 64  # pixels of an image that stays open once it was read: opening it takes longer than all the rest
_TINY_TOTAL = 16 * 2**20  # pixels of all those, in each worker; with the files about 100 MB
_IN_USE = 2  # batches that are with the consumer
_POLL = 5  # seconds between two looks at the workers
_PATIENCE = 60  # seconds without a batch that are worth a line in the log
_PLENTY = 2e9  # bytes of shared memory that are enough for everybody
_MORE_SHARED_MEMORY = (
    "Give the container more (docker run --shm-size 2g, or --ipc host), or use fewer workers (0 needs none) or a "
    "smaller --batch-size."
)


class Request(NamedTuple):
    """One sample that a worker is asked for: the epoch travels along, so workers can live longer than an epoch."""

    epoch: int
    sample: int
    copy: int  # 0, or more for the repetitions of repeated augmentation


class BatchReader(Protocol):
    """Reads whole batches: what a task with targets of its own gives the loader instead of a dataset."""

    @property
    def data(self) -> DataSet:
        """The samples that the requests number."""

    def __getitems__(self, requests: list[Request]) -> Batch:
        """The batch of some samples; those that could not be read are in its `skipped`, or raise."""


@dataclass
class BadImages:
    """What to do with images that cannot be read.

    Attributes:
        policy: "raise" stops at the first, naming it; "skip" leaves it out of its batch, counts it and logs it.
        quota: part of the dataset that may be bad before skipping stops too. A few images always may: one in ten, but
            not more than five.
        log: file to which skipped images are appended, one JSON object per line, each image once.
        seen: the skipped images so far: key -> reason.
    """

    policy: str = "raise"
    quota: float = 0.01
    log: Path | None = None
    seen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy not in ("raise", "skip"):
            raise DataError(f"The policy for bad images is 'raise' or 'skip', not {self.policy!r}.")

    def note(self, skipped: Sequence[tuple[str, str]], total: int) -> None:
        """Count and log skipped images; raise when there are too many."""
        new = {key: reason for key, reason in skipped if key not in self.seen}
        self.seen.update(new)
        if new and self.log is not None:
            lines = "".join(json.dumps({"key": key, "reason": reason}) + "\n" for key, reason in new.items())
            append(self.log, lines.encode())
        if len(self.seen) > max(1, self.quota * total, min(_FEW, total / 10)):
            reasons = "\n  ".join(list(self.seen.values())[:5])
            raise DataError(
                f"{len(self.seen)} of {total} images cannot be read, more than the quota of {self.quota:.1%}:\n"
                f"  {reasons}\n"
                f"{f'They are listed in {self.log}. ' if self.log else ''}Repair or remove them; `everytoken doctor` "
                'finds all such images. (In your own loop, BadImages("skip", quota=0.1) lets more pass.)'
            )


class BatchSampler(Sampler[list[Request]]):
    """Batches of requests for one rank.

    Args:
        total: samples in the dataset.
        batch_size: samples per step and process.
        train: shuffle, and give every rank the same number of batches.
        seed: of the order.
        rank, world: this process and the number of processes.
        repeats: repeated augmentation.
    """

    def __init__(
        self,
        total: int,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
    ) -> None:
        if batch_size < 1 or repeats < 1:
            raise DataError(f"batch_size and repeats must be at least 1, got {batch_size} and {repeats}.")
        if not 0 <= rank < world:
            raise DataError(f"rank must be in 0..{world - 1} for {world} processes, got {rank}.")
        if train and total < batch_size * world:
            raise DataError(
                f"{total} training images do not fill one batch of {batch_size} on {world} "
                f"process{'es' if world > 1 else ''}. Lower --batch-size."
            )
        self.total, self.batch_size, self.train, self.seed = total, batch_size, train, seed
        self.rank, self.world, self.repeats = rank, world, repeats
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and the batch to begin with."""
        if not 0 <= start <= len(self):
            raise DataError(f"start must be in 0..{len(self)}, the batches of an epoch, got {start}.")
        self.epoch, self.start = epoch, start

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(sample, copy) of each position in the epoch, over all ranks. int64 [total]."""
        if not self.train:
            return np.arange(self.total), np.zeros(self.total, dtype=np.int64)
        shuffled = keyed.generator(self.seed, epoch, "order").permutation(self.total)
        position = np.arange(self.total)
        return shuffled[position // self.repeats], position % self.repeats

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        if self.train:
            return self.total // (self.batch_size * self.world)
        return -(-len(range(self.rank, self.total, self.world)) // self.batch_size)

    def __iter__(self) -> Iterator[list[Request]]:
        epoch = self.epoch
        samples, copies = (values[self.rank :: self.world] for values in self.order(epoch))
        for step in range(self.start, len(self)):
            span = slice(step * self.batch_size, (step + 1) * self.batch_size)
            yield [Request(epoch, i, c) for i, c in zip(samples[span].tolist(), copies[span].tolist(), strict=True)]


class _ImageBatches:
    """Makes batches of a dataset's images, for `Loader`; lives in each worker."""

    def __init__(self, data: DataSet, transform: Any, seed: int, train: bool, skip: bool, maps: Maps | None) -> None:
        self.data, self.transform, self.seed, self.train, self.skip = data, transform, seed, train, skip
        self.maps = maps
        self.tiny: dict[int, Picture] = {}
        self.tiny_pixels = 0

    def picture(self, index: int) -> Picture:
        """Image `index`; tiny ones are opened once."""
        picture = self.tiny.get(index)
        if picture is None:
            picture = self.data.picture(index)
            pixels = picture.size[0] * picture.size[1]
            if self.train and pixels <= min(_TINY, _TINY_TOTAL - self.tiny_pixels):
                self.tiny[index] = picture
                self.tiny_pixels += pixels
        return picture

    def view(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """(pixels uint8 [H, W, 3], placement [2, 3]) of one sample."""
        epoch, index, copy = request
        picture = self.picture(index)
        rng = None
        if self.train:
            again = (copy,) if copy else ()
            rng = keyed.generator(self.seed, epoch, self.data.key(index), "augment", *again)
        pixels, placement = self.transform(picture, rng)
        return pixels, placement

    def __getitems__(self, requests: list[Request]) -> Batch:
        images: np.ndarray | None = None
        placement = np.zeros((len(requests), 2, 3), dtype=np.float32)
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for request in requests:
            try:
                pixels, where = self.view(request)
            except ImageError as error:
                if not self.skip:
                    raise ImageError(
                        f"{error} (on_bad_image 'skip' leaves such images out; `everytoken doctor` finds them all.)"
                    ) from error
                skipped.append((self.data.key(request.sample), str(error)))
                continue
            if images is None:
                images = np.empty((len(requests), 3, *pixels.shape[:2]), dtype=np.uint8)
            k = len(kept)
            np.copyto(images[k], pixels.transpose(2, 0, 1))
            placement[k] = where
            kept.append(request.sample)
        if images is None:
            images = np.empty((0, 3, 1, 1), dtype=np.uint8)
        n, keys = len(kept), tuple(self.data.key(i) for i in kept)
        return Batch(
            images=torch.from_numpy(images[:n]),
            labels=torch.from_numpy(self.data.labels[kept]),
            placement=torch.from_numpy(placement[:n]),
            indices=torch.tensor(kept, dtype=torch.int64),
            keys=keys,
            maps=self.read_maps(keys) if n else None,
            skipped=tuple(skipped),
        )

    def read_maps(self, keys: Sequence[str]) -> MapBatch | None:
        """The score maps of a batch."""
        if self.maps is None:
            return None
        return collate_maps([self.maps[key] for key in keys], num_classes=self.maps.manifest.num_classes)


def _check_maps(data: DataSet, maps: Maps) -> None:
    """Every image has a score map; found out before the first batch, not in the middle of an epoch."""
    without = [key for key in data.keys() if key not in maps]  # noqa: SIM118
    if not without:
        return
    where, example = maps.path, without[0]
    if len(without) == len(data):
        raise DataError(
            f"{where} has no map of any of the {len(data):,} images of {data.name}, such as {example!r}. Its keys are "
            f"paths relative to the annotated folder, such as {maps.key(0)!r}."
        )
    why = maps.skipped.get(example)
    first = f"{example!r} was skipped ({why})" if why else f"{example!r} is not in it"
    raise DataError(
        f"{where} has no map of {len(without):,} of the {len(data):,} images of {data.name}: {first}. Images that were "
        "added later, or that another val_split had held out, need a new store of all images (`everytoken annotate`); "
        "skipped ones are tried again with `everytoken annotate --retry-skipped`. `everytoken doctor DATA MAPS` lists "
        "them."
    )


# Worker processes ---------------------------------------------------------------------------------------------------


class WorkerError(EverytokenError):
    """A process that loads images has ended, or cannot send what it has read."""


@dataclass
class _Failure:
    """An error on its way from a worker. As a value it keeps its type and its sentence; torch would wrap it."""

    error: Exception


class _Guarded:
    """A batch reader that returns its errors, and in a worker puts batches into shared memory itself: torch would do it
    in another thread, where an error is printed and the batch is lost, so that everybody waits for ever."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __getitems__(self, requests: Sequence[Any]) -> Any:
        try:
            batch = self.reader.__getitems__(requests)
        except (EverytokenError, OSError, MemoryError) as error:
            return _Failure(error)
        if get_worker_info() is not None:
            try:
                for tensor in tensors_in(batch):
                    tensor.share_memory_()
            except RuntimeError as error:
                return _Failure(
                    WorkerError(f"a batch does not fit into shared memory ({error}). {_MORE_SHARED_MEMORY}")
                )
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; only the main process should answer them.

    A worker ends when the main process asks it to (`close_workers`) or is gone, which torch's own watchdog sees.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_alive: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def _close_all() -> None:
    for loader in list(_alive):
        close_workers(loader)


@cache
def _close_at_exit() -> None:
    """Python ends daemon processes by SIGTERM and waits for them, for ever if they ignore it: close them before."""
    atexit.register(_close_all)


def read_ahead(
    reader: Any,
    requests: Iterable[Sequence[Any]],
    workers: int,
    *,
    generator: torch.Generator,
    pin_memory: bool = False,
    ahead: int = 4,
) -> DataLoader[Any]:
    """A loader whose workers read batches in advance, for `receive`.

    Args:
        reader: with `__getitems__(request) -> batch`.
        requests: one for each batch.
        workers: processes; 0: this one reads, when asked for a batch.
        generator: torch seeds workers from it, though nothing here draws from that.
        ahead: batches that each worker reads in advance.
    """
    loader: DataLoader[Any] = DataLoader(
        _Guarded(reader),  # type: ignore[arg-type]
        batch_sampler=requests,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers > 0 else None,
        timeout=_POLL if workers > 0 else 0,
        worker_init_fn=_ignore_signals,
        generator=generator,
    )
    if workers > 0:
        _alive.add(loader)
        _close_at_exit()
    return loader


def receive(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader from `read_ahead`. Errors of the workers are raised as they are; a worker that has ended
    is an error; one that does not answer for a while is named in the log."""
    if loader.num_workers and loader._iterator is None:
        _check_open_files(loader.num_workers)
        _fit_shared_memory(loader)
    batches: Any = iter(loader)
    waiting, warned = time.monotonic(), 0.0
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:  # of torch's: what readers raise comes as a value
            if dead := dead_workers():
                raise WorkerError(dead) from error
            waited = time.monotonic() - waiting
            if waited < 0.9 * _POLL:
                raise WorkerError(f"the workers cannot send what they have read ({error})") from error
            if waited >= max(_PATIENCE, 2 * warned):
                warned = waited
                log.warning(
                    f"no batch for {waited:.0f} seconds: still waiting for {_late_worker(batches)}. A slow disk? "
                    "With workers 0 everything is read in the main process, where an interrupt shows the place."
                )
            continue
        if batch is None:
            return
        if isinstance(batch, _Failure):
            raise batch.error
        yield batch
        waiting, warned = time.monotonic(), 0.0


def _late_worker(batches: Any) -> str:
    """The worker whose turn it is."""
    try:
        worker = batches._workers[batches._task_info[batches._rcvd_idx][0]]
        return f"the loader's process {worker.pid}"
    except (AttributeError, LookupError):  # torch's own business
        return "one of the loader's processes"


def _check_open_files(workers: int) -> None:
    """Each tensor on its way from a worker is an open file; one that cannot be opened would be waited for in vain."""
    limit, needed = open_files(), 48 + 8 * workers
    if limit is not None and 0 <= limit < needed:
        raise WorkerError(
            f"this process may have {limit} files open, and {workers} workers need {needed} or more. Raise the limit "
            "(ulimit -n 1024), or use fewer workers (0 needs none)."
        )


def _fit_shared_memory(loader: DataLoader[Any]) -> None:
    """Before the first batch: let workers read fewer batches ahead if shared memory is small; raise if it is too small.

    Workers send batches through it, and containers often have 64 MB. Only then is an image read here to know the size.
    """
    free = shared_memory()
    request = next(iter(loader.batch_sampler), None)  # type: ignore[arg-type]
    if free is None or free >= _PLENTY or not request:
        return
    sample = loader.dataset.__getitems__(request[:1])  # type: ignore[attr-defined]
    if isinstance(sample, _Failure):
        return  # a worker will say so
    size = max(1, sum(tensor.nbytes for tensor in tensors_in(sample))) * len(request)
    ahead = (free // size - _IN_USE) // loader.num_workers
    if ahead < 1:
        needed = size * (loader.num_workers + _IN_USE)
        raise WorkerError(
            f"shared memory (/dev/shm) has {free / 1e6:.0f} MB free, and {loader.num_workers} workers with batches of "
            f"{size / 1e6:.0f} MB need {needed / 1e6:.0f} MB or more. {_MORE_SHARED_MEMORY}"
        )
    usual = loader.prefetch_factor or 1
    if ahead < usual:
        loader.prefetch_factor = ahead
        log.warning(
            f"shared memory (/dev/shm) has only {free / 1e6:.0f} MB free, so each worker reads {ahead} batches ahead "
            f"instead of {usual}. A container gets more with --shm-size 2g."
        )


def dead_workers() -> str:
    """Which workers of any loader have ended by themselves, in words; empty if none has."""
    processes = [worker for loader in list(_alive) for worker in getattr(loader._iterator, "_workers", ())]
    dead = [process for process in processes if process.exitcode not in (None, 0)]
    if not dead:
        return ""
    code = dead[0].exitcode
    how = f"by {signal.Signals(-code).name}" if -code in list(signal.Signals) else f"with code {code}"
    return (
        f"a process that loads images (pid {dead[0].pid}) was ended {how}. Often memory is too small: use fewer "
        "workers or a smaller --batch-size. What is finished is kept, and the same command continues from there."
    )


def close_workers(loader: DataLoader[Any]) -> None:
    """End the workers of a loader; the next `receive` would start new ones."""
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():  # stuck, perhaps in a read from a network disk
                worker.kill()


# The loader of datasets ---------------------------------------------------------------------------------------------


class Loader:
    """Batches of a dataset.

    Args:
        data: the samples; or a `BatchReader`, which reads batches itself (`transform` and `maps` are then its own
            business).
        transform: `TrainTransform`, `EvalTransform`, or any callable (Picture, generator or None) -> (uint8 [H, W, 3],
            placement [2, 3]).
        batch_size: samples per step and process.
        train: shuffled and augmented, or in order, every sample once, without a generator.
        seed: of order and augmentation.
        workers: processes that make batches; 0: this one.
        rank, world: this process and the number of processes; the top of this file says who gets what.
        maps: score maps by key; every image must have one.
        bad_images: what happens to unreadable images.
        repeats: repeated augmentation.
        pin_memory: page-locked batches, for CUDA.
    """

    def __init__(
        self,
        data: DataSet | BatchReader,
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
        reader: Any = data
        if isinstance(data, DataSet):
            self.data = data
            skip = self.bad_images.policy == "skip"
            reader = _ImageBatches(data, transform, seed, train, skip, maps)
        else:
            self.data = data.data
        self.sampler = BatchSampler(
            len(self.data), batch_size, train=train, seed=seed, rank=rank, world=world, repeats=repeats
        )
        if maps is not None:
            _check_maps(self.data, maps)
        generator = keyed.torch_generator(seed, "workers")  # else torch draws from the global generator
        self._loader = read_ahead(reader, self.sampler, workers, generator=generator, pin_memory=pin_memory)

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on; those before it are not read."""
        self.sampler.set_epoch(epoch, start)
        self._upcoming = epoch + 1
        for batch in receive(self._loader):
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
        close_workers(self._loader)
