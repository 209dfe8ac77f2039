"""`everytoken recipes`: what is shipped, and one recipe in full."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated

import tyro

from everytoken_lab.schema import say
from everytoken_lab.terminal import print_table


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


def main(options: Recipes) -> None:
    from everytoken_lab.engine.options import header, recipe_names, recipe_text

    name, names = options.name, recipe_names()
    pattern = name if set("*?[") & set(name) else f"*{name}*"
    matching = [recipe for recipe in names if fnmatch(recipe, pattern)]
    if name in names or not matching:
        say(recipe_text(name).rstrip("\n"))
        return
    rows = []
    for recipe in matching:
        text = " ".join(header(recipe).split())
        run = _sentence(text.partition("Run by us:")[2]).partition(";")[0]
        rows.append({"name": recipe, "what": _sentence(text), "run by us": run})
    print_table(rows, "Recipes", "`everytoken recipes NAME` prints one; copy it to make your own")


def _sentence(text: str) -> str:
    """The first sentence, without its full stop."""
    return re.split(r"\.(?:\s|$)", text.strip(), maxsplit=1)[0]
