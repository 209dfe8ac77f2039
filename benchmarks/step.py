"""What a training step costs beyond the network.

    python benchmarks/step.py [--batch 4] [--repeats 9]

Two questions, each answered by ratios from one process with interleaved repeats:
1. One step of lvvit_s at 224 with token labeling and MixToken against the same step with plain labels (floor: the token
   head's multiply-adds).
2. The loop's own work per update (seeding, logging, schedule, checks), timed with a network of a few weights, as a part
   of a step of lvvit_t.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace

import numpy as np
import timm
import torch
from torch import nn

import everytoken  # noqa: F401
from everytoken.functional import MapBatch
from everytoken.models import TokenModel
from everytoken.objectives import Batch
from everytoken.train.distributed import World
from everytoken.train.loop import Loop
from everytoken.train.options import DataOptions, ModelOptions, OptimOptions, RunOptions, TrainOptions
from everytoken.train.runfolder import RunFolder
from everytoken.train.step import Moment, TokenStep, build_mixer, build_objectives

WORLD = World(0, 1, torch.device("cpu"))


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
    return Batch(torch.randn(size, 3, 224, 224), labels, maps=maps, placement=crop).prepare((14, 14))


def seconds(step: TokenStep, batch: Batch, number: int) -> float:
    """Processor time of one forward and backward pass."""
    started = time.process_time()
    step(batch, Moment(0, number))["loss"].backward()
    spent = time.process_time() - started
    step.zero_grad(set_to_none=True)
    return spent


def token_labeling(batch_size: int, repeats: int) -> None:
    """Question 1."""
    steps = {}
    for name, objectives, mixing, head in (
        ("plain", {"hard": {}}, {}, None),
        ("token labeling + MixToken", {"token": {}}, {"mixtoken": {}}, 1000),
    ):
        model = TokenModel(timm.create_model("lvvit_s"), head)
        steps[name] = TokenStep(model, build_objectives(objectives, model), build_mixer(mixing)).train()
        steps[name].grid = (14, 14)
    batch = fake_batch(batch_size)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 1):
        for name, step in steps.items():
            spent = seconds(step, batch, number)
            if number:
                times[name].append(spent)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    low, high = sorted(ratios)[len(ratios) // 10], sorted(ratios)[-1 - len(ratios) // 10]
    floor = 1 + 196 * 384 * 1000 / 6.476e9
    print(f"lvvit_s step, token labeling + MixToken / plain: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    print(f"  floor by multiply-adds: {floor:.3f}; limit 1.02")


class Tiny(nn.Module):
    """A network whose own work is nearly nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Batch, moment: Moment) -> dict[str, torch.Tensor]:
        """A loss of the two weights."""
        return {"loss": (self.weight - 1).square().sum()}


class TinyTask:
    """For the loop alone."""

    def __init__(self, updates: int) -> None:
        self.module = Tiny()
        self.backbone = self.module
        self.batches_per_epoch = updates

    def batches(self, epoch: int, start: int):
        """The same small batch again and again."""
        batch = Batch(torch.zeros(64, 1, 1, 1), keys=("k",) * 64)
        for _ in range(start, self.batches_per_epoch):
            yield batch

    def size(self, batch: Batch) -> int:
        """Images."""
        return len(batch)

    def name(self, batch: Batch) -> list[str]:
        """Keys."""
        return list(batch.keys)

    def score(self, module: nn.Module) -> dict[str, float]:
        """Nothing to validate."""
        return {"score": 0.0}

    def weights(self, state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Two numbers."""
        return {"": state}

    def metadata(self) -> dict[str, str]:
        """None."""
        return {}


def loop_overhead(batch_size: int) -> None:
    """Question 2."""
    updates = 400
    options = TrainOptions(
        data="x", model=ModelOptions(), dataset=DataOptions(batch_size=64),
        optim=OptimOptions(epochs=1, lr=0.1, warmup_epochs=0), run=RunOptions(log_interval=50),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(TinyTask(updates), replace(options), RunFolder(folder), WORLD)
        started = time.process_time()
        loop._train_epoch()
        own = (time.process_time() - started) / updates
    model = TokenModel(timm.create_model("lvvit_t"))
    step = TokenStep(model, build_objectives({}, model)).train()
    batch = fake_batch(batch_size)
    full = statistics.median(seconds(step, batch, i) for i in range(3)) * 64 / batch_size
    print(f"the loop's own work: {own * 1e3:.2f} ms per update; lvvit_t step at batch 64: {full * 1e3:.0f} ms: "
          f"{own / full:.3%} (limit 3 %)")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loop_overhead(arguments.batch)
    token_labeling(arguments.batch, arguments.repeats)
