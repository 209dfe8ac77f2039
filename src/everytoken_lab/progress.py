"""How far a long job is: a bar with rate and time left, or a plain line now and then when nobody watches."""

from __future__ import annotations

import sys
import time

import rich.progress
from rich.console import Console

from everytoken_lab.schema import say, shown


def clock(seconds: float) -> str:
    """90 -> '1:30'; 7300 -> '2:01:40'."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Progress:
    """Shows the progress of a command on stderr: call it with (done, total). A context manager.

    The rate is measured from the first call on: opening data and models is not part of it.

    Args:
        job: its name.
        unit: what is counted, "files" for example; "B" for bytes.
        every: seconds between plain lines.
        keep: leave the bar on the terminal when the job is done.
    """

    def __init__(self, job: str, unit: str, every: float = 10.0, keep: bool = True) -> None:
        self.job, self.unit, self.every = job, unit, every
        self._bar: rich.progress.Progress | None = None
        self._last = 0.0
        self._first: tuple[float, int] | None = None  # when, and what was done then
        console = Console(stderr=True)
        if console.is_terminal:
            columns = (
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[rate]}"),
                rich.progress.TimeRemainingColumn(),
            )
            self._bar = rich.progress.Progress(*columns, console=console, transient=not keep)
            self._task = self._bar.add_task(job, total=None, rate="")

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Show how far it is; `doing` is shown behind the name of the job."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._last = (now, done), now
        rate = (done - self._first[1]) / max(now - self._first[0], 1e-9)
        amount = f"{self._amount(done).removesuffix(f' {self.unit}')} of {self._amount(total)}"
        amount += f", {self._amount(rate)}/s" if rate > 0 else ""
        title = shown(f"{self.job} {doing}").rstrip()
        if self._bar is not None:
            self._bar.update(self._task, description=title, completed=done, total=total, rate=amount)
        elif now - self._last >= self.every:
            self._last = now
            left = f", {clock((total - done) / rate)} left" if rate > 0 else ""
            say(f"{title}: {amount}{left}", file=sys.stderr)

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
        few = isinstance(number, float) and number < 10  # a rate
        return f"{number:.2g} {self.unit}" if few else f"{number:,.0f} {self.unit}"

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
