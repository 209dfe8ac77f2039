"""What a person sees while training: a bar on a terminal, steady log lines elsewhere, rows in the metrics file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, TypeVar

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


class TrainingProgress:
    """Progress until the next validation.

    Loss terms stay on the device until they are recorded: what is shown in between are the terms of the last record (on
    the CPU, of the last update).
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.images = self.updates = 0
        self.waited = self.spent = 0.0
        self.shown = time.monotonic()
        self.values: dict[str, float] = {}  # of the terms, when they were last read
        self.bar: Any = None
        self.bar_task: Any = None

    def __enter__(self) -> TrainingProgress:
        loop = self.loop
        if loop.world.is_main and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}")
            )
            self.bar.start()
            self.bar_task = self.bar.add_task("updates", total=loop.total, completed=loop.place, facts="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, terms: Mapping[str, Tensor], images: int, waited: float, spent: float) -> None:
        """Count one update; show and record it when it is time."""
        loop = self.loop
        self.images += images
        self.updates += 1
        self.waited += waited
        self.spent += spent
        last = loop.validation_is_due()
        record = last or loop.step % loop.options.run.log_interval == 0
        pause = 0.5 if self.bar is not None else 30.0
        show = loop.world.is_main and (last or time.monotonic() - self.shown > pause)
        if not (record or show):
            return
        if record:  # at the same updates on every process
            terms = mean_over(dict(terms), loop.world)
        if record or loop.world.device.type == "cpu":
            scalars = torch.stack([value.detach().float().reshape(()) for value in terms.values()])
            self.values = dict(zip(terms, scalars.tolist(), strict=True))
        rate = self.images * loop.world.size / max(self.spent, 1e-9)
        lr = max(group["lr"] for group in loop.optimizer.param_groups)
        waiting = self.waited / max(self.spent, 1e-9)
        if record:
            epoch = round(loop.place / loop.total * loop.epochs, 4)
            row = {"kind": "step", "step": loop.step, "epoch": epoch, "lr": lr, **self.values}
            loop.folder.record({**row, "images_per_second": round(rate, 2), "waiting": round(waiting, 4)})
        if show:
            self.shown = time.monotonic()
            left = (loop.total - loop.place) * self.spent / self.updates
            facts = " ".join(f"{key} {value:.3f}" for key, value in self.values.items() if key != "grad_norm")
            facts += f" | {rate:.1f} images/s, waiting {waiting:.0%}, lr {lr:.2g}, {clock(left)} left"
            if self.bar is not None:
                self.bar.update(self.bar_task, completed=loop.place, facts=facts)
            else:
                loop.folder.log(f"{loop.when()}: {facts}")
