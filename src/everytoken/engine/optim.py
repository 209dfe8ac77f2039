"""Optimizer and schedule, both timm's; the learning rate follows the real global batch."""

from __future__ import annotations

from typing import Any

from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim import Optimizer

from everytoken.engine.options import OptimOptions


def learning_rate(options: OptimOptions, global_batch: int) -> float:
    """The peak learning rate: `lr` if it is given, else `lr_base` scaled linearly to the global batch.

    The papers: 1e-3 * batch / 640 with token labeling, 1e-3 * batch / 1024 without.
    """
    return options.lr or options.lr_base * global_batch / options.lr_base_size


def build_optimizer(module: nn.Module, backbone: nn.Module, options: OptimOptions, lr: float) -> Optimizer:
    """timm's optimizer over the step module: no decay for biases, norms and what the backbone names.

    With layer decay, the backbone's own layer groups are used and what objectives add keeps the full rate.
    """
    if options.layer_decay:
        from timm.optim import param_groups_layer_decay

        groups = param_groups_layer_decay(backbone, options.weight_decay, layer_decay=options.layer_decay)
        ours = {id(p) for p in backbone.parameters()}
        extra = [p for p in module.parameters() if id(p) not in ours and p.requires_grad]
        if extra:
            groups.append({"params": extra, "lr_scale": 1.0, "weight_decay": options.weight_decay})
        return create_optimizer_v2(groups, opt=options.opt, lr=lr, weight_decay=0.0)
    exempt: set[str] = getattr(backbone, "no_weight_decay", set)()
    names = {n for n, _ in module.named_parameters() if n.rsplit(".", 1)[-1] in exempt or _ends_with_any(n, exempt)}
    decay = [p for n, p in module.named_parameters() if p.requires_grad and p.ndim > 1 and n not in names]
    plain = [p for n, p in module.named_parameters() if p.requires_grad and (p.ndim <= 1 or n in names)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decay, "weight_decay": options.weight_decay}]
    return create_optimizer_v2([g for g in groups if g["params"]], opt=options.opt, lr=lr, weight_decay=0.0)


def _ends_with_any(name: str, exempt: set[str]) -> bool:
    return any(name == e or name.endswith(f".{e}") for e in exempt)


def build_schedule(optimizer: Optimizer, options: OptimOptions, updates_per_epoch: int) -> tuple[Any, int]:
    """timm's schedule, stepped every update; also the number of epochs with cool-down.

    "linear" is timm's "poly" with a power of 1 (its own default, 0.1, is nearly constant). Warm-up and end are never
    above the learning rate itself, which a small batch may have made smaller than them.
    """
    highest = max(group["lr"] for group in optimizer.param_groups)
    linear = options.sched == "linear"
    more: dict[str, Any] = {"decay_rate": 1.0} if linear else {}
    if options.sched == "multistep":
        more = {"decay_rate": options.decay_rate, "decay_milestones": list(options.decay_milestones)}
    schedule, epochs = create_scheduler_v2(
        optimizer,
        sched="poly" if linear else options.sched,
        **more,
        num_epochs=options.epochs,
        cooldown_epochs=options.cooldown_epochs,
        min_lr=min(options.min_lr, highest),
        warmup_lr=min(options.warmup_lr, highest),
        warmup_epochs=options.warmup_epochs,
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return schedule, epochs
