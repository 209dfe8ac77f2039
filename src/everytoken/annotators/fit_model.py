"""Building, keeping and finding again the networks that `fit` trains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from timm.data import resolve_data_config
from torch import Tensor, nn

from everytoken.annotators.annotator import AnnotatorError, Preprocessing
from everytoken.annotators.small_cnn import small_cnn
from everytoken.files import write_atomically
from everytoken.keyed import digest
from everytoken.models import family_of
from everytoken.models.open import check_architecture, create_pretrained, create_sized, registry_model

FOLDER = "annotator"
"""Where in a store's folder the networks are kept."""


@dataclass(frozen=True)
class FitModel:
    """A network to train, and the input it wants."""

    backbone: nn.Module
    preprocessing: Preprocessing


def build_model(name: str, pretrained: bool, num_classes: int, size: tuple[int, int], seed: int) -> FitModel:
    """A network with fresh or pretrained weights; the fresh ones depend on the seed alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(int.from_bytes(digest(seed, "fit-init")[:7], "little"))
        if not name:
            return FitModel(small_cnn(num_classes, max(size)), Preprocessing(size))
        if name.startswith("registry:"):
            model: Any = registry_model(name.removeprefix("registry:"))
            model.reset_classifier(num_classes)
            return FitModel(model, Preprocessing(size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
        check_architecture(name)
        if pretrained:
            model, _ = create_pretrained(name, {"img_size": size})
            model.reset_classifier(num_classes)
        else:
            model, _ = create_sized(name, {"num_classes": num_classes, "img_size": size})
        family_of(model)  # raises for models without a token view, before they are trained
        config = resolve_data_config({}, model=model)
        return FitModel(model, Preprocessing(size, config["mean"], config["std"], config["interpolation"]))


@dataclass(frozen=True)
class SavedFold:
    """A finished network: its weights, and what was measured."""

    weights: dict[str, Tensor]
    facts: dict[str, Any]


def load_network(model: nn.Module, fold: SavedFold, where: Path) -> None:
    """Give a network the weights of a finished fold."""
    try:
        model.load_state_dict(fold.weights)
    except RuntimeError as error:
        raise AnnotatorError(
            f"the networks in {where} are of another kind than those that `fit` trains now (they come from another "
            "version of everytoken or of timm). The maps can be used; to annotate or to teach, fit a new store."
        ) from error


def save_fold(folder: Path, number: int, model: nn.Module, plan: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Weights first, then the note that makes them count: a kill in between costs the training, not the truth."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomically(folder / f"fold-{number}.safetensors", save(weights))
    note = json.dumps({"plan": plan, "facts": dict(facts)}, indent=1, sort_keys=True)
    write_atomically(folder / f"fold-{number}.json", note.encode())


def load_fold(folder: Path, number: int, plan: Mapping[str, Any]) -> SavedFold | None:
    """A finished network, or None. One that was trained otherwise is an error, not a surprise."""
    note, path = folder / f"fold-{number}.json", folder / f"fold-{number}.safetensors"
    if not note.is_file() or not path.is_file():
        return None
    try:
        content = json.loads(note.read_text())
        weights = load_file(path)
        facts: dict[str, Any] = content["facts"]
        kept: dict[str, Any] = content["plan"]
    except (ValueError, KeyError, SafetensorError, OSError) as error:
        raise AnnotatorError(
            f"{note} or {path.name} is damaged ({error}). Remove both; it will be trained again."
        ) from error
    plan = json.loads(json.dumps(plan))
    different = [name for name in plan.keys() | kept.keys() if plan.get(name) != kept.get(name)]
    if different:
        what = "the images or their classes" if "data_sha256" in different else ", ".join(sorted(different))
        raise AnnotatorError(
            f"{folder} holds an annotator that was trained with other settings ({what} changed). Use the old settings, "
            "another --out, or remove that folder."
        )
    return SavedFold(weights, facts)


def kept_network(store: Path) -> tuple[FitModel, tuple[str, ...]]:
    """The (first) network that `fit` has left beside a store, and its classes."""
    note = store / FOLDER / "fold-0.json"
    if not note.is_file():
        raise AnnotatorError(
            f"{store} keeps no network of its own ({note} is missing): its annotator was not made with `fit`."
        )
    try:
        plan = json.loads(note.read_text())["plan"]
        names, size = tuple(plan["class_names"]), (int(plan["size"][0]), int(plan["size"][1]))
        made = build_model(plan["model"], False, len(names), size, plan["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise AnnotatorError(f"{note} is damaged ({error}); annotate again to have it trained anew.") from error
    found = load_fold(note.parent, 0, plan)
    if found is None:
        raise AnnotatorError(f"{note.with_suffix('.safetensors')} is missing; annotate again to have it trained anew.")
    load_network(made.backbone, found, note.parent)
    return made, names
