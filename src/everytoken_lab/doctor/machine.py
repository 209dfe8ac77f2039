"""The machine: versions, GPU, mixed precision, compiling, memory for workers, disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from everytoken_lab.doctor.findings import Finding
from everytoken_lab.machine import SHARED_MEMORY, shared_memory

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "safetensors")
LITTLE_DISK = 5e9


def examine_machine(places: Sequence[Path]) -> list[Finding]:
    """What training here would meet; `places` are folders that will be written to."""
    return [*_versions(), *_system(), *_device(), *_compiling(), *_inference(), *_workers(), *_disk(places)]


def _versions() -> list[Finding]:
    needed = _lower_bounds()
    found, findings = [f"Python {platform.python_version()}"], []
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            todo = f"pip install {name}"
            findings.append(Finding("error", "package-missing", f"{name} is not installed", "Python packages", todo))
            continue
        found.append(f"{name} {version}")
        if name in needed and _numbers(version) < _numbers(needed[name]):
            todo = f"pip install -U '{name}>={needed[name]}'"
            what = f"{name} {version} is older than {needed[name]}, the oldest that is supported"
            findings.append(Finding("error", "package-old", what, "Python packages", todo))
    return [*findings, Finding("note", "versions", ", ".join(found), "Python packages")]


def _system() -> list[Finding]:
    name = platform.system()
    if name == "Linux":
        return []
    what = f"everytoken is tested on Linux only; it is written to run on {name or 'this system'}, too"
    return [Finding("note", "system", what, "system", "Please report what does not work; docs/trust.md says more.")]


def _lower_bounds() -> dict[str, str]:
    """name -> oldest version, from this package's own requirements."""
    try:
        lines = importlib.metadata.requires("everytoken") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [re.match(r"([A-Za-z0-9_-]+)\s*>=\s*([0-9.]+)", line) for line in lines if "extra ==" not in line]
    return {m[1].lower(): m[2] for m in plain if m}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def _device() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        free = [torch.cuda.mem_get_info(i)[0] / 1e9 for i in range(len(names))]
        what = "; ".join(f"{name}, {memory:.1f} GB free" for name, memory in zip(names, free, strict=True))
        kind = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        todo = f"Use --amp --amp-dtype {kind}." + (" torchrun uses all GPUs." if len(names) > 1 else "")
        return [Finding("note", "gpu", what, "GPU", todo)]
    if torch.backends.mps.is_available():
        todo = "It is used by default, but nobody has tested it: compare with --device cpu before you rely on it."
        return [Finding("note", "gpu", "an Apple GPU (--device mps)", "GPU", todo)]
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    nvidia = shutil.which("nvidia-smi") is not None
    cores = os.cpu_count() or 1
    if nvidia:
        what = "there is an NVIDIA driver, but torch sees no GPU" + (
            "" if built else " (this torch is built without CUDA)"
        )
        return [
            Finding(
                "warning", "gpu-unused", what, "GPU", "Install the torch build that fits your driver (pytorch.org)."
            )
        ]
    todo = "Small models and images are fine (`everytoken recipes`: small_32, small_64, small_96); leave --amp off."
    return [Finding("note", "no-gpu", f"no GPU; training runs on {cores} CPU cores", "GPU", todo)]


def _compiling() -> list[Finding]:
    import torch

    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if torch.cuda.is_available():
        try:
            importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            what = "--torchcompile will not work: triton is not installed"
            return [Finding("note", "compile", what, "torch.compile", "pip install triton")]
    if compiler is None:
        what = "--torchcompile will not work: there is no C++ compiler"
        return [Finding("note", "compile", what, "torch.compile", "Install one (Debian: apt install g++).")]
    return [Finding("note", "compile", f"--torchcompile can be used ({compiler})", "torch.compile")]


def _inference() -> list[Finding]:
    """How networks annotate, compute features, evaluate and predict on the CPU."""
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        return [Finding("note", "inference", "ONNX Runtime runs convolutional networks on the CPU", "inference")]
    todo = "pip install onnx onnxruntime: convolutional networks annotate, evaluate and predict in half of the time."
    return [Finding("note", "inference", "PyTorch is used for inference on the CPU", "inference", todo)]


def _workers() -> list[Finding]:
    free = shared_memory()
    if free is None or free >= 256e6:
        return []
    what = f"shared memory has {free / 1e6:.0f} MB free, which loader workers may exceed"
    todo = "In a container: --shm-size 2g or --ipc host; or train with --workers 0."
    return [Finding("warning", "shared-memory", what, str(SHARED_MEMORY), todo)]


def _disk(places: Sequence[Path]) -> list[Finding]:
    findings, seen = [], set[int]()
    for place in (Path.cwd(), *places):
        folder = next(p for p in (place.absolute(), *place.absolute().parents) if p.is_dir())
        device = folder.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(folder).free
        if free < LITTLE_DISK:
            todo = "Free some: a run keeps two checkpoints of 16 bytes per parameter; maps take 1 to 7 KB per image."
            level = "error" if free < LITTLE_DISK / 25 else "warning"
            findings.append(
                Finding(level, "disk", f"{free / 1e9:.1f} GB are free", str(folder), todo)  # type: ignore[arg-type]
            )
        else:
            findings.append(Finding("note", "disk", f"{free / 1e9:.0f} GB are free", str(folder)))
    return findings
