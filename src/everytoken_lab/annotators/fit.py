"""`fit`: an annotator of the dataset's own classes.

A linear classifier on the features of a frozen, pretrained backbone (see `linear` and `features`), applied at every
cell. The backbone is the best of those that are available here, by cross-validation.

What is held out: the images that `train` sets aside for validation by default are never learnt from, so that maps do
not carry their labels into a training that validates on them. Each of the other images is annotated by the head of its
fold, which was not fitted on it: a head that knows an image gives it a label that says no more than its folder.

The heads are kept in the store's folder (`annotator/linear.safetensors` and `.json`), with the features, and the whole
classifier as a plain timm model (`annotator/best.safetensors`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.files import make_inside, refuse_link, write_atomically
from everytoken.models.weights import WeightsError, encode_weights, read_weights
from everytoken_lab import schema
from everytoken_lab.annotators import AnnotateOptions, pair
from everytoken_lab.annotators.annotator import Annotator, AnnotatorError, CellScores, whole_cells
from everytoken_lab.annotators.features import Choice, FrozenBackbone, candidates, choose_backbone
from everytoken_lab.classes import ClassList
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, DataSet, keys_hash, split_off
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World

logger = logging.getLogger(__name__)
FOLDER = "annotator"
"""Where in a store's folder the heads are kept."""
_SEED = 42  # of the folds


@dataclass
class LinearAnnotator(Annotator):
    """Linear heads at every cell of a frozen backbone.

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
    """Fit what is not fitted yet, by the first process, keep it in `out/annotator`, and return the annotator."""
    if data.multi_label:
        raise EverytokenError(
            f"`fit` learns one class per image, and {data.name} is multi-label. Use registry:NAME or timm:NAME."
        )
    if len(data.class_names) < 2:
        raise EverytokenError(
            f"`fit` learns to tell classes apart, and {data.name} has {len(data.class_names)}. Put the images of each "
            "class into a folder of its own, or use timm:NAME."
        )
    folder = out / FOLDER
    refuse_link(folder)
    if world.is_main and not (folder / "linear.json").is_file():
        save_heads(fit_heads(data, folder, options, world), data, folder, options)
    world.barrier()
    return open_heads(data, folder, options, world)


def fit_heads(data: DataSet, folder: Path, options: AnnotateOptions, world: World) -> tuple[Choice, np.ndarray]:
    """The chosen backbone with its heads, and the indices of the images that they were fitted on."""
    name = options.fit_model
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
    return choice, learnt


def save_heads(fitted: tuple[Choice, np.ndarray], data: DataSet, folder: Path, options: AnnotateOptions) -> None:
    """Heads, then the whole classifier, then the note that makes them count."""
    (choice, learnt), fit = fitted, fitted[0].fit
    heads = (*fit.fold_heads, fit.head)
    part = np.full(len(data), len(heads) - 1, dtype=np.int64)
    part[learnt[choice.features.readable]] = fit.fold
    content = {
        "weight": torch.stack([head.weight for head in heads]),
        "bias": torch.stack([head.bias for head in heads]),
        "part": torch.from_numpy(part),
    }
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
        raise AnnotatorError(
            f"{note} or {path.name} is damaged ({error}). Remove both; they are fitted again."
        ) from error
    wanted = _plan(data, options)
    wanted |= {"model": options.fit_model} if options.fit_model else {}
    wanted |= {"size": [options.fit_size] * 2} if options.fit_size else {}
    different = sorted(key for key, value in wanted.items() if plan.get(key) != value)
    if different:
        what = "the images or their classes" if "data_sha256" in different else ", ".join(different)
        raise AnnotatorError(
            f"{folder} holds an annotator that was fitted with other settings ({what} changed). Use the old settings, "
            "another output folder, or remove that folder."
        )
    own = whole_cells((height, width)) if name.startswith("registry:") else (height, width)
    backbone = FrozenBackbone(name, pair(options.img_size) or own, world.device)
    logger.info(
        f"annotator of these classes: a linear head on {name}; {accuracy:.1%} right in cross-validation "
        f"({facts.get('images', 0):,} images)"
    )
    heads = zip(weight.numpy(), bias.numpy(), strict=True)
    hashes = [backbone.weights_sha256, *(hashlib.sha256(w.tobytes() + b.tobytes()).hexdigest() for w, b in heads)]
    settings = {
        "fit": {key: value for key, value in plan.items() if key != "data_sha256"},
        "weights_sha256": hashes,
        "held_out_accuracy": round(accuracy, 4),
    }
    classes, network = ClassList(len(data.class_names), tuple(data.class_names)), CellScores(backbone.model)
    return LinearAnnotator("fit", backbone.preprocessing, classes, settings, network, weight, bias, part)
