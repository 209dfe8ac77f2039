"""Pictures and numbers of what a model sees: what its tokens say, which regions support a class, whose a mix is.

Nothing heavy is imported until something is explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from everytoken_lab import schema
from everytoken_lab.evaluation import OpenOptions

if TYPE_CHECKING:
    from everytoken_lab.explanation.cards import Explanation
    from everytoken_lab.models.open import OpenModel


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
    mix_part: float = 0.4
    """mix: the second image's fraction of the area."""
    seed: int = 0
    """mix: where the box lies."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""


def explain(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    **options: Any,
) -> Explanation:
    """Draw what a model sees in images: what its tokens say, and which regions support which class.

    Example:
        >>> lab.explain("runs/first", "cat.jpg").cards[0].show()

    Args:
        source: a run folder, a weights file, an exported folder, timm:NAME, hf-hub:USER/NAME, registry:NAME, or a
            loaded model.
        images: image files.
        out: folder for the pictures and explain.json; None: write nothing.
        options: fields of `ExplainOptions`.
    """
    from everytoken_lab.explanation.cards import explain_files

    settings = schema.from_keywords(ExplainOptions, options, "explain()")
    files = [images] if isinstance(images, str | Path) else images
    return explain_files(source, [str(file) for file in files], None if out is None else Path(out), settings)
