"""Which samples make up which batch: a function of (seed, epoch), cut up by (rank, world), startable anywhere.

Training: the epoch's order is a permutation keyed by (seed, epoch). Step t takes the next batch_size * world samples,
and rank r takes every world-th of them from the r-th on. The samples of a step therefore do not depend on how many
processes share it, as long as the global batch is the same, and a run goes on where it stopped by naming a step.
    drop_last=True   what does not fill a global batch is left out; every epoch leaves out other samples.
    drop_last=False  every sample exactly once: the last step is smaller and divided as evenly as possible. If it had
                     fewer samples than processes, they join the step before it, so no process is ever without a batch.
Evaluation: in order, every sample exactly once, nothing repeated to fill up; ranks may differ by one batch.

Repeated augmentation (Hoffer et al. 2020, as in DeiT): each sample is seen `repeats` times in a row with different
augmentation, on neighbouring ranks; an epoch has as many samples as before, so 1/repeats of the images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from everytoken import keyed
from everytoken.data.sources import DataError


class Request(NamedTuple):
    """One sample that a worker is asked for: the epoch travels along, so workers can live longer than an epoch."""

    epoch: int
    sample: int
    copy: int  # 0, or more for the repetitions of repeated augmentation


class BatchSampler(Sampler[list[Request]]):
    """Batches of requests for one rank.

    Args:
        total: samples in the data set.
        batch_size: samples per step and process.
        train: shuffle, and give every rank the same number of batches.
        seed: of the order.
        rank, world: this process and the number of processes.
        drop_last: see above; only for training.
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
        drop_last: bool = True,
        repeats: int = 1,
    ) -> None:
        if batch_size < 1 or repeats < 1:
            raise DataError(f"batch_size and repeats must be at least 1, got {batch_size} and {repeats}.")
        if not 0 <= rank < world:
            raise DataError(f"rank must be in 0..{world - 1} for {world} processes, got {rank}.")
        self.total, self.batch_size, self.train, self.seed = total, batch_size, train, seed
        self.rank, self.world, self.repeats = rank, world, repeats
        self.drop_last = drop_last and train
        self.epoch, self.start = 0, 0
        self._cuts = self._plan()

    def _plan(self) -> list[tuple[int, int]]:
        """(first, last + 1) of each step's samples in the epoch's order."""
        if not self.train:
            own = len(range(self.rank, self.total, self.world))
            return [(k, min(k + self.batch_size, own)) for k in range(0, own, self.batch_size)]
        step = self.batch_size * self.world
        full, rest = divmod(self.total, step)
        if full == 0 and (self.drop_last or rest < self.world):
            raise DataError(
                f"{self.total} training images do not fill one batch of {self.batch_size} on {self.world} "
                f"process{'es' if self.world > 1 else ''}. Lower the batch size (--batch-size; in your own loop, "
                "drop_last=False keeps the incomplete batch)."
            )
        cuts = [(k * step, (k + 1) * step) for k in range(full)]
        if rest and not self.drop_last:
            if rest < self.world:
                cuts[-1] = (cuts[-1][0], self.total)
            else:
                cuts.append((full * step, self.total))
        return cuts

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and the batch to begin with."""
        if not 0 <= start <= len(self._cuts):
            raise DataError(f"start must be in 0..{len(self._cuts)}, the batches of an epoch, got {start}.")
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
        return len(self._cuts)

    def __iter__(self) -> Iterator[list[Request]]:
        epoch, (samples, copies) = self.epoch, self.order(self.epoch)
        if not self.train:
            samples, copies = samples[self.rank :: self.world], copies[self.rank :: self.world]
        for first, end in self._cuts[self.start :]:
            step = slice(first + self.rank, end, self.world) if self.train else slice(first, end)
            yield [Request(epoch, i, c) for i, c in zip(samples[step].tolist(), copies[step].tolist(), strict=True)]
