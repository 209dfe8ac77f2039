"""`python:module:function`: the user's own function from images to score maps.

    # my_labels.py
    def score(images):                  # float32 [B, 3, H, W], RGB, 0..1
        ...
        return logits                   # [B, rows, columns, classes], a tensor or an array

    score.class_names = ["cat", "dog"]  # needed
    score.img_size = 448                # the rest if it wants: 224, mean 0, std 1, bicubic, version ""
    score.mean, score.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    score.version = "2"                 # a store is not continued with another version

`function` may be a torch module (an object, not its class): it is moved to the device and put into evaluation mode.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.annotators.annotator import Annotator, AnnotatorError, Preprocessing
from everytoken.classes import ClassList
from everytoken.errors import did_you_mean


@dataclass
class FunctionAnnotator(Annotator):
    """Calls `function`."""

    function: Callable[[Tensor], Any] = lambda images: images

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """What the function returns, as a tensor."""
        made = torch.as_tensor(self.function(images.contiguous()), device=images.device)
        if made.ndim != 4 or len(made) != len(images) or made.shape[3] != self.classes.count:
            raise AnnotatorError(
                f"{self.name} returned scores of shape {list(made.shape)} for {len(images)} images; "
                f"[{len(images)}, rows, columns, {self.classes.count}] is needed (its class_names has "
                f"{self.classes.count} names)."
            )
        return made

    def to(self, device: torch.device) -> None:
        """Move it, if it is a module."""
        if isinstance(self.function, nn.Module):
            self.function.to(device).eval().requires_grad_(False)


def from_python(spec: str, size: tuple[int, int] | None = None, checkpoint: str = "") -> Annotator:
    """Import `module:name` (the working directory counts) and read its attributes."""
    if checkpoint:
        raise AnnotatorError("python: functions load their weights themselves; leave --checkpoint out.")
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise AnnotatorError(f"python:{spec} should be python:module:function, for example python:my_labels:score.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise AnnotatorError(
            f"python:{spec}: the module {module_name!r} cannot be imported ({error}). It is looked for in the working "
            "directory and in PYTHONPATH."
        ) from error
    function = getattr(module, name, None)
    if function is None:
        raise AnnotatorError(f"python:{spec}: {module_name} has no {name!r}.{did_you_mean(name, dir(module))}")
    if not callable(function) or isinstance(function, type):
        raise AnnotatorError(
            f"python:{spec}: {name} is a {type(function).__name__}, not a function or a module object."
        )
    names = tuple(map(str, getattr(function, "class_names", ())))
    if not names or len(set(names)) < len(names):
        raise AnnotatorError(
            f"python:{spec}: set {name}.class_names to the list of its classes, all different, in the order of its "
            "scores."
        )
    own = getattr(function, "img_size", 224)
    wanted = size or ((own, own) if isinstance(own, int) else (int(own[0]), int(own[1])))
    mean, std = (_three(getattr(function, what, default)) for what, default in (("mean", 0.0), ("std", 1.0)))
    preprocessing = Preprocessing(wanted, mean, std, str(getattr(function, "interpolation", "bicubic")))
    settings = {"version": str(getattr(function, "version", ""))}
    return FunctionAnnotator(f"python:{spec}", preprocessing, ClassList(len(names), names), settings, function)


def _three(value: Any) -> tuple[float, float, float]:
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    first, second, third = value
    return float(first), float(second), float(third)
