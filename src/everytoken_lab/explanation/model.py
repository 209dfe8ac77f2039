"""A model to be explained: what its classes are called, and how it looks at an image file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.decode import Picture
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.evaluation.calibrated import calibrated, probabilities
from everytoken_lab.evaluation.run import open_with
from everytoken_lab.explanation.saliency import evaluating
from everytoken_lab.models.open import Description, OpenModel

Area = tuple[float, float, float, float]


@dataclass(frozen=True)
class ModelInput:
    """What a model sees of an image."""

    pixels: np.ndarray  # uint8 [H, W, 3], before normalisation
    images: Tensor  # float32 [1, 3, H, W], the network's input
    area: Area  # (x0, y0, x1, y1) of the source image, in fractions


@dataclass(frozen=True)
class ExplainedModel:
    """A model in evaluation mode, and what one needs to know of it."""

    name: str  # short, for pictures
    source: str  # as the user named it
    model: TokenModel
    classes: ClassList
    token_classes: ClassList  # those of the class head without a token head
    transform: EvalTransform
    info: Description  # with the calibration of its run

    def read(self, path: str | Path) -> ModelInput:
        """Read an image file as evaluation does: upright, resized, centre crop."""
        if not Path(path).is_file():
            more = " It is a folder: name the files, such as folder/*.jpg." if Path(path).is_dir() else ""
            raise EverytokenError(f"there is no image file {path}.{more}")
        pixels, placement = self.transform(Picture(path, str(path)))
        pixels = np.ascontiguousarray(pixels)
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.transform.mean, self.transform.std))
        images = (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std
        return ModelInput(pixels, images[None].to(next(self.model.parameters()).device), pl.box(placement))

    def probabilities(self, images: Tensor) -> Tensor:
        """[K] of one image, as `predict` shows them."""
        return probabilities(self.info, self.model(images).voted(self.info.token_vote)[0]).cpu()

    def find_class(self, text: str) -> int:
        """The class that a text names: its name, a word for it that ImageNet knows, or its number."""
        number = self.classes.find(text)
        if number is None and text.isdigit():
            number = int(text)
        if number is None or not 0 <= number < self.classes.count:
            examples = ", ".join(self.classes.names[:4]) or "not named"
            raise EverytokenError(
                f"{self.name} has no class {text!r}.{self.classes.near(text)} Its {self.classes.count} classes are "
                f"{examples}{', ...' if self.classes.count > 4 else ''}; a number from 0 to {self.classes.count - 1} "
                "is accepted, too."
            )
        return number


def name_of(classes: ClassList, number: int) -> str:
    """A class's name."""
    return classes.names[number] if number < len(classes.names) else f"class {number}"


@torch.no_grad()
def token_probabilities(model: TokenModel, images: Tensor) -> tuple[Tensor, bool]:
    """(probabilities [B, h, w, C] of every cell, whether they are the token head's).

    A model without one is asked with its own classifier at every cell, for which it was not trained unless its head
    reads the mean of the tokens.
    """
    with evaluating(model):
        logits = model(images).token_logits
        cells = model.cell_logits(images) if logits is None else logits
    return cells.float().softmax(-1), logits is not None


def open_explained(
    source: str | Path | OpenModel, options: InferenceOptions | None = None, names: Sequence[str] = ()
) -> ExplainedModel:
    """The model that `source` names, or a loaded one. `names`: of its classes, where the weights do not say them."""
    options = options or InferenceOptions(workers=0)
    opened = open_with(source, options)
    source = str(source.source if isinstance(source, OpenModel) else source)
    if not hasattr(opened.model.backbone, "forward_features"):
        raise EverytokenError(
            f"{source} has no gradients, which an explanation needs. Explain the run or the weights that it was "
            "exported from."
        )
    classes, token_classes = opened.classes, opened.token_classes
    if names or not classes.count:
        if len(names) != classes.count or not names:
            raise EverytokenError(f"{len(names)} class names were given; {source} has {classes.count} classes.")
        named = replace(classes, names=tuple(names), synonyms=())
        classes, token_classes = named, named if token_classes == classes else token_classes
    if not options.img_size:
        opened, _ = calibrated(opened, options, None)
    path = Path(source)
    folder = path.parent if path.is_file() and path.suffix == ".safetensors" else path
    name = (
        source
        if source.startswith(("timm:", "registry:", "hf-hub:"))
        else f"{folder.name} · {opened.info.architecture}"
    )
    return ExplainedModel(name, source, opened.model, classes, token_classes, eval_view(opened.info), opened.info)
