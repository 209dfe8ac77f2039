"""Options that segmentation and detection share. Names are those of `everytoken train`.

Nothing here imports torch, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from annotated_types import Interval

from everytoken.errors import EverytokenError
from everytoken_lab.engine.options import BatchOptions, Fraction, OptimOptions, RunOptions
from everytoken_lab.machine import Workers, default_workers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Chance = Annotated[float, Interval(ge=0, le=1)]
Scale = Annotated[float, Interval(gt=0, lt=100)]


@dataclass(frozen=True)
class BackboneOptions:
    """The backbone."""

    model: str = ""
    """timm model name; empty: that of the weights."""
    weights: str = ""
    """Start from trained weights: a run folder, a file, timm:NAME, timm (of the model), registry:efficientnet_lite0|1|2
    or hf-hub:USER/NAME. Empty: from scratch."""
    drop_path: Fraction = 0.1
    """Stochastic depth, rising linearly to this rate in the last block."""
    grad_checkpointing: bool = False
    """Trade time for memory: recompute activations in the backward pass."""
    model_kwargs: tyro.conf.Suppress[dict[str, Any]] = field(default_factory=dict)
    """Further arguments of the model's constructor (recipes and --set only)."""


@dataclass(frozen=True)
class DenseOptions:
    """Everything that determines a run; `config.yaml` of a run folder is this, resolved. Tasks add their groups."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ""
    """The dataset; the page of the task says how it is laid out."""
    recipe: str = ""
    """Shipped recipe, or a YAML file of your own; flags override it. `everytoken recipes` lists them."""
    model: tyro.conf.OmitArgPrefixes[BackboneOptions] = field(default_factory=BackboneOptions)
    dataset: tyro.conf.OmitArgPrefixes[BatchOptions] = field(default_factory=BatchOptions)
    optim: tyro.conf.OmitArgPrefixes[OptimOptions] = field(default_factory=OptimOptions)
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)


def check_rate(optim: OptimOptions) -> None:
    """Raise if `lr_base` was set and would do nothing: dense tasks have an absolute `lr`, as the papers do."""
    if optim.lr and optim.lr_base != OptimOptions().lr_base:
        raise EverytokenError(f"lr_base is {optim.lr_base:g}, but lr is {optim.lr:g} and used instead; set lr to 0")


@dataclass(frozen=True)
class SourceOptions:
    """A trained model and where it runs."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder or a weights file."""
    device: str = field(default="", kw_only=True)
    """cpu, cuda, mps; default: the best available."""
    amp: bool | None = field(default=None, kw_only=True)
    """Mixed precision. Default: as the run was validated."""


@dataclass(frozen=True)
class EvaluateOptions(SourceOptions):
    """Options of every evaluation of a dense task."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """The dataset, laid out as for training."""
    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data. If the data has no validation part, val means the images that the run held out, or all
    images if the run was trained on other data."""
    workers: Workers = field(default_factory=default_workers)
    """Loader processes."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image or mask that cannot be read."""


@dataclass(frozen=True)
class PredictOptions(SourceOptions):
    """Options of every prediction of a dense task."""

    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders."""
    out: str
    """Folder for the results."""
    workers: Workers = 0
    """Loader processes."""


def fill(options: T, defaults: Mapping[str, Any]) -> T:
    """Fields that were left open (None or an empty tuple) take their value from `defaults`."""
    open_fields = {name: value for name, value in defaults.items() if getattr(options, name) in (None, ())}
    return replace(options, **open_fields)


def default_output(options: DenseOptions, task: str) -> str:
    """runs/<recipe or task>-<model, or the run it starts from>-<data>-seed<seed>."""
    recipe, start = Path(options.recipe).stem if options.recipe else task, Path(options.model.weights)
    model = start.name if options.model.weights and start.is_dir() else options.model.model.partition(".")[0]
    data = Path(options.data).name.removesuffix(".json")
    return str(Path("runs") / f"{recipe}-{model}-{data}-seed{options.run.seed}")
