"""Sort out what was named (images, maps or a run), and examine it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

from everytoken.maps.format import list_shards
from everytoken_lab.data.tree import dataset_title
from everytoken_lab.doctor import Finding, Level
from everytoken_lab.doctor.images import Images, examine_images
from everytoken_lab.doctor.labels import examine_labels
from everytoken_lab.doctor.machine import examine_machine
from everytoken_lab.doctor.maps import compare, examine_maps
from everytoken_lab.doctor.runs import examine_run
from everytoken_lab.engine.run_folder import is_run

Meter = Callable[[str, str], AbstractContextManager[Callable[[int, int], None]]]


def diagnose(
    paths: Sequence[str], meter: Meter, sample: int = 0, workers: int = 4, labels: bool = False, out: str = ""
) -> list[Finding]:
    """All findings, worst first; images and maps that are named together are compared.

    Args:
        meter: shows progress: meter(title, unit) is a context manager that gives tell(done, total).
        sample: look at this many images of each split only; 0: all.
        labels: also look for doubtful labels, in all images (not with `sample`).
        out: folder for the page and the table of doubtful labels; default: doctor/NAME of the data.
    """
    findings: list[Finding] = []
    sets: list[Images] = []
    stores: list[Path] = []
    for path in paths:
        folder = Path(path).expanduser()
        if is_run(folder) or (folder / "checkpoints").is_dir():
            with meter(f"checkpoints of {path}", "checkpoints") as tell:
                findings += examine_run(folder, tell)
        elif list_shards(folder):
            stores.append(folder)
            with meter(f"score maps {path}", "B") as tell:
                findings += examine_maps(folder, tell)
        else:
            sets.append(images := Images(path))
            with meter(f"images of {path}", "images") as tell:
                findings += examine_images(images, sample, workers, tell)
            if labels and not sample and "train" in images.splits:
                with meter(f"labels of {path}", "images") as tell:
                    page = Path(out or Path("doctor") / dataset_title(path))
                    findings += examine_labels(images, page, workers, tell)
    findings += [finding for store in stores for images in sets for finding in compare(store, images)]
    findings += examine_machine([Path(path) for path in paths if ":" not in path])
    return sorted(findings, key=lambda finding: get_args(Level).index(finding.level))
