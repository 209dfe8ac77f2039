"""`--dry-run`: the plan of a run, with memory and time from a few timed steps."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from everytoken.keyed import StepKey
from everytoken_lab.engine.distributed import World, local_part
from everytoken_lab.engine.loop import prepared
from everytoken_lab.engine.options import LoopOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.engine.task import Task
from everytoken_lab.progress import clock


def plan(build: Callable[[World, RunFolder], Task], options: LoopOptions, output: str | Path) -> dict[str, str]:
    """What the task that `build` makes would train and how long that would take, as rows of a table on rank 0."""
    with prepared(build, options, output, writable=False) as loop:
        task, data, world = loop.task, options.dataset, loop.world
        count = sum(p.numel() for p in task.module.parameters())
        held = sum(local_part(p).numel() for p in task.module.parameters())
        seconds, load_seconds = step_seconds(task, options)
        per_update = max(seconds, load_seconds / max(1, data.workers)) * options.optim.grad_accum_steps
        facts = {
            **loop.facts(),
            "parameters": f"{count:,}",
            "sharded": f"{held:,} of {count:,} in this one of {world.size} processes",
            "memory": _memory(world),
            "one step": f"{seconds:.2f} s, {data.batch_size / seconds:.1f} images/s per process",
            "loading": f"{data.batch_size / load_seconds:.1f} images/s per worker, {data.workers} workers",
            "time": f"about {clock(per_update * loop.total)} without validation",
        }
        if not loop.fsdp:
            del facts["sharded"]
        return facts if world.is_main else {}


def step_seconds(task: Task, options: LoopOptions, steps: int = 3) -> tuple[float, float]:
    """Seconds of the fastest training step, and of loading a batch in one process; the task is closed."""
    loading, working = [], []
    batches = task.loaders[0].epoch(0)
    for _ in range(min(steps + 1, task.batches_per_epoch)):
        started = time.perf_counter()
        next(batches)
        loading.append(time.perf_counter() - started)
    task.train()
    for number, batch in enumerate(itertools.islice(task.train_batches(0, 0), len(loading))):
        started = time.perf_counter()
        with task.autocast():
            terms = task(replace(batch, key=StepKey(options.run.seed, number)))
        terms["loss"].backward()
        if task.world.device.type == "cuda":
            torch.cuda.synchronize()
        working.append(time.perf_counter() - started)
        task.zero_grad(set_to_none=True)
    task.close()
    return min(working), min(loading)


def _memory(world: World) -> str:
    if world.device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(world.device) / 2**30:.1f} GiB on the GPU, without the optimizer"
    try:
        import resource  # not on Windows
    except ImportError:
        return "not measured on this system"
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, other systems KiB
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB, without the optimizer"
