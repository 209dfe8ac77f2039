"""A trained model from a run folder, a weights file or a timm name, ready to use, with what it knows about itself.

Weights written here carry a description (safetensors metadata): architecture and its arguments, class names, input size
and normalisation. For weights from elsewhere, name the architecture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.data import resolve_data_config
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models.token_model import TokenModel
from everytoken.models.weights import LoadReport, load_weights, read_weights

DESCRIPTION = "everytoken"  # the key in the metadata


@dataclass(frozen=True)
class Description:
    """What somebody needs to know to use a set of weights.

    Attributes:
        architecture: timm model name; arguments: of its constructor, `num_classes` and `img_size` included.
        class_names: of the class head.
        token_class_names: of the token head, if there is one.
        img_size: (height, width); mean, std, crop_pct, interpolation: evaluation preprocessing.
    """

    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    token_class_names: tuple[str, ...] = ()
    img_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    interpolation: str = "bicubic"

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it. One entry only: several are written in random order, so equal runs would differ."""
        return {DESCRIPTION: json.dumps(self.__dict__)}

    @staticmethod
    def from_metadata(metadata: dict[str, str] | None) -> Description | None:
        """The reverse; None for weights that were not written here."""
        if not metadata or DESCRIPTION not in metadata:
            return None
        values: dict[str, Any] = json.loads(metadata[DESCRIPTION])
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return Description(**values)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its description, and what was left out while loading."""

    model: TokenModel
    description: Description
    source: str
    report: LoadReport | None


def find_weights(source: str | Path) -> Path:
    """The weights file that a path means: itself; for a run folder its best weights, else the newest checkpoint's."""
    path = Path(source)
    if path.is_dir():
        candidates = [path / "best.safetensors", path / "ema.safetensors", path / "model.safetensors"]
        found = [p for p in path.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", p.name)]
        for folder in sorted(found, reverse=True):
            candidates += [folder / "ema.safetensors", folder / "model.safetensors"]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise EverytokenError(f"{path} holds no weights: neither a run folder nor a checkpoint")
    if not path.is_file():
        raise EverytokenError(f"there is no run folder or weights file at {path}")
    return path


def describe(path: Path) -> Description | None:
    """What a weights file says about itself."""
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return Description.from_metadata(file.metadata())
    except SafetensorError as error:
        raise EverytokenError(f"{path} is not a readable safetensors file: {error}") from error


def token_head_file(weights: Path) -> Path:
    """Where the token head of a weights file is kept, if it is not part of the backbone."""
    return weights.with_name(weights.name.removesuffix(".safetensors") + ".token_head.safetensors")


def create_sized(name: str, arguments: Mapping[str, Any], **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """timm's model, and the arguments that it took: convolutional networks have no `img_size` and work at any."""
    used = dict(arguments)
    try:
        return timm.create_model(name, **used, **more), used
    except TypeError as error:
        if "img_size" not in used or "img_size" not in str(error):
            raise
    del used["img_size"]
    return timm.create_model(name, **used, **more), used


def classifier_size(architecture: str, state: Mapping[str, Tensor]) -> int | None:
    """Classes of foreign weights, from the shape of their classifier; None if they have none."""
    with torch.device("meta"):
        model = timm.create_model(architecture)
    for head in _classifiers(model):
        for part in ("weight", "bias"):
            if f"{head}.{part}" in state:
                return int(state[f"{head}.{part}"].shape[0])
    return None


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of a timm model's classifiers, that of the class token first."""
    config: Any = model.pretrained_cfg
    heads = (config or {}).get("classifier") or ()
    return (heads,) if isinstance(heads, str) else tuple(heads)


def with_own_head(backbone: nn.Module, known: Description | None) -> TokenModel:
    """The token view, with the token head that the backbone brings (LV-ViT, VOLO) where it learnt the same classes.

    Args:
        backbone: with its weights.
        known: what they say about themselves. Weights from elsewhere have trained their token head; those written here
            say which classes it learnt, and none if it was not trained.
    """
    trained = known is None or (bool(known.token_class_names) and known.token_class_names == known.class_names)
    own = getattr(backbone, "aux_head", None)
    if trained and isinstance(own, nn.Linear) and own.out_features == backbone.num_classes:
        return TokenModel(backbone, own.out_features)
    return TokenModel(backbone)


def load_model(
    source: str | Path, architecture: str = "", num_classes: int = 0, img_size: Sequence[int] | int | None = None
) -> LoadedModel:
    """Load a model for use.

    Args:
        source: a run folder, a weights file, or "timm:NAME" (pretrained weights, which timm downloads).
        architecture: timm name, for weights that do not say it themselves.
        num_classes: of the class head, likewise; 0: found from the file.
        img_size: another input size; position embeddings are resized.
    """
    if str(source).startswith("timm:"):
        return _from_timm(str(source).removeprefix("timm:"), img_size)
    path = find_weights(source)
    known = describe(path)
    if known is None:
        known = _describe_foreign(path, architecture, num_classes)
    size = _pair(img_size) or known.img_size
    asked = {} if img_size is None else {"img_size": size}
    backbone, arguments = create_sized(known.architecture, {**known.arguments, **asked})
    model = TokenModel(backbone, len(known.token_class_names) or None)
    report = load_weights(backbone, path)
    _check_classifier(backbone, report, path)
    if model.token_head is not None:
        head = token_head_file(path)
        if not head.is_file():
            raise EverytokenError(f"the token head of {path} should be in {head.name} beside it, which is missing")
        load_weights(model.token_head, head)
    description = Description(**{**known.__dict__, "img_size": size, "arguments": arguments})
    return LoadedModel(model.eval(), description, str(path), report)


def _pair(img_size: Sequence[int] | int | None) -> tuple[int, int] | None:
    if img_size is None:
        return None
    return (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])


def _check_classifier(backbone: nn.Module, report: LoadReport, path: Path) -> None:
    """A classifier with fresh values would answer noise."""
    head = (*_classifiers(backbone), "head")[0]
    wrong = [name for name in (*report.left_out, *report.missing) if name.startswith(f"{head}.")]
    if wrong:
        raise EverytokenError(
            f"{path} does not fill the classifier ({', '.join(wrong)}), so its answers would be noise. Give weights "
            "with a classifier, or train one: everytoken finetune DATA --from FILE --model NAME"
        )


def _from_timm(name: str, img_size: Sequence[int] | int | None) -> LoadedModel:
    if not timm.is_model(name.split(".")[0]):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    asked = {} if img_size is None else {"img_size": _pair(img_size)}
    try:
        backbone, arguments = create_sized(name, asked, pretrained=True)
    except (RuntimeError, OSError) as error:
        raise EverytokenError(f"the pretrained weights of {name} could not be had: {str(error)[:200]}") from error
    config = resolve_data_config({}, model=backbone)
    size = _pair(img_size) or (config["input_size"][1], config["input_size"][2])
    description = Description(
        name, arguments, img_size=size, mean=config["mean"], std=config["std"],
        crop_pct=config["crop_pct"], interpolation=config["interpolation"],
    )  # fmt: skip
    return LoadedModel(TokenModel(backbone).eval(), description, f"timm:{name}", None)


def _describe_foreign(path: Path, architecture: str, num_classes: int) -> Description:
    if not architecture:
        raise EverytokenError(f"{path} does not say which model it belongs to; name it with --model")
    if not timm.is_model(architecture):
        raise EverytokenError(f"timm knows no model {architecture!r}.{did_you_mean(architecture, timm.list_models())}")
    probe = timm.create_model(architecture)
    num_classes = num_classes or classifier_size(architecture, read_weights(path)) or 1000
    config = resolve_data_config({}, model=probe)
    return Description(
        architecture, {"num_classes": num_classes}, img_size=tuple(config["input_size"][1:]), mean=config["mean"],
        std=config["std"], crop_pct=config["crop_pct"], interpolation=config["interpolation"],
    )  # fmt: skip
