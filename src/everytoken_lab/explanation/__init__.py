"""Pictures and numbers of what a model sees: what its tokens say, which regions support a class, whose a mix is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from annotated_types import Interval

from everytoken_lab.evaluation import OpenOptions


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(OpenOptions):
    """What to explain, and how."""

    classes: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="class", metavar="NAME|INDEX")
    ] = ()
    """A class to explain; can be given several times. Default: the two that the model finds most likely."""
    method: Literal["auto", "attention", "lrp", "cam"] = "auto"
    """attention: gradient-weighted attention relevance. lrp: relevance propagated through layers, as in the papers'
    pictures (ViT, DeiT, LV-ViT). cam: Grad-CAM. auto: attention for transformers with a class token, else cam."""
    compare: str = ""
    """A second model, shown next to the first on the same images and classes."""
    mix: bool = False
    """Mix the two images given (a box of the second in the first) and follow the labels through the model."""
    mix_part: Annotated[float, Interval(gt=0, lt=1)] = 0.4
    """mix: the second image's fraction of the area."""
    seed: int = 0
    """mix: where the box lies."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""
