"""A model to be explained: where it comes from, what its classes are called, and how it looks at an image file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.decode import Picture
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.evaluation.calibrated import calibrated, probabilities
from everytoken_lab.evaluation.run import eval_view
from everytoken_lab.models.open import Description, OpenModel, open_model

Area = tuple[float, float, float, float]


@dataclass(frozen=True)
class ModelInput:
    """What a model sees of an image.

    Attributes:
        pixels: uint8 [H, W, 3], the network's input before normalisation.
        images: float32 [1, 3, H, W], the network's input.
        area: (x0, y0, x1, y1) of the source image, in fractions, that it shows.
    """

    pixels: np.ndarray
    images: Tensor
    area: Area


@dataclass(frozen=True)
class ExplainedModel:
    """A model in evaluation mode, and what one needs to know of it.

    Attributes:
        name: short, for pictures.
        source: as the user named it.
        model: its token view.
        classes: of the class head; token_classes: of the token head (those of the class head without one).
        view: how it looks at images.
        info: its description, with the calibration of its run.
        remark: something odd about it (random weights), or "".
    """

    name: str
    source: str
    model: TokenModel
    classes: ClassList
    token_classes: ClassList
    view: EvalTransform
    info: Description
    remark: str = ""

    def read(self, path: str | Path) -> ModelInput:
        """Read an image file as evaluation does: upright, resized, centre crop."""
        if not Path(path).is_file():
            more = " It is a folder: name the files, such as folder/*.jpg." if Path(path).is_dir() else ""
            raise EverytokenError(f"there is no image file {path}.{more}")
        pixels, placement = self.view(Picture(path, str(path)))
        pixels = np.ascontiguousarray(pixels)
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.view.mean, self.view.std))
        device = next(self.model.parameters()).device
        images = (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std
        return ModelInput(pixels, images[None].to(device), pl.box(placement))

    def probabilities(self, images: Tensor) -> Tensor:
        """[K] of one image, as `predict` shows them."""
        return probabilities(self.info, self.model(images).voted(self.info.token_vote)[0]).cpu()

    def find_class(self, text: str) -> int:
        """The class that a text names: its name, a part of it that ImageNet knows, or its number."""
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
    """A class's name for people."""
    return classes.names[number] if number < len(classes.names) else f"class {number}"


def open_explained(
    source: str | OpenModel,
    weights: str = "",
    architecture: str = "",
    img_size: int = 0,
    names: Sequence[str] = (),
    untrained: bool = False,
    device: str = "cpu",
) -> ExplainedModel:
    """The model that `source` names.

    Args:
        source: whatever `open_model` takes, or a loaded model, which is used as it is.
        weights: with timm:NAME, the weights to use instead of pretrained ones.
        architecture: timm name, for a weights file that does not say it itself.
        img_size: side of the input; 0: the model's own.
        names: of the classes, where the weights do not say them.
        untrained: with timm:NAME, random weights. To see that a method works, not what a model has learnt.
    """
    if isinstance(source, OpenModel):
        opened, source = source, source.source
        opened.model.to(device)
    else:
        opened = open_model(
            source,
            architecture=architecture,
            weights=weights,
            img_size=img_size,
            untrained=untrained,
            device=device,
        )
    if not hasattr(opened.model.backbone, "forward_features"):
        raise EverytokenError(
            f"{source} has no gradients, which an explanation needs. Explain the run or the weights that it was "
            "exported from."
        )
    classes, token_classes = opened.classes, opened.token_classes
    if classes.count < 1:
        raise EverytokenError(f"{source} has no classifier (0 classes), so there is nothing to explain.")
    if names:
        if len(names) != classes.count:
            raise EverytokenError(f"{len(names)} class names were given; {source} has {classes.count} classes.")
        same = token_classes == classes
        classes = ClassList(len(names), tuple(names))
        token_classes = classes if same else token_classes
    if not img_size:
        opened, _ = calibrated(opened, InferenceOptions(workers=0, device=device), None)
    remark = "random weights: this means nothing" if untrained else ""
    view = eval_view(opened.info)
    title = _short(source, opened.info.architecture)
    return ExplainedModel(title, source, opened.model, classes, token_classes, view, opened.info, remark)


def _short(source: str, architecture: str) -> str:
    """`runs/first` -> 'first · deit_tiny...'; timm:NAME and the like as they are."""
    if source.startswith(("timm:", "registry:", "hf-hub:")):
        return source
    path = Path(source)
    folder = path.parent if path.is_file() and path.suffix == ".safetensors" else path
    return f"{folder.name} · {architecture}"
