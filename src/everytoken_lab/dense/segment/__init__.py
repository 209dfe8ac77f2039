"""Semantic segmentation, a class for every pixel: the options of its commands. Defaults are the papers' set-up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from everytoken_lab.engine.options import (
    BatchOptions,
    Chance,
    DenseOptions,
    EvaluateOptions,
    Fraction,
    NotNegative,
    OptimOptions,
    Positive,
    PredictOptions,
    RunOptions,
    Scale,
    SourceOptions,
)


@dataclass(frozen=True)
class DecoderOptions:
    """The head."""

    head: Literal["upernet", "fcn"] = "upernet"
    """UperNet (pyramid pooling and a feature pyramid), or FCN (convolutions on one map)."""
    channels: NotNegative = 0
    """Channels inside the head; 0: 512 for UperNet, 256 for FCN."""
    convs: NotNegative = 2
    """3x3 convolutions of an FCN head."""
    dropout: Fraction = 0.1
    """Dropout of channels before the classifier."""
    aux_weight: float = 0.4
    """Weight of the auxiliary FCN head's loss; 0: no such head."""
    aux_channels: NotNegative = 0
    """Channels inside the auxiliary head; 0: 256."""
    neck: Literal["transposed", "interpolated"] = "transposed"
    """How levels are made of a plain transformer: transposed convolutions (LV-ViT's), or convolutions around an
    interpolation, the coarsest level at half the tokens' resolution (DeiT's)."""
    pyramid_channels: NotNegative = 0
    """Channels of the coarsest pyramid level built from a plain transformer; 0: 2048 for UperNet, 768 for FCN."""


@dataclass(frozen=True)
class MaskOptions:
    """Images and masks."""

    classes: str = ""
    """Class file: a name per line (value 0 first), or JSON {"value": "name"}; default: found below DATA."""
    ignore_index: tuple[int, ...] = (255,)
    """Mask values to ignore: such pixels count neither in the loss nor in the metrics."""
    reduce_zero_label: bool | None = None
    """Ignore value 0 and number the classes from 1. Default: true for ADE20K."""
    val_split: Fraction = 0.0
    """Fraction of the images to hold out for validation if the data has no validation part (0: the default, 0.1)."""


@dataclass(frozen=True)
class SegmentData(BatchOptions, MaskOptions):
    """Images, masks and batches."""


@dataclass(frozen=True)
class SegmentAugment:
    """Augmentation: a random scale, a crop, a flip, photometric distortion."""

    crop_size: Positive = 512
    """Side of the square crop that the network is trained on."""
    resize: NotNegative = 0
    """The short side of an image before the random scale; 0: the crop's side."""
    scale: tuple[Scale, Scale] = (0.5, 2.0)
    """Random scale, on top of resize."""
    hflip: Chance = 0.5
    """Chance of a left-right flip."""
    photometric: bool = True
    """Random brightness, contrast, saturation and hue."""
    cat_max_ratio: Chance = 0.75
    """Look for a crop in which no class covers more than this (ten attempts); 1: take the first."""


@dataclass(frozen=True)
class EvalOptions:
    """Evaluation. Options that are not given are as in the run's validation; defaults for a new run are in brackets."""

    mode: Literal["whole", "slide"] | None = None
    """The whole image at once, or overlapping windows of the training crop's size. [whole]"""
    stride: NotNegative | None = None
    """Step of the windows; 0: two thirds of the window. [0]"""
    scales: tuple[Scale, ...] = ()
    """Average over these scales, for example 0.75 1.0 1.25 1.5 1.75. [1.0]"""
    flip: bool | None = None
    """Average with the mirrored image as well. [False]"""
    test_scales: tuple[Scale, ...] = ()
    """Scales of `segment eval --multi-scale`, which also averages mirrored images; validation does not use them."""


NEW_RUN = {"mode": "whole", "stride": 0, "scales": (1.0,), "flip": False}
"""What a run's `EvalOptions` are where they are left open."""


def _optim() -> OptimOptions:
    optim = OptimOptions(iters=160_000, warmup_iters=1500, weight_decay=0.01, sched="linear")
    return replace(optim, lr=6e-5, warmup_lr=6e-11, min_lr=5e-6)


@dataclass(frozen=True)
class SegmentOptions(DenseOptions):
    """Everything that determines a run."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ""
    """Folder of images and masks: ADE20K, or images/ and masks/ with a class file."""
    decoder: tyro.conf.OmitArgPrefixes[DecoderOptions] = field(default_factory=DecoderOptions)
    dataset: tyro.conf.OmitArgPrefixes[SegmentData] = field(default_factory=SegmentData)
    augment: tyro.conf.OmitArgPrefixes[SegmentAugment] = field(default_factory=SegmentAugment)
    evaluation: tyro.conf.OmitArgPrefixes[EvalOptions] = field(default_factory=EvalOptions)
    optim: tyro.conf.OmitArgPrefixes[OptimOptions] = field(default_factory=_optim)
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=lambda: RunOptions(val_iters=8000))


@dataclass(frozen=True)
class SegmenterOptions(SourceOptions):
    """How a segmenter is used."""

    multi_scale: bool = False
    """Average over the scales that the run's recipe names for testing (test_scales) and their mirror images."""
    evaluation: tyro.conf.OmitArgPrefixes[EvalOptions] = field(default_factory=EvalOptions)


@dataclass(frozen=True)
class SegmentEval(SegmenterOptions, EvaluateOptions):
    """Options of `evaluate`."""

    masks: tyro.conf.OmitArgPrefixes[MaskOptions] = field(default_factory=MaskOptions)


@dataclass(frozen=True)
class SegmentPredict(SegmenterOptions, PredictOptions):
    """Options of `predict`."""
