"""`--dry-run`: the plan of a run, with memory and time from a few timed steps."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from everytoken.engine.distributed import World
from everytoken.engine.optim import learning_rate
from everytoken.engine.options import TrainOptions
from everytoken.keyed import StepKey
from everytoken.progress import clock

if TYPE_CHECKING:
    from everytoken.tasks.classify import Classification


def plan_facts(task: Classification, options: TrainOptions, steps: int = 3) -> dict[str, Any]:
    """What would be trained, as rows of a table; `steps` updates are timed, and the task is closed."""
    optim, data, parts, world = options.optim, options.dataset, task.parts, task.world
    updates = max(1, task.batches_per_epoch // optim.grad_accum_steps)
    global_batch = data.batch_size * world.size * optim.grad_accum_steps
    weights = sum(p.numel() for p in task.backbone.parameters())
    extra = sum(p.numel() for p in parts.step.parameters()) - weights
    step_seconds, load_seconds = _time_steps(task, options, steps)
    per_update = max(step_seconds, load_seconds / max(1, data.workers)) * optim.grad_accum_steps
    total = optim.iters or updates * (optim.epochs + optim.cooldown_epochs)
    length = f"{updates} per epoch, {total:,} in all, {total / updates:g} epochs"
    warmup = (
        f"{optim.warmup_iters} warm-up updates" if optim.warmup_iters else f"{optim.warmup_epochs:g} warm-up epochs"
    )
    rate = learning_rate(optim, global_batch)
    images = f"{len(parts.train_set):,} training, {len(parts.val_set):,} validation"
    return {
        "model": options.model.model,
        "parameters": f"{weights:,}" + (f" (+ {extra:,} only while training)" if extra else ""),
        "token grid": f"{parts.grid[0]} x {parts.grid[1]} at {options.model.img_size} px",
        "images": f"{images}, {parts.train_set.num_classes} classes",
        "score maps": f"{options.maps} ({parts.store.manifest.num_classes} classes)" if parts.store else "none",
        "objectives": ", ".join(f"{n} (weight {getattr(o, 'weight', 1):g})" for n, o in parts.step.objectives.items()),
        "mixing": ", ".join(options.mixing) or "none",
        "batch": f"{data.batch_size} x {world.size} processes x {optim.grad_accum_steps} accumulated = {global_batch}",
        "updates": length,
        "learning rate": f"{rate:.3g} ({optim.sched}, {warmup}, down to {min(optim.min_lr, rate):.3g})",
        "memory": _memory(world),
        "one step": f"{step_seconds:.2f} s, {data.batch_size / step_seconds:.1f} images/s per process",
        "loading": f"{data.batch_size / load_seconds:.1f} images/s per worker, {data.workers} workers",
        "time": f"about {clock(per_update * total)} without validation",
        "run folder": str(task.folder.path),
    }


def _time_steps(task: Classification, options: TrainOptions, steps: int) -> tuple[float, float]:
    """Median seconds of a training step, and of loading a batch in one process."""
    loading, working = [], []
    batches = task.train_loader.epoch(0)
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
    return sorted(working)[len(working) // 2], sorted(loading)[len(loading) // 2]


def _memory(world: World) -> str:
    if world.device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(world.device) / 2**30:.1f} GiB on the GPU, without the optimizer"
    try:
        import resource  # not on Windows
    except ImportError:
        return "not measured on this system"
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{largest / memory_unit(sys.platform):.1f} GiB of the process, without the optimizer"


def memory_unit(system: str) -> int:
    """Units of `ru_maxrss` in a GiB: macOS counts bytes, other systems KiB."""
    return 2**30 if system == "darwin" else 2**20
