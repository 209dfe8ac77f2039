"""What people see on the terminal: progress, tables, facts, lists, and the results of dense tasks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rich.progress
from rich.console import Console
from rich.table import Table

from everytoken.files import plain_json
from everytoken_lab.schema import counted, one_line, say, shown

if TYPE_CHECKING:
    from everytoken_lab.dense.common import Evaluation


def clock(seconds: float) -> str:
    """90 -> '1:30'; 7300 -> '2:01:40'."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Progress:
    """Shows the progress of a command on stderr: a bar, or a plain line now and then when nobody watches.

    A context manager, called with (done, total). The rate is measured from the first call on: opening data and models
    is not part of it.

    Args:
        job: its name.
        unit: what is counted, "files" for example; "B" for bytes.
        every: seconds between plain lines.
        keep: leave the bar on the terminal when the job is done.
    """

    def __init__(self, job: str, unit: str, every: float = 10.0, keep: bool = True) -> None:
        self.job, self.unit, self.every = job, unit, every
        self._last = 0.0
        self._first: tuple[float, int] | None = None  # when, and what was done then
        console = Console(stderr=True)
        columns = (
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[rate]}"),
            rich.progress.TimeRemainingColumn(),
        )
        silent = not console.is_terminal
        self._bar = rich.progress.Progress(*columns, console=console, transient=not keep, disable=silent)
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
        self._bar.update(self._task, description=title, completed=done, total=total, rate=amount)
        if self._bar.disable and now - self._last >= self.every:
            self._last = now
            left = f", {clock((total - done) / rate)} left" if rate > 0 else ""
            say(f"{title}: {amount}{left}", file=sys.stderr)

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
        few = isinstance(number, float) and number < 10  # a rate
        return f"{number:.2g} {self.unit}" if few else f"{number:,.0f} {self.unit}"

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # which prints an empty line otherwise
            self._bar.stop()


# -- tables ------------------------------------------------------------------------------------------------------------


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "", caption: str = "") -> None:
    """One line per row, under the names of the first row; numbers are right-aligned."""
    table = Table(caption=caption or None)
    for name in rows[0] if rows else ():
        numbers = any(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=name == "name")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    _print(title, table)


def print_classes(rows: Sequence[Mapping[str, Any]], order: str) -> None:
    """The worst classes, by the column `order`."""
    worst = sorted(rows, key=lambda row: -1.0 if row[order] is None else row[order])[:20]
    print_table(worst, f"Classes, worst first ({len(worst)} of {len(rows)})")


def print_facts(facts: Mapping[str, Any], title: str = "") -> None:
    """Names and values side by side."""
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    _print(title, table)


def _print(title: str, table: Table) -> None:
    console = Console(markup=False)  # names of classes and folders are nobody's formatting
    if title:
        console.print(shown(title))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else one_line(value)


def print_notes(notes: Sequence[str], aside: bool = True) -> None:
    """Print what people should know about a result; `aside`: on stderr."""
    for note in notes:
        say(f"note: {note}", file=sys.stderr if aside else sys.stdout)


def print_some(lines: Sequence[str], limit: int) -> None:
    """The first lines, and how many more there are."""
    for line in lines[:limit]:
        say(f"  {line}")
    if len(lines) > limit:
        say(f"  and {len(lines) - limit:,} more")


# -- segmentation and detection ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonFlag:
    """How results are shown."""

    json: bool = False
    """Print JSON: of an evaluation numbers and all classes, of predictions one image per line."""


def print_evaluation(result: Evaluation, options: Any, numbers: Sequence[dict[str, Any]], order: str) -> None:
    """Notes, a table of numbers and one of classes, sorted by the column `order`; or JSON."""
    print_notes(result.notes, aside=options.json)
    if options.json:
        say(plain_json({**result.numbers, "classes": result.classes}))
        return
    print_table(numbers, f"{options.source} on {options.data}: {result.numbers['images']:,.0f} images")
    say(f"{result.numbers['images_per_second']:.2f} images/s")
    if result.skipped:
        say(f"Left out {counted(len(result.skipped), 'unreadable image')}")
    print_classes([{name: known(value) for name, value in row.items()} for row in result.classes], order)


def known(value: Any) -> Any:
    """COCO's evaluator says -1 where there is no number."""
    return None if isinstance(value, float) and value < 0 else value


def print_predictions(rows: Sequence[dict[str, Any]], options: Any, what: str, unit: str = "") -> None:
    """A line for each image, with at most five classes; or JSON."""
    if options.json:
        for row in rows:
            say(json.dumps(row))
        return
    for row in rows:
        (_, image), *classes = row.items()
        say(f"{image}: {', '.join(f'{title} {value:.0f}{unit}' for title, value in classes[:5]) or 'nothing'}")
    say(f"{len(rows)} pictures and their {what} in {options.out}")
