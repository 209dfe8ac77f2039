"""Accuracy of a model on labelled images, and predictions for unlabelled images.

    result = et.evaluate("runs/first", "photos")
    result.numbers["top1"], result.per_class(), result.notes

    model = et.load("runs/first")          # or a weights file, timm:NAME, hf-hub:USER/NAME, registry:NAME
    for image in model.predict("new-photos"):
        print(image.path, image.classes[0], image.probabilities[0])

The options are dataclasses that the commands share. Nothing heavy is imported until something is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from everytoken import schema
from everytoken.machine import default_workers

if TYPE_CHECKING:
    from everytoken.data.datasets import DataSet
    from everytoken.evaluation.run import Evaluation, ImagePredictions, LoadedModel
    from everytoken.models.open import OpenModel

__all__ = ["EvalOptions", "InferenceOptions", "PredictOptions", "evaluate", "load", "predict"]

Progress = Callable[[int, int], None]
"""Hears how many images are done, of how many."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """How a model is opened and applied to images."""

    model: str = ""
    """timm model name, for weights without metadata."""
    weights: str = ""
    """Weights for timm:NAME, instead of the pretrained ones."""
    img_size: int = 0
    """Another input size; position embeddings are resized. 0: the model's own."""
    crop_pct: float = 0.0
    """Part of the resized image that the centre crop shows; 0: the model's own."""
    token_vote: float | None = None
    """Add this much of the strongest token logit of each class; default: as the run was validated. The papers' LV-ViT
    numbers used 0.5."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 64
    """Images per step."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(InferenceOptions):
    """How a model is evaluated."""

    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data; all: every image in the folder. If the data has no validation part, val means the
    images that the run held out, or all images if the run was trained on other data."""
    real: str = ""
    """ImageNet ReaL labels (real.json)."""
    amp: bool = False
    """Mixed precision (bfloat16)."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(InferenceOptions):
    """How images are classified."""

    top: int = 3
    """Classes for each image."""
    amp: bool = False
    """Mixed precision (bfloat16)."""


def load(source: str | Path, **options: Any) -> LoadedModel:
    """Open a trained model for use.

    Example:
        >>> model = et.load("runs/first")
        >>> model.predict("photo.jpg")[0].classes
        >>> model.model(images).token_logits        # the TokenModel itself

    Args:
        source: a run folder, a weights file, timm:NAME, hf-hub:USER/NAME or registry:efficientnet_lite0|1|2.
        options: of `everytoken.models.open.open_model`: architecture, weights, img_size, crop_pct, device, ...
    """
    from everytoken.evaluation.run import LoadedModel
    from everytoken.models.open import open_model

    opened = open_model(source, **options)
    return LoadedModel(**{item.name: getattr(opened, item.name) for item in fields(opened)})


def evaluate(
    source: str | Path | OpenModel, data: str | Path | DataSet, *, progress: Progress | None = None, **options: Any
) -> Evaluation:
    """Accuracy of a model: top-1, top-5, loss, calibration error, a table of classes, what each image got.

    Example:
        >>> et.evaluate("runs/first", "photos").numbers["top1"]

    Args:
        source: a run folder, a weights file, timm:NAME, hf-hub:USER/NAME, registry:NAME, or a loaded model.
        data: a folder with val/, a folder of class folders, tar shards, torchvision:NAME, hf:NAME, or an open dataset.
        progress: hears how many images are done, of how many.
        options: fields of `EvalOptions`.
    """
    from everytoken.evaluation.run import run_evaluation

    return run_evaluation(source, data, schema.from_keywords(EvalOptions, options, "evaluate()"), progress)


def predict(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> ImagePredictions:
    """Predict the classes of unlabelled images.

    Example:
        >>> et.predict("runs/first", "new-photos").to_csv("predictions.csv")

    Args:
        source: a run folder, a weights file, timm:NAME, hf-hub:USER/NAME, registry:NAME, or a loaded model.
        images: files and folders; folders are searched to the bottom.
        progress: hears how many images are done, of how many.
        options: fields of `PredictOptions`.
    """
    from everytoken.evaluation.run import run_prediction

    files = [images] if isinstance(images, str | Path) else images
    return run_prediction(
        source, [str(file) for file in files], schema.from_keywords(PredictOptions, options, "predict()"), progress
    )
