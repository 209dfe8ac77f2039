"""Checkpoints that survive: written whole or not at all, verified before they are used.

A checkpoint is a folder `checkpoints/step-00001200/` with `model.safetensors` (the plain timm model's weights, which
timm loads by itself), `ema.safetensors` when weights are averaged, `state.pt` (all that resuming needs: the training
modules, optimizer, scaler, position) and `manifest.json` (sizes and SHA-256 of the others), written last. The folder is
made under another name, every file is synced, and it is renamed into place; so a kill at any moment leaves either the
whole checkpoint or none. On resume the newest one whose hashes agree is taken; torn ones are named and passed over.
"""

from __future__ import annotations

import errno
import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.files import sha256_of, sync_folder

STATE = "state.pt"
MANIFEST = "manifest.json"


class CheckpointError(EverytokenError):
    """A checkpoint cannot be written or read."""


def step_of(folder: Path) -> int:
    """The update after which a checkpoint folder was written."""
    return int(folder.name.removeprefix("step-"))


def checkpoints_in(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, oldest first; whatever has another name is not ours."""
    return sorted((p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()), key=step_of)


def write_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace a safetensors file in one step, on the disk; one that has the same content is left alone."""
    work = path.with_name(f".{path.name}.new")
    _save_weights(work, tensors, metadata)
    if path.exists() and filecmp.cmp(work, path, shallow=False):
        work.unlink()
        return
    _sync(work)
    os.replace(work, path)
    sync_folder(path.parent)


def save_checkpoint(
    root: Path,
    step: int,
    weights: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    metadata: Mapping[str, str],
    keep: int = 2,
) -> Path:
    """Write `root/step-<step>` and remove all but the `keep` newest.

    Args:
        weights: file stem -> state dict, written as safetensors with `metadata`.
        state: anything `torch.load(weights_only=True)` can read back: tensors, numbers, strings, lists, dicts.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{step:08d}"
    work = root / f".writing-{step:08d}-{os.getpid()}"
    for left in root.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        work.mkdir()
        for stem, tensors in weights.items():
            _save_weights(work / f"{stem}.safetensors", tensors, metadata)
        torch.save(dict(state), work / STATE)
        content = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps({"step": step, "files": content}, indent=1))
        for path in work.iterdir():
            _sync(path)
        sync_folder(work)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        sync_folder(root)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk of {root} is full; the checkpoint of step {step} was not written and the last good one is "
                "kept. Free some space and run the same command again."
            ) from error
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {root}: {error}") from error
    for old in checkpoints_in(root)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty when it is whole."""
    try:
        files: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return [f"{folder / MANIFEST} is missing"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        return [f"{folder / MANIFEST} cannot be read ({error})"]
    found = []
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != facts["bytes"]:
            found.append(f"{path} has {path.stat().st_size} bytes instead of {facts['bytes']}")
        elif sha256_of(path) != facts["sha256"]:
            found.append(f"{path} was changed after it was written")
    return found


def newest_good(root: Path, tell: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest whole checkpoint under `root`, or None; every one that is passed over is told."""
    for folder in reversed(checkpoints_in(root)):
        wrong = problems(folder)
        if not wrong:
            return folder
        tell(f"passing over a damaged checkpoint: {'; '.join(wrong)}")
    return None


def load_state(folder: Path) -> dict[str, Any]:
    """The resume state of a whole checkpoint, on the CPU."""
    state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return state


def _save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    save_file(plain, path, metadata=dict(metadata))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
