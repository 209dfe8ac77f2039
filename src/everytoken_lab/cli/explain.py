"""`everytoken explain`: pictures of what a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from everytoken_lab.cli._parse import Source, check_source, values_of
from everytoken_lab.explanation import ExplainOptions
from everytoken_lab.schema import say


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(ExplainOptions):
    """Draw what a model sees in images: what its tokens say, and which regions support which class.

    Examples:
        everytoken explain runs/first photos/val/cat/1.jpg photos/val/dog/7.jpg --out pictures
        everytoken explain runs/first cat.jpg --compare runs/plain --class cat --class dog --out pictures
        everytoken explain registry:efficientnet_lite0 cat.jpg --out pictures
        everytoken explain runs/first cat.jpg dog.jpg --mix --out pictures
    """

    source: Source
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")]
    """Image files."""
    out: Path
    """Folder for the pictures and explain.json."""


def main(options: ExplainCommand) -> None:
    check_source(options.source)
    from everytoken_lab.explanation.cards import explain

    result = explain(options.source, options.images, options.out, **values_of(options, ExplainOptions))
    for path in result.files:
        say(path)
