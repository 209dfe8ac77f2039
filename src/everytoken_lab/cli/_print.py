"""What commands print: tables, facts, lists, and the evaluations and predictions of segmentation and detection."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from everytoken.files import plain_json
from everytoken_lab.schema import counted, one_line, say, shown

if TYPE_CHECKING:
    from everytoken_lab.dense.common import Evaluation


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


def print_some(lines: Sequence[str], limit: int) -> None:
    """The first lines, and how many more there are."""
    for line in lines[:limit]:
        say(f"  {line}")
    if len(lines) > limit:
        say(f"  and {len(lines) - limit:,} more")


# Segmentation and detection


@dataclass(frozen=True)
class JsonFlag:
    """How results are shown."""

    json: bool = False
    """Print JSON: of an evaluation numbers and all classes, of predictions one image per line."""


def print_evaluation(result: Evaluation, options: Any, numbers: Sequence[dict[str, Any]], order: str) -> None:
    """Notes, a table of numbers and one of classes, sorted by the column `order`; or JSON."""
    for note in result.notes:
        say(f"note: {note}", file=sys.stderr if options.json else sys.stdout)
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
