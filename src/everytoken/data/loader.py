"""The loader: a data set, a transform and perhaps a store of score maps become batches.

    loader = Loader(data, TrainTransform(config), batch_size=128, train=True, workers=4, store=Maps("maps"))
    for batch in loader.epoch(3, start=120): ...
    for batch in loader: ...                      # the next epoch: 0 at first, here 4

What a sample looks like depends on (seed, epoch, key) alone: not on the number of workers, the order, the rank, or
where a run was resumed. Images stay bytes. Workers write samples straight into a batch and live as long as the loader.

An image that cannot be read raises, naming it, or is left out of its batch, counted and logged (`BadImages`); it is
never replaced by another one.

Cost on one core, besides decoding and augmentation (see `augment`): 0.1 ms per image, 0.03 ms more for reading and
collating its 18x18x5 score map.
"""

from __future__ import annotations

import atexit
import json
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from everytoken import keyed
from everytoken.data.batch import Batch
from everytoken.data.decode import Alpha, ImageError
from everytoken.data.sampler import BatchSampler, Request
from everytoken.data.sources import DataError, DataSet
from everytoken.errors import EverytokenError
from everytoken.functional import collate_maps as stack_maps

_FEW = 5  # bad images that are no reason to stop


class MapStore(Protocol):
    """What the loader needs of `everytoken.maps.Maps`."""

    @property
    def manifest(self) -> Any:
        """With num_classes."""

    def __getitem__(self, key: str) -> Any:
        """The score map of an image."""

    def __contains__(self, key: object) -> bool:
        """Whether there is one."""


