"""Find trouble before training does: in images, labels and the machine (versions, GPU, memory for workers, disk)."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import get_args

from everytoken_lab.data.tree import dataset_title
from everytoken_lab.doctor.images import Finding, Level, examine_images, open_splits
from everytoken_lab.doctor.labels import examine_labels
from everytoken_lab.machine import cores, existing_folder, free_disk

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "safetensors")
LITTLE_DISK = 5e9
SHARED_MEMORY = Path("/dev/shm")  # through which processes share tensors
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


def examine_machine(places: Sequence[Path]) -> Iterator[Finding]:
    """What training here would meet; `places` are folders that will be written to."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    system = "" if platform.system() == "Linux" else f"; {platform.system()}, where nothing has been tested"
    yield Finding("note", "versions", f"Python {platform.python_version()}, {versions}{system}", "software")
    yield _device()
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < 256e6:
        what = f"shared memory has {free / 1e6:.0f} MB free, which loader workers may exceed"
        todo = "In a container: --shm-size 2g or --ipc host; or train with --workers 0."
        yield Finding("warning", "shared-memory", what, str(SHARED_MEMORY), todo)
    folders = [existing_folder(place.absolute()) for place in (Path.cwd(), *places)]
    for folder in {folder.stat().st_dev: folder for folder in reversed(folders)}.values():
        free = free_disk(folder)
        level: Level = "note" if free >= LITTLE_DISK else "warning" if free >= LITTLE_DISK / 25 else "error"
        todo = "Free some: a run keeps two checkpoints of 16 bytes per parameter; maps take 1 to 7 KB per image."
        yield Finding(level, "disk", f"{free / 1e9:.1f} GB are free", str(folder), "" if level == "note" else todo)


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        free = (torch.cuda.mem_get_info(i)[0] / 1e9 for i in devices)
        what = "; ".join(f"{torch.cuda.get_device_name(i)}, {gb:.1f} GB free" for i, gb in enumerate(free))
        todo = "Use --amp." + (" torchrun uses all GPUs." if len(devices) > 1 else "")
        return Finding("note", "gpu", what, "GPU", todo)
    if torch.backends.mps.is_available():
        todo = "It is used by default, but nobody has tested it: compare with --device cpu before you rely on it."
        return Finding("note", "gpu", "an Apple GPU (--device mps)", "GPU", todo)
    if shutil.which("nvidia-smi"):
        todo = "Install the torch build that fits your driver (pytorch.org)."
        return Finding("warning", "gpu-unused", "there is an NVIDIA driver, but torch sees no GPU", "GPU", todo)
    todo = "Small models and images are fine (`everytoken recipes`: small_32, small_64, small_96); leave --amp off."
    return Finding("note", "no-gpu", f"no GPU; training runs on {cores()} CPU cores", "GPU", todo)
