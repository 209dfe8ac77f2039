"""A model to be explained: how it looks at an image file, and what its classes are called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken_lab.data.decode import Picture
from everytoken_lab.engine.run_folder import PUBLISHED
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.evaluation.calibrated import calibrated, probabilities
from everytoken_lab.evaluation.run import network_inputs, open_with
from everytoken_lab.explanation.saliency import evaluating
from everytoken_lab.models.open import OpenModel


@dataclass(frozen=True)
class ExplainedModel:
    """A model with the calibration of its run, and a short name for pictures."""

    name: str
    opened: OpenModel

    def read(self, path: str | Path) -> tuple[np.ndarray, Tensor]:
        """An image file as evaluation shows it to the network: uint8 [H, W, 3], and normalised [1, 3, H, W]."""
        if not Path(path).is_file():
            more = " It is a folder: name the files, such as folder/*.jpg." if Path(path).is_dir() else ""
            raise EverytokenError(f"there is no image file {path}.{more}")
        device = next(self.opened.model.parameters()).device
        (pixels,), images = network_inputs(self.opened.info, [Picture(path, str(path))], device)
        return pixels, images

    def probabilities(self, images: Tensor) -> Tensor:
        """[K] of one image, as `predict` shows them."""
        info = self.opened.info
        with torch.no_grad(), evaluating(self.opened.model):
            return probabilities(info, self.opened.model(images).voted(info.token_vote)[0]).cpu()

    def find_class(self, text: str) -> int:
        """The class that a text names: its name, a word for it that ImageNet knows, or its number."""
        classes = self.opened.classes
        number, digits = classes.find(text), text.removeprefix("class ")
        if number is None and digits.isdigit():
            number = int(digits)
        if number is None or not 0 <= number < classes.count:
            examples = ", ".join(classes.names[:4]) or "not named"
            raise EverytokenError(
                f"{self.name} has no class {text!r}.{classes.near(text)} Its {classes.count} classes are {examples}"
                f"{', ...' if classes.count > 4 else ''}; a number from 0 to {classes.count - 1} is accepted, too."
            )
        return number


def open_explained(source: str | Path | OpenModel, options: InferenceOptions | None = None) -> ExplainedModel:
    """The model that `source` names, or a loaded one."""
    options = options or InferenceOptions(workers=0)
    opened = open_with(source, options)
    if not hasattr(opened.model.backbone, "forward_features"):
        raise EverytokenError(
            f"{opened.source} has no gradients, which an explanation needs. Explain the run or the weights that it was "
            "exported from."
        )
    if not options.img_size:
        opened, _ = calibrated(opened, options)
    path = Path(opened.source)
    folder = path.parent if path.suffix == ".safetensors" else path
    named = opened.source.startswith(PUBLISHED)
    return ExplainedModel(opened.source if named else f"{folder.name} · {opened.info.architecture}", opened)
