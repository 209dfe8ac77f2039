"""`everytoken train`: train a classifier on every token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.cli._parse import given_options, parse, values_of
from everytoken_lab.cli._tables import print_facts
from everytoken_lab.engine.options import AutoOptions, TrainOptions
from everytoken_lab.engine.recipe import apply, flat, overrides, read_recipe


@dataclass(frozen=True)
class TrainFlags:
    """Flags of training that are not part of a run's options."""

    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """NAME=VALUE for inner settings, such as objectives.drloc.weight=0.1 or model_kwargs.depth=4. May be repeated."""
    dry_run: bool = False
    """Print the plan (data, model, schedule, memory, time from a few timed steps) and stop."""
    given: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """Names of the options that were typed."""

    @classmethod
    def read(cls, argv: list[str], prog: str) -> Self:
        """Recipe, then flags, then --set."""
        base: Any = cls()
        if recipe := _recipe_of(argv):
            values = read_recipe(recipe, "--trust-code" in argv)
            base = dataclasses.replace(apply(base, values, recipe), recipe=recipe)
        options = parse(cls, prog, argv, default=base)
        options = apply(options, overrides(options.set, flat(options)), "options")
        return dataclasses.replace(options, given=tuple(given_options(argv)))


@dataclass(frozen=True)
class Train(TrainFlags, TrainOptions):
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
    trust_code: bool = False
    """Import and run objectives that a recipe file or the run of --weights names by import paths."""


def main(options: Train) -> None:
    _check_path(options.data)
    from everytoken_lab.training import classify

    plain, asked = TrainOptions(**values_of(options, TrainOptions)), {*options.given}
    trust_code = options.trust_code and "trust_code" in asked  # a recipe cannot say so
    if not options.dry_run:
        classify.start(plain, asked, options.auto, options.set, trust_code)
        return
    if classify.decides_itself(plain, options.auto) and not options.set:
        raise EverytokenError(
            "--dry-run shows the plan of a recipe, a model or weights; without these, the plan is made by looking at "
            "the photos: leave --dry-run out, the decisions come first and are written to recipe.yaml"
        )
    if plan := classify.dry_run(plain, asked, options.set, trust_code):  # the first process alone makes one
        print_facts(plan, "The plan (nothing was written)")


def _check_path(data: str) -> None:
    """Say that a path does not exist before torch and timm are imported; patterns and names are looked up later."""
    if not data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    path = Path(data).expanduser()
    if not any(sign in data for sign in ":*?[{") and not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise EverytokenError(f"There is no file or folder {path}.{did_you_mean(path.name, near)}")


def _recipe_of(argv: list[str]) -> str:
    """The value of --recipe, needed before the other flags are read."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--recipe":
            return value or following
    return ""
