"""How far a long job is: a bar with rate and time left, or a plain line now and then when nobody watches."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def clock(seconds: float) -> str:
    """90 -> '1:30'; 7300 -> '2:01:40'."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Meter:
    """Call it with (done, total); a context manager.

    Args:
        what: name of the job.
        unit: what is counted, "files" for example; "B" for bytes.
        every: seconds between plain lines.
        keep: leave the bar on the terminal when the job is done.
    """

    def __init__(self, what: str, unit: str, every: float = 10.0, keep: bool = True) -> None:
        self.what, self.unit, self.every = what, unit, every
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._begin = self._last = time.monotonic()
        self._first: int | None = None
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=not keep)
            self._task = self._bar.add_task(what, total=None, rate="")

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        """Show how far it is; `doing` is said behind the name of the job."""
        now = time.monotonic()
        self._first = done if self._first is None else self._first
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        words = f"{self._amount(done)} of {self._amount(total)}, {self._rate(rate)}/s"
        what = f"{self.what} {doing}".rstrip()
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=total, rate=words)
        elif now - self._last >= self.every:
            self._last = now
            left = f", {clock((total - done) / rate)} left" if rate > 0 else ""
            print(f"{what}: {words}{left}", file=sys.stderr, flush=True)

    def _rate(self, number: float) -> str:
        return f"{number:.2g} {self.unit}" if number < 10 and self.unit != "B" else self._amount(number)

    def _amount(self, number: float) -> str:
        if self.unit != "B":
            return f"{number:,.0f} {self.unit}"
        return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
