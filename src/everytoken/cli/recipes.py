"""`everytoken recipes`: what is shipped, and one recipe in full."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse


@dataclass(frozen=True)
class Recipes:
    """List the shipped recipes, or print one.

    Examples:
        everytoken recipes
        everytoken recipes lvvit_s_token > mine.yaml
    """

    name: tyro.conf.Positional[str] = ""
    """Print this recipe."""


def main(argv: list[str], prog: str) -> None:
    """Parse, print."""
    options = parse(Recipes, prog, argv)
    from everytoken.train.recipe import header, read_recipe, recipe_names

    if options.name:
        read_recipe(options.name)
        print((resources.files("everytoken.recipes") / f"{options.name}.yaml").read_text(), end="")
        return
    table = Table(title="Recipes", caption="`everytoken recipes NAME` prints one; copy it to make your own")
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    table.add_column("run by us")
    for name in recipe_names():
        lines = header(name).splitlines()
        run = next((line.rsplit("Run by us:", 1)[1].strip(" .") for line in lines if "Run by us:" in line), "")
        table.add_row(name, lines[0], run)
    Console().print(table)
