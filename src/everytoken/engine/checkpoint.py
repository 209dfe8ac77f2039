"""Checkpoints that survive: written whole or not at all, verified before they are used.

A checkpoint is a folder `checkpoints/step-00001200/` with `model.safetensors` (the plain timm model's weights, which
timm loads by itself), `ema.safetensors` when weights are averaged, `state.pt` (all that resuming needs: the training
modules, optimizer, scaler, position) and `manifest.json` (sizes and SHA-256 of the others), written last. The folder is
made under another name, every file is synced, and it is renamed into place; so a kill at any moment leaves either the
whole checkpoint or none. On resume the newest one whose hashes agree is taken; torn ones are named and passed over.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from everytoken import schema
from everytoken.errors import EverytokenError
from everytoken.files import FileError, disk_errors, remove_temporary, sha256_of, sync_folder, write_atomically
from everytoken.models.weights import encode_weights

STATE = "state.pt"
MANIFEST = "manifest.json"
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)


class _File(TypedDict):
    bytes: int
    sha256: str


class _Manifest(TypedDict):
    files: dict[str, _File]


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
    content = encode_weights(tensors, metadata)
    with _disk_errors(path.parent, f"writing {path.name}"):
        remove_temporary(path.parent)  # of a writer that was killed
        if not (path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content):
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
        state: anything `torch.load(weights_only=True)` can read back: tensors, numbers, strings, lists, dicts.
    """
    final = root / f"step-{step:08d}"
    work = root / f".writing-{step:08d}-{os.getpid()}"
    with _disk_errors(root, f"writing the checkpoint of step {step}"):
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            work.mkdir()
            for stem, tensors in weights.items():
                _write(work / f"{stem}.safetensors", encode_weights(tensors, metadata))
            _save_state(work / STATE, state)
            content = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(work.iterdir())}
            _write(work / MANIFEST, json.dumps({"step": step, "files": content}, indent=1).encode())
            sync_folder(work)
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


class _StateFile(io.FileIO):
    """A file for `torch.save`, which hides why writing failed; this remembers."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        try:
            while len(view):
                view = view[super().write(view) :]
        except OSError as error:
            self.error = error
            raise
        return total


def _save_state(path: Path, state: Mapping[str, Any]) -> None:
    with _StateFile(path, "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            raise file.error or error from error
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _disk_errors(path: Path, doing: str) -> Iterator[None]:
    """A full disk, missing permission or broken disk as a `CheckpointError` that names them."""
    try:
        with disk_errors(path, doing, "The last good checkpoint is kept, and the same command continues from it."):
            yield
    except FileError as error:
        raise CheckpointError(str(error)) from error


def problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, as sentences; empty when it is whole."""
    try:
        files = schema.read_json(folder / MANIFEST, _Manifest)["files"]
    except schema.SchemaError as error:
        return [str(error).rstrip(".")]
    return [what for name in {STATE: None, **files} if (what := _problem(folder / name, files.get(name)))]


def _problem(path: Path, facts: _File | None) -> str:
    """What is wrong with one file of a checkpoint; empty if it is whole."""
    if facts is None:
        return f"{path.parent / MANIFEST} does not list {path.name}"
    try:
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path} has {size} bytes instead of {facts['bytes']}"
        return "" if sha256_of(path) == facts["sha256"] else f"{path} was changed after it was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({error})"


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
    path = folder / STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise CheckpointError(f"{path} is not the state of a run and was not opened: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not the state of a run: it holds {type(state).__name__}")
    return dict(present_names(state))


def present_names(state: Any) -> Any:
    """A state in which weights have the names that this version gives them; older ones kept objectives elsewhere."""
    if isinstance(state, dict):
        return {present_names(name): present_names(value) for name, value in state.items()}
    if isinstance(state, list):
        return [present_names(value) for value in state]
    if isinstance(state, str) and state.startswith("brought.drloc."):
        return state.replace("brought.drloc.", "objectives.drloc.heads.", 1)
    return state
