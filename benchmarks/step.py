"""What a training step costs beyond the network, for every objective.

    python benchmarks/step.py [--batch 4] [--repeats 5]

Three questions, each answered by ratios from one process with interleaved repeats, in processor time:
1. Forward and backward of lvvit_s at 224 with each objective and the mixing it is usually trained with, against the
   same with plain labels. Beside it the floor: the multiply-adds that the method cannot do without (token head,
   teacher, drloc's MLP, labels through attention), over those of the plain step.
2. The loop's own work per update (seeding, logging, schedule, checks), timed with a network of a few weights, as a part
   of a step of lvvit_t.
3. Mixed precision on the CPU: a ViT on 8x8 tokens in bfloat16, with torch's fused attention, with its fallback, and
   with matrices that the layers make, as classification trains grids of up to 16x16, against float32.
Exit code 1 when token labeling is above 1.02 in all repeats, or the loop above 3 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np
import timm
import torch
from ratios import Ratio, judge
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import everytoken  # noqa: F401
from everytoken.data.batch import Batch
from everytoken.functional import MapBatch
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.models import TokenModel
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher, TokenStep
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.loop import Loop
from everytoken_lab.engine.options import DataOptions, ModelOptions, OptimOptions, RunOptions, TrainOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.engine.task import Task

WORLD = World(0, 1, torch.device("cpu"))
LIMIT = 1.02
NORM = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def fake_batch(size: int, classes: int = 1000, words: int = 40) -> Batch:
    """Images with smooth maps of a few tens of classes, cropped."""
    rng = np.random.default_rng(0)
    local = rng.integers(0, words // 5, (size, 18, 18, 1)) * 5 + np.arange(5)
    vocabulary = np.stack([np.sort(rng.permutation(classes)[:words]) for _ in range(size)])
    scores = -np.sort(-rng.normal(4, 2, (size, 18, 18, 5)), axis=-1)
    maps = MapBatch(
        torch.from_numpy(scores).half(), torch.from_numpy(local.astype(np.uint8)),
        torch.from_numpy(vocabulary), torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(size, 1), classes,
    )  # fmt: skip
    crop = torch.tensor([[0.6, 0.0, 0.2], [0.0, 0.7, 0.1]]).repeat(size, 1, 1)
    labels = torch.from_numpy(rng.integers(0, classes, size))
    return Batch(torch.randn(size, 3, 224, 224), labels, maps=maps, placement=crop).plan((14, 14))


def seconds(step: TokenStep, batch: Batch, number: int) -> float:
    """Processor time of one forward and backward pass."""
    started = time.process_time()
    step(replace(batch, key=StepKey(0, number)))["loss"].backward()
    spent = time.process_time() - started
    step.zero_grad(set_to_none=True)
    return spent


def objectives() -> dict[str, tuple[dict[str, Any], dict[str, Any], float]]:
    """name -> (objectives, mixing, multiply-adds per image it needs, of forward and backward)."""
    n, d, k, teacher = 196, 384, 1000, 4.1e9
    head = 3 * n * d * k
    # drloc: 64 pairs through (2d, 512), (512, 512), (512, 2); alignment: two shares through 6 heads of 16 blocks
    mlp = 3 * 64 * (2 * d * 512 + 512 * 512 + 512 * 2)
    labels = 16 * 6 * 2 * (n + 1) ** 2
    return {
        "plain": ({"hard": {}}, {}, 0.0),
        "plain, CutMix": ({"hard": {}}, {"cutmix": {}}, 0.0),
        "plain, MixToken": ({"hard": {}}, {"mixtoken": {}}, 0.0),
        "relabel, CutMix": ({"relabel": {}}, {"cutmix": {}}, 0.0),
        "token_labeling, MixToken": ({"token_labeling": {}}, {"mixtoken": {}}, head),
        "drloc": ({"hard": {}, "drloc": {}}, {}, mlp),
        "tl_align, CutMix": ({"tl_align": {}}, {"cutmix": {}}, labels),
        "transmix, CutMix": ({"transmix": {}}, {"cutmix": {}}, 0.0),
        "distillation, a ResNet-50": ({"hard": {}, "distillation": {}}, {}, teacher),
        "online_token, a ResNet-50": ({"online_token": {}}, {}, head + teacher),
    }


def every_objective(batch_size: int, repeats: int) -> bool:
    """Question 1."""
    torch.manual_seed(0)
    teacher = FrozenTeacher(TokenModel(timm.create_model("resnet50")), NORM, NORM)
    steps = {}
    for name, (wanted, mixing, _) in objectives().items():
        model = TokenModel(timm.create_model("lvvit_s"), 1000 if "token" in " ".join(wanted) else None)
        taught = teacher if wanted.keys() & {"distillation", "online_token"} else None
        steps[name] = TokenStep(model, build_objectives(wanted, model), build_mixer(mixing), taught).train()
        steps[name].grid = (14, 14)
    batch = fake_batch(batch_size)
    ratios: dict[str, list[float]] = {name: [] for name in steps if name != "plain"}
    for step in steps.values():
        seconds(step, batch, 0)
    for number in range(1, repeats + 1):  # plain before and after, so that a drifting machine cancels out
        for name, found in ratios.items():
            order = ["plain", name, name, "plain"] if number % 2 else [name, "plain", "plain", name]
            times = [(one, seconds(steps[one], batch, number)) for one in order]
            ours, plain = (sum(t for one, t in times if (one == name) == mine) for mine in (True, False))
            found.append(ours / plain)
    held = True
    print(f"lvvit_s, forward and backward, batch {batch_size}, {repeats} repeats; median and range of the ratios\n")
    print(f"{'step':28s} {'/ plain':>8s} {'range':>16s} {'floor':>7s}")
    for name, found in ratios.items():
        found.sort()
        low, high, middle = found[0], found[-1], statistics.median(found)
        print(f"{name:28s} {middle:8.3f} {low:8.3f}-{high:.3f} {1 + objectives()[name][2] / (3 * 6.476e9):9.3f}")
        if name == "token_labeling, MixToken":
            held = judge("token labeling in a step of lvvit_s", Ratio(middle, low, high), at_most=LIMIT)
    print()
    return held


class Tiny(nn.Module):
    """A network whose own work is nearly nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """A loss of the two weights."""
        return {"loss": (self.weight - 1).square().sum()}


