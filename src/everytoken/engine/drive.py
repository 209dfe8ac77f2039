"""A run around any task: go on from a checkpoint or begin, say so, train, answer signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everytoken.engine.checkpoint import checkpoints_in
from everytoken.engine.distributed import World
from everytoken.engine.loop import Loop, Stopped, Task
from everytoken.engine.options import LoopOptions
from everytoken.engine.recipe import flat
from everytoken.engine.runfolder import RunFolder, lock_run
from everytoken.engine.track import build_trackers
from everytoken.errors import EverytokenError

Log = Callable[[str], None]
_WHICH_RUN = ("model", "model_kwargs", "img_size", "seed", "data", "labels", "initial_checkpoint")
_PLACES = ("data", "labels", "initial_checkpoint")
_HARMLESS = {"workers", "output", "resume", "device", "threads", "log_interval", "keep", "checkpoint_minutes"}


def drive(
    task: Task,
    options: LoopOptions,
    folder: RunFolder,
    world: World,
    introduce: Callable[[Loop], str],
    finish: Callable[[Loop, dict[str, Any], Log], None],
) -> int:
    """Train a task to its end in its run folder.

    Args:
        introduce: the first line of the log: data, model, schedule.
        finish: called on rank 0 when the run is complete, with the summary.

    Returns:
        The exit code: 0, or 130 and 143 after a signal, when the same command goes on.
    """
    with _alone(folder, world):
        return _drive(Loop(task, options, folder, world), introduce, finish)


@contextmanager
def _alone(folder: RunFolder, world: World) -> Iterator[None]:
    """Hold the run folder's lock in the first process; if it cannot be had, all processes stop alike."""
    lock, trouble = None, None
    if world.is_main:
        try:
            lock = lock_run(folder.path)
        except EverytokenError as error:
            trouble = error
    trouble = world.gather(trouble)[0]
    if trouble is not None:
        raise trouble
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _drive(loop: Loop, introduce: Callable[[Loop], str], finish: Callable[[Loop, dict[str, Any], Log], None]) -> int:
    options, folder, world = loop.options, loop.folder, loop.world

    def log(text: str) -> None:
        if world.is_main:
            say(text)
        folder.say(text)

    changed = _changes(folder, options)
    if checkpoints_in(folder.checkpoints):
        _refuse_another_run(folder, changed)
    try:
        resumed = loop.resume(log)
    except (RuntimeError, KeyError) as error:  # a network of another shape
        why = str(error).strip().splitlines()[0]
        raise EverytokenError(
            f"{folder.path} holds another run{_told(changed)} ({why}). Choose another --output."
        ) from error
    if resumed and loop.epoch >= loop.epochs and folder.is_finished(loop.step):
        return 0  # its record stays as it is
    if resumed:
        for key, (before, now) in changed.items():
            log(f"note: going on with another {key}: {before!r} before, {now!r} now")
    folder.write_config(flat(options))
    if world.is_main:
        folder.trackers = build_trackers(options, folder.path, flat(options))
    log(introduce(loop))
    try:
        summary = loop.run()
    except Stopped as stop:
        log(f"stopped by a signal after update {loop.step}; the same command goes on from here")
        return stop.code
    finally:
        for tracker in folder.trackers:
            tracker.close()
    if world.is_main:
        finish(loop, summary, log)
    return 0


def say(text: str) -> None:
    """A line on the terminal, at once."""
    print(text, flush=True)
    sys.stdout.flush()


def _changes(folder: RunFolder, options: LoopOptions) -> dict[str, tuple[Any, Any]]:
    """What the run in the folder had, and what it would get now; harmless changes are left out."""
    old, new = folder.read_config(), flat(options)
    return {k: (old[k], new[k]) for k in new if k in old and old[k] != new[k] and k not in _HARMLESS}


def _refuse_another_run(folder: RunFolder, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Going on with other settings is the user's will; with another network or other data it is a mistake."""
    other = {k: v for k, v in changed.items() if k in _WHICH_RUN and not (k in _PLACES and _moved(*v))}
    if other:
        raise EverytokenError(
            f"{folder.path} holds another run{_told(other)}. Choose another --output, or repeat the command as it was "
            "to go on with that one."
        )


def _moved(before: Any, now: Any) -> bool:
    """Whether two paths may mean the same thing: equal, or the old one is gone."""
    if not before or not now:
        return False
    return not Path(before).exists() or Path(before).resolve() == Path(now).resolve()


def _told(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "".join(f", {k} {before!r} and not {now!r}" for k, (before, now) in list(changed.items())[:3])
