"""`everytoken train`: train a classifier on every token."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import plain_json
from everytoken_lab.cli._parse import given_options, parse, values_of
from everytoken_lab.engine.options import AutoOptions, TrainOptions, apply, flat, overrides, read_recipe
from everytoken_lab.schema import say


@dataclass(frozen=True)
class TrainFlags:
    """Flags of training that are not part of a run's options."""

    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """NAME=VALUE for inner settings, such as objectives.drloc.weight=0.1 or model_kwargs.depth=4. May be repeated."""
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
class AutoFlags:
    """The flags of the first example, which the help shows first."""

    auto: tyro.conf.OmitArgPrefixes[AutoOptions] = field(default_factory=AutoOptions)


@dataclass(frozen=True)
class Train(TrainFlags, TrainOptions, AutoFlags):
    """Train a classifier. The same command resumes an interrupted run.

    Without --recipe, --model and --weights, the command chooses the settings itself: a linear classifier on pretrained
    features, then fine-tuning, which is kept only if it is better. --weights with --minutes does this with that
    network; --weights alone takes the recipe `finetune`. Defaults below are those of training with --recipe or --model.

    Examples:
        everytoken train photos --minutes 10
        everytoken train photos --weights registry:efficientnet_lite2 --minutes 20
        everytoken train photos --recipe small_96
        everytoken train photos --recipe small_96_token --maps maps --set objectives.token_labeling.beta=0.5
        everytoken train imagenet --recipe lvvit_s_token --maps maps
        torchrun --nproc-per-node 8 -m everytoken_lab train imagenet --recipe lvvit_s_token --maps maps

    Objectives and mixing come from the recipe; --set changes them (set one to null to remove it).
    """

    json: bool = False
    """Print the result as JSON, and everything else on stderr."""
    trust_code: bool = False
    """Import and run objectives that a recipe file or the run of --weights names by import paths."""


def main(options: Train) -> None:
    _check_path(options.data)
    from everytoken_lab.training import classify

    plain, asked = TrainOptions(**values_of(options, TrainOptions)), {*options.given}
    trust_code = options.trust_code and "trust_code" in asked  # a recipe cannot say so
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        run = classify.start(plain, asked, options.auto, options.set, trust_code)
    if options.json and os.environ.get("RANK", "0") == "0":
        say(plain_json({"run": str(run.path), **run.summary}))


def _check_path(data: str) -> None:
    """Say that a path does not exist before torch and timm are imported; patterns and names are looked up later."""
    path = Path(data).expanduser()
    if data and not any(sign in data for sign in ":*?[{") and not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise EverytokenError(f"There is no file or folder {path}.{did_you_mean(path.name, near)}")


def _recipe_of(argv: list[str]) -> str:
    """The value of --recipe, needed before the other flags are read."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--recipe":
            return value or following
    return ""