class TinyTask(Task):
    """For the loop alone."""

    def __init__(self, updates: int, options: TrainOptions, folder: RunFolder) -> None:
        super().__init__(Tiny(), options, WORLD, folder)
        self.batches_per_epoch = updates

    @property
    def backbone(self) -> nn.Module:
        """All of it."""
        return self.module

    def train_batches(self, epoch: int, start: int):
        """The same small batch again and again."""
        batch = Batch(torch.zeros(64, 1, 1, 1), keys=("k",) * 64)
        for _ in range(start, self.batches_per_epoch):
            yield batch


def loop_overhead(batch_size: int) -> bool:
    """Question 2."""
    updates = 400
    options = TrainOptions(
        data="x", model=ModelOptions(), dataset=DataOptions(batch_size=64),
        optim=OptimOptions(epochs=1, lr=0.1, warmup_epochs=0), run=RunOptions(log_interval=50),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(folder)
        run.open()
        loop = Loop(TinyTask(updates, options, run), options, run, WORLD)
        started = time.process_time()
        loop._train()
        own = (time.process_time() - started) / updates
    model = TokenModel(timm.create_model("lvvit_t"))
    step = TokenStep(model, build_objectives({}, model)).train()
    batch = fake_batch(batch_size)
    full = statistics.median(seconds(step, batch, i) for i in range(3)) * 64 / batch_size
    print(f"the loop's own work: {own * 1e3:.2f} ms per update; lvvit_t step at batch 64: {full * 1e3:.0f} ms")
    return judge("the loop's own part of an update", Ratio(own / full, own / full, own / full), at_most=0.03)


def mixed_precision(repeats: int) -> None:
    """Question 3."""
    model = TokenModel(timm.create_model("vit_nano_patch4_32", embed_dim=96, depth=6, num_heads=3))
    step = TokenStep(model, build_objectives({}, model)).train()
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    batch = Batch(torch.randn(50, 3, 32, 32), torch.arange(50) % 10)
    # type, does the layer call torch's attention, and with which kernel
    ways = {
        "float32": (False, True, SDPBackend.FLASH_ATTENTION),
        "bfloat16, fused": (True, True, SDPBackend.FLASH_ATTENTION),
        "bfloat16, torch's own matrices": (True, True, SDPBackend.MATH),
        "bfloat16, the layer's matrices": (True, False, SDPBackend.MATH),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, (half, fused, kernel) in ways.items():
            for layer in layers:
                layer.fused_attn = fused
            with torch.autocast("cpu", torch.bfloat16, enabled=half), sdpa_kernel(kernel):
                times[name].append(seconds(step, batch, number))
    for name in list(ways)[1:]:
        ratios = sorted(a / b for a, b in zip(times[name][1:], times["float32"][1:], strict=True))
        print(f"ViT, 8x8 tokens: {name} / float32 {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mixed_precision(2 * arguments.repeats)
    held = [every_objective(arguments.batch, arguments.repeats), loop_overhead(arguments.batch)]
    raise SystemExit(0 if all(held) else 1)
