"""Accuracy of a model on labelled images, and predictions for unlabelled images.

    result = lab.evaluate("runs/first", "photos")
    result.numbers["top1"], result.per_class(), result.notes

    model = lab.load("runs/first")          # or a weights file, model.onnx, timm:NAME, hf-hub:USER/NAME, registry:NAME
    for image in model.predict("new-photos", sure=0.95, locate=True):
        print(image.path, image.answer, image.probabilities[0], image.location.pixels)
    model.export("my-model", to=("timm", "onnx"))

The options are dataclasses that the commands share. Nothing heavy is imported until something is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Interval

from everytoken_lab import schema
from everytoken_lab.machine import Workers, default_workers

if TYPE_CHECKING:
    from everytoken_lab.data.datasets import DataSet
    from everytoken_lab.evaluation.exporting import Exported
    from everytoken_lab.evaluation.predictions import ImagePredictions
    from everytoken_lab.evaluation.run import Evaluation
    from everytoken_lab.models.open import OpenModel

Progress = Callable[[int, int], None]
"""Hears how many images are done, of how many."""


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a model is opened."""

    model: str = ""
    """timm model name, for weights without metadata."""
    weights: str = ""
    """Weights for timm:NAME, instead of the pretrained ones."""
    img_size: Annotated[int, Interval(ge=0)] = 0
    """Another input size; position embeddings are resized. 0: the model's own."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(OpenOptions):
    """How a model is opened and applied to images."""

    crop_pct: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Fraction of the resized image that the centre crop shows; 0: the model's own."""
    token_vote: float | None = None
    """Add this much of the strongest token logit of each class; default: as the run was validated. The papers' LV-ViT
    numbers used 0.5."""
    batch_size: Annotated[int, Interval(ge=1), tyro.conf.arg(aliases=["-b"])] = 64
    """Images per step."""
    workers: Workers = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda or mps. Empty: the best available."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(InferenceOptions):
    """How a model is evaluated."""

    split: Literal["val", "test", "train", "all"] = "val"
    """Which split of the data; all: every image in the folder. If the data has no validation split, val means the
    images that the run held out, or all images if the run was trained on other data."""
    real: str = ""
    """ImageNet ReaL labels (real.json)."""
    amp: bool | None = None
    """Mixed precision. Default: as the run was validated."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(InferenceOptions):
    """How images are classified."""

    top: Annotated[int, Interval(ge=1)] = 3
    """Classes for each image."""
    sure: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Answer "unsure" below a probability at which the other answers have this accuracy (such as 0.95) on the images
    that the run held out. For models without held-out images it is the probability itself. 0: always answer. Of
    multi-label models: the precision of the labels; 0: the best F1."""
    calibrate: bool = True
    """Calibrate probabilities on the images that the run held out (once, then kept in the run)."""
    locate: bool = False
    """Also locate the object: a box and a mask, from the network's logits for every cell of the image."""
    amp: bool | None = None
    """Mixed precision. Default: as the run was validated."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OpenOptions):
    """How a model is exported."""

    to: tuple[Literal["timm", "onnx", "hf"], ...] = ("timm",)
    """timm (alias: hf): weights and config.json for timm, transformers and the Hugging Face Hub. onnx: an ONNX file."""
    cells: bool = False
    """onnx: a second output with the logits of every cell, so that objects can be located."""
    images: str = ""
    """Photos to check the exported files on; default: photos that the run held out."""
    license: str = ""
    """Licence of the weights, for the model card: apache-2.0, cc-by-4.0, ..."""
    push: str = ""
    """USER/NAME of a repository on the Hugging Face Hub, to which the folder is uploaded."""
    private: bool = False
    """push: make a new repository private."""


def load(source: str | Path, **options: Any) -> OpenModel:
    """Open a trained model for use.

    `predict`, `evaluate`, `explain` and `export` are its methods, and `.model` is the TokenModel itself.

    Args:
        source: a run folder, a weights file, an exported folder or .onnx file, timm:NAME, hf-hub:USER/NAME or
            registry:efficientnet_lite0|1|2.
        options: of `everytoken_lab.models.open.open_model`: architecture, weights, img_size, crop_pct, device, ...
    """
    from everytoken_lab.models.open import open_model

    return open_model(source, **options)


def evaluate(
    source: str | Path | OpenModel, data: str | Path | DataSet, *, progress: Progress | None = None, **options: Any
) -> Evaluation:
    """Accuracy of a model: top-1, top-5, loss, calibration error, a table of classes, what each image got.

    Args:
        source: as for `load`, or a loaded model.
        data: a folder with val/, a folder of class folders, tar shards, torchvision:NAME, hf:NAME, or an open dataset.
        options: fields of `EvalOptions`.
    """
    from everytoken_lab.evaluation.run import run_evaluation

    return run_evaluation(source, data, schema.from_keywords(EvalOptions, options, "evaluate()"), progress)


def predict(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> ImagePredictions:
    """Predict the classes of unlabelled images.

    Args:
        source: as for `load`, or a loaded model.
        images: files and folders; folders are searched to the bottom.
        options: fields of `PredictOptions`.
    """
    from everytoken_lab.evaluation.predictions import run_prediction

    files = [images] if isinstance(images, str | Path) else images
    settings = schema.from_keywords(PredictOptions, options, "predict()")
    return run_prediction(source, list(map(str, files)), settings, progress)


def export(source: str | Path | OpenModel, out: str | Path | None = None, **options: Any) -> Exported:
    """Write a folder that others use without this package: for timm and the Hub or ONNX; with a model card.

    Example:
        >>> lab.export("runs/first", "flowers", to=("timm", "onnx")).differences
        {'model.safetensors': 0.0, 'model.onnx': 4.8e-06}
        >>> timm.create_model("local-dir:flowers", pretrained=True)

    Args:
        source: as for `load`, or a loaded model.
        out: the folder; default: `export` in the run.
        options: fields of `ExportOptions`; `to` may be one name.
    """
    from everytoken_lab.evaluation.exporting import run_export

    if isinstance(options.get("to"), str):
        options["to"] = (options["to"],)
    settings = schema.from_keywords(ExportOptions, options, "export()")
    return run_export(source, None if out is None else Path(out), settings)
