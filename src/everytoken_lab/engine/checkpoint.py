"""Checkpoints that survive: written whole or not at all, verified before they are used.

A checkpoint is a folder `checkpoints/step-00001200/` with `model.safetensors` (the plain timm model's weights, which
timm loads by itself), `ema.safetensors` when weights are averaged, `state.pt` (all that resuming needs: the training
modules, optimizer, scaler, position) and `manifest.json` (sizes and SHA-256 of the others), written last. The folder is
made under another name, every file is synced, and it is renamed into place; so a kill at any moment leaves either the
whole checkpoint or none. On resume the newest one whose hashes agree is taken; torn ones are named and passed over.

A sharded run (`fsdp`) has `shards/` instead of the weights: every process writes its part of all tensors into a
safetensors file of its own, by `torch.distributed.checkpoint` with its safetensors storage (its usual one keeps a
pickled index), and `state.pt` has no tensors. Any number of processes reads them back.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from typing_extensions import TypedDict

from everytoken.errors import EverytokenError
from everytoken.files import (
    FileError,
    disk_errors,
    make_inside,
    open_new,
    remove_temporary,
    sha256_of,
    sync_folder,
    write_atomically,
)
from everytoken.models.weights import encode_weights
from everytoken_lab import schema
from everytoken_lab.engine.distributed import World

STATE = "state.pt"
MANIFEST = "manifest.json"
SHARDS = "shards"
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
    with _disk_errors(root, f"writing the checkpoint of step {step}"):
        work = _begin(root, step)
        try:
            for stem, tensors in weights.items():
                write_atomically(work / f"{stem}.safetensors", encode_weights(tensors, metadata))
            return _commit(work, step, state, _facts(work), keep)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def save_sharded_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World, keep: int = 2
) -> None:
    """Write `root/step-<step>`, every process its part of the tensors; all must call this.

    Args:
        tensors: by name, sharded or, where every process has the same, plain.
        state: as for `save_checkpoint`; that of rank 0 is written.
    """
    doing = f"writing the checkpoint of step {step}"
    work = root
    with world.agree(), _disk_errors(root, doing):
        if world.is_main:
            work = _begin(root, step)
    work = world.gather(work)[0]
    try:
        with _checkpoint_errors(root, doing):
            writer = HuggingFaceStorageWriter(str(work / SHARDS), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer, no_dist=world.size == 1)
        facts: dict[str, _File] = {}
        with world.agree(), _disk_errors(root, doing):  # each process reads back what it wrote
            mine = sorted((work / SHARDS).glob(f"shard-{world.rank + 1:05d}-*"))
            facts = {f"{SHARDS}/{name}": fact for name, fact in _facts(work / SHARDS, mine).items()}
        files = {name: fact for of_rank in world.gather(facts) for name, fact in of_rank.items()}
        with world.agree(), _disk_errors(root, doing):
            if world.is_main:
                unseen = sorted(name for name in files if not (work / name).is_file())
                if unseen:
                    raise CheckpointError(
                        f"{root} is not the same folder for all processes: {unseen[0]} was written elsewhere. Give an "
                        "output on a disk that all machines share."
                    )
                sync_folder(work / SHARDS)
                _commit(work, step, state, files, keep)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _begin(root: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; those of killed writers are removed."""
    make_inside(root.parent, root.name)
    for left in root.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    work = root / f".writing-{step:08d}-{os.getpid()}"
    work.mkdir()
    return work


def _facts(work: Path, paths: Iterable[Path] | None = None) -> dict[str, _File]:
    """Sizes and hashes of the files in a folder, for the manifest."""
    paths = sorted(work.iterdir()) if paths is None else paths
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}


def _commit(work: Path, step: int, state: Mapping[str, Any], files: Mapping[str, _File], keep: int) -> Path:
    """Add state and manifest to the files of a checkpoint, give it its name, and remove all but the `keep` newest."""
    root = work.parent
    final = root / f"step-{step:08d}"
    _save_state(work / STATE, state)
    content = {**files, **_facts(work, [work / STATE])}
    write_atomically(work / MANIFEST, json.dumps({"step": step, "files": content}, indent=1).encode())
    sync_folder(work)
    if final.exists():
        shutil.rmtree(final)
    work.rename(final)
    sync_folder(root)
    for old in checkpoints_in(root)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a sharded checkpoint in place, each process its part of them; all processes must call this."""
    with _checkpoint_errors(folder, "reading the shards"):
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))


def whole_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    """Tensors of a sharded checkpoint whose names begin with `part`, without it, put together by this process alone."""
    with _checkpoint_errors(folder, "reading the shards"):
        entries: dict[str, Any] = HuggingFaceStorageReader(str(folder / SHARDS)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(part)
        }
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)), no_dist=True)
    return {name.removeprefix(part): tensor for name, tensor in tensors.items()}


@contextmanager
def _checkpoint_errors(path: Path, doing: str) -> Iterator[None]:
    """What torch reports about some process (it is no `Exception`), as a `CheckpointError` or a `RuntimeError`."""
    try:
        with warnings.catch_warnings():  # about one process, which is fine
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        with _disk_errors(path, doing):
            if isinstance(first, OSError):
                raise first from error
        raise RuntimeError(f"{doing}, rank {rank}: {first}") from error


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
    with _StateFile(open_new(path), "wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            raise file.error or error from error
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
    return state
