"""What dense relative localization costs in a training step, against its multiply-add floor.

    OMP_NUM_THREADS=1 python benchmarks/drloc.py                  # swin_tiny and deit_small at 224, a few minutes
    OMP_NUM_THREADS=1 python benchmarks/drloc.py --repeats 40     # narrower intervals

The floor is the number of multiply-adds that the paper's form of the loss (m pairs, concatenated) adds to a step of
forward and backward, over those of the step without it, both counted. Three times are taken in turn, again and again,
and compared pair by pair, as processor time, which a busy machine disturbs least:
    step    forward, cross entropy, backward, AdamW
    part    what drloc adds: sampling, pooling, MLP forward and backward, AdamW of the MLP; on a grid that is there
    both    a step with drloc in it
"part / step" is the precise number, "both / step - 1" the honest one with its noise. Exit code 1 when part / step is
above 1.3 times the floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import timm
import torch
from ratios import Ratio, judge
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import everytoken  # noqa: F401  (registers the models)
from everytoken.functional import drloc as fn
from everytoken.models import TokenModel
from everytoken.objectives.drloc import Drloc

LIMIT = 1.3


@dataclass
class Bench:
    """A model with and without drloc, on one batch."""

    name: str
    batch: int
    pairs: int
    size: int = 224

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = TokenModel(timm.create_model(self.name, img_size=self.size)).train()
        self.drloc = Drloc(self.model, pairs=self.pairs)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.head_optimizer = torch.optim.AdamW(self.drloc.modules().parameters(), lr=1e-4, fused=True)
        self.images = torch.randn(self.batch, 3, self.size, self.size)
        self.labels = torch.randint(1000, (self.batch,))
        self.generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.grid = self.model(self.images).grid.clone()

    def step(self) -> None:
        """Without drloc."""
        F.cross_entropy(self.model(self.images).logits, self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def both(self) -> None:
        """With drloc."""
        view = self.model(self.images)
        loss = F.cross_entropy(view.logits, self.labels)
        (loss + self.drloc.weight * self.drloc.loss(view.grid, self.generator)).backward()
        for optimizer in (self.optimizer, self.head_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def part(self) -> None:
        """What drloc adds."""
        grid = self.grid.detach().requires_grad_()
        (self.drloc.weight * self.drloc.loss(grid, self.generator)).backward()
        self.head_optimizer.step()
        self.head_optimizer.zero_grad()

    def concatenated(self) -> None:
        """The multiply-adds of the paper's form: every pair through all three layers."""
        tokens = fn.pool_grid(self.grid, (7, 7)).flatten(1, 2).detach().requires_grad_()
        first, second = fn.random_pairs(self.batch, self.pairs, (7, 7), self.generator)

        def pick(positions: Tensor) -> Tensor:
            return tokens.gather(1, positions.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))

        answer = self.drloc.heads[0].layers(torch.cat([pick(first), pick(second)], -1))
        answer.sum().backward()


def multiply_adds(run: Callable[[], None]) -> float:
    """Of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / 2


def seconds(run: Callable[[], None], calls: int = 1) -> float:
    """Processor time of a call; the median of several."""
    times = []
    for _ in range(calls):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return float(np.median(times))


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Median and its 90 % interval, by resampling."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.05, 0.95])
    return float(np.median(values)), float(low), float(high)


def main() -> int:
    """Measure, print a table, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["swin_tiny_patch4_window7_224", "deit_small_patch16_224"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    columns = ["model", "floor", "counted", "part / step", "both / step - 1", "of the floor"]
    table = Table(*columns, title=f"drloc, {options.pairs} pairs, batch {options.batch}, {options.repeats} repeats")
    goals = []
    for name in options.models:
        bench = Bench(name, options.batch, options.pairs)
        whole = multiply_adds(bench.step)
        floor, counted = multiply_adds(bench.concatenated) / whole, multiply_adds(bench.part) / whole
        for run in (bench.step, bench.part, bench.both):
            run()
        rows = []
        for repeat in range(options.repeats):
            order = [bench.step, bench.part, bench.both]
            # the part is a hundredth of the others, so a single call of it would be mostly noise
            times = {
                run.__name__: seconds(run, 7 if run.__name__ == "part" else 1)
                for run in (order if repeat % 2 else order[::-1])
            }
            rows.append((times["part"] / times["step"], times["both"] / times["step"] - 1))
        ratios = np.array(rows)
        part, both = interval(ratios[:, 0]), interval(ratios[:, 1])
        goals.append((f"drloc in a step of {name}, of its floor", Ratio(*(value / floor for value in part))))
        table.add_row(
            name,
            f"{floor:.2%}",
            f"{counted:.2%}",
            f"{part[0]:.2%} ({part[1]:.2%} to {part[2]:.2%})",
            f"{both[0]:.1%} ({both[1]:.1%} to {both[2]:.1%})",
            f"{part[0] / floor:.2f} x",
        )
    Console(width=140).print(table)
    held = [judge(what, found, at_most=LIMIT) for what, found in goals]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
