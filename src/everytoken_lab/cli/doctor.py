"""`everytoken doctor`: find trouble before training does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from everytoken_lab.machine import Workers, default_workers
from everytoken_lab.schema import counted

if TYPE_CHECKING:
    from everytoken_lab.doctor.findings import Finding


@dataclass(frozen=True)
class Doctor:
    """Examine images, score maps, runs and this machine, and suggest fixes for problems.

    Images and maps that are named together are compared with each other. The exit code is 1 when there are errors,
    and 0 otherwise; warnings and notes do not count.

    Examples:
        everytoken doctor
        everytoken doctor photos
        everytoken doctor photos maps
        everytoken doctor runs/mine --json
    """

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DATA|MAPS|RUN ...]")] = ()
    """Folders of images, stores of score maps, run folders; none: the machine only."""
    sample: int = 0
    """Look at this many images of each split only, spread evenly; 0: all."""
    workers: Workers = field(default_factory=default_workers)
    """Threads that decode images."""
    labels: bool = True
    """Look for doubtful labels, by a classifier on frozen features that has not seen the image (from 100 images on)."""
    out: str = ""
    """Folder for the page and the table of doubtful labels. Default: doctor/NAME of the data."""
    json: bool = False
    """Print JSON instead of text."""


def main(options: Doctor) -> int:
    from everytoken_lab.doctor import diagnose
    from everytoken_lab.progress import Progress

    findings = diagnose(options.paths, Progress, options.sample, options.workers, options.labels, options.out)
    errors = sum(finding.level == "error" for finding in findings)
    if options.json:
        print(json.dumps({"errors": errors, "findings": [finding.to_json() for finding in findings]}, indent=1))
    else:
        _print(findings)
    return 1 if errors else 0


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from everytoken_lab.doctor.findings import SHOWN

    console = Console(highlight=False)
    colours = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in findings:
        head = Text(f"{finding.level:<8}", style=colours[finding.level])
        console.print(head.append(finding.what, style="default").append(f"  [{finding.where}]", style="dim"))
        more = len(finding.examples) - SHOWN
        for line in [*finding.examples[:SHOWN], *([f"and {more} more"] if more > 0 else [])]:
            console.print(Padding(Text(line, style="dim", overflow="fold"), (0, 0, 0, 11), expand=False))
        if finding.todo:
            console.print(Padding(Text(f"-> {finding.todo}"), (0, 0, 0, 8), expand=False))
    counts = {level: sum(f.level == level for f in findings) for level in colours}
    console.print("\n" + ", ".join(counted(n, level) for level, n in counts.items()))
