"""What a training opens, each once: its images and its initial weights; and what is decided by them.

`complete` fills in the options that were left open:

- The weights decide the model, its arguments and its size, unless these were asked for.
- Weights without a recipe are fine-tuned: the recipe `finetune` for other classes, `finetune_resolution` for the same,
  and objectives, mixing and augmentation of the run that they come from.
- A run that is continued keeps what was decided when it began.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence, Set
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import read_bytes
from everytoken.objectives.registry import refuse_code
from everytoken_lab.data import datasets
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, DataSet
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.data.tree import NAMED, dataset_title, find_split
from everytoken_lab.engine.checkpoint import checkpoints_in
from everytoken_lab.engine.optim import default_scaling
from everytoken_lab.engine.options import AugmentOptions, TrainOptions, apply, flat, overrides, read_recipe
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.models.open import Weights, open_weights, source_of

logger = logging.getLogger(__name__)
DEFAULT_MODEL, DEFAULT_SIZE = "lvvit_t", 224
FINETUNE = ("finetune", "finetune_resolution")
"""Recipes that are taken for weights if none is given: for other classes, and for the same."""
_INHERITED = ("objectives", "mixing", "drop_path", "clip_grad", "token_vote", *(f.name for f in fields(AugmentOptions)))


class Inputs:
    """Images and weights of a command, opened when they are first asked for."""

    def __init__(self) -> None:
        self._images: dict[tuple[str, str], DataSet] = {}
        self._weights: dict[str, Weights] = {}
        self._only: str | None = None

    def only(self, part: Literal["train", "held out", "all"]) -> Inputs:
        """The same, with this part of the images (of undivided data) to train on and nothing to validate on."""
        other = Inputs()
        other._images, other._weights, other._only = self._images, self._weights, part
        return other

    def weights(self, source: str, model: str = "") -> Weights:
        """As `open_weights`."""
        if source not in self._weights:
            found = open_weights(source, model)
            found = replace(found, read=cache(found.read))
            self._weights |= {source: found, found.source: found}
        return self._weights[source]

    def splits(self, options: TrainOptions) -> tuple[DataSet, DataSet, list[str]]:
        """Training and validation images, and what to say about them.

        A tenth is held out where the data has no validation images of its own and nothing was asked for: by the names
        of the images alone, so the same ones for every seed, and for `everytoken annotate`.
        """
        fraction, notes = options.dataset.val_split, []
        if not fraction and not has_validation(options):
            fraction = DEFAULT_VAL_SPLIT
            notes.append(f"{options.data} has no validation images: 10 % of each class are held out (val_split)")
        if fraction:
            whole = self._open(options.data, "undivided")
            train, val = datasets.hold_out(whole, options.data, fraction)
            train = {None: train, "train": train, "held out": val, "all": whole}[self._only]
        else:
            train, val = self._open(options.data, "train"), self._open(options.data, "val")
        if self._only is not None:
            val = val.subset([])
        train, val, more = _chosen(options, train, val)
        return train, val, notes + more

    def undivided(self, options: TrainOptions) -> DataSet:
        """All images of data without validation images."""
        whole = self._open(options.data, "undivided")
        return _chosen(options, whole, whole.subset(np.zeros(0, dtype=np.int64)))[0]

    def _open(self, data: str, split: str) -> DataSet:
        if (data, split) not in self._images:
            self._images[data, split] = datasets.open_dataset(data, split)
        return self._images[data, split]


def has_validation(options: TrainOptions) -> bool:
    """Whether the data brings validation images, or some are to be held out."""
    named = options.data.startswith(NAMED)
    return bool(options.dataset.val_split) or named or find_split(options.data, "val") is not None


def _chosen(options: TrainOptions, train: DataSet, val: DataSet) -> tuple[DataSet, DataSet, list[str]]:
    """Without the training images to leave out, and with corrected labels."""
    notes: list[str] = []
    if train.num_classes < 2 and not train.multi_label:
        what = f"{options.data} has one class only ({', '.join(train.class_names)})"
        raise EverytokenError(f"{what}: give every class a folder of its own, at least two")
    if names := excluded(options):
        train = train.subset([i for i, key in enumerate(train.keys()) if key not in names])
        if not len(train):
            raise EverytokenError(f"exclude leaves no images of {train.name}")
    if options.dataset.corrections:
        (train, val), notes = corrected(train, val, Path(options.dataset.corrections))
    return train, val, notes


def excluded(options: TrainOptions) -> set[str]:
    """Names of the training images to leave out."""
    file = options.dataset.exclude
    try:
        lines = os.fsdecode(read_bytes(file)).splitlines() if file else []
    except OSError as error:
        raise EverytokenError(f"exclude: {file} cannot be read ({error.strerror})") from error
    return {line.partition("\t")[0] for line in lines}  # what follows a tab is a remark


def corrected(train: DataSet, val: DataSet, file: Path) -> tuple[tuple[DataSet, DataSet], list[str]]:
    """Both splits with the labels of a CSV file (path, label, perhaps split); images with an empty one are left out."""
    if not file.is_file():
        raise EverytokenError(f"corrections: there is no file {file}")
    rows = list(parse_labels(file, corrections=True))
    out, changed, dropped, found = [], 0, 0, set[int]()
    for name, data in (("train", train), ("val", val)):
        by_path = {row.path: row for row in rows if row.split in ("", name)}
        number = {label: k for k, label in enumerate(data.class_names)}
        labels, keep = data.labels.copy(), np.ones(len(data), dtype=bool)
        for i, row in enumerate(map(by_path.get, data.keys())):
            if row is None:
                continue
            found.add(row.line)
            where, unknown = f"{file}, line {row.line}", [label for label in row.labels if label not in number]
            if unknown:
                hint = did_you_mean(unknown[0], number)
                raise EverytokenError(f"{where}: no class is {unknown[0]!r} of {data.name}.{hint}")
            if not row.labels and not row.several:
                keep[i], dropped = False, dropped + 1
                continue
            if data.multi_label:
                labels[i] = [label in row.labels for label in data.class_names]
            elif len(row.labels) == 1:
                labels[i] = number[row.labels[0]]
            else:
                raise EverytokenError(f"{where}: {';'.join(row.labels)!r} is not one label of {data.name}.")
            changed += not np.array_equal(labels[i], data.labels[i])
        part = data.subset(np.flatnonzero(keep))
        part.labels = labels[keep]
        out.append(part)
    notes = [f"{file}: {changed:,} labels corrected, {dropped:,} images left out"]
    if len(found) < len(rows):
        notes.append(f"{file} names {len(rows) - len(found):,} images that are not there")
    return (out[0], out[1]), notes


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
    """
    inputs = inputs or Inputs()
    if asked is not None and "lr_base" in asked and options.optim.lr:
        if "lr" in asked:
            raise EverytokenError("lr is for any batch, and lr_base is scaled to the batch: set one of them")
        options = apply(options, {"lr": 0.0}, "lr_base")  # a recipe's
    if asked is None:
        plain = flat(TrainOptions())
        asked = {name for name, value in flat(options).items() if value != plain[name]}
    asked = {*asked, *(text.partition("=")[0] for text in assignments)}
    if (teacher := source_of(options.model.teacher)).startswith("timm:"):
        full_name = open_weights(teacher).source.removeprefix("timm:")
        options = apply(options, {"teacher": full_name}, "teacher")
    source = options.model.weights
    weights = inputs.weights(source, options.model.model) if source else None
    chosen = options.model
    values: dict[str, Any] = {"model": chosen.model or DEFAULT_MODEL, "img_size": chosen.img_size or DEFAULT_SIZE}
    if weights is not None:
        model, arguments = weights.choose(chosen.model, chosen.model_kwargs, "model" in asked)
        values = {"model": model, "model_kwargs": arguments, "img_size": chosen.img_size or weights.info.img_size[0]}
        values |= {} if Path(weights.source).exists() else {"weights": weights.source}  # by its full name
    options = apply(options, values, source or "defaults")
    if options.recipe:
        decisions: dict[str, Any] = {"lr_scaling": default_scaling(options.optim, options.recipe)}
    else:
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
        decisions = {k: v for k, v in decisions.items() if k not in asked}
    options = apply(options, decisions, options.recipe or "fine-tuning")
    options = apply(options, overrides(assignments, flat(options)), "--set")
    return options if "batch_size" in asked or not options.data else _small_batch(options, inputs)


