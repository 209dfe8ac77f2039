"""What this machine has, without importing anything heavy."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """Processes that read images, where nothing else was said: 4, or as many as there are cores."""
    return min(4, cores())
