"""`everytoken models`: what is supported, by family, or the names that match a pattern."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError, did_you_mean


@dataclass(frozen=True)
class ModelsOptions:
    """List the backbones that have a token view, which all objectives but tl_align and transmix work on.

    Without a pattern: one line per family. With one: the matching model names.

    Examples:
        everytoken models
        everytoken models 'swin*'
        everytoken models lvvit
    """

    pattern: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PATTERN]")] = ""
    """Part of a name, or a pattern with * and ?."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: list[str], prog: str) -> None:
    """Parse, list, print."""
    options = parse(ModelsOptions, prog, argv)
    names = names_by_family(options.pattern)
    if not names:
        beginnings = {name.split("_")[0] for group in names_by_family("").values() for name in group}
        raise EverytokenError(
            f"no supported model matches {options.pattern!r}.{did_you_mean(options.pattern, beginnings)} `everytoken "
            "models` lists the families; other timm models have no token view yet."
        )
    if options.json:
        print(json.dumps(names, indent=1))
    elif options.pattern:
        print("\n".join(name for group in names.values() for name in group))
    else:
        Console().print(_families(names))


def names_by_family(pattern: str) -> dict[str, list[str]]:
    """Title of a family -> its model names that match; a pattern without * and ? is part of a name."""
    import timm

    from everytoken.models import family_of_name

    if pattern and not set("*?[") & set(pattern):
        pattern = f"*{pattern}*"
    names: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models(pattern):
        family = family_of_name(name)
        if family is not None:
            names[family.title].append(name)
    return dict(names)


def _families(names: dict[str, list[str]]) -> Table:
    from everytoken.models import FAMILIES

    table = Table(title="Backbones with a token view", caption="`everytoken models PATTERN` lists the names")
    for column in ("family", "models", "MixToken", "for example"):
        table.add_column(column, justify="right" if column == "models" else "left")
    for title, family in {family.title: family for family in FAMILIES.values()}.items():
        example = min(names[title], key=lambda name: (len(name), name))
        table.add_row(title, str(len(names[title])), "yes" if family.embed else "use CutMix", example)
    return table
