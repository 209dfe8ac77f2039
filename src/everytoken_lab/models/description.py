"""What weights say about themselves, `Description`: kept in their safetensors metadata, checked when it is read.

A file comes from outside, so on its word only models that timm has registered are built, with arguments of their own
constructors.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import timm
import torch
from annotated_types import Interval, Len, Predicate
from safetensors import SafetensorError, safe_open
from timm.data import resolve_data_config
from torch import nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models.weights import WeightsError
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration

DESCRIPTION = "everytoken"  # the key in the metadata
_COMMON_ARGUMENTS = ("num_classes", "img_size", "in_chans", "global_pool", "drop_rate", "drop_path_rate")
_LARGEST = 1 << 16  # number among the arguments of a described model
_PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
_INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "box", "hamming", "lanczos", "random")
Side = Annotated[int, Interval(ge=1, le=1 << 14)]


@dataclass(frozen=True)
class Description:
    """What somebody needs to know to use a set of weights.

    Attributes:
        architecture: timm model name; arguments: of its constructor, `num_classes` and `img_size` included.
        class_names: of the class head.
        token_class_names: of the token head, if there is one.
        img_size: (height, width); mean, std, crop_pct, crop_mode, interpolation: evaluation preprocessing.
        token_vote: in evaluation, this much of the strongest token logit of each class is added to the class logits.
        calibration: what held-out images say about its probabilities, if that is known.
        multi_label: probabilities are sigmoids, not a softmax.
        amp: the type of the mixed precision that the run was validated in; empty: float32.
    """

    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    token_class_names: tuple[str, ...] = ()
    img_size: tuple[Side, Side] = (224, 224)
    mean: Annotated[tuple[Annotated[float, Interval(ge=-100, le=100)], ...], Len(3, 3)] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[Annotated[float, Interval(ge=1e-4, le=1e4)], ...], Len(3, 3)] = (0.229, 0.224, 0.225)
    crop_pct: Annotated[float, Interval(gt=0, le=1)] = 0.875
    interpolation: Annotated[str, Predicate(_INTERPOLATIONS.__contains__)] = "bicubic"
    token_vote: Annotated[float, Interval(ge=-100, le=100)] = 0.0
    calibration: Calibration | None = None
    multi_label: bool = False
    crop_mode: Literal["center", "squash", "border"] = "center"
    amp: Literal["", "bfloat16", "float16"] = ""

    def amp_dtype(self, amp: bool | None = None) -> torch.dtype | None:
        """The type of mixed precision for evaluation: as validated, unless `amp` says otherwise; None: float32."""
        on = bool(self.amp) if amp is None else amp
        return getattr(torch, self.amp or "bfloat16") if on else None

    def values(self) -> dict[str, Any]:
        """As plain data, which `from_values` reads."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it. One entry only: several are written in random order, so equal runs would differ."""
        return {DESCRIPTION: json.dumps(self.values())}

    @staticmethod
    def from_values(values: Any, where: str) -> Description:
        """A description that was read from a file `where`, checked."""
        info = schema.parse(Description, values, f"{where}, description of the weights")
        check_architecture(info.architecture, where)
        allowed = constructor_arguments(info.architecture)
        for name, value in info.arguments.items():
            if name not in allowed or any(number > _LARGEST for number in integers(value)):
                what = f"{where}: its description has the argument {name}={value!r}"
                raise schema.SchemaError(f"{what}, which no {info.architecture} takes.")
        return info


def integers(value: Any) -> Iterator[int]:
    """The integers in plain data, without their signs."""
    if isinstance(value, int):
        yield abs(value)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value.values() if isinstance(value, dict) else value:
            yield from integers(item)


def timm_config(backbone: nn.Module, info: Description) -> dict[str, Any]:
    """The content of config.json, with which timm opens a folder: `timm.create_model("local-dir:FOLDER")`."""
    model: Any = backbone
    config = dict(model.pretrained_cfg or {})
    kept = ("first_conv", "classifier", "pool_size", "fixed_input_size", "min_input_size")
    return {
        "architecture": info.architecture.partition(".")[0],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "label_names": list(info.class_names),
        "model_args": {name: value for name, value in info.arguments.items() if name != "num_classes"},
        "pretrained_cfg": {
            "num_classes": model.num_classes,
            "input_size": [3, *info.img_size],
            **{name: getattr(info, name) for name in _PREPROCESSING},
            **{name: config[name] for name in kept if config.get(name) is not None},
        },
        DESCRIPTION: info.values(),
    }


def check_architecture(name: str, where: str = "") -> None:
    """Refuse what is not the name of a model that timm has registered, with or without a tag of weights."""
    if ":" in name or "/" in name or not timm.is_model(name.split(".")[0]):
        place, hint = f"{where}: " if where else "", did_you_mean(name, timm.list_models())
        raise EverytokenError(f"{place}timm has no model {name!r}.{hint}")


@cache
def constructor_arguments(architecture: str) -> frozenset[str]:
    """What the constructor of a registered model takes: the arguments that a file may ask for."""
    with torch.device("meta"):
        bases = type(timm.create_model(architecture)).__mro__
    names = {name for base in bases if issubclass(base, nn.Module) for name in inspect.signature(base).parameters}
    return frozenset(name for name in {*names, *_COMMON_ARGUMENTS} - {"args", "kwargs"} if "pretrained" not in name)


@contextmanager
def building(what: str) -> Iterator[None]:
    """Say which model cannot be built; timm and torch raise whatever the first wrong argument meets."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError, ArithmeticError, AttributeError) as error:
        raise WeightsError(f"{what} cannot be built: {error}") from error


def create_sized(name: str, arguments: Mapping[str, Any], **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """timm's model, and the arguments that it took: convolutional networks have no `img_size` and work at any."""
    used = dict(arguments)
    try:
        return timm.create_model(name, **used, **more), used
    except TypeError:
        if used.pop("img_size", None) is None:
            raise
    return timm.create_model(name, **used, **more), used


def tensor_shapes(architecture: str, arguments: Mapping[str, Any], size: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors, and whether it takes images of this size, without any memory for it."""
    with torch.device("meta"), torch.no_grad():
        model = create_sized(architecture, arguments)[0].eval()
        model(torch.empty(1, 3, *size))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def described(name: str, pretrained_cfg: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Description:
    """What timm knows about a model."""
    config = resolve_data_config({}, pretrained_cfg=dict(pretrained_cfg))
    kept = {key: config[key] for key in _PREPROCESSING}
    return Description(name, dict(arguments or {}), img_size=tuple(config["input_size"][1:]), **kept)


def read_metadata(path: Path, key: str) -> Any:
    """What a safetensors file says under `key`, as plain data; None where it says nothing, and for other files."""
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return parse_metadata(file.metadata() or {}, key, path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error


def parse_metadata(metadata: Mapping[str, str], key: str, path: Path) -> Any:
    """What the metadata of a weights file say under `key`; None where they say nothing."""
    try:
        return json.loads(metadata[key]) if key in metadata else None
    except (ValueError, RecursionError) as error:
        raise schema.SchemaError(f"{path}: its description is not valid JSON ({error}).") from error


def describe(path: Path) -> Description | None:
    """What a weights file says about itself; None if it was not written here."""
    values = read_metadata(path, DESCRIPTION)
    return None if values is None else Description.from_values(values, str(path))


def token_head_file(weights: Path) -> Path:
    """Where the token head of a weights file is kept, if it is not part of the backbone."""
    return weights.with_name(weights.name.removesuffix(".safetensors") + ".token_head.safetensors")


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of all weights with their names, types and shapes: which model it was, beyond its name."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()
