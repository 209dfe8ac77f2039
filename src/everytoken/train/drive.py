"""A run around any task: go on from a checkpoint or begin, say so, train, answer signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from everytoken.errors import EverytokenError
from everytoken.train.distributed import World
from everytoken.train.loop import Loop, Stopped, Task
from everytoken.train.options import LoopOptions
from everytoken.train.recipe import flat
from everytoken.train.runfolder import RunFolder, lock_run
from everytoken.train.track import build_trackers

Log = Callable[[str], None]
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

    resumed = loop.resume(log)
    _check_same_run(folder, options, resumed, log)
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


def _check_same_run(folder: RunFolder, options: LoopOptions, resumed: bool, log: Log) -> None:
    """When a run goes on with other options, say which; some changes are harmless, others are the user's will."""
    if not resumed:
        return
    old, new = folder.read_config(), flat(options)
    changed = [k for k in new if k in old and old[k] != new[k] and k not in _HARMLESS]
    for key in changed:
        log(f"note: going on with another {key}: {old[key]!r} before, {new[key]!r} now")
