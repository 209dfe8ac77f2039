"""Detection, boxes and masks of objects: the options of its commands. Defaults are the papers' set-up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro
from annotated_types import MinLen

from everytoken_lab.engine.options import (
    BatchOptions,
    Chance,
    DenseOptions,
    EvaluateOptions,
    Fraction,
    OptimOptions,
    Positive,
    PredictOptions,
    Scale,
)


@dataclass(frozen=True)
class DetectorOptions:
    """The detector."""

    detector: Literal["cascade", "mask"] = "cascade"
    """cascade: Cascade Mask R-CNN, three stages at IoU 0.5, 0.6, 0.7, box heads of four convolutions with batch norm,
    GIoU loss. mask: Mask R-CNN, one stage, a box head of two hidden layers, L1 loss."""
    masks: bool = True
    """Find masks too; without, only boxes (Cascade R-CNN, Faster R-CNN), and annotations need no segmentation."""
    channels: Positive = 256
    """Channels of the pyramid and of the convolutions in the heads."""
    hidden: Positive = 1024
    """Width of the hidden layers of a box head."""
    anchor_scale: Scale = 8
    """Side of the anchors, in cells of their level."""
    proposals: Positive | None = None
    """Proposals per image, in evaluation at most 1000. Default: 2000 for cascade, 1000 for mask."""
    regions: Positive = 512
    """Proposals per image that each stage is trained on, at most a quarter of them objects."""
    norm_eval: bool = False
    """Keep the backbone's batch norms as they are (pretrained ResNets with few images per process)."""


@dataclass(frozen=True)
class CocoOptions:
    """Images and annotations."""

    annotations: str = ""
    """COCO json of this part of the data (train: of the training part); default: found below DATA. Its images are next
    to it or in DATA."""
    val_annotations: str = ""
    """detect train: COCO json of the validation part; default: found below DATA."""
    val_split: Fraction = 0.0
    """Fraction of the images to hold out for validation if the data has no validation part (0: the default, 0.1)."""


@dataclass(frozen=True)
class DetectData(BatchOptions, CocoOptions):
    """Images, annotations and batches."""


@dataclass(frozen=True)
class DetectAugment:
    """Augmentation: a random crop, a random size and a flip."""

    sizes: Annotated[tuple[Positive, ...], MinLen(1)] = tuple(range(480, 801, 32))
    """Short sides, one of which is drawn for each image."""
    longest: Positive = 1333
    """The long side is at most this; the short side is then smaller than drawn."""
    hflip: Chance = 0.5
    """Chance of a left-right flip."""
    crop: Chance = 0.5
    """Chance of a random crop before the resize, as in Swin's set-up: of an image with a short side of 400, 500 or 600
    pixels, 384 to 600 of each side."""


@dataclass(frozen=True)
class FindOptions:
    """Evaluation. Options that are not given are as in the run's validation; defaults for a new run are in brackets."""

    size: Positive | None = None
    """Short side of the image. [800, or the largest of training if that is smaller]"""
    max_size: Positive | None = None
    """The long side is at most this. [as in training]"""
    score_thresh: Chance | None = None
    """Drop objects with a lower score. [0.05]"""
    nms_thresh: Chance | None = None
    """Of two boxes of a class that overlap by more than this IoU, only the one with the higher score is kept. [0.5]"""
    max_detections: Positive | None = None
    """Objects per image. [100]"""


NEW_RUN = {"size": 800, "max_size": 1333, "score_thresh": 0.05, "nms_thresh": 0.5, "max_detections": 100}
"""What a run's `FindOptions` are where they are left open."""


def _optim() -> OptimOptions:
    optim = OptimOptions(epochs=12, sched="multistep", decay_milestones=(8, 11), weight_decay=0.05)
    return replace(optim, lr=1e-4, warmup_iters=500, warmup_lr=1e-7)


@dataclass(frozen=True)
class DetectOptions(DenseOptions):
    """Everything that determines a run."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ""
    """COCO's folder, a folder with images/ and one json, a folder with parts of such, or a json file."""
    detector: tyro.conf.OmitArgPrefixes[DetectorOptions] = field(default_factory=DetectorOptions)
    dataset: tyro.conf.OmitArgPrefixes[DetectData] = field(default_factory=DetectData)
    augment: tyro.conf.OmitArgPrefixes[DetectAugment] = field(default_factory=DetectAugment)
    find: tyro.conf.OmitArgPrefixes[FindOptions] = field(default_factory=FindOptions)
    optim: tyro.conf.OmitArgPrefixes[OptimOptions] = field(default_factory=_optim)


@dataclass(frozen=True)
class DetectEval(EvaluateOptions):
    """Options of `evaluate`."""

    coco: tyro.conf.OmitArgPrefixes[CocoOptions] = field(default_factory=CocoOptions)
    find: tyro.conf.OmitArgPrefixes[FindOptions] = field(default_factory=FindOptions)
    results: str = ""
    """Write all objects to this file, in COCO's results format."""


@dataclass(frozen=True)
class DetectPredict(PredictOptions):
    """Options of `predict`."""

    sure: Chance = 0.5
    """Draw and count objects with at least this score; the file has all objects above score_thresh."""
    find: tyro.conf.OmitArgPrefixes[FindOptions] = field(default_factory=FindOptions)
