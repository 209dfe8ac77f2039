"""Evaluate a trained model on a folder of images: numbers, a class table, throughput."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.classes import imagenet_numbers, match_classes
from everytoken.data.augment import EvalTransform
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.datasets import DataError, DataSet, find_split, open_dataset
from everytoken.data.loader import BadImages, Loader
from everytoken.engine.run_folder import DATASET_NAMES, Run
from everytoken.errors import EverytokenError
from everytoken.evaluation.accuracy import Predictions, predict, read_real, real_accuracy
from everytoken.evaluation.held_out import held_out
from everytoken.models import TokenModel
from everytoken.models.open import Description, OpenModel, open_model


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating one model on one set.

    Attributes:
        numbers: top1, top5, loss, ece (and real_*), plus images, images_per_second and parameters.
        predictions: what each image got.
        class_names: of the model's answers.
        keys: of the images.
        skipped: unreadable images, key -> reason.
    """

    numbers: dict[str, float]
    predictions: Predictions
    class_names: list[str]
    keys: list[str]
    skipped: dict[str, str]


class Voter(nn.Module):
    """Images -> class logits, plus `vote` times the strongest token logit of each class (the released evaluation)."""

    def __init__(self, model: TokenModel, vote: float = 0.0) -> None:
        super().__init__()
        self.model, self.vote = model, vote

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K]"""
        view = self.model(images)
        if not self.vote or view.token_logits is None:
            return view.logits
        return view.logits + self.vote * view.token_logits.flatten(1, 2).amax(1)


def evaluate(
    source: str,
    data: str,
    *,
    split: str = "val",
    architecture: str = "",
    img_size: int | None = None,
    crop_pct: float = 0.0,
    batch_size: int = 64,
    workers: int = 4,
    device: str = "cpu",
    amp: bool = False,
    token_vote: float = 0.0,
    real: str = "",
    on_bad_image: str = "raise",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a run, a weights file or timm:NAME on a data set. See `everytoken eval --help` for the options."""
    loaded = open_model(source, architecture=architecture, img_size=img_size)
    dataset, note = open_part([source], data, split)
    if note:
        print(f"note: {note}", file=sys.stderr)
    return evaluate_on(
        loaded, dataset, crop_pct=crop_pct, batch_size=batch_size, workers=workers, device=device, amp=amp,
        token_vote=token_vote, real=real, on_bad_image=on_bad_image, tell=tell,
    )  # fmt: skip