def _small_batch(options: TrainOptions, inputs: Inputs) -> TrainOptions:
    """With a smaller batch, if the training images do not fill the recipe's."""
    try:
        each = len(inputs.splits(options)[0]) // int(os.environ.get("WORLD_SIZE", "1"))
    except EverytokenError:  # told when the images are opened, after the options have been checked
        each = 0
    if 0 < each < options.dataset.batch_size:
        logger.info(f"Batch size {each} instead of {options.dataset.batch_size}: there are no more training images.")
        options = apply(options, {"batch_size": each}, "batch_size")
    return options


def _fine_tuning(options: TrainOptions, weights: Weights, source: str, inputs: Inputs) -> dict[str, Any]:
    """A recipe for the weights, with what the run that they come from had."""
    names = inputs.splits(options)[0].class_names if options.data else []
    recipe = FINETUNE[not names or weights.matches(names)]
    run = read_run(Path(source)).config if Path(source).is_dir() else {}
    return {"recipe": recipe, **read_recipe(recipe), **{name: run[name] for name in _INHERITED if name in run}}


def default_output(options: TrainOptions) -> str:
    """runs/<recipe>-<model>-<data>-seed<seed>, and the size of the images for one that starts from weights."""
    start = options.model.weights
    recipe = Path(options.recipe).stem if options.recipe not in ("", *FINETUNE) else "finetune" if start else "train"
    size = f"-{options.model.img_size}px" if start else ""
    data = dataset_title(options.data) or "data"
    return str(Path("runs") / f"{recipe}-{options.model.model}{size}-{data}-seed{options.run.seed}")
