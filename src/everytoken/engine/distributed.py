"""One process or many: torchrun sets the environment, this reads it. All collectives are no-ops for one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everytoken.errors import EverytokenError

DEVICES = ("cpu", "cuda", "mps")


class LostPeerError(EverytokenError):
    """Another process of the job ended."""


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Attributes:
        rank: 0 to size - 1; rank 0 writes.
        size: number of processes.
        device: where this process computes.
    """

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
        if self.size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in order of rank."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Give every process rank 0's buffers: running means differ between processes, and the weights file has his."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()


def best_device() -> str:
    """cuda, mps or cpu, the first there is."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(name: str) -> None:
    """Raise if torch cannot compute there; an empty name stands for the best there is."""
    kind, _, number = name.partition(":")
    if not name or kind == "cpu":
        return
    if kind not in DEVICES or (number and not number.isdecimal()):
        raise EverytokenError(f"--device is {name!r}; it can be cpu, cuda, cuda:1 and so on, or mps")
    there = torch.cuda.device_count() if kind == "cuda" else int(torch.backends.mps.is_available())
    if int(number or 0) >= there:
        raise EverytokenError(
            f"--device is {name!r}, and torch finds {there or 'no'} such device{'s' if there != 1 else ''} on this "
            "machine; take --device cpu, or leave it out for the best there is (`everytoken doctor` tells more)"
        )


def pick_device(name: str) -> str:
    """The device that was asked for, if it is there; the best one if none was."""
    check_device(name)
    return name or best_device()


@contextmanager
def join_world(device: str = "", timeout_minutes: float = 30.0) -> Iterator[World]:
    """Join the processes that torchrun started, or be alone.

    A lost peer ends the job with one clear message instead of a long traceback.
    """
    kind = pick_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if kind == "cuda" and size > 1:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        kind = f"cuda:{local}"
    world = World(rank, size, torch.device(kind))
    if size == 1:
        yield world
        return
    dist.init_process_group("nccl" if kind.startswith("cuda") else "gloo", timeout=timedelta(minutes=timeout_minutes))
    try:
        yield world
    except RuntimeError as error:
        text = str(error)
        if any(word in text for word in ("Connection closed", "Connection reset", "peer", "NCCL", "Broken pipe")):
            raise LostPeerError(
                f"rank {rank} lost contact with another process of the job ({text.splitlines()[0][:120]}). The last "
                "good checkpoint is kept; start the same command again and it goes on from there."
            ) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
