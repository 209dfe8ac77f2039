"""`everytoken report`: a page about one or several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from everytoken_lab.cli._parse import values_of
from everytoken_lab.reports import ReportOptions
from everytoken_lab.schema import say


@dataclass(frozen=True, kw_only=True)
class ReportCommand(ReportOptions):
    """Write one page about runs: result with its interval over seeds, comparison, curves, classes, sample predictions.

    Runs that differ in the seed only are one group. The group of the first run is the baseline (in a folder of runs,
    one that learns plain labels); the others are compared with it seed by seed. The page holds everything it
    shows and needs no network.

    Examples:
        everytoken report runs/plain-seed1 runs/plain-seed2 runs/token-seed1 runs/token-seed2 --out report.html
        everytoken report runs --out report.html
        everytoken report runs/mine --no-predictions
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folders, or folders of run folders."""
    out: Path = Path("report.html")
    """The file to write."""


def main(options: ReportCommand) -> None:
    from everytoken_lab.reports.collect import report
    from everytoken_lab.terminal import Progress, print_notes

    settings = values_of(options, ReportOptions)
    result = report(options.runs, options.out, progress=lambda title: Progress(title, "images"), **settings)
    say(result.headline)
    print_notes(result.notes, aside=False)
    say(f"report: {options.out} ({options.out.stat().st_size / 1e6:.1f} MB)")
