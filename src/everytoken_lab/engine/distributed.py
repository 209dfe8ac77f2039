"""One process or many: torchrun sets the environment, this reads it. All collectives are no-ops for one process.

DDP copies everything to every process and is the default. FSDP2 (`fsdp`) shards weights, gradients, optimizer state and
averaged weights, block by block. Checkpoints do not depend on it: a run continues with any number of processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everytoken.errors import EverytokenError
from everytoken.files import disk_errors, open_new, temporary_name


@dataclass(frozen=True)
class World:
    """This process (rank 0 to size - 1; rank 0 writes) among its peers, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        value = torch.tensor([int(flag)])  # on the host, through gloo: nobody waits for a GPU
        if self.size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank."""
        out = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(out, value)
        return out

    @contextmanager
    def agree(self) -> Iterator[None]:
        """An error inside, in one process, is raised in all of them, so that none waits for the others."""
        error = None
        try:
            yield
        except EverytokenError as raised:
            error = raised
        for of_rank in self.gather(error):
            if of_rank is not None:
                raise of_rank if error is None else error

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Give every process rank 0's buffers: running means differ between processes, and files hold rank 0's."""
        for buffer in module.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()

    def shares(self, folder: Path) -> bool:
        """Whether `folder`, which is made, is the same for all processes: whether they share its disk."""
        if self.size == 1:
            return True
        mark = temporary_name(folder / "here", self.rank)
        with self.agree(), disk_errors(folder, "looking who shares it"):
            folder.mkdir(parents=True, exist_ok=True)
            os.close(open_new(mark))
        try:
            marks, until = self.gather(mark.name), time.monotonic() + 5
            while not (there := set(os.listdir(folder)).issuperset(marks)) and time.monotonic() < until:
                time.sleep(0.1)  # network disks may be late
            return not self.any(not there)
        finally:
            mark.unlink(missing_ok=True)


def pick_device(name: str) -> str:
    """The device that was asked for, if torch finds it; else the first that there is of cuda, mps and cpu."""
    kind, _, number = name.partition(":")
    if not name:
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cpu":
        return name
    if kind not in ("cuda", "mps") or (number and not number.isdecimal()):
        raise EverytokenError(f"device is {name!r}; it can be cpu, cuda, cuda:1 and so on, or mps")
    there = torch.cuda.device_count() if kind == "cuda" else int(torch.backends.mps.is_available())
    if int(number or 0) >= there:
        found = f"{there or 'no'} such device{'s' if there != 1 else ''} on this machine"
        raise EverytokenError(f"device is {name!r}, and torch finds {found}; take cpu, or leave it out")
    return name


@contextmanager
def kernel_settings(device: torch.device) -> Iterator[None]:
    """Kernels for a training on CUDA; restores the settings afterwards.

    Float32 matrix products and convolutions may use TF32, and cuDNN tries its algorithms once per shape.
    """
    cudnn = torch.backends.cudnn
    precision, benchmark = torch.get_float32_matmul_precision(), cudnn.benchmark
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.benchmark = benchmark


@contextmanager
def join_world(device: str = "", timeout_minutes: float = 30.0) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone; a lost peer ends the job with one sentence."""
    kind = pick_device(device)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if kind == "cuda" and size > 1:
        # some launchers show each process its own GPU only, which then is number 0 for all of them
        local = int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0
        torch.cuda.set_device(local)
        kind = f"cuda:{local}"
    world = World(rank, size, torch.device(kind))
    if size == 1:
        yield world
        return
    # NCCL for what is on GPUs, gloo for what the hosts have to tell each other
    backend = "cpu:gloo,cuda:nccl" if kind.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        yield world
    except RuntimeError as error:
        text = str(error)
        if any(word in text for word in ("Connection closed", "Connection reset", "peer", "NCCL", "Broken pipe")):
            cause = text.splitlines()[0].split("] ", 1)[-1].split(". ")[0][:120]  # without the place in gloo's code
            what = f"rank {rank} lost contact with another process of the job ({cause})"
            way = "The last good checkpoint is kept; run the same again and it continues from there."
            raise EverytokenError(f"{what}. {way}") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def distribute(module: nn.Module, backbone: nn.Module, world: World, fsdp: bool) -> nn.Module:
    """What is called in training. With FSDP the module itself is changed, so this comes before the optimizer."""
    if fsdp:
        shard(module, backbone, world)
        return module
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids) if world.size > 1 else module


def shard(module: nn.Module, backbone: nn.Module, world: World) -> None:
    """Spread the module's weights over the processes, block by block of its backbone (FSDP2)."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*_blocks(backbone), module):
        fully_shard(part, mesh=mesh)


class ShardedAverage(ModelEmaV3):
    """An average of weights that is sharded like them. A sharded module cannot be copied, so this is made first."""

    def _foreach_lerp_(self, ema_values: list[Tensor], model_values: list[Tensor], weight: float) -> None:
        # torch does not take sharded tensors and plain ones (buffers) in one list
        local = [[v.to_local() if isinstance(v, DTensor) else v for v in part] for part in (ema_values, model_values)]
        super()._foreach_lerp_(*local, weight)

    def shard_twin(self, module: nn.Module, backbone: nn.Module, world: World) -> None:
        """Shard the copy; `module` is what was copied, and `backbone` a part of it."""
        name = next(name for name, part in module.named_modules() if part is backbone)
        shard(self.module, self.module.get_submodule(name), world)


def _blocks(backbone: nn.Module) -> list[nn.Module]:
    """The repeated parts of a backbone: the members of its longest lists of layers."""
    lists = [m for m in backbone.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    blocks, inside = list[nn.Module](), set[nn.Module]()
    for group in sorted(lists, key=lambda g: -sum(p.numel() for p in g.parameters())):
        if len({type(m) for m in group}) == 1 and group not in inside and inside.isdisjoint(group):
            members = [m for m in group if any(True for _ in m.parameters())]
            blocks += members
            inside |= {inner for m in members for inner in m.modules()}
    return blocks


_WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def module_state(module: nn.Module, fsdp: bool) -> dict[str, Any]:
    """The whole state dict. With FSDP every process must call this; the first gets the content."""
    return dcp.get_model_state_dict(module, options=_WHOLE) if fsdp else module.state_dict()


def optimizer_state(module: nn.Module, optimizer: Optimizer, fsdp: bool) -> dict[str, Any]:
    """The optimizer's state by names of weights; with FSDP as `module_state`."""
    return dict(dcp.get_optimizer_state_dict(module, optimizer, options=_WHOLE if fsdp else None))


def load_module_state(module: nn.Module, state: dict[str, Any], fsdp: bool) -> None:
    """The reverse of `module_state`; every process has the whole state."""
    dcp.set_model_state_dict(module, state, options=dcp.StateDictOptions(full_state_dict=fsdp))


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: dict[str, Any], fsdp: bool) -> None:
    """The reverse of `optimizer_state`."""
    dcp.set_optimizer_state_dict(module, optimizer, state, options=dcp.StateDictOptions(full_state_dict=fsdp))


def whole(value: Tensor) -> Tensor:
    """A sharded tensor, put together; others as they are."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over(values: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The mean of each value over the processes, for the log."""
    if world.size == 1 or not values:
        return values
    stacked = world.add(torch.stack([v.detach().float().reshape(()) for v in values.values()])) / world.size
    return dict(zip(values, stacked, strict=True))
