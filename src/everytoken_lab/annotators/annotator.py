"""Annotators: what gives every cell of an image a score for every class. `ANNOTATORS` lists the kinds.

The job that fills a store sees only `Annotator`. Its `settings` go into the store's metadata: everything that changes
the maps, and nothing else, so that a store is continued only by the annotator that began it.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.models.inference import faster
from everytoken_lab.models.open import OpenModel, describe, find_weights, open_model

Size = tuple[int, int]
_STRIDE = 32  # of EfficientNet-Lite


class AnnotatorError(EverytokenError):
    """An annotator cannot be used or does not work; the message says what else there is."""


@dataclass
class Annotator(ABC):
    """Scores for every cell.

    Attributes:
        name: how the user calls it, for messages and the metadata.
        preprocessing: the size, filter and normalisation of its input; how much of an image is seen is up to the job.
        classes: what its scores mean.
        settings: what the store says about it (plain JSON values).
    """

    name: str
    preprocessing: EvalTransform
    classes: ClassList
    settings: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits [B, h, w, K] of normalised images [B, 3, H, W]; `indices` [B] say which images of the dataset."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move to a device and make ready for use."""

    def accelerate(self) -> None:  # noqa: B027 - most have nothing to do
        """Spend a second or two on being faster, for many images; after `to`."""

    def describe(self) -> dict[str, Any]:
        """For the store's metadata."""
        wanted = {name: getattr(self.preprocessing, name) for name in ("size", "mean", "std", "interpolation")}
        return {"name": self.name, "input": wanted, **self.settings}

    @torch.inference_mode()
    def grid(self, device: torch.device) -> tuple[int, int]:
        """(h, w) of its maps, found with one grey image."""
        height, width = self.preprocessing.size
        images = torch.zeros(1, 3, height, width, device=device)
        try:
            logits = self.score(images, np.zeros(1, dtype=np.int64))
        except (EverytokenError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            raise AnnotatorError(
                f"{self.name} fails on an image of {height} x {width} pixels: {str(error).strip()[:300]}\n"
                "Try another img_size; transformers want their own size, other networks multiples of 32."
            ) from error
        return logits.shape[1], logits.shape[2]


@dataclass
class NetworkAnnotator(Annotator):
    """An annotator that is one network, `module`: images [B, 3, H, W] -> [B, h, w, K]."""

    module: nn.Module = field(default_factory=nn.Identity)
    forward: Callable[[Tensor], Tensor] | None = None  # faster than `module`, with the same result

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits of every cell."""
        return (self.forward or self.module)(images)

    def to(self, device: torch.device) -> None:
        """Convolutions are faster on channels-last images, on the CPU too."""
        self.module.to(device).to(memory_format=torch.channels_last).eval().requires_grad_(False)
        self.forward = None

    def accelerate(self) -> None:
        """ONNX Runtime, on the CPU."""
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        self.forward = faster(self.module, noise(self.preprocessing.size, device))


def noise(size: Size, device: torch.device) -> Tensor:
    """Three images, for a network to be tried on."""
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of all weights with their names, types and shapes: which annotator it was, beyond its name."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


class CellScores(nn.Module):
    """The class head at every cell, or the token head that a backbone brings: [B, 3, H, W] -> [B, h, w, K]."""

    def __init__(self, model: TokenModel) -> None:
        super().__init__()
        self.model = model

    @staticmethod
    def of(opened: OpenModel) -> CellScores:
        """Without a token head that was trained apart: `self:RUN` is for that."""
        brings_head = opened.model.uses_own_head and opened.token_classes == opened.classes
        return CellScores(opened.model if brings_head else TokenModel(opened.model.backbone))

    def forward(self, images: Tensor) -> Tensor:
        return self.model.class_and_cell_logits(images)[1]


class TokenScores(nn.Module):
    """The token head: [B, 3, H, W] -> [B, h, w, C]."""

    def __init__(self, model: TokenModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images).token_logits  # `from_run` has seen that there is a token head
        return logits


def from_timm(name: str, size: Size | None = None, weights: str = "") -> Annotator:
    """Any timm classifier, pretrained or with the weights of a file: its head is applied at every cell instead of to
    the mean of the cells, so the mean of the cells' logits is the logit of the image (token labeling, 3.2; ReLabel)."""
    opened = open_model(f"timm:{name}", weights=weights, img_size=size)
    if not weights:
        name = opened.source.removeprefix("timm:")  # with the tag of the weights that were really loaded
    settings: dict[str, Any] = {"model": name}
    report = opened.report
    if weights:
        settings["checkpoint"] = find_weights(weights).name
    if report is not None and (report.missing or report.left_out):
        wrong = ", ".join([*report.left_out, *report.missing][:3])
        raise AnnotatorError(
            f"{opened.source} does not fill all weights of {name}, which would make an annotator of noise: {wrong}."
        )
    if opened.num_classes < 1:
        raise AnnotatorError(f"timm:{name} has no classifier (0 classes), so it cannot label; choose a classifier.")
    settings["weights_sha256"] = weights_hash(opened.model.backbone)
    return NetworkAnnotator(f"timm:{name}", eval_view(opened.info), opened.classes, settings, CellScores.of(opened))


def from_registry(name: str, size: Size | None = None, weights: str = "") -> Annotator:
    """An EfficientNet-Lite from the package index, at its own size rounded up, so that whole cells cover the image."""
    opened = open_model(f"registry:{name}")
    height, width = (-(-side // _STRIDE) * _STRIDE for side in opened.info.img_size)
    settings = {"model": f"tf_{name}", "weights_sha256": weights_hash(opened.model.backbone)}
    preprocessing = replace(eval_view(opened.info), img_size=size or (height, width))
    return NetworkAnnotator(f"registry:{name}", preprocessing, opened.classes, settings, CellScores.of(opened))


def from_run(source: str, size: Size | None = None, weights: str = "") -> Annotator:
    """The token head of a model trained here; `source` is a run folder or a weights file."""
    path = find_weights(source)
    info = describe(path)
    if info is None:
        raise AnnotatorError(
            f"{path} was not written by everytoken. For other weights use timm:NAME with these weights."
        )
    if not info.token_class_names:
        raise AnnotatorError(
            f"{path} has no token head, so it has nothing to say about tokens. Train with token labels first, or let "
            f"its class head look at every cell: timm:{info.architecture} with the weights {path}"
        )
    opened = open_model(path, img_size=size)
    settings = {"model": info.architecture, "weights_sha256": weights_hash(opened.model)}
    name, module = f"self:{info.architecture}", TokenScores(opened.model)
    return NetworkAnnotator(name, eval_view(opened.info), opened.token_classes, settings, module)


@dataclass
class FunctionAnnotator(Annotator):
    """Calls `function`."""

    function: Callable[[Tensor], Any] = lambda images: images

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """What the function returns, as a tensor."""
        scores = torch.as_tensor(self.function(images.contiguous()), device=images.device)
        if scores.ndim != 4 or len(scores) != len(images) or scores.shape[3] != self.classes.count:
            raise AnnotatorError(
                f"{self.name} returned scores of shape {list(scores.shape)} for {len(images)} images; "
                f"[{len(images)}, rows, columns, {self.classes.count}] is needed (its class_names has "
                f"{self.classes.count} names)."
            )
        return scores

    def to(self, device: torch.device) -> None:
        """Move it, if it is a module."""
        if isinstance(self.function, nn.Module):
            self.function.to(device).eval().requires_grad_(False)


def from_python(spec: str, size: tuple[int, int] | None = None, weights: str = "") -> Annotator:
    """Your own function from images to score maps: `module:name` is imported (the working directory counts).

        def score(images):                  # float32 [B, 3, H, W], RGB, 0..1
            return logits                   # [B, rows, columns, classes], a tensor or an array

        score.class_names = ["cat", "dog"]  # needed
        score.img_size = 448                # the rest if it wants: 224, mean 0, std 1, bicubic, version ""
        score.mean, score.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        score.version = "2"                 # a store is not continued with another version

    It may be a torch module (an object, not its class): it is moved to the device and put into evaluation mode.
    """
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
    usual = getattr(function, "img_size", 224)
    wanted = size or ((usual, usual) if isinstance(usual, int) else (int(usual[0]), int(usual[1])))
    mean, std = (_three(getattr(function, what, default)) for what, default in (("mean", 0.0), ("std", 1.0)))
    interpolation = str(getattr(function, "interpolation", "bicubic"))
    preprocessing = EvalTransform(wanted, interpolation=interpolation, mean=mean, std=std)
    settings = {"version": str(getattr(function, "version", ""))}
    return FunctionAnnotator(f"python:{spec}", preprocessing, ClassList(len(names), names), settings, function)


def _three(value: Any) -> tuple[float, float, float]:
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    first, second, third = value
    return float(first), float(second), float(third)


class Kind(NamedTuple):
    """A kind of annotator: how it is written, what it is, and what builds it (name, size, weights -> annotator)."""

    form: str
    what: str
    build: Callable[[str, Size | None, str], Annotator] | None = None


ANNOTATORS = {
    "timm": Kind("timm:NAME", "any timm classifier", from_timm),
    "registry": Kind("registry:efficientnet_lite0|1|2", "ImageNet weights from the package index", from_registry),
    "fit": Kind("fit", "a linear head on a frozen network, fitted to this dataset; see `fit`"),
    "self": Kind("self:RUN", "the token head of a model trained here", from_run),
    "python": Kind("python:module:function", "a function of your own", from_python),
}


def build_annotator(spec: str, size: Size | None = None, weights: str = "") -> Annotator:
    """The annotator that `spec` names; not `fit`, which needs a dataset.

    Args:
        spec: kind and name, with a colon between.
        size: (height, width) of its input; None: its own.
        weights: weights file or run folder, for `timm:`.
    """
    kind, _, name = spec.partition(":")
    kinds = ", ".join(f"{known.form} ({known.what})" for known in ANNOTATORS.values())
    build = ANNOTATORS[kind].build if kind in ANNOTATORS else None
    if build is None:
        raise AnnotatorError(f"there is no annotator {spec!r}.{did_you_mean(kind, ANNOTATORS)} There are: {kinds}.")
    if not name:
        raise AnnotatorError(f"the annotator {kind}: needs a name after the colon. There are: {kinds}.")
    if weights and kind != "timm":
        raise AnnotatorError(f"{kind}: brings its own weights; leave weights out, or use timm:NAME with weights.")
    return build(name, size, weights)
