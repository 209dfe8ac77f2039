"""`everytoken train`: train a classifier on every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.cli._parse import given_options, parse, values_of
from everytoken_lab.engine.options import AutoOptions, TrainOptions
from everytoken_lab.engine.recipe import apply, flat, overrides, read_recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Train(TrainOptions):
    """Train a model. Run the same command again to resume an interrupted run.

    Without recipe, model and weights, everything is decided by looking at the photos and at the machine: a linear
    classifier on pretrained features first, then fine-tuning, which has to beat it. The decisions are written as a
    recipe. --weights with --minutes does the same with that network; --weights alone takes the recipe `finetune`.

    Examples:
        everytoken train photos --minutes 10
        everytoken train photos --weights registry:efficientnet_lite2 --minutes 20
        everytoken train photos --recipe small_96
        everytoken train photos --recipe small_96_token --maps maps --set objectives.token_labeling.beta=0.5
        everytoken train imagenet --recipe lvvit_s_token --maps maps --dry-run
        torchrun --nproc-per-node 8 -m everytoken_lab train imagenet --recipe lvvit_s_token --maps maps

    Objectives and mixing come from the recipe; --set changes them, and a value of null removes one.
    """

    auto: tyro.conf.OmitArgPrefixes[AutoOptions] = field(default_factory=AutoOptions)
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = field(
        default_factory=tuple
    )
    """NAME=VALUE for inner settings, such as objectives.drloc.weight=0.1. May be repeated."""
    trust_code: bool = False
    """Import and run objectives that a recipe file or the run of --weights names by import paths."""
    dry_run: bool = False
    """Print the plan (model, batches, schedule, memory, time from a few timed steps) and stop."""


OPTIONS = Train


def main(argv: list[str], prog: str) -> int:
    """Parse, then train or print the plan."""
    options = resolve(Train, argv, prog)
    _check_path(options.data)
    from everytoken_lab.training import classify

    plain, asked = TrainOptions(**values_of(options, TrainOptions)), given_options(argv)
    if options.dry_run and classify.decides_itself(plain, options.auto) and not options.set:
        raise EverytokenError(
            "--dry-run shows the plan of a recipe, a model or weights; without these, the plan is made by looking at "
            "the photos: leave --dry-run out, the decisions come first and are written to recipe.yaml"
        )
    if options.dry_run:
        print_plan(classify.dry_run(plain, asked, options.set, trusts_code(argv)))
    else:
        classify.start(plain, asked, options.auto, options.set, trusts_code(argv))
    return 0


def _check_path(data: str) -> None:
    """Say that a path does not exist before torch and timm are imported; patterns and names are looked up later."""
    if not data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    path = Path(data).expanduser()
    if not any(sign in data for sign in ":*?[{") and not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise EverytokenError(f"There is no file or folder {path}.{did_you_mean(path.name, near)}")


def print_plan(facts: Mapping[str, Any]) -> None:
    """The table of --dry-run; nothing on all processes but the first."""
    from rich.console import Console
    from rich.table import Table

    if facts:
        table = Table(title="The plan (nothing was written)", show_header=False)
        for name, value in facts.items():
            table.add_row(name, str(value))
        Console().print(table)


def resolve(config: type[T], argv: list[str], prog: str) -> T:
    """Recipe, then flags, then --set."""
    base: Any = config()
    if recipe := _recipe_of(argv):
        base = dataclasses.replace(apply(base, read_recipe(recipe, trusts_code(argv)), recipe), recipe=recipe)
    options: Any = parse(config, prog, argv, default=base)
    return apply(options, overrides(options.set, flat(options)), "options")


def trusts_code(argv: list[str]) -> bool:
    """Whether --trust-code was typed; a recipe cannot say so."""
    return "--trust-code" in argv


def _recipe_of(argv: list[str]) -> str:
    """The value of --recipe, needed before the other flags are read."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--recipe":
            return value or following
    return ""
