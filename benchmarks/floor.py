"""What a training step costs on paper: multiply-adds, bytes and the least time on a GPU. No GPU is needed or used.

    python benchmarks/floor.py [--batch 128]

FLOPs are counted by `torch.utils.flop_counter` on tensors without values (two per multiply-add; matrix products,
convolutions and attention). Bytes are the sizes of what every operator of the forward and backward pass reads and
writes, views left out, as if nothing stayed in a cache: an upper bound, which fused kernels (torch.compile) undercut.
TL-Align's second attention call is counted as the CPU makes it, with V as wide as Q; on CUDA V has 8 columns.
The floor is the larger of FLOPs / peak and (least bytes) / bandwidth, where the least bytes are weights, gradients and
optimizer state once, and every saved activation written and read once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from everytoken.data.batch import Batch
from everytoken.functional import CompactTarget
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.models import TokenModel
from everytoken.objectives.registry import build_objectives
from everytoken.step import TokenStep, probe

# From the vendors' data sheets, dense: (bfloat16 FLOP/s, bytes/s).
DEVICES = {"A100 80GB": (312e12, 2.04e12), "H100 SXM": (989e12, 3.35e12)}
CLASSES, VOCABULARY = 1000, 32  # classes that occur in the maps of one image
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LV-ViT-S": ("lvvit_s", {"hard": {}}, {}),
    "LV-ViT-S + MixToken + token labels": ("lvvit_s", {"token_labeling": {}}, {"mixtoken": {}}),
    "DeiT-S, CutMix": ("deit_small_patch16_224", {"hard": {}}, {"cutmix": {}}),
    "DeiT-S + drloc": ("deit_small_patch16_224", {"hard": {}, "drloc": {}}, {"cutmix": {}}),
    "DeiT-S + TL-Align": ("deit_small_patch16_224", {"tl_align": {}}, {"cutmix": {}}),
    "Swin-T, CutMix": ("swin_tiny_patch4_window7_224", {"hard": {}}, {"cutmix": {}}),
    "Swin-T + drloc": ("swin_tiny_patch4_window7_224", {"hard": {}, "drloc": {}}, {"cutmix": {}}),
    "Swin-T + TL-Align": ("swin_tiny_patch4_window7_224", {"tl_align": {}}, {"cutmix": {}}),
}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, and how many of them there are; views and factories of nothing are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "_unsafe_view" not in str(func) and "detach" not in str(func):
            flat = torch.utils._pytree.tree_leaves((args, kwargs, out))
            self.bytes += sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
            self.operators += 1
        return out


@dataclass(frozen=True)
class Cost:
    """Of one training step.

    Attributes:
        flops: forward and backward.
        bytes: as if nothing stayed in a cache.
        saved: bytes that the forward pass keeps for the backward pass.
        state: bytes of weights, gradients and AdamW that an update reads and writes.
        operators: that are not views; about as many kernels are launched.
    """

    flops: int
    bytes: int
    saved: int
    state: int
    operators: int

    def floor(self, device: str) -> float:
        """Least seconds on a device."""
        peak, bandwidth = DEVICES[device]
        return max(self.flops / peak, (2 * self.saved + self.state) / bandwidth)

    def unfused(self, device: str) -> float:
        """Seconds if every operator fetched its inputs from memory and nothing overlapped."""
        peak, bandwidth = DEVICES[device]
        return self.flops / peak + self.bytes / bandwidth


def build(name: str, objectives: dict[str, Any], mixing: dict[str, Any]) -> TokenStep:
    """The step, with weights that have no values."""
    token = CLASSES if "token_labeling" in objectives else None
    model = TokenModel(timm.create_model(name, num_classes=CLASSES), token_classes=token)
    step = TokenStep(model, build_objectives(objectives, model), build_mixer(mixing)).train()
    step.grid = probe(model, (224, 224), 3)
    return step


def fake_batch(size: int, grid: tuple[int, int]) -> Batch:
    """Images, labels and token targets; inside of a FakeTensorMode, none has values."""
    mass, ones = torch.zeros(size, *grid, VOCABULARY), torch.ones(size, *grid)
    classes = torch.zeros(size, VOCABULARY, dtype=torch.int64)
    target = CompactTarget(classes, mass, ones / CLASSES, ones, CLASSES)
    labels = torch.zeros(size, dtype=torch.int64)
    return Batch(torch.zeros(size, 3, 224, 224), labels, token_target=target, key=StepKey(0, 1))


def cost(name: str, objectives: dict[str, Any], mixing: dict[str, Any], size: int) -> Cost:
    """Count one step under bfloat16 autocast."""
    step = build(name, objectives, mixing)
    saved: dict[int, tuple[Any, int]] = {}  # storages by number; they are kept, so that no number is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = (storage, storage.nbytes())
        return tensor

    traffic = Traffic()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in step.modules():
            for key, value in part.named_parameters(recurse=False):
                setattr(part, key, nn.Parameter(torch.empty(value.shape), value.requires_grad))
            for key, value in part.named_buffers(recurse=False):
                part.register_buffer(key, torch.empty(value.shape, dtype=value.dtype))
        assert step.grid is not None
        batch = fake_batch(size, step.grid)
        with FlopCounterMode(display=False) as counter, traffic:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
                loss = step(batch)["loss"]
            loss.backward()
    weights = sum(p.numel() for p in step.parameters() if p.requires_grad)
    # an update reads weight, gradient and two moments and writes all but the gradient, in float32
    state, kept = 7 * 4 * weights, sum(size for _, size in saved.values())
    return Cost(counter.get_total_flops(), traffic.bytes, kept, state, traffic.operators)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    size = parser.parse_args().batch
    devices = " | ".join(f"{name}, ms" for name in DEVICES)
    print(f"| step of {size} images at 224 px | TFLOP | saved, GB | traffic, GB | operators | {devices} |")
    print("|---|---:|---:|---:|---:|" + "---:|" * len(DEVICES))
    for label, setup in METHODS.items():
        c = cost(*setup, size)
        floors = " | ".join(f"{c.floor(name) * 1e3:.1f} to {c.unfused(name) * 1e3:.0f}" for name in DEVICES)
        numbers = f"{c.flops / 1e12:.3f} | {c.saved / 1e9:.2f} | {c.bytes / 1e9:.1f} | {c.operators}"
        print(f"| {label} | {numbers} | {floors} |", flush=True)


if __name__ == "__main__":
    main()
