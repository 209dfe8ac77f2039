"""`--dry-run`: the plan of a run, with memory and time from a few timed steps."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from everytoken.keyed import StepKey
from everytoken_lab.engine.backends import kernel_settings
from everytoken_lab.engine.checks import check_loop
from everytoken_lab.engine.distributed import World, distribute, join_world, local_part
from everytoken_lab.engine.optim import learning_rate, warmup_epochs
from everytoken_lab.engine.options import LoopOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.engine.task import Task
from everytoken_lab.progress import clock


def plan(build: Callable[[World, RunFolder], Task], options: LoopOptions, output: str | Path) -> dict[str, Any]:
    """What a run would train and how long that would take, as rows of a table; nothing is written.

    `build` makes the task, as for `loop.run`, with loaders without workers. Empty on all processes but the first.
    """
    check_loop(options)
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    with join_world(options.run.device) as world:
        torch.manual_seed(options.run.seed)
        with kernel_settings(world.device, options.run.deterministic):
            facts = _facts(build(world, RunFolder(output, writable=False)), options)
        return facts if world.is_main else {}


def _facts(task: Task, options: LoopOptions, steps: int = 3) -> dict[str, Any]:
    optim, data, world = options.optim, options.dataset, task.world
    updates = max(1, task.batches_per_epoch // optim.grad_accum_steps)
    global_batch = data.batch_size * world.size * optim.grad_accum_steps
    weights = sum(p.numel() for p in task.backbone.parameters())
    extra = sum(p.numel() for p in task.module.parameters()) - weights
    fsdp = options.run.fsdp and world.size > 1
    task.trainable_module = distribute(task.module, task.backbone, world, fsdp)
    held = sum(local_part(p).numel() for p in task.module.parameters())
    seconds, load_seconds = step_seconds(task, options, steps)
    per_update = max(seconds, load_seconds / max(1, data.workers)) * optim.grad_accum_steps
    total = optim.iters or updates * optim.epochs
    warmup = f"{warmup_epochs(optim, updates):g} warm-up {'updates' if optim.iters else 'epochs'}"
    rate = learning_rate(optim, global_batch)
    return {
        **task.facts(),
        "parameters": f"{weights:,} of the backbone" + (f", {extra:,} besides" if extra else ""),
        **({"sharded": f"{held:,} of {weights + extra:,} in this one of {world.size} processes"} if fsdp else {}),
        "batch": f"{data.batch_size} x {world.size} processes x {optim.grad_accum_steps} accumulated = {global_batch}",
        "updates": f"{updates} per epoch, {total:,} in all, {total / updates:g} epochs",
        "learning rate": f"{rate:.3g} ({optim.sched}, {warmup}, down to {min(optim.min_lr, rate):.3g})",
        "memory": _memory(world),
        "one step": f"{seconds:.2f} s, {data.batch_size / seconds:.1f} images/s per process",
        "loading": f"{data.batch_size / load_seconds:.1f} images/s per worker, {data.workers} workers",
        "time": f"about {clock(per_update * total)} without validation",
        "run folder": str(task.folder.path),
    }


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
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, other systems KiB
    return f"{largest / unit:.1f} GiB of the process, without the optimizer"
