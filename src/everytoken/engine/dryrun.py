"""`--dry-run`: the plan of a run, with memory and time from a few timed steps."""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from everytoken._meter import clock
from everytoken.engine.distributed import World
from everytoken.engine.optim import learning_rate
from everytoken.engine.options import TrainOptions
from everytoken.engine.runfolder import RunFolder
from everytoken.keyed import StepKey
from everytoken.tasks.build import Parts


def print_plan(parts: Parts, options: TrainOptions, world: World, steps: int = 3) -> None:
    """Print what would be trained, and how long it would take. Nothing is written."""
    facts = plan_facts(parts, options, world, steps)
    if not world.is_main:
        return
    table = Table(title="The plan (nothing was written)", show_header=False)
    for key, value in facts.items():
        table.add_row(key, str(value))
    Console().print(table)


def plan_facts(parts: Parts, options: TrainOptions, world: World, steps: int) -> dict[str, Any]:
    """The rows of the table."""
    from everytoken.tasks.classify import Classification, default_output

    optim, data = options.optim, options.dataset
    folder = RunFolder(".", writable=False)
    # a dry run starts no workers: what it times is the step; the loader's rate is timed beside it
    quick = replace(options, dataset=replace(data, workers=0))
    task = Classification(parts, quick, world, folder)
    updates = task.batches_per_epoch // optim.grad_accum_steps
    global_batch = data.batch_size * world.size * optim.grad_accum_steps
    weights = sum(p.numel() for p in parts.step.model.backbone.parameters())
    extra = sum(p.numel() for p in parts.step.parameters()) - weights
    step_seconds, load_seconds = _time_steps(task, options, world, steps)
    per_update = max(step_seconds, load_seconds / max(1, data.workers)) * optim.grad_accum_steps
    epochs = optim.epochs + optim.cooldown_epochs
    rate = learning_rate(optim, global_batch)
    return {
        "model": options.model.model,
        "parameters": f"{weights:,}" + (f" (+ {extra:,} only while training)" if extra else ""),
        "token grid": f"{parts.grid[0]} x {parts.grid[1]} at {options.model.img_size} px",
        "images": f"{len(parts.train_set):,} training, {len(parts.val_set):,} validation, "
        f"{parts.train_set.num_classes} classes",
        "score maps": f"{options.labels} ({parts.store.manifest.num_classes} classes)" if parts.store else "none",
        "objectives": ", ".join(f"{o.name} (weight {o.weight:g})" for o in parts.step.objectives),
        "mixing": ", ".join(options.mixing) or "none",
        "batch": f"{data.batch_size} x {world.size} processes x {optim.grad_accum_steps} accumulated = {global_batch}",
        "updates": f"{updates} per epoch, {updates * epochs:,} in all, {epochs} epochs",
        "learning rate": f"{rate:.3g} ({optim.sched}, {optim.warmup_epochs:g} warm-up epochs, "
        f"down to {min(optim.min_lr, rate):.3g})",
        "memory": _memory(world),
        "one step": f"{step_seconds:.2f} s, {data.batch_size / step_seconds:.1f} images/s per process",
        "loading": f"{data.batch_size / load_seconds:.1f} images/s per worker, {data.workers} workers",
        "time": f"about {clock(per_update * updates * epochs)} without validation",
        "run folder": options.run.output or default_output(options),
    }


def _time_steps(task: Any, options: TrainOptions, world: World, steps: int) -> tuple[float, float]:
    """Median seconds of a training step, and of loading a batch in one process."""
    raw = task.loader.epoch(0)
    loading, batches = [], []
    for _ in range(min(steps + 1, task.batches_per_epoch)):
        started = time.perf_counter()
        batches.append(next(raw))
        loading.append(time.perf_counter() - started)
    task.loader.close()
    working = []
    for number, batch in enumerate(itertools.islice(task.batches(0, 0), len(batches))):
        started = time.perf_counter()
        with torch.autocast(world.device.type, torch.bfloat16, enabled=options.optim.amp):
            terms = task.module.train()(replace(batch, key=StepKey(options.run.seed, number)))
        terms["loss"].backward()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        working.append(time.perf_counter() - started)
        task.module.zero_grad(set_to_none=True)
    task.close()
    return sorted(working)[len(working) // 2], sorted(loading)[len(loading) // 2]


def _memory(world: World) -> str:
    if world.device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(world.device) / 2**30:.1f} GiB on the GPU, without the optimizer"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of the process, without the optimizer"
