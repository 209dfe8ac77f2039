"""`everytoken report`: a page about one or several runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError


@dataclass(frozen=True)
class Report:
    """Write one page about runs: result with its interval over seeds, comparison, curves, classes, sample predictions.

    Runs that differ in the seed only are one group. The group of the first run is the baseline (in a folder of runs,
    one that learns plain labels); the others are compared with it seed by seed. The page holds everything it
    shows and needs no network.

    Examples:
        everytoken report runs/plain-seed1 runs/plain-seed2 runs/token-seed1 runs/token-seed2 --out report.html
        everytoken report runs --out report.html
        everytoken report runs/mine --format md --no-predictions
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folders, or folders of run folders."""
    out: Path | None = None
    """The file to write. Default: report.html, or report.md with --format md. `-`: print it."""
    format: Literal["html", "md"] = "html"
    """html: a page with charts and pictures. md: words and tables."""
    title: str = ""
    """Title of the page."""
    predictions: bool = True
    """Evaluate the best weights on the validation images, for class tables and sample predictions (kept in the run)."""
    samples: int = 12
    """Validation images to show."""
    data: str = ""
    """Where the images are now, if not where they were in training."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = 0
    """Loader processes."""


def main(argv: list[str], prog: str) -> int:
    """Parse, collect, write."""
    options = parse(Report, prog, argv)
    if not options.runs:
        raise EverytokenError("name at least one run folder: everytoken report runs/mine --out report.html")
    from everytoken.reports.build import collect

    out = options.out or Path(f"report.{options.format}")
    if str(out) != "-" and not out.parent.is_dir():
        raise EverytokenError(f"there is no folder {out.parent} to write {out.name} to")
    if out.is_dir():
        raise EverytokenError(f"--out {out} is a folder; name a file, such as {out / ('report.' + options.format)}")
    report = collect(
        options.runs, data=options.data, predictions=options.predictions, count=options.samples,
        device=options.device, workers=options.workers, meter=_meter,
    )  # fmt: skip
    if options.format == "md":
        from everytoken.reports.markdown import render
    else:
        from everytoken.reports.page import render
    text = render(report, options.title)
    if str(out) == "-":
        print(text)
        return 0
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EverytokenError(f"the report could not be written to {out}: {error}") from error
    from everytoken.reports.words import headline

    print(headline(report))
    for note in report.notes:
        print(f"note: {note}")
    print(f"report: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


@contextmanager
def _meter(title: str) -> Iterator[Callable[[int, int], None]]:
    from everytoken._meter import Meter

    sys.stdout.flush()
    with Meter(title, "images") as meter:
        yield meter
