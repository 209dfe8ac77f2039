"""What a person sees while training: a bar on a terminal, steady plain lines elsewhere, rows in the metrics file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from everytoken._meter import Meter, clock
from everytoken.engine.distributed import World
from everytoken.engine.sharding import mean_over

if TYPE_CHECKING:
    from everytoken.engine.loop import Loop


B = TypeVar("B", bound=Sized)


def watched(batches: Iterable[B], total: int, world: World) -> Iterator[B]:
    """Hand batches on and show how far validation is: a bar on a terminal, a plain line every half minute elsewhere."""
    if not world.is_main:
        yield from batches
        return
    done = 0
    with Meter("validation", "images", every=30, keep=False) as meter:
        for batch in batches:
            yield batch
            done += len(batch) * world.size
            meter(min(done, total), total)


def tell_score(loop: Loop, score: float) -> None:
    """A line about the validation of the epoch that has just ended."""
    text = f"epoch {loop.epoch}/{loop.epochs}: validation {loop.task.score_name} {score:.2f}"
    if loop.best["epoch"] != loop.epoch:
        text += f" (best {loop.best['score']:.2f} at epoch {loop.best['epoch']:.0f})"
    if loop.world.is_main:
        print(text, flush=True)
    loop.folder.say(text)


class Progress:
    """Progress of one epoch. Loss terms stay on the device until they are shown, so showing costs no wait per step."""

    def __init__(self, loop: Loop, epoch: int) -> None:
        self.loop, self.epoch = loop, epoch
        self.images = 0
        self.waited = self.spent = 0.0
        self.shown = time.monotonic()
        self.bar: Any = None
        self.task_id: Any = None

    def __enter__(self) -> Progress:
        if self.loop.world.is_main and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}")
            )
            self.bar.start()
            total, done = self.loop.updates_per_epoch, self.loop.place % self.loop.updates_per_epoch
            title = f"epoch {self.epoch + 1}/{self.loop.epochs}"
            self.task_id = self.bar.add_task(title, total=total, completed=done, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, terms: Mapping[str, Tensor], images: int, waited: float, spent: float) -> None:
        """Count one update; show and record it when it is time."""
        loop = self.loop
        self.images += images
        self.waited += waited
        self.spent += spent
        last = loop.place % loop.updates_per_epoch == 0
        record = last or loop.step % loop.options.run.log_interval == 0
        pause = 0.5 if self.bar is not None else 30.0
        show = loop.world.is_main and (last or time.monotonic() - self.shown > pause)
        if not (record or show):
            return
        if record:  # at the same updates on every process
            terms = mean_over(dict(terms), loop.world)
        values = {key: float(value) for key, value in terms.items()}
        rate = self.images * loop.world.size / max(self.spent, 1e-9)
        lr = max(group["lr"] for group in loop.optimizer.param_groups)
        share = self.waited / max(self.spent, 1e-9)
        if record:
            row = {"kind": "step", "step": loop.step, "epoch": round(loop.place / loop.updates_per_epoch, 4), "lr": lr}
            loop.folder.record({**row, **values, "images_per_second": round(rate, 2), "waiting": round(share, 4)})
        if show:
            self.shown = time.monotonic()
            left = (loop.epochs * loop.updates_per_epoch - loop.place) * self._seconds_per_update()
            facts = " ".join(f"{key} {value:.3f}" for key, value in values.items() if key != "grad_norm")
            facts += f" | {rate:.1f} images/s, waiting {share:.0%}, lr {lr:.2g}, {clock(left)} left"
            if self.bar is not None:
                done = loop.place % loop.updates_per_epoch or loop.updates_per_epoch
                self.bar.update(self.task_id, completed=done, facts=facts)
            else:
                line = f"epoch {self.epoch + 1}/{loop.epochs} update {loop.step}: {facts}"
                print(line, flush=True)
                loop.folder.say(line)

    def _seconds_per_update(self) -> float:
        done = max(1, round(self.images / max(1, self.loop.global_batch / self.loop.world.size)))
        return self.spent / done
