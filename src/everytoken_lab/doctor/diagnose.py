"""Sort out what was named (images, maps or a run), and examine it. Each finding says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from everytoken.maps import Maps
from everytoken_lab.data.datasets import dataset_title
from everytoken_lab.doctor.findings import Finding, worst_first
from everytoken_lab.doctor.images import Images, examine, open_images, total_images
from everytoken_lab.doctor.labels import examine_labels
from everytoken_lab.doctor.machine import examine_machine
from everytoken_lab.doctor.maps import compare, examine_maps
from everytoken_lab.doctor.runs import examine_run

Kind = Literal["images", "maps", "run"]
Meter = Callable[[str, str], AbstractContextManager[Callable[[int, int], None]]]


def kind_of(path: str) -> Kind:
    """What a path holds."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        return "run"
    if (folder / "checkpoints").is_dir() or (folder / "best.safetensors").is_file():
        return "run"
    manifest = folder / "manifest.json"
    if manifest.is_file():
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return "maps"  # damaged, and will be reported so
        if not isinstance(content, dict) or "format" in content:
            return "maps"
    return "images"


def diagnose(
    paths: Sequence[str], meter: Meter, sample: int = 0, workers: int = 4, labels: bool = False, out: str = ""
) -> list[Finding]:
    """All findings, worst first; with images and maps named together, they are compared.

    Args:
        meter: shows progress: meter(title, unit) is a context manager that gives tell(done, total).
        sample: look at this many images of each part only; 0: all.
        labels: also look for doubtful labels, in all images (not with `sample`).
        out: folder for the page and the table of doubtful labels; default: doctor/NAME of the data.
    """
    findings: list[Finding] = []
    sets: list[Images] = []
    stores: list[Maps] = []
    for path in paths:
        kind = kind_of(path)
        if kind == "run":
            with meter(f"checkpoints of {path}", "checkpoints") as tell:
                findings += examine_run(Path(path).expanduser(), tell)
        elif kind == "maps":
            with meter(f"score maps {path}", "B") as tell:
                store, found = examine_maps(Path(path).expanduser(), tell)
            findings += found
            stores += [store] if store is not None else []
        else:
            images, found = open_images(path)
            findings += found
            sets.append(images)
            findings += _look(images, meter, sample, workers)
            if labels and not sample and "train" in images.parts:
                folder = Path(out or Path("doctor") / dataset_title(path))
                with meter(f"labels of {path}", "images") as tell:
                    findings += examine_labels(images, folder, workers, tell)
    for store in stores:
        for images in sets:
            findings += compare(store, images)
    return worst_first([*findings, *examine_machine([Path(p) for p in paths if ":" not in p])])


def _look(images: Images, meter: Meter, sample: int, workers: int) -> list[Finding]:
    total, done = total_images(images, sample), 0
    with meter(f"images of {images.spec}", "images") as tell:

        def one() -> None:
            nonlocal done
            done += 1
            tell(done, total)

        return examine(images, sample, workers, one)
