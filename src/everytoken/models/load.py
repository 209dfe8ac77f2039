"""A trained model from a run folder, a weights file or a timm name, ready to use, with what it knows about itself.

Weights written here carry a description (safetensors metadata): architecture and its arguments, class names, input size
and normalisation. For weights from elsewhere, name the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError, safe_open
from timm.data import resolve_data_config

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models.view import TokenModel
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
        for folder in sorted(path.glob("checkpoints/step-*"), reverse=True):
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
    arguments = dict(known.arguments)
    size = known.img_size
    if img_size is not None:
        size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        if "img_size" in arguments:
            arguments["img_size"] = size
    backbone = timm.create_model(known.architecture, **arguments)
    head = path.with_name(path.name.removesuffix(".safetensors") + ".token_head.safetensors")
    model = TokenModel(backbone, len(known.token_class_names) or None)
    report = load_weights(backbone, path)
    if model.token_head is not None:
        if not head.is_file():
            raise EverytokenError(f"the token head of {path} should be in {head.name} beside it, which is missing")
        load_weights(model.token_head, head)
    description = Description(**{**known.__dict__, "img_size": size, "arguments": arguments})
    return LoadedModel(model.eval(), description, str(path), report)


def _from_timm(name: str, img_size: Sequence[int] | int | None) -> LoadedModel:
    if not timm.is_model(name.split(".")[0]):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    arguments: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    try:
        backbone = timm.create_model(name, pretrained=True, **arguments)
    except (RuntimeError, OSError) as error:
        raise EverytokenError(f"the pretrained weights of {name} could not be had: {str(error)[:200]}") from error
    config = resolve_data_config({}, model=backbone)
    size = (config["input_size"][1], config["input_size"][2])
    if img_size is not None:
        size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
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
    if not num_classes:
        state = read_weights(path)
        names = probe.pretrained_cfg.get("classifier", ())
        names = (names,) if isinstance(names, str) else names
        bias = next((state[f"{n}.bias"] for n in names if f"{n}.bias" in state), None)
        num_classes = 1000 if bias is None else bias.shape[0]
    config = resolve_data_config({}, model=probe)
    return Description(
        architecture, {"num_classes": num_classes}, img_size=tuple(config["input_size"][1:]), mean=config["mean"],
        std=config["std"], crop_pct=config["crop_pct"], interpolation=config["interpolation"],
    )  # fmt: skip
