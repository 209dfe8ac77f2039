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
class Models:
    """List the backbones that have a token view, which all objectives but alignment and transmix work on.

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
    """Parse, collect, print."""
    options = parse(Models, prog, argv)
    import timm

    from everytoken.models import FAMILIES, family_of_name

    titles = {family.title: family for family in FAMILIES.values()}
    names: dict[str, list[str]] = defaultdict(list)
    pattern = options.pattern
    if pattern and not set("*?[") & set(pattern):
        pattern = f"*{pattern}*"
    for name in timm.list_models(pattern):
        family = family_of_name(name)
        if family is not None:
            names[family.title].append(name)
    if not names:
        beginnings = {name.split("_")[0] for name in timm.list_models() if family_of_name(name) is not None}
        raise EverytokenError(
            f"no supported model matches {options.pattern!r}.{did_you_mean(options.pattern, beginnings)} `everytoken "
            "models` lists the families; other timm models have no token view yet."
        )
    if options.json:
        print(json.dumps(names, indent=1))
        return
    if pattern:
        print("\n".join(name for group in names.values() for name in group))
        return
    table = Table(title="Backbones with a token view", caption="`everytoken models PATTERN` lists the names")
    for column in ("family", "models", "MixToken", "for example"):
        table.add_column(column, justify="right" if column == "models" else "left")
    for title, known in titles.items():
        group = names[title]
        example = min(group, key=lambda name: (len(name), name))
        table.add_row(title, str(len(group)), "yes" if known.embed else "use CutMix", example)
    Console().print(table)
