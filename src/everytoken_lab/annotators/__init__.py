"""Score maps from annotators, and the options of `annotate`: the same for Python and the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Interval, Len

from everytoken.errors import EverytokenError
from everytoken_lab.machine import Workers, default_workers

Count = Annotated[int, Interval(ge=0)]
Sides = Annotated[tuple[Annotated[int, Interval(ge=1)], ...], Len(0, 2)]
"""Nothing, one number, or height and width."""
Size = tuple[int, int]


class AnnotatorError(EverytokenError):
    """An annotator cannot be used or does not work; the message says what else there is."""


@dataclass(frozen=True)
class AnnotateOptions:
    """How to annotate."""

    weights: str = ""
    """For timm:NAME: your own weights (file or run folder) instead of pretrained ones."""
    img_size: Sides = ()
    """Side of the annotator's input, or height and width. Default: its own. 576 gives 18x18 cells at stride 32."""
    resize: Literal["squash", "letterbox", "center"] = "squash"
    """squash: stretch the whole image. letterbox: keep its aspect and pad. center: keep its aspect and cut off what
    sticks out, as the released script does; tokens beyond the middle then have no label."""
    top_k: Count = 0
    """Classes to keep per cell; 0: five, or all of them if there are at most 20 classes."""
    class_map: str = ""
    """csv file: class of the dataset, the annotator's class; `order`: both have the same order."""
    foreign_classes: bool = False
    """Keep the annotator's own classes instead of matching them to the folder names."""
    split: str = "train"
    """Part of the dataset: train, val, test, or all."""
    val_split: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Leave out the fraction that training with the same val_split sets aside for validation. Without it all images are
    annotated, and `fit` does not learn from the fraction that training sets aside by default."""
    class_list: Path | None = None
    """Text file with the dataset's class names in the order of their numbers. Default: sorted folder names."""
    batch_size: Annotated[int, Interval(ge=1), tyro.conf.arg(aliases=["-b"])] = 32
    """Images per step, within a shard. Changing it may change scores in the last bit."""
    workers: Workers = field(default_factory=default_workers)
    """Processes that decode images; 0 decodes in the main process."""
    device: str = ""
    """cpu, cuda, mps. Default: the best available."""
    amp: bool = False
    """Mixed precision."""
    amp_dtype: Literal["float16", "bfloat16"] = "float16"
    """Its type. The scores are stored as float16; networks that overflow in float16 need bfloat16."""
    retry_skipped: bool = False
    """Try unreadable images again."""
    shard_size: tyro.conf.Suppress[Count] = 0
    """Images per shard. 0: the store's choice."""
    fit_model: str = ""
    """fit: backbone whose frozen features the linear head reads: registry:NAME, timm:NAME, a run or a weights file.
    Default: the best of the pretrained networks that are available."""
    fit_size: Count = 0
    """fit: side of the images; 0: the backbone's own."""
