"""Annotators: what gives every cell of an image a score for every class. `ANNOTATORS` lists the kinds.

Their `settings` go into the store's metadata: everything that changes the maps, and nothing else, so that a store is
continued only by the annotator that began it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.models.description import describe
from everytoken_lab.models.onnx import faster
from everytoken_lab.models.open import find_weights, open_model

Size = tuple[int, int]
_STRIDE = 32  # of EfficientNet-Lite


class AnnotatorError(EverytokenError):
    """An annotator cannot be used or does not work; the message says what else there is."""


class CellScores(nn.Module):
    """The token head, or without one the class head at every cell: [B, 3, H, W] -> [B, h, w, K]."""

    def __init__(self, model: TokenModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.class_and_cell_logits(images)[1]


@dataclass
class Annotator:
    """Scores for every cell.

    Attributes:
        name: how the user calls it, for messages and the metadata.
        preprocessing: the size, filter and normalisation of its input; how much of an image is seen is up to the job.
        classes: what its scores mean.
        settings: what the store says about it (plain JSON values).
        network: normalised images [B, 3, H, W] -> logits [B, h, w, K], a module or a function.
    """

    name: str
    preprocessing: EvalTransform
    classes: ClassList
    settings: dict[str, Any]
    network: Callable[[Tensor], Any]
    _faster: Callable[[Tensor], Tensor] | None = field(default=None, init=False)  # with the same result

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits [B, h, w, K] of normalised images [B, 3, H, W]; `indices` [B] say which images of the dataset."""
        scores = self.forward(images)
        if scores.ndim != 4 or len(scores) != len(images) or scores.shape[3] != self.classes.count:
            raise AnnotatorError(
                f"{self.name} returned scores of shape {list(scores.shape)}; [{len(images)}, rows, columns, "
                f"{self.classes.count}] is needed."
            )
        return scores

    def forward(self, images: Tensor) -> Tensor:
        """What the network answers, as a tensor."""
        if not isinstance(self.network, CellScores):
            images = images.contiguous()  # a function of the user's
        return torch.as_tensor((self._faster or self.network)(images), device=images.device)

    def to(self, device: torch.device) -> None:
        """Move to a device and make ready for use; ours are faster on channels-last images, on the CPU too."""
        self._faster = None
        if isinstance(self.network, nn.Module):
            self.network.to(device).eval().requires_grad_(False)
        if isinstance(self.network, CellScores):
            self.network.to(memory_format=torch.channels_last)

    def accelerate(self) -> None:
        """Spend a second or two on ONNX Runtime, on the CPU, for many images; after `to`."""
        if isinstance(self.network, CellScores):
            device = next(self.network.parameters()).device
            self._faster = faster(self.network, noise(self.preprocessing.size, device))

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


def whole_cells(size: Size) -> Size:
    """The size of the registry's networks rounded up, so that whole cells cover the image."""
    return -(-size[0] // _STRIDE) * _STRIDE, -(-size[1] // _STRIDE) * _STRIDE


def from_network(spec: str, size: Size | None = None, weights: str = "") -> Annotator:
    """Any timm classifier, pretrained or with the weights of a file, or an EfficientNet-Lite of the package index.

    Its head is applied at every cell instead of to the mean of the cells, so the mean of the cells' logits is the logit
    of the image (token labeling, 3.2; ReLabel). A token head that the backbone brings is used instead.
    """
    opened = open_model(spec, weights=weights, img_size=size)
    preprocessing, report = eval_view(opened.info), opened.report
    if report is not None and (report.missing or report.left_out):
        wrong = ", ".join([*report.left_out, *report.missing][:3])
        raise AnnotatorError(f"{opened.source} does not fill all weights of {spec} ({wrong}): scores would be noise.")
    if opened.num_classes < 1:
        raise AnnotatorError(f"{spec} has no classifier (0 classes), so it cannot label; choose a classifier.")
    if spec.startswith("registry:"):
        settings = {"model": f"tf_{spec.removeprefix('registry:')}"}
        preprocessing = preprocessing if size else replace(preprocessing, img_size=whole_cells(opened.info.img_size))
    elif weights:
        settings = {"model": spec.removeprefix("timm:"), "checkpoint": find_weights(weights).name}
    else:
        spec = opened.source  # with the tag of the weights that were really loaded
        settings = {"model": spec.removeprefix("timm:")}
    settings["weights_sha256"] = weights_hash(opened.model.backbone)
    # not a token head that was trained beside the backbone: `self:RUN` is for that
    brings_head = opened.model.uses_own_head and opened.token_classes == opened.classes
    network = CellScores(opened.model if brings_head else TokenModel(opened.model.backbone))
    return Annotator(spec, preprocessing, opened.classes, settings, network)


def from_run(spec: str, size: Size | None = None, weights: str = "") -> Annotator:
    """self:RUN, the token head of a model trained here; RUN is a run folder or a weights file."""
    path = find_weights(spec.removeprefix("self:"))
    info = describe(path)
    if info is None:
        raise AnnotatorError(f"{path} was not written by everytoken: use timm:NAME with these weights.")
    if not info.token_class_names:
        raise AnnotatorError(
            f"{path} has no token head. Use its class head at every cell: timm:{info.architecture} with these weights."
        )
    opened = open_model(path, img_size=size)
    settings = {"model": info.architecture, "weights_sha256": weights_hash(opened.model)}
    name, network = f"self:{info.architecture}", CellScores(opened.model)
    return Annotator(name, eval_view(opened.info), opened.token_classes, settings, network)


ANNOTATORS: dict[str, tuple[str, Callable[[str, Size | None, str], Annotator] | None]] = {
    "timm": ("timm:NAME (any timm classifier)", from_network),
    "registry": ("registry:efficientnet_lite0|1|2 (ImageNet weights from the package index)", from_network),
    "fit": ("fit (a linear head on a frozen network, fitted to this dataset)", None),
    "self": ("self:RUN (the token head of a model trained here)", from_run),
}
"""How each kind is written, and what builds it from its name, the size of its input and weights."""


def build_annotator(spec: str, size: Size | None = None, weights: str = "") -> Annotator:
    """The annotator that `spec` names; not `fit`, which needs a dataset.

    Args:
        spec: kind and name, with a colon between.
        size: (height, width) of its input; None: its own.
        weights: weights file or run folder, for `timm:`.
    """
    kind, _, name = spec.partition(":")
    kinds = ", ".join(form for form, _ in ANNOTATORS.values())
    _, build = ANNOTATORS.get(kind, ("", None))
    if build is None:
        raise AnnotatorError(f"there is no annotator {spec!r}.{did_you_mean(kind, ANNOTATORS)} There are: {kinds}.")
    if not name:
        raise AnnotatorError(f"the annotator {kind}: needs a name after the colon. There are: {kinds}.")
    if weights and kind != "timm":
        raise AnnotatorError(f"{kind}: brings its own weights; leave weights out, or use timm:NAME with weights.")
    return build(spec, size, weights)
