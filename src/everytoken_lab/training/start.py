"""From what somebody asks for to all options of a classification run: what was left open is decided here, and recorded.

- The weights decide the model, its arguments and its size, unless these were asked for.
- Weights without a recipe are fine-tuned: the recipe `finetune` for other classes, `finetune_resolution` for the same,
  and objectives, mixing and augmentation of the run that they come from.
- A run that is continued keeps what was decided when it began.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from everytoken.errors import EverytokenError
from everytoken.objectives.registry import refuse_code
from everytoken_lab.data.datasets import dataset_title
from everytoken_lab.engine.checkpoint import checkpoints_in
from everytoken_lab.engine.optim import default_scaling
from everytoken_lab.engine.options import AugmentOptions, TrainOptions
from everytoken_lab.engine.recipe import apply, flat, overrides, read_recipe
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.models.open import Weights, open_weights, source_of
from everytoken_lab.training.inputs import Inputs

DEFAULT_MODEL, DEFAULT_SIZE = "lvvit_t", 224
FINETUNE = {"finetune": "other classes", "finetune_resolution": "the same classes"}
"""Recipes that are taken for weights if none is given, and what they are for."""
_INHERITED = ("objectives", "mixing", "drop_path", "clip_grad", "token_vote", *(f.name for f in fields(AugmentOptions)))


def complete(
    options: TrainOptions,
    asked: Set[str] | None = None,
    assignments: Sequence[str] = (),
    trust_code: bool = False,
    inputs: Inputs | None = None,
) -> TrainOptions:
    """The options with everything decided that was left open; complete options stay as they are.

    Args:
        options: with the values of a recipe, if one is named.
        asked: names of the options that the user gave, which are not changed. Default: those that are not the default.
        assignments: of the kind `objectives.drloc.weight=0.1`, which come last.
        trust_code: whether objectives that a run folder names by import paths may be taken over.
        inputs: where images and weights are opened.
    """
    inputs = inputs or Inputs()
    if asked is not None and "lr_base" in asked and options.optim.lr:
        if "lr" in asked:
            raise EverytokenError(
                f"lr is {options.optim.lr:g} for any batch, and lr_base {options.optim.lr_base:g} is scaled to the "
                "batch: set one of them"
            )
        options = apply(options, {"lr": 0.0}, "lr_base")  # a recipe's
    if asked is None:
        plain = flat(TrainOptions())
        asked = {name for name, value in flat(options).items() if value != plain[name]}
    asked = {*asked, *(text.partition("=")[0] for text in assignments)}
    source, weights = options.model.weights, None
    teacher = source_of(options.model.teacher)
    if teacher.startswith("timm:") and not options.model.teacher_weights:
        full_name = open_weights(teacher).source.removeprefix("timm:")
        options = apply(options, {"teacher": full_name}, "teacher")
    if source:
        weights = inputs.weights(source, options.model.model)
        options = apply(options, _of_weights(options, weights, asked), source)
    missing: dict[str, Any] = {} if options.model.model else {"model": DEFAULT_MODEL}
    missing |= {} if options.model.img_size else {"img_size": DEFAULT_SIZE}
    options = apply(options, missing, "defaults")
    if not options.recipe:
        decisions = {} if weights is None else _fine_tuning(options, weights, source, inputs)
        if "opt" in asked or "lr_scaling" not in decisions:
            decisions["lr_scaling"] = default_scaling(options.optim)
        if "lr_base" in asked:
            decisions.pop("lr", None)
        folder = Path(options.run.out or default_output(options))
        began = read_run(folder).config if checkpoints_in(folder / "checkpoints") else {}
        recorded = {name: began[name] for name in decisions if name in began}
        decisions |= recorded
        if "objectives" not in asked and not trust_code:
            refuse_code(decisions, str((folder if "objectives" in recorded else Path(source)) / "config.yaml"))
        options = apply(options, {k: v for k, v in decisions.items() if k not in asked}, "fine-tuning")
    else:
        options = apply(options, {"lr_scaling": default_scaling(options.optim, options.recipe)}, options.recipe)
    return apply(options, overrides(assignments, flat(options)), "--set")


def _of_weights(options: TrainOptions, weights: Weights, asked: Set[str]) -> dict[str, Any]:
    """What follows from the weights alone: themselves, by their full name; the model; its size."""
    chosen = options.model
    model, arguments = weights.choose(chosen.model, chosen.model_kwargs, "model" in asked)
    values: dict[str, Any] = {"model": model, "model_kwargs": arguments}
    if not Path(weights.source).exists():
        values["weights"] = weights.source
    if not chosen.img_size:
        values["img_size"] = weights.info.img_size[0]
    return values


def _fine_tuning(options: TrainOptions, weights: Weights, source: str, inputs: Inputs) -> dict[str, Any]:
    """A recipe for the weights, with what the run that they come from had."""
    names = inputs.splits(options)[0].class_names if options.data else []
    recipe = "finetune_resolution" if not names or weights.matches(names) else "finetune"
    values = {"recipe": recipe, **read_recipe(recipe)}
    run = read_run(Path(source)).config if Path(source).is_dir() else {}
    values |= {name: run[name] for name in _INHERITED if name in run}
    return values


def default_output(options: TrainOptions) -> str:
    """runs/<recipe>-<model>-<data>-seed<seed>, and the size of the images for one that starts from weights."""
    start = options.model.weights
    recipe = Path(options.recipe).stem if options.recipe not in ("", *FINETUNE) else "finetune" if start else "train"
    size = f"-{options.model.img_size}px" if start else ""
    data = dataset_title(options.data) or "data"
    return str(Path("runs") / f"{recipe}-{options.model.model}{size}-{data}-seed{options.run.seed}")
