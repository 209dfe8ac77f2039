"""`everytoken recipes`: what is shipped, and one recipe in full."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse


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


def main(argv: list[str], prog: str) -> None:
    """Parse, print."""
    options = parse(Recipes, prog, argv)
    from everytoken.engine.recipe import read_recipe, recipe_names

    name, names = options.name, recipe_names()
    pattern = name if set("*?[") & set(name) else f"*{name}*"
    matching = [one for one in names if fnmatch(one, pattern)]
    if name not in names and matching:
        _list(matching)
        return
    read_recipe(name)  # raises, in words, for what is no recipe
    own = name.endswith((".yaml", ".yml"))
    file = Path(name) if own else resources.files("everytoken.recipes") / f"{name}.yaml"
    print(file.read_text(encoding="utf-8"), end="")


def _list(names: Sequence[str]) -> None:
    from everytoken.engine.recipe import header

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
