"""Run folders: readable, with whole checkpoints and finite weights, and with data that is still there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from everytoken.errors import EverytokenError
from everytoken.models.weights import WeightsError, read_weights
from everytoken_lab.data.tree import dataset_path
from everytoken_lab.doctor import Finding
from everytoken_lab.engine.checkpoint import checkpoints_in, problems
from everytoken_lab.engine.run_folder import Run, read_run


def examine_run(path: Path, tell: Callable[[int, int], None]) -> Iterator[Finding]:
    """Everything about one run folder."""
    run, where = read_run(path), str(path)
    for trouble in run.troubles:
        todo = "Train again with the same command: it resumes from an intact checkpoint and writes missing files again."
        yield Finding("error" if not run.config else "warning", "run-files", trouble, where, todo)
    if run.state in ("unfinished", "not begun"):
        what = f"the run is {run.state}: {run.done_epochs} of {run.planned_epochs} epochs"
        yield Finding("note", "run-unfinished", what, where, "The same `everytoken train` command resumes.")
    if run.bad_updates:
        what = f"{run.bad_updates} updates were left out because the loss was not finite"
        todo = "Try a lower --lr, --clip-grad 1 or no --amp; bad-updates.jsonl names the images."
        yield Finding("warning", "run-bad-updates", what, where, todo)
    if run.skipped:
        listed = [f"{key}: {why}" for key, why in run.skipped.items()]
        what = f"{len(listed)} images could not be read and were left out"
        yield Finding("warning", "run-skipped", what, where, "Replace or remove them.", listed)
    yield from _checkpoints(path, tell)
    yield from _weights(path / "best.safetensors")
    yield from _sources(run)


def _checkpoints(path: Path, tell: Callable[[int, int], None]) -> Iterator[Finding]:
    found: dict[str, list[str]] = {}
    folders = checkpoints_in(path / "checkpoints")
    for done, folder in enumerate(folders, 1):
        found[folder.name] = problems(folder)
        tell(done, len(folders))
    if texts := [text for each in found.values() for text in each]:
        whole = [name for name, each in found.items() if not each]
        todo = "No whole checkpoint is left: restore one from a copy, or train again into a new folder."
        if whole:
            todo = f"Delete it; the run resumes from {whole[-1]}, which is intact."
        what = f"{len(folders) - len(whole)} of {len(folders)} checkpoints are damaged"
        yield Finding("error", "checkpoint-damaged", what, str(path), todo, texts)


def _weights(file: Path) -> Iterator[Finding]:
    todo = "Take the weights of a whole checkpoint (checkpoints/step-*/model.safetensors), or train again."
    try:
        weights = read_weights(file) if file.is_file() else {}
    except WeightsError as error:
        yield Finding("error", "weights-damaged", f"the best weights cannot be used: {error}", str(file), todo)
        return
    if bad := [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]:
        what = f"{len(bad)} tensors of the best weights are not finite"
        yield Finding("error", "weights-not-finite", what, str(file), todo, bad)


def _sources(run: Run) -> Iterator[Finding]:
    """The images and maps that going on needs."""
    for option in ("data", "maps"):
        given = str(run.config.get(option) or "")
        with contextlib.suppress(OSError, EverytokenError):
            path = dataset_path(given)
            if not path or any(c in path for c in "*{?") or Path(path).expanduser().exists():
                continue
        what = f"its {option} {given} are not there (seen from {Path.cwd()})"
        todo = "Resuming and sample predictions need them; call from the folder in which the run was started."
        yield Finding("warning", f"run-{option}-gone", what, str(run.path), todo)
