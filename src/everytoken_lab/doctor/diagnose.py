"""Examine everything that was named, and the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

from everytoken_lab.data.tree import dataset_title
from everytoken_lab.doctor import Finding, Level
from everytoken_lab.doctor.images import examine_images, open_splits
from everytoken_lab.doctor.labels import examine_labels
from everytoken_lab.doctor.machine import examine_machine

Meter = Callable[[str, str], AbstractContextManager[Callable[[int, int], None]]]


def diagnose(
    datasets: Sequence[str], meter: Meter, sample: int = 0, workers: int = 4, labels: bool = True, out: str = ""
) -> list[Finding]:
    """All findings, worst first.

    Args:
        meter: shows progress: meter(title, unit) is a context manager that gives tell(done, total).
        sample: look at this many images of each split only; 0: all.
        labels: also look for doubtful labels, in all images (not with `sample`).
        out: folder for the page and the table of doubtful labels; default: doctor/NAME of the data.
    """
    findings: list[Finding] = []
    for name in datasets:
        splits, found = open_splits(name)
        findings += found
        if not splits:
            continue
        with meter(f"images of {name}", "images") as tell:
            findings += examine_images(name, splits, sample, workers, tell)
        if labels and not sample:
            with meter(f"labels of {name}", "images") as tell:
                page = Path(out or Path("doctor") / dataset_title(name))
                findings += examine_labels(name, splits, page, workers, tell)
    findings += examine_machine([Path(name) for name in datasets if ":" not in name])
    return sorted(findings, key=lambda finding: get_args(Level).index(finding.level))
