"""Accuracy of a model on labelled images, predictions for unlabelled ones, export: the options of their commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from annotated_types import Interval

from everytoken_lab.machine import Workers, default_workers

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
    batch_size: Annotated[int, Interval(ge=0), tyro.conf.arg(aliases=["-b"])] = 0
    """Images per step. 0: 64 on a GPU; 8 on the CPU, where more are no faster and take more memory."""
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
    """Answer "unsure" below a threshold, chosen on the held-out images so that the other answers have this accuracy
    (such as 0.95). Without held-out images, this is the threshold. 0: always answer. Multi-label models: the precision
    of the labels; 0: the best F1."""
    calibrate: bool = True
    """Calibrate probabilities on the images that the run held out (once, then kept in the run)."""
    locate: bool = False
    """Also locate the object: a box and a mask, from the network's logits for every cell of the image."""
    amp: bool | None = None
    """Mixed precision. Default: as the run was validated."""
    on_bad_image: Literal["raise", "skip"] = "skip"
    """skip: an image that cannot be read gets a row with an error. raise: stop at the first one."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OpenOptions):
    """How a model is exported."""

    to: tuple[Literal["timm", "onnx", "hf"], ...] = ("timm",)
    """timm (alias: hf): weights and config.json for timm, transformers and the Hugging Face Hub. onnx: an ONNX file."""
    cells: bool = False
    """onnx: a second output with the logits of every cell, so that objects can be located."""
    license: str = ""
    """Licence of the weights, for the model card: apache-2.0, cc-by-4.0, ..."""
