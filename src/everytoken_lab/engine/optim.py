"""Optimizer and schedule, both timm's; the learning rate follows the real global batch.

Adam, AdamW and SGD take torch's fused kernels, on every device. They are faster, and they can be told on the device to
leave an update out (`step_unless`), so that the host need not wait to know whether the gradient is finite.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_class,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.options import LoopOptions, OptimOptions


def check_loop(options: LoopOptions) -> None:
    """Raise on what the training loop cannot work with. For every task, before anything is built."""
    optim = options.optim
    kind = optim.opt.lower().rsplit("_", 1)[-1]  # timm: lookahead_adamw
    if kind not in list_optimizers():
        raise EverytokenError(f"timm has no optimizer {optim.opt!r}.{did_you_mean(kind, list_optimizers())}")
    try:
        get_optimizer_class(kind)
    except (AssertionError, ImportError) as error:
        raise EverytokenError(f"opt {optim.opt} cannot be used here: {error}; adamw works everywhere") from error
    if optim.decay_rate != OptimOptions().decay_rate and optim.sched != "multistep":
        raise EverytokenError(f"decay_rate is {optim.decay_rate:g}, which sched {optim.sched} does not use")
    pick_device(options.run.device)


def learning_rate(options: OptimOptions, global_batch: int) -> float:
    """The peak learning rate: `lr` if it is given, else `lr_base` scaled to the global batch.

    The papers: 1e-3 * batch / 640 with token labeling, 1e-3 * batch / 1024 without.
    """
    ratio = global_batch / options.lr_base_size
    return options.lr or options.lr_base * (math.sqrt(ratio) if options.lr_scaling == "sqrt" else ratio)


def default_scaling(options: OptimOptions, recipe: str = "") -> Literal["linear", "sqrt"]:
    """As the options say; linear with a recipe that does not say; else timm's: square root for adaptive optimizers."""
    adaptive = any(name in options.opt.lower() for name in ("ada", "lamb"))
    return options.lr_scaling or ("sqrt" if adaptive and not recipe else "linear")


def warmup_epochs(options: OptimOptions, updates_per_epoch: int) -> float:
    """Epochs (updates, where updates are counted) of warm-up, which never last for the whole training.

    Warm-up that would, because fewer epochs were asked for than a recipe has, takes a tenth of the training.
    """
    unit = 1 if options.iters else updates_per_epoch
    asked = options.warmup_iters / unit if options.warmup_iters else options.warmup_epochs
    whole = options.iters or options.epochs
    return asked if asked < whole else whole / 10


def build_optimizer(module: nn.Module, backbone: nn.Module, options: OptimOptions, lr: float) -> Optimizer:
    """timm's optimizer over the trained module: no decay for biases, norms and what the backbone exempts.

    With layer decay, the backbone's own layer groups are used and what objectives add keeps the full rate.
    """
    exempt: set[str] = set(getattr(backbone, "no_weight_decay", set)())
    if options.layer_decay:
        groups = param_groups_layer_decay(
            backbone, options.weight_decay, no_weight_decay_list=exempt, layer_decay=options.layer_decay
        )
        of_backbone = {id(p) for p in backbone.parameters()}
        others = [p for p in module.parameters() if id(p) not in of_backbone and p.requires_grad]
        decayed = {"params": [p for p in others if p.ndim > 1], "weight_decay": options.weight_decay, "lr_scale": 1.0}
        plain = {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0, "lr_scale": 1.0}
        groups += [plain, decayed]
    else:
        patterns = exempt | {f"*.{name}" for name in exempt}
        groups = param_groups_weight_decay(module, options.weight_decay, no_weight_decay_list=patterns)
    groups = [group for group in groups if group["params"]]
    opt = options.opt.lower()
    more: dict[str, Any] = {"fused": True} if "_" not in opt and get_optimizer_class(opt) in (Adam, AdamW, SGD) else {}
    optimizer = create_optimizer_v2(groups, opt=opt, lr=lr, weight_decay=0.0, **more)
    prepare_fused(optimizer)
    return optimizer


def prepare_fused(optimizer: Optimizer) -> None:
    """Make a fused optimizer's state fit its kernel, after it was built and after a state was loaded into it.

    A loaded state may count its updates on the host. SGD's kernel initialises momentum in its first update; if that one
    is left out, it would go on with uninitialised memory.
    """
    if not can_skip_on_device(optimizer):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p] if p in optimizer.state or group.get("momentum") else {}
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
            if group.get("momentum") and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether the optimizer reads on the device whether to leave an update out, as `torch.amp.GradScaler` asks."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, bad: Tensor) -> None:
    """One update of the weights, unless `bad` (a flag on the device) is set.

    The host waits for the flag only where the optimizer cannot read it: timm's own optimizers (lamb, lion and others).
    """
    if can_skip_on_device(optimizer):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.found_inf = None  # type: ignore[attr-defined]
    elif not bool(bad):
        optimizer.step()


class RunningStatistics:
    """Running statistics of batch norms, restored on the device when an update is left out.

    A mean that has seen a value that is not finite stays so for ever.
    """

    def __init__(self, module: nn.Module) -> None:
        names = ("running_mean", "running_var", "num_batches_tracked")
        self.buffers = [buffer for name, buffer in module.named_buffers() if name.endswith(names)]

    def keep(self) -> None:
        """Remember them as they are before an update."""
        self.kept = [buffer.clone() for buffer in self.buffers]

    def restore_if(self, bad: Tensor) -> None:
        """Make them what they were if `bad`, a flag on the device, is set."""
        for buffer, kept in zip(self.buffers, self.kept, strict=True):
            buffer.copy_(torch.where(bad, kept, buffer))


def build_schedule(optimizer: Optimizer, options: OptimOptions, updates_per_epoch: int) -> tuple[Any, int]:
    """timm's schedule, stepped every update; also the number of updates in all.

    "linear" is timm's "poly" with a power of 1. Warm-up and end are never above the learning rate itself, which a small
    batch may have made smaller than them. Where updates are counted (`iters`), an epoch of timm's schedule is one
    update.
    """
    highest = max(group["lr"] for group in optimizer.param_groups)
    linear = options.sched == "linear"
    unit, length = (1, options.iters) if options.iters else (updates_per_epoch, options.epochs)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="poly" if linear else options.sched,
        decay_rate=1.0 if linear else options.decay_rate,
        decay_milestones=list(options.decay_milestones),
        num_epochs=length,
        min_lr=min(options.min_lr, highest),
        warmup_lr=min(options.warmup_lr, highest),
        warmup_epochs=warmup_epochs(options, updates_per_epoch),
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=unit,
    )
    return schedule, length * unit
