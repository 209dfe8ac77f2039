"""`fit`: no annotator for these classes exists, so train one on the data set first.

A small ResNet (see `small_cnn`), or any timm model by name, from scratch or from pretrained weights; AdamW with one
cycle of the learning rate, random crops, flips and light colour changes, plain cross entropy: what counts are the soft
labels, and smoothing would flatten them. Everything random is keyed by the seed, so the same data gives the same
network on the same machine.

A finished network is kept in the store's folder (`annotator/fold-0.safetensors` and `.json`) and is not trained again.
Cost: as measured on 2 CPU cores, see docs/annotate.md; k folds cost k times as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.annotators.annotator import Annotator, AnnotatorError, Preprocessing, weights_hash
from everytoken.annotators.fit_model import FOLDER, build_model, load_fold, load_network, save_fold
from everytoken.annotators.folds import make_folds
from everytoken.annotators.job import Team, check_out
from everytoken.annotators.networks import CellScores
from everytoken.annotators.training import Trainer
from everytoken.classes import ClassList
from everytoken.data.datasets import DataSet
from everytoken.errors import EverytokenError
from everytoken.machine import default_workers
from everytoken.models.open import with_own_head

Meter = Callable[[str], Any]


@dataclass(frozen=True)
class FitOptions:
    """How to train an annotator.

    Attributes:
        model: "" for the small CNN, a timm name, or "registry:efficientnet_lite0".
        pretrained: begin with timm's pretrained weights.
        size: (height, width) for training and by default for annotating; None: from the images, 128 at most.
        epochs: 0: 12 to 100, fewer for more images; 4 to 15 from pretrained weights.
        batch_size: 0: 64, or 32 below 2000 images.
        lr: 0: 2e-3, or 5e-4 from pretrained weights.
        weight_decay: of AdamW.
        folds: 1, or k for cross-fitting.
        seed, workers: as everywhere.
    """

    model: str = ""
    pretrained: bool = False
    size: tuple[int, int] | None = None
    epochs: int = 0
    batch_size: int = 0
    lr: float = 0.0
    weight_decay: float = 0.05
    folds: int = 1
    seed: int = 42
    workers: int = field(default_factory=default_workers)


@dataclass
class FitAnnotator(Annotator):
    """Networks that were trained on the data set; `part` [n] says which of them annotates each image."""

    models: list[nn.Module] = field(default_factory=list)
    part: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits of every cell, each image asked of its own network."""
        part = self.part[indices]
        if (part == part[0]).all():
            logits: Tensor = self.models[int(part[0])](images)
            return logits
        out: Tensor | None = None
        for number in np.unique(part).tolist():
            mine = torch.from_numpy(np.flatnonzero(part == number)).to(images.device)
            some = self.models[number](images[mine])
            out = some.new_empty(len(images), *some.shape[1:]) if out is None else out
            out[mine] = some
        if out is None:
            raise AnnotatorError("there are no images to score")
        return out

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        for model in self.models:
            model.to(device).to(memory_format=torch.channels_last).eval().requires_grad_(False)


