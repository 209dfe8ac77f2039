"""`everytoken recipes`: what is shipped, and one recipe in full."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from everytoken_lab.cli._parse import parse


@dataclass(frozen=True)
class Recipes:
    """List the shipped recipes, or print one.

    Examples:
        everytoken recipes
        everytoken recipes 'small*'
        everytoken recipes lvvit_s_token > mine.yaml
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = ""
    """Print this recipe (or a file of your own), or list those whose names match: part of a name, or with * and ?."""


OPTIONS = Recipes


def main(argv: list[str], prog: str) -> None:
    """Parse, print."""
    options = parse(Recipes, prog, argv)
    from everytoken_lab.engine.recipe import recipe_names, recipe_text

    name, names = options.name, recipe_names()
    pattern = name if set("*?[") & set(name) else f"*{name}*"
    matching = [recipe for recipe in names if fnmatch(recipe, pattern)]
    if name not in names and matching:
        _list(matching)
    else:
        print(recipe_text(name), end="")


def _list(names: Sequence[str]) -> None:
    from everytoken_lab.engine.recipe import header

    table = Table(title="Recipes", caption="`everytoken recipes NAME` prints one; copy it to make your own")
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    table.add_column("run by us")
    for name in names:
        text = " ".join(header(name).split())
        _, _, run = text.partition("Run by us:")
        table.add_row(name, _sentence(text), _sentence(run).partition(";")[0])
    Console().print(table)


def _sentence(text: str) -> str:
    """The first sentence, without its full stop."""
    return re.split(r"\.(?:\s|$)", text.strip(), maxsplit=1)[0]