@dataclass
class BadImages:
    """What to do with images that cannot be read.

    Attributes:
        policy: "raise" stops at the first, naming it; "skip" leaves it out of its batch, counts it and logs it.
        quota: part of the data set that may be bad before skipping stops too. A few images always may: one in ten, but
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
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(lines)
        if len(self.seen) > max(1, self.quota * total, min(_FEW, total / 10)):
            listed = "\n  ".join(list(self.seen.values())[:5])
            raise DataError(
                f"{len(self.seen)} of {total} images cannot be read, more than the quota of {self.quota:.1%}:\n"
                f"  {listed}\n"
                f"{f'They are listed in {self.log}. ' if self.log else ''}Mend or remove them; `everytoken doctor` "
                'finds all such images. (In your own loop, BadImages("skip", quota=0.1) lets more pass.)'
            )


class _Samples:
    """Makes batches; lives in each worker."""

    def __init__(
        self,
        data: DataSet,
        transform: Any,
        seed: int,
        train: bool,
        alpha: Alpha,
        skip: bool,
        store: MapStore | None,
        collate: Callable[[list[Any]], Any] | None,
        missing: bool,
    ) -> None:
        self.data, self.transform, self.seed, self.train, self.alpha = data, transform, seed, train, alpha
        self.skip, self.store, self.collate, self.missing = skip, store, collate, missing
        config = getattr(transform, "config", None)
        self.rectangles = config.recount if train and config is not None and config.reprob > 0 else 0

    def __len__(self) -> int:
        return len(self.data)

    def sample(self, request: Request) -> tuple[np.ndarray, np.ndarray, Sequence[Sequence[float]]]:
        """(pixels uint8 [H, W, 3], placement [2, 3], erased rectangles) of one sample."""
        epoch, index, copy = request
        picture = self.data.picture(index, self.alpha)
        rng = None
        if self.train:
            again = (copy,) if copy else ()
            rng = keyed.generator(self.seed, epoch, self.data.key(index), "augment", *again)
        if hasattr(self.transform, "view"):
            return self.transform.view(picture, rng)
        pixels, placement = self.transform(picture, rng)
        return pixels, placement, ()

    def __getitems__(self, requests: list[Request]) -> Batch:
        images: np.ndarray | None = None
        placement = np.zeros((len(requests), 2, 3), dtype=np.float32)
        erased = np.zeros((len(requests), self.rectangles, 4), dtype=np.float32)
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for request in requests:
            try:
                pixels, where, boxes = self.sample(request)
            except ImageError as error:
                if not self.skip:
                    raise ImageError(
                        f"{error} `everytoken doctor` finds all such images; --on-bad-image skip leaves them out."
                    ) from error
                skipped.append((self.data.key(request.sample), str(error)))
                continue
            if images is None:
                images = np.empty((len(requests), 3, *pixels.shape[:2]), dtype=np.uint8)
            k = len(kept)
            np.copyto(images[k], pixels.transpose(2, 0, 1))
            placement[k] = where
            if boxes:
                erased[k, : len(boxes)] = boxes
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
            erased=torch.from_numpy(erased[:n]) if self.rectangles else None,
            maps=self.maps(keys) if n else None,
            skipped=tuple(skipped),
        )

    def maps(self, keys: Sequence[str]) -> Any:
        """The score maps of a batch."""
        if self.store is None or self.collate is None:
            return None
        try:
            maps = [None if self.missing and key not in self.store else self.store[key] for key in keys]
        except (KeyError, EverytokenError) as error:
            lacking = next((key for key in keys if key not in self.store), None)
            if lacking is None:  # something else is wrong
                raise
            raise DataError(self.without_map(self.store, lacking)) from error
        return self.collate(maps)

    def without_map(self, store: MapStore, example: str) -> str:
        """How many images have no map, and what to do about it."""
        count = sum(key not in store for key in self.data.keys())  # noqa: SIM118
        where = getattr(store, "path", "the store")
        if count == len(self.data):
            key = getattr(store, "key", None)
            such = f" Its keys are paths relative to the annotated folder, such as {key(0)!r}." if key else ""
            return f"{where} has no map of any of the {count:,} images of {self.data.name}, such as {example!r}.{such}"
        why = getattr(store, "skipped", {}).get(example)
        first = f"{example!r} was skipped ({why})" if why else f"{example!r} is not in it"
        return (
            f"{where} has no map of {count:,} of the {len(self.data):,} images of {self.data.name}: {first}. Images "
            "that came later, or that another --val-split had set aside, need a new store of all images (`everytoken "
            "annotate`); skipped ones are tried again with --retry-skipped. `everytoken doctor DATA MAPS` lists them."
        )


def _as_it_is(batch: Any) -> Any:
    return batch


def _quiet_worker(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; only the main process should answer them.

    A worker ends when the main process asks it to (`Loader.close`) or is gone, which torch's own watchdog sees.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_alive: weakref.WeakSet[Loader] = weakref.WeakSet()


def _close_all() -> None:
    for loader in list(_alive):
        loader.close()


@cache
def _close_at_exit() -> None:
    """Python ends daemon processes by SIGTERM and waits for them, for ever if they ignore it: close them before."""
    atexit.register(_close_all)


class Loader:
    """Batches of a data set.

    Args:
        data: the samples.
        transform: `TrainTransform`, `EvalTransform`, or any callable (Picture, generator or None) -> (uint8 [H, W, 3],
            placement [2, 3]).
        batch_size: samples per step and process.
        train: shuffled and augmented, or in order, every sample once, without a generator.
        seed: of order and augmentation.
        workers: processes that make batches; 0: this one.
        rank, world: this process and the number of processes; see `sampler` for who gets what.
        store: score maps by key.
        collate_maps: makes `batch.maps` of the list of a batch's score maps (None for a sample without one); default:
            `functional.collate_maps`.
        missing_maps: allow samples without a map (their weight is 0); otherwise a missing one raises.
        bad_images: what happens to unreadable images.
        drop_last, repeats: see `sampler`.
        prefetch: batches that each worker prepares in advance.
        pin_memory: page-locked batches, for CUDA.
        alpha: what transparency is composited over.
        samples: makes batches itself instead of `transform`, `store` and so on (dense tasks, whose targets are masks or
            boxes): its `__getitems__(requests)` returns something with `skipped`, a length and `pin_memory`.
    """

    def __init__(
        self,
        data: DataSet,
        transform: Any,
        batch_size: int,
        *,
        train: bool,
        seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        store: MapStore | None = None,
        collate_maps: Callable[[list[Any]], Any] | None = None,
        missing_maps: bool = False,
        bad_images: BadImages | None = None,
        drop_last: bool = True,
        repeats: int = 1,
        prefetch: int = 4,
        pin_memory: bool = False,
        alpha: Alpha = "white",
        samples: Any = None,
    ) -> None:
        self.data, self.train = data, train
        self._upcoming = 0
        self.bad_images = bad_images or BadImages()
        self.sampler = BatchSampler(
            len(data), batch_size, train=train, seed=seed, rank=rank, world=world, drop_last=drop_last, repeats=repeats
        )
        if store is not None and collate_maps is None:
            collate_maps = partial(stack_maps, num_classes=store.manifest.num_classes)
        skip = self.bad_images.policy == "skip"
        self.samples: Any = samples or _Samples(
            data, transform, seed, train, alpha, skip, store, collate_maps, missing_maps
        )
        self._loader: DataLoader[Batch] = DataLoader(
            self.samples,  # type: ignore[arg-type]
            batch_sampler=self.sampler,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=prefetch if workers > 0 else None,
            worker_init_fn=_quiet_worker,
            generator=keyed.torch_generator(seed, "workers"),  # else torch draws from the global generator
        )
        if workers > 0:
            _alive.add(self)
            _close_at_exit()

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return len(self.sampler)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on; those before it are not read."""
        self.sampler.set_epoch(epoch, start)
        self._upcoming = epoch + 1
        for batch in self._loader:
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
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            for worker in iterator._workers:
                if worker.is_alive():  # stuck, perhaps in a read from a network disk
                    worker.kill()
