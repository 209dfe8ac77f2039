"""What this machine has, without importing anything heavy."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, TypeVar

import tyro
from annotated_types import Interval

T = TypeVar("T")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """Processes that read images, where nothing else was said: 4, or as many as there are cores."""
    return min(4, cores())


Workers = Annotated[
    int, Interval(ge=0), tyro.conf.arg(aliases=["-j"], help_behavior_hint="(default: one per core, at most 4)")
]
"""The option --workers; its help is the same on every machine."""


def keep_freed_memory() -> bool:
    """Let glibc reuse the memory of large tensors instead of mapping it anew for each of them; True if it does.

    Convolutional networks on the CPU are up to twice as fast. Our commands call this when they start; the library does
    not, since it changes the whole process. MALLOC_MMAP_THRESHOLD_ in the environment has precedence.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))


def memory() -> int | None:
    """Bytes of memory that programs can still have; None where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limits = [_read_number(Path("/sys/fs/cgroup/memory.max")), _read_number(Path("/sys/fs/cgroup/memory.current"))]
    if limits[0] is not None and limits[1] is not None:  # of a container
        free.append(max(0, limits[0] - limits[1]))
    return min(free, default=None)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def existing_folder(path: Path) -> Path:
    """The folder at `path`, or the nearest one above."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir() or folder == folder.parent)


def free_disk(path: Path) -> int:
    """Free bytes where `path` is or will be."""
    return shutil.disk_usage(existing_folder(path)).free


def patiently(seconds: float, call: Callable[..., T], *words: Any, **settings: Any) -> T:
    """What a function answers; a TimeoutError after some seconds, and then nobody waits for its thread any longer."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call(*words, **settings))
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    return answer.result(seconds)
