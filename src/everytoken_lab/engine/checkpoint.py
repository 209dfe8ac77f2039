"""Checkpoints that survive: written whole or not at all, verified before they are used.

A checkpoint is a folder `checkpoints/step-00001200/` with `model.safetensors` (the plain timm model), `ema.safetensors`
when weights are averaged, `state.pt` (all that resuming needs) and `manifest.json` (sizes and SHA-256 of the others),
written last. The folder is made under another name and renamed, so a kill at any moment leaves either the whole
checkpoint or none. On resume the newest one whose hashes agree is taken; damaged ones are named and passed over.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.files import disk_errors, make_inside, remove_temporary, sha256_of, sync_folder, write_atomically
from everytoken.models.weights import encode_weights
from everytoken_lab import schema

STATE, MANIFEST = "state.pt", "manifest.json"
_ADVICE = "The last good checkpoint is kept, and the same command continues from it."
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)


class _File(TypedDict):
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    files: dict[str, _File]


def step_of(folder: Path) -> int:
    """The update after which a checkpoint folder was written."""
    return int(folder.name.removeprefix("step-"))


def checkpoints_in(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, oldest first; whatever has another name is not ours."""
    return sorted((p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()), key=step_of)


def write_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace a safetensors file in one step, on the disk; one that has the same content is left alone."""
    content = encode_weights(tensors, metadata)
    with disk_errors(path.parent, f"writing {path.name}", _ADVICE):
        remove_temporary(path.parent)  # of a writer that was killed
        if not (path.is_file() and path.stat().st_size == len(content) and files.read_bytes(path) == content):
            write_atomically(path, content)


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
        state: anything `torch.load(weights_only=True)` can read back.
    """
    final, work = root / f"step-{step:08d}", root / f".writing-{step:08d}-{os.getpid()}"
    with disk_errors(root, f"writing the checkpoint of step {step}", _ADVICE):
        make_inside(root.parent, root.name)
        for left in root.glob(".writing-*"):  # by writers that were killed
            shutil.rmtree(left, ignore_errors=True)
        work.mkdir()
        try:
            for stem, tensors in weights.items():
                write_atomically(work / f"{stem}.safetensors", encode_weights(tensors, metadata))
            content = io.BytesIO()  # for a full disk, torch would raise an error of its own
            torch.save(dict(state), content)
            write_atomically(work / STATE, content.getbuffer())
            files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(work.iterdir())}
            write_atomically(work / MANIFEST, json.dumps({"step": step, "files": files}, indent=1).encode())
            if final.exists():
                shutil.rmtree(final)
            work.rename(final)
            sync_folder(root)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    for old in checkpoints_in(root)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty when it is whole."""
    try:
        listed = schema.read_json(folder / MANIFEST, _Manifest)["files"]
    except schema.SchemaError as error:
        return [str(error).rstrip(".")]
    found = [] if STATE in listed else [f"{folder / MANIFEST} does not list {STATE}"]
    for name, facts in listed.items():
        path = folder / name
        try:
            if path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]:
                found.append(f"{path} was changed after it was written")
        except (OSError, ValueError) as error:
            found.append(f"{path} cannot be read ({error})")
    return found


def newest_good(root: Path, tell: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest intact checkpoint under `root`, or None; damaged ones are reported and skipped."""
    for folder in reversed(checkpoints_in(root)):
        wrong = problems(folder)
        if not wrong:
            return folder
        tell(f"passing over a damaged checkpoint: {'; '.join(wrong)}")
    return None


def load_state(folder: Path) -> dict[str, Any]:
    """The resume state of a whole checkpoint, on the CPU."""
    path = folder / STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise EverytokenError(f"{path} is not the state of a run and was not opened: {error}") from error
    if not isinstance(state, dict):
        raise EverytokenError(f"{path} is not the state of a run: it holds {type(state).__name__}")
    return state
