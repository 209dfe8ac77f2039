"""How a module is spread over processes, and how its state is gathered again: alone, DDP, or FSDP2.

DDP copies everything to every process and is the default. FSDP2 (`--fsdp`) shards weights, gradients and optimizer
state, block by block, for models that do not fit otherwise; checkpoints are gathered to whole state dicts, so that they
look the same and a run can go on with another number of processes, or with DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everytoken.engine.distributed import World


def spread(module: nn.Module, backbone: nn.Module, world: World, fsdp: bool) -> nn.Module:
    """What is called in training. With FSDP the module itself is changed, so this comes before the optimizer."""
    if world.size == 1:
        return module
    if not fsdp:
        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in _blocks(backbone):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _blocks(backbone: nn.Module) -> list[nn.Module]:
    """The repeated parts of a backbone: the members of its longest lists of layers."""
    lists = [m for m in backbone.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    found: list[nn.Module] = []
    inside: set[int] = set()
    for group in sorted(lists, key=lambda g: -sum(p.numel() for p in g.parameters())):
        kinds = {type(m) for m in group}
        if len(kinds) == 1 and id(group) not in inside and not any(id(m) in inside for m in group):
            members = [m for m in group if any(True for _ in m.parameters())]
            found += members
            inside |= {id(inner) for m in members for inner in m.modules()}
    return found


def module_state(module: nn.Module, fsdp: bool) -> dict[str, Any]:
    """The whole state dict. With FSDP every process must call this; the first gets the content."""
    if not fsdp:
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_module_state(module: nn.Module, state: dict[str, Any], fsdp: bool) -> None:
    """The reverse."""
    if not fsdp:
        module.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))


def optimizer_state(module: nn.Module, optimizer: Optimizer, fsdp: bool) -> dict[str, Any]:
    """The optimizer's state by names of weights, so that it does not depend on how they are spread."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=fsdp, cpu_offload=fsdp)
    return dict(get_optimizer_state_dict(module, optimizer, options=options))


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: dict[str, Any], fsdp: bool) -> None:
    """The reverse."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=fsdp))


def whole(value: Tensor) -> Tensor:
    """A sharded tensor, put together; others as they are."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def mean_over(values: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The mean of each value over the processes, for the log."""
    if world.size == 1 or not values:
        return values
    stacked = world.add(torch.stack([v.detach().float().reshape(()) for v in values.values()])) / world.size
    return dict(zip(values, stacked.unbind(), strict=True))
