"""What a person sees while training: a bar on a terminal, steady log lines elsewhere, rows in the metrics file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from everytoken_lab.engine.distributed import World, mean_over
from everytoken_lab.progress import Progress, clock

if TYPE_CHECKING:
    from everytoken_lab.engine.loop import Loop


B = TypeVar("B", bound=Sized)


def watched(batches: Iterable[B], total: int, world: World) -> Iterator[B]:
    """Hand batches on and show how far validation is: a bar on a terminal, a plain line every half minute elsewhere."""
    if not world.is_main:
        yield from batches
        return
    done = 0
    with Progress("validation", "images", every=30, keep=False) as progress:
        for batch in batches:
            yield batch
            done += len(batch) * world.size
            progress(min(done, total), total)


class TrainingProgress(ExitStack):
    """Progress until the next validation; a context manager.

    Loss terms stay on the device until they are recorded: what is shown in between are the terms of the last record (on
    the CPU, of the last update).
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.images = self.updates = 0
        self.waited = self.spent = 0.0
        self.shown = time.monotonic()
        self.values: dict[str, float] = {}  # of the terms, when they were last read
        on_terminal = loop.world.is_main and sys.stderr.isatty()
        self.bar = self.enter_context(Progress("training", "updates", keep=False)) if on_terminal else None

    def update(self, terms: Mapping[str, Tensor], images: int, waited: float, spent: float) -> None:
        """Count one update; show and record it when it is time."""
        loop = self.loop
        self.images += images
        self.updates += 1
        self.waited += waited
        self.spent += spent
        last = loop.validation_is_due()
        record = last or loop.step % loop.options.run.log_interval == 0
        pause = 30.0 if self.bar is None else 0.5
        show = loop.world.is_main and (last or time.monotonic() - self.shown > pause)
        if not (record or show):
            return
        if record:  # at the same updates on every process
            terms = mean_over(dict(terms), loop.world)
        if record or loop.world.device.type == "cpu":
            scalars = torch.stack([value.detach().float().reshape(()) for value in terms.values()])
            self.values = dict(zip(terms, scalars.tolist(), strict=True))
        rate, waiting = self.images * loop.world.size / max(self.spent, 1e-9), self.waited / max(self.spent, 1e-9)
        lr = max(group["lr"] for group in loop.optimizer.param_groups)
        if record:
            epoch = round(loop.place / loop.total * loop.epochs, 4)
            row = {"kind": "step", "step": loop.step, "epoch": epoch, "lr": lr, **self.values}
            loop.folder.record({**row, "images_per_second": round(rate, 2), "waiting": round(waiting, 4)})
        if show:
            self.shown = time.monotonic()
            losses = " ".join(f"{key} {value:.3f}" for key, value in self.values.items() if key != "grad_norm")
            if self.bar is not None:
                self.bar(loop.place, loop.total, losses)
            else:
                left = clock((loop.total - loop.place) * self.spent / self.updates)
                facts = f"{rate:.1f} images/s, waiting {waiting:.0%}, lr {lr:.2g}, {left} left"
                loop.folder.log(f"{loop.when()}: {losses} | {facts}")
