"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from everytoken_lab.schema import one_line, say, shown


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
