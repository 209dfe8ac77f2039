"""Training one classifier, shortly: AdamW, one cycle of the learning rate, light augmentation, cross entropy.

For annotators only; `everytoken.engine` is the engine for everything else. The order of images, their augmentation and
dropout are keyed by (seed, fold, epoch, image), so a training that is begun again gives the same network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from everytoken.annotators.annotator import AnnotatorError, Preprocessing
from everytoken.annotators.folds import Fold
from everytoken.annotators.networks import CellScores
from everytoken.annotators.reading import BatchReader, ImageBatch
from everytoken.data.augment import AugmentOptions, TrainTransform
from everytoken.data.datasets import DataSet
from everytoken.errors import EverytokenError
from everytoken.keyed import digest, generator
from everytoken.models.open import with_own_head


class _Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Augmented batches by (epoch, indices): pixels uint8 [n, H, W, 3] and labels [n]."""

    def __init__(self, data: DataSet, transform: TrainTransform, seed: int) -> None:
        self.data, self.transform, self.seed = data, transform, seed

    def __getitem__(self, item: tuple[int, np.ndarray]) -> tuple[Tensor, Tensor]:
        epoch, indices = item
        pixels, labels = [], []
        for index in indices.tolist():
            rng = generator(self.seed, epoch, self.data.key(index), "fit-augment")
            try:
                pixels.append(self.transform(self.data.picture(index), rng)[0])
            except EverytokenError:  # it is named when its turn to be annotated comes
                continue
            labels.append(self.data.label(index))
        height, width = self.transform.size
        made = np.stack(pixels) if pixels else np.zeros((0, height, width, 3), dtype=np.uint8)
        return torch.from_numpy(made), torch.tensor(labels, dtype=torch.int64)


class _Epochs:
    """(epoch, indices) of all batches of a training; images that fill no batch are left out of that epoch."""

    def __init__(self, members: np.ndarray, batch_size: int, epochs: int, seed: int, fold: int) -> None:
        self.members, self.epochs, self.seed, self.fold = members, epochs, seed, fold
        self.batch_size = min(batch_size, len(members))
        self.per_epoch = len(members) // self.batch_size

    def __len__(self) -> int:
        return self.per_epoch * self.epochs

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for epoch in range(self.epochs):
            order = generator(self.seed, self.fold, epoch, "fit-order").permutation(self.members)
            for start in range(0, self.per_epoch * self.batch_size, self.batch_size):
                yield epoch, order[start : start + self.batch_size]


@dataclass(frozen=True)
class Trainer:
    """Trains networks on a data set.

    Attributes:
        data: the images and their labels.
        plan: seed, size, epochs, batch_size, lr, weight_decay.
        workers, device: as everywhere.
    """

    data: DataSet
    plan: dict[str, Any]
    workers: int
    device: torch.device

    def train(
        self, fold: Fold, model: nn.Module, preprocessing: Preprocessing, tell: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """Train `model` in place on the fold's images; returns what was measured."""
        plan, seed = self.plan, int(self.plan["seed"])
        size = (plan["size"][0], plan["size"][1])
        augment = AugmentOptions(
            scale=(0.35, 1.0) if min(size) <= 48 else (0.25, 1.0), aa="", color_jitter=0.2, reprob=0.0
        )
        transform = TrainTransform(size, augment, mean=preprocessing.mean, std=preprocessing.std)
        steps = _Epochs(fold.train, plan["batch_size"], plan["epochs"], seed, fold.number)
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            _Augmented(self.data, transform, seed),
            batch_size=None,
            sampler=steps,
            num_workers=self.workers,
            generator=torch.Generator(),
        )
        model.to(self.device).to(memory_format=torch.channels_last).train()
        optimizer = torch.optim.AdamW(_groups(model, plan["weight_decay"]), lr=plan["lr"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan["lr"], total_steps=len(steps) + 1, pct_start=0.2)
        started, losses = time.perf_counter(), []
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest(seed, fold.number, "fit-dropout")[:7], "little"))
            for step, (pixels, labels) in enumerate(loader):
                if len(labels) > 1:  # batch norm needs two
                    images = preprocessing.normalise(pixels.to(self.device))
                    loss = F.cross_entropy(model(images), labels.to(self.device))
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    if step >= len(steps) - steps.per_epoch:
                        losses.append(loss.detach())
                schedule.step()
                tell((step + 1) * steps.batch_size, len(steps) * steps.batch_size)
        last = float(torch.stack(losses).mean()) if losses else float("nan")
        if not np.isfinite(last):
            raise AnnotatorError(
                f"the annotator could not be trained: its loss became {last}. Try a smaller --fit-lr "
                f"(now {plan['lr']:g})."
            )
        return {"seconds": time.perf_counter() - started, "last_loss": last, "trained_on": len(fold.train)}

    @torch.inference_mode()
    def held_out(self, fold: Fold, model: nn.Module, view: Preprocessing, resize: str) -> np.ndarray:
        """[n] bool: the mean of the map is highest for the image's label. Unreadable images are left out."""
        scores = CellScores(with_own_head(model, None)).eval()
        reader = BatchReader(self.data, fold.held_out, view, resize)
        total = len(fold.held_out)
        spans = [range(start, min(start + 64, total)) for start in range(0, total, 64)]
        right: list[bool] = []
        loader: DataLoader[ImageBatch] = DataLoader(
            reader, batch_size=None, sampler=spans, num_workers=self.workers, generator=torch.Generator()
        )
        for batch in loader:
            guess = scores(view.normalise(batch.pixels.to(self.device))).mean((1, 2)).argmax(1).cpu().numpy()
            for place, index in enumerate(batch.indices.tolist()):
                if place not in batch.failures:
                    right.append(bool(guess[place] == self.data.label(index)))
        if not right:
            raise AnnotatorError("none of the held-out images can be read.")
        return np.array(right)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and norms are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