def evaluate_on(
    loaded: OpenModel,
    dataset: DataSet,
    *,
    crop_pct: float = 0.0,
    batch_size: int = 64,
    workers: int = 4,
    device: str = "cpu",
    amp: bool = False,
    token_vote: float = 0.0,
    real: str = "",
    on_bad_image: str = "raise",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a loaded model on an open data set; `tell` hears how many images are done, of how many."""
    check_vote(loaded, token_vote)
    lookup = torch.from_numpy(match_classes(loaded.classes, dataset.class_names, dataset.name).labels)
    imagenet = imagenet_numbers(loaded.classes) if real else None
    view = eval_view(loaded, crop_pct)
    bad = BadImages(on_bad_image)
    loader = Loader(
        dataset, view, batch_size, train=False, workers=workers, bad_images=bad,
        pin_memory=device.startswith("cuda"),
    )  # fmt: skip
    model = Voter(loaded.model, token_vote).to(device).eval()

    def batches() -> Iterator[Batch]:
        done = 0
        for batch in Prefetcher(loader.epoch(0), device, view.mean, view.std):
            assert batch.labels is not None
            yield replace(batch, labels=lookup.to(batch.labels.device)[batch.labels])
            done += len(batch)
            tell(done, len(dataset))

    started = time.perf_counter()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
        predictions = predict(model, batches())
    seconds = time.perf_counter() - started
    loader.close()
    keys = [dataset.key(i) for i in range(len(dataset))]
    numbers: dict[str, float] = predictions.summary()
    numbers |= {"images": len(predictions), "images_per_second": len(predictions) / seconds}
    numbers["parameters"] = sum(p.numel() for p in loaded.model.backbone.parameters())
    if real:
        numbers |= real_accuracy(predictions, keys, read_real(real), imagenet)
    names = list(loaded.class_names)
    if not loaded.classes.or_imagenet().names:
        for folder, output in zip(dataset.class_names, lookup.tolist(), strict=True):
            names[output] = folder
    return Evaluation(numbers, predictions, names, keys, dict(bad.seen))


def eval_view(loaded: OpenModel, crop_pct: float = 0.0) -> EvalTransform:
    """How a model wants to see images in evaluation; `crop_pct` 0: the model's own."""
    return view_of(loaded.info, crop_pct)


def view_of(about: Description, crop_pct: float = 0.0) -> EvalTransform:
    """The same, from what weights say about themselves."""
    return EvalTransform(
        img_size=(about.img_size[0], about.img_size[1]),
        crop_pct=crop_pct or about.crop_pct,
        interpolation=about.interpolation,
        mean=_three(about.mean),
        std=_three(about.std),
    )


def open_part(sources: Sequence[str], data: str, split: str = "val", *, doubt: bool = True) -> tuple[DataSet, str]:
    """The images to evaluate models on, and what to say about them.

    Of data without a part for validation, these are the images that the runs held out, if they were trained on it. If
    they were trained on something else, all images are new to them.

    Args:
        sources: the models: run folders, weights files, timm:NAME.
        doubt: say it if it cannot be known whether they were trained on these images.
    """
    if split != "val":
        return _own_part(data, split), ""
    if data.startswith(DATASET_NAMES):
        return _named_part(sources, data)
    if find_split(data, "val"):
        return open_dataset(data, "val"), ""
    known = held_out(sources, data, lambda run: run.names(data, part=_train_folder), _share)
    if known.share:
        found = open_dataset(data, "val", val_split=known.share)
        return found, known.note(data, len(found))
    train = find_split(data, "train")
    if train:
        raise EverytokenError(
            f"{data} has no images for validation, only {train.name}, and it is not known that a part of them was held "
            "out. Give the run folder of a model that was trained on it, other images, or --split train for all of them"
        )
    found = open_dataset(data, "all")
    return found, known.note(data, len(found)) if known.trained or doubt else ""


def _own_part(data: str, split: str) -> DataSet:
    """A part that the data has a place for, or all of it."""
    if split == "test" and not data.startswith(DATASET_NAMES) and find_split(data, split) is None:
        raise EverytokenError(
            f"{data} has no part for {split}. Make a folder {split}/ in it, or choose another --split"
        )
    return open_dataset(data, split)


def _named_part(sources: Sequence[str], data: str) -> tuple[DataSet, str]:
    """The validation part that data with a name brings; without one, what the runs held out."""
    try:
        return open_dataset(data, "val"), ""
    except DataError:
        known = held_out(sources, data)
        if not known.share:
            raise
    found = open_dataset(data, "val", val_split=known.share)
    return found, known.note(data, len(found))


def _share(run: Run) -> float:
    """The part that a run held out; 0 if its data has a part for validation."""
    there = run.place()
    return 0.0 if there is not None and find_split(str(there), "val") else run.val_split


def _train_folder(path: Path) -> Path:
    """The folder that training images come from: data with train/ and that train/ itself hold the same."""
    try:
        found = find_split(str(path), "train")
    except DataError:
        found = None
    return found.folder.resolve() if found and found.folder else path


def check_vote(loaded: OpenModel, vote: float) -> None:
    """Refuse a vote of tokens that have no say; attach the token head that a backbone brought."""
    if not vote:
        return
    own = getattr(loaded.model.backbone, "aux_head", None)
    classes: Any = loaded.model.backbone.num_classes
    if loaded.model.token_head is None and not loaded.model.uses_own_head:
        if own is None or own.out_features != classes:
            raise EverytokenError(f"{loaded.source} has no token head, so --token-vote cannot be used")
        loaded.model.add_token_head(classes)  # the one that the backbone brought
    tokens = loaded.model.token_head or own
    if tokens is None or tokens.out_features != classes:
        raise EverytokenError("the token head speaks other classes than the class head, so --token-vote cannot be used")


def _three(values: tuple[float, ...]) -> tuple[float, float, float]:
    return values[0], values[1], values[2]
