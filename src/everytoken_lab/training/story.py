"""What training without a recipe knows: its options and photos (`Job`), and what it decided (`Story`, in auto.json)."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from everytoken.files import plain_json
from everytoken_lab import schema
from everytoken_lab.annotators.features import Features, FrozenBackbone, compute_features
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.distributed import best_device
from everytoken_lab.engine.options import TrainOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.machine import memory
from everytoken_lab.training.build import log_priors
from everytoken_lab.training.inputs import Inputs

logger = logging.getLogger(__name__)
STATE = "auto.json"
IMBALANCE, ADJUSTMENT = 1.5, 0.5
"""Largest class / smallest class from which on large classes are preferred less, and by how much (docs/photos.md)."""


@dataclass
class Story:
    """What was decided and measured so far, in auto.json.

    Attributes:
        images: changes with the names and labels of the photos.
        lines: every decision with its reason.
        backbone, img_size, squash: the chosen candidate.
        features: where its features are, if that is the folder of an earlier run.
        updates: of fine-tuning; None until it is decided.
        result: what was kept, and its numbers; empty until the end.
    """

    images: str
    lines: list[str] = field(default_factory=list)
    backbone: str = ""
    img_size: int = 0
    squash: bool = False
    features: str = ""
    updates: int | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Story | None:
        """The story of a folder; None if it has none."""
        path = folder / STATE
        return schema.read_json(path, Story) if path.is_file() else None

    def write(self, folder: RunFolder) -> None:
        """Keep it, for a start that goes on from here."""
        folder.write(STATE, plain_json(vars(self)))

    def say(self, text: str) -> None:
        """A line for the log and for the head of the recipe."""
        logger.info(text)
        self.lines.append(text)


@dataclass
class Job:
    """One run.

    Attributes:
        asked: names of the options that the user gave.
        train: photos that the linear head is fitted on. val: those that judge it; None: cross-validation does.
        seconds: the budget, from `started` on.
    """

    options: TrainOptions
    asked: Set[str]
    inputs: Inputs
    train: DataSet
    val: DataSet | None
    output: Path
    story: Story
    seconds: float
    started: float

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.run.device or best_device())

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.seconds - (time.monotonic() - self.started)

    @property
    def adjustment(self) -> float:
        """How much of the log of the class priors is taken from their logits; multi-label classes do not compete."""
        if "logit_adjustment" in self.asked:
            return self.options.model.logit_adjustment
        counts = self.train.class_counts()
        unequal = counts.max() > IMBALANCE * max(1, counts.min()) and not self.train.multi_label
        return ADJUSTMENT if unequal else 0.0

    @property
    def offset(self) -> torch.Tensor:
        """[K] what an adjusted head takes from its logits."""
        if not self.adjustment:
            return torch.zeros(self.train.num_classes)
        return self.adjustment * torch.from_numpy(log_priors(self.train.labels, self.train.num_classes)).float()

    @property
    def cache(self) -> Path:
        """Where features are kept."""
        return Path(self.story.features or self.output / "features")

    def features(self, data: DataSet, backbone: FrozenBackbone, digests: list[str] | None = None) -> Features:
        """Of all photos of a set, from the cache or computed."""
        workers = self.options.dataset.workers
        return compute_features(data, backbone, self.cache, digests=digests, workers=workers)


def free_memory(device: torch.device) -> int:
    """Of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory() or 4 * 2**30
