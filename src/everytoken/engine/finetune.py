"""What fine-tuning changes in the options: the model of the source, and the papers' settings where none were given.

Papers: All Tokens Matter, supplement section 1 (another resolution): batch 512, lr 5e-6, weight decay 1e-8, 30 epochs,
objectives, mixing and augmentation kept. Dense relative localization, supplement (other classes): lr 5e-4, 10 warm-up
epochs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from everytoken.engine.options import AugmentOptions, TrainOptions
from everytoken.engine.recipe import apply, flat, overrides
from everytoken.engine.run_folder import read_run
from everytoken.errors import EverytokenError
from everytoken.models.open import Description, classifier_size, describe, find_weights
from everytoken.models.weights import read_weights
from everytoken.objectives.registry import resolved

RESOLUTION: dict[str, Any] = {
    "lr": 5e-6,  # at any batch: scaled to a laptop's, it would not move at all
    "min_lr": 5e-6,
    "warmup_lr": 5e-6,
    "warmup_epochs": 0.0,
    "weight_decay": 1e-8,
    "epochs": 30,
}
TRANSFER: dict[str, Any] = {
    "lr_base": 5e-4,
    "lr_base_size": 512,
    "warmup_epochs": 10.0,
    "weight_decay": 0.05,
    "epochs": 100,
}
_NOT_KEPT = ("num_classes", "img_size", "token_vote")  # arguments of the source's model


def finetune_options(
    options: TrainOptions, source: str, given: Set[str], assignments: Sequence[str] = ()
) -> TrainOptions:
    """Options of a fine-tuning run.

    Args:
        options: as parsed, with a recipe's values in place.
        source: run folder or weights file.
        given: names of the flags that were given, which are left alone.
        assignments: those of --set, which change what the source had and come last.
    """
    weights = find_weights(source)
    about = describe(weights)
    values: dict[str, Any] = {"initial_checkpoint": str(weights)}
    if about is not None:
        values["model"] = about.architecture
        values["model_kwargs"] = {k: v for k, v in about.arguments.items() if k not in _NOT_KEPT}
        if "img_size" not in given and not options.recipe:
            values["img_size"] = about.img_size[0]
    elif not ({"model", "recipe"} & given):
        raise EverytokenError(f"{weights} does not say which model it belongs to; name it (model)")
    if not options.recipe:
        old = read_run(Path(source)).config if Path(source).is_dir() else {}
        names = ("objectives", "mixing", "drop_path", "clip_grad", "token_vote")
        for name in (*names, *(f.name for f in fields(AugmentOptions))):
            if name in old and name not in given:
                values[name] = old[name]
        if "objectives" in values:
            values["objectives"] = resolved(values["objectives"], values["objectives"])
        values |= TRANSFER if _other_classes(options, about, weights) else RESOLUTION
    if "lr_base" in given:
        values.pop("lr", None)
    values = {name: value for name, value in values.items() if name == "initial_checkpoint" or name not in given}
    options = apply(options, values, "finetune")
    return apply(options, overrides(assignments, flat(options)), "--set")


def _other_classes(options: TrainOptions, about: Description | None, weights: Path) -> bool:
    """Whether the data has other classes than the weights were trained on, by name, or by number for foreign ones."""
    if not options.data:
        return False
    from everytoken.data.datasets import open_dataset

    data = open_dataset(options.data, "train", val_split=options.dataset.val_split)
    if about is not None and about.class_names:
        return list(data.class_names) != list(about.class_names)
    classes = classifier_size(options.model.model if about is None else about.architecture, read_weights(weights))
    return classes != (options.dataset.num_classes or data.num_classes)
