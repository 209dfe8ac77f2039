"""Annotators from networks: `timm:NAME`, `registry:NAME`, `self:RUN`.

A classifier that pools its last feature map by a plain mean and then applies a linear layer can apply that layer at
every cell instead: the mean of the cells' logits is then the logit of the image (token labeling, 3.2; ReLabel). The
token view does it for every supported family, with the head's norms and biases in their places.

`self:RUN` asks the token head of a model that was trained here: labels that emerged in training teach the next model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from everytoken.annotators.annotator import Annotator, AnnotatorError, NetworkAnnotator, Preprocessing, weights_hash
from everytoken.errors import EverytokenError
from everytoken.models import TokenModel
from everytoken.models.open import Description, OpenModel, describe, find_weights, open_model

Size = tuple[int, int]
_STRIDE = 32  # of EfficientNet-Lite


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
        logits = self.model(images).token_logits
        if logits is None:
            raise AnnotatorError("this model has no token head")
        return logits


def _preprocessing(info: Description, size: Size | None = None) -> Preprocessing:
    mean, std = ((v[0], v[1], v[2]) for v in (info.mean, info.std))
    return Preprocessing(size or info.img_size, mean, std, info.interpolation)


def from_timm(name: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """Any timm classifier: pretrained, or with the weights of a file.

    Args:
        name: timm's, with or without a tag of pretrained weights; `hf-hub:` and `local-dir:` names too.
        size: (height, width) of the input; default: the model's own.
        checkpoint: weights file or run folder.
    """
    opened = open_model(f"timm:{name}", checkpoint=checkpoint, img_size=size)
    settings: dict[str, Any] = {"model": name}
    report = opened.report
    if checkpoint:
        settings["checkpoint"] = find_weights(checkpoint).name
    if report is not None and (report.missing or report.left_out):
        wrong = ", ".join([*report.left_out, *report.missing][:3])
        raise AnnotatorError(
            f"{opened.source} does not fill all weights of {name}, which would make an annotator of noise: {wrong}."
        )
    if opened.num_classes < 1:
        raise AnnotatorError(f"timm:{name} has no classifier (0 classes), so it cannot label; choose a classifier.")
    settings["weights_sha256"] = weights_hash(opened.model.backbone)
    return NetworkAnnotator(
        f"timm:{name}", _preprocessing(opened.info), opened.classes, settings, CellScores.of(opened)
    )


def from_registry(name: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """An EfficientNet-Lite from the package index, at its own size rounded up, so that whole cells cover the image."""
    if checkpoint:
        raise AnnotatorError("registry: annotators bring their weights; with a checkpoint use timm:NAME.")
    opened = open_model(f"registry:{name}")
    height, width = (-(-side // _STRIDE) * _STRIDE for side in opened.info.img_size)
    settings = {"model": f"tf_{name}", "weights_sha256": weights_hash(opened.model.backbone)}
    preprocessing = _preprocessing(opened.info, size or (height, width))
    return NetworkAnnotator(f"registry:{name}", preprocessing, opened.classes, settings, CellScores.of(opened))


def from_run(source: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """The token head of a model trained here; `source` is a run folder or a weights file."""
    if checkpoint:
        raise AnnotatorError("self: names the run or the weights itself; leave --checkpoint out.")
    path = find_weights(source)
    info = describe(path)
    if info is None:
        raise AnnotatorError(
            f"{path} was not written by everytoken. For other weights use timm:NAME --checkpoint {path}."
        )
    if not info.token_class_names:
        raise AnnotatorError(
            f"{path} has no token head, so it has nothing to say about tokens. Train with token labels first, or let "
            f"its class head look at every cell: --annotator timm:{info.architecture} --checkpoint {path}"
        )
    opened = open_model(path, img_size=size)
    settings = {"model": info.architecture, "weights_sha256": weights_hash(opened.model)}
    return NetworkAnnotator(
        f"self:{info.architecture}",
        _preprocessing(opened.info),
        opened.token_classes,
        settings,
        TokenScores(opened.model),
    )


def image_size(given: Sequence[int]) -> Size | None:
    """--img-size: nothing, one number, or height and width."""
    if len(given) > 2 or any(side < 1 for side in given):
        raise EverytokenError(f"--img-size takes one number or height and width, not {tuple(given)}")
    return None if not given else (given[0], given[-1])
