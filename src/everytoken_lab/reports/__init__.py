"""The page of one or several runs: groups of seeds, intervals, mistakes, doubtful labels, classes, curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows."""

    title: str = ""
    """Title of the page."""
    predictions: bool = True
    """Evaluate the best weights on the validation images, for mistakes and classes (kept in the run)."""
    samples: int = 60
    """Photos that are shown large, with tokens and a mask. All mistakes (up to 2,000) are shown as thumbnails."""
    data: str = ""
    """Where the images are now, if not where they were in training; also needed if they are at an address."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = 0
    """Loader processes."""
