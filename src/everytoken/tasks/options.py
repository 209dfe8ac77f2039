"""Options that dense tasks share. Names are those of `everytoken train`, which are timm's where timm has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tyro

from everytoken.engine.options import OptimOptions, RunOptions


@dataclass(frozen=True)
class BackboneOptions:
    """The backbone."""

    model: str = ""
    """timm model name; empty: the one that --initial-checkpoint was trained as."""
    pretrained: bool = False
    """Start from timm's pretrained weights (needs the network)."""
    initial_checkpoint: str = ""
    """Start from the weights in this file or run folder."""
    drop_path: float = 0.1
    """Stochastic depth, rising linearly to this rate in the last block."""
    taps: tuple[int, ...] = ()
    """Blocks of a plain transformer to take features from, from 0; default: four, the last and every third before.
    Detection uses the last of them only."""
    grad_checkpointing: bool = False
    """Trade time for memory: recompute activations in the backward pass."""
    model_kwargs: tyro.conf.Suppress[dict[str, Any]] = field(default_factory=dict)
    """Further arguments of the model's constructor (recipes and --set only)."""


@dataclass(frozen=True)
class IterOptim(OptimOptions):
    """Optimizer and schedule, counted in updates."""

    iters: int = 160_000
    """Updates of the weights, warm-up included, through as many passes over the data as it takes; 0: count epochs."""
    warmup_iters: int = 1500
    """Updates of linear warm-up."""


@dataclass(frozen=True)
class IterRun(RunOptions):
    """The run."""

    val_iters: int = 8000
    """Updates between validations; each also writes a checkpoint."""


class _Named(Protocol):
    """What the name of a run folder is made of."""

    @property
    def data(self) -> str: ...
    @property
    def recipe(self) -> str: ...
    @property
    def model(self) -> BackboneOptions: ...
    @property
    def run(self) -> RunOptions: ...


def default_output(options: _Named, task: str) -> str:
    """runs/<recipe or task>-<model>-<data>-seed<seed>."""
    recipe = Path(options.recipe).stem if options.recipe else task
    model = options.model.model or Path(options.model.initial_checkpoint).name
    data = Path(options.data).name.removesuffix(".json")
    return str(Path("runs") / f"{recipe}-{model}-{data}-seed{options.run.seed}")