def fit_annotator(
    data: DataSet,
    out: Path,
    options: FitOptions,
    size: tuple[int, int] | None,
    resize: str,
    team: Team,
    say: Callable[[str], None],
    meter: Meter,
) -> FitAnnotator:
    """Train what is not trained yet, and return the annotator.

    Args:
        out: the store's folder; networks are kept in `out/annotator`.
        size, resize: of the images when annotating; None: as in training.
        say: tells a sentence. meter: a context manager that gives progress(done, total), for a titled piece of work.
    """
    if len(data.class_names) < 2:
        raise EverytokenError(
            f"`fit` learns to tell classes apart, and {data.name} has {len(data.class_names)}. Put the images of each "
            "class into a folder of its own, or use an annotator that exists (--annotator timm:NAME)."
        )
    check_out(data, out, "fit")
    folds, part = make_folds(data, options.folds, options.seed)
    side = options.size or _usual_size(data)
    plan = _plan(data, options, side)
    folder = out / FOLDER
    for fold in folds[team.rank :: team.size]:
        title = f"network {fold.number + 1} of {len(folds)}" if len(folds) > 1 else "the annotator"
        if load_fold(folder, fold.number, plan) is None:
            model = build_model(options.model, options.pretrained, len(data.class_names), side, options.seed)
            say(
                f"training {title}: {len(fold.train):,} images, {plan['epochs']} epochs at {side[0]} x {side[1]} pixels"
            )
            trainer = Trainer(data, plan, options.workers, team.device)
            with meter(f"training {title}") as tell:
                facts = trainer.train(fold, model.backbone, model.preprocessing, tell)
            view = Preprocessing(size or side, *_view(model.preprocessing))
            correct = trainer.held_out(fold, model.backbone, view, resize)
            facts |= {"held_out_right": int(correct.sum()), "held_out": len(correct)}
            save_fold(folder, fold.number, model.backbone, plan, facts)
            say(f"{title}: {correct.mean():.1%} of {len(correct):,} held-out images right, {facts['seconds']:.0f} s")
    team.meet()
    models: list[nn.Module] = []
    right = held = 0
    for fold in folds:
        found = load_fold(folder, fold.number, plan)
        if found is None:
            raise AnnotatorError(f"{folder} lacks fold {fold.number}; was it removed while this command ran?")
        model = build_model(options.model, False, len(data.class_names), side, options.seed)
        load_network(model.backbone, found, folder)
        models.append(CellScores(with_own_head(model.backbone, None)))
        right, held = right + found.facts["held_out_right"], held + found.facts["held_out"]
    what = f"{len(folds)} networks, each image held out once" if len(folds) > 1 else "one network"
    say(f"annotator trained on this data set: {what}; held-out accuracy {right / held:.1%} ({held:,} images)")
    names = tuple(data.class_names)
    view = Preprocessing(size or side, *_view(model.preprocessing))
    settings = {
        "fit": {k: v for k, v in plan.items() if k != "data_sha256"},
        "weights_sha256": [weights_hash(m) for m in models],
        "held_out_accuracy": round(right / held, 4),
    }
    return FitAnnotator("fit", view, ClassList(len(names), names), settings, models, part)


def _view(own: Preprocessing) -> tuple[Any, Any, str]:
    return own.mean, own.std, own.interpolation


def _usual_size(data: DataSet) -> tuple[int, int]:
    """A square that fits the images: the median of their shorter sides, rounded; 128 at most, to stay quick."""
    sides = []
    for i in range(0, len(data), max(1, len(data) // 64)):
        try:
            sides.append(min(data.picture(i).size))
        except EverytokenError:
            continue
    usual = float(np.median(sides)) if sides else 128
    side = 32 if usual <= 48 else 64 if usual <= 96 else 128
    return side, side


def _usual_epochs(images: int, side: tuple[int, int], pretrained: bool) -> int:
    """So many that a laptop is done in minutes: 120,000 images in all, fewer large ones, but 12 to 100 times each."""
    shown = 120_000 if max(side) <= 96 else 72_000
    if pretrained:
        return max(4, min(15, round(shown / 4 / images)))
    return max(12, min(100, round(shown / images)))


def _plan(data: DataSet, options: FitOptions, side: tuple[int, int]) -> dict[str, Any]:
    """Everything a trained network depends on; a finished one is used again only if this is equal."""
    content = hashlib.sha256()
    for key, label in zip(data.keys(), data.labels.tolist(), strict=True):
        content.update(f"{label} {key}\n".encode("utf-8", "surrogateescape"))
    given = {k: v for k, v in asdict(options).items() if k != "workers"}
    few = len(data) < 2000
    given["size"] = list(side)
    begun = options.pretrained or options.model.startswith("registry:")
    given["epochs"] = options.epochs or _usual_epochs(len(data), side, begun)
    given["batch_size"] = options.batch_size or (32 if few else 64)
    given["lr"] = options.lr or (5e-4 if begun else 2e-3)
    return {**given, "class_names": list(data.class_names), "data_sha256": content.hexdigest()}
