"""`everytoken doctor`: find trouble before training does."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from everytoken_lab.machine import Workers, default_workers
from everytoken_lab.schema import counted, say
from everytoken_lab.terminal import Progress, print_some


@dataclass(frozen=True)
class Doctor:
    """Examine images and this machine, and suggest fixes for problems.

    The exit code is 1 when there are errors, and 0 otherwise; warnings and notes do not count.

    Examples:
        everytoken doctor
        everytoken doctor photos
        everytoken doctor photos --json
    """

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DATA ...]")] = ()
    """Folders of images, archives, torchvision:NAME; none: the machine only."""
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
    from everytoken_lab.doctor.images import SHOWN

    findings = diagnose(options.paths, Progress, options.sample, options.workers, options.labels, options.out)
    levels = Counter(finding.level for finding in findings)
    if options.json:
        say(json.dumps({"errors": levels["error"], "findings": [f.to_json() for f in findings]}, indent=1))
        return 1 if levels["error"] else 0
    for finding in findings:
        say(f"{finding.level:<8}{finding.what}  [{finding.where}]")
        print_some(finding.examples, SHOWN)
        if finding.todo:
            say(f"  -> {finding.todo}")
    say("\n" + ", ".join(counted(levels[level], level) for level in ("error", "warning", "note")))
    return 1 if levels["error"] else 0
