"""What the commands of segmentation and detection share: train, and the printing of evaluations and predictions."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from everytoken.files import plain_json
from everytoken_lab.cli._parse import given_options, parse, values_of
from everytoken_lab.cli.train import print_plan, resolve
from everytoken_lab.schema import counted

if TYPE_CHECKING:
    from everytoken_lab.dense.common import Evaluation


@dataclass(frozen=True)
class TrainFlags:
    """Flags of training that are not part of a run's options."""

    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = field(
        default_factory=tuple
    )
    """NAME=VALUE for inner settings, such as model_kwargs.depth=4. May be repeated."""
    dry_run: bool = False
    """Print the plan (data, model, schedule, memory, time from a few timed steps) and stop."""


@dataclass(frozen=True)
class PrintFlags:
    """How an evaluation is shown."""

    table: int = 20
    """Rows of the class table, worst first; 0: none, -1: all."""
    json: bool = False
    """Print numbers and classes as JSON instead of tables."""


@dataclass(frozen=True)
class JsonFlag:
    """How predictions are shown."""

    json: bool = False
    """Print JSON, one image per line."""


def train(config: type[Any], plain: type[Any], name: str, argv: list[str], prog: str) -> int:
    """Recipe, then flags, then --set; then train the task called `name`, or print the plan."""
    options = resolve(config, argv, prog)
    task = importlib.import_module(f"everytoken_lab.dense.{name}.task")
    made = task.train(plain(**values_of(options, plain)), given_options(argv), options.set, options.dry_run)
    if options.dry_run:
        print_plan(made)
    return 0


def report(
    result: Evaluation, options: Any, rows: Sequence[tuple[str, ...]], order: str, columns: Mapping[str, str]
) -> None:
    """Notes, a table of numbers and one of classes; or JSON.

    Args:
        rows: of the table of numbers, the first one its header. order: column by which classes are sorted.
        columns: of the table of classes, title -> name in a row.
    """
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(plain_json({**result.numbers, "classes": result.classes}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(*rows[0], title=f"{options.source} on {options.data}: {result.numbers['images']:,.0f} images")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    console.print(f"{result.numbers['images_per_second']:.2f} images/s")
    if result.skipped:
        console.print(f"Left out {counted(len(result.skipped), 'unreadable image')}")
    if options.table:
        shown = sorted(result.classes, key=lambda row: row[order])[: None if options.table < 0 else options.table]
        classes = Table(title=f"Classes, worst first ({len(shown)} of {len(result.classes)} that occur)")
        for title in columns:
            classes.add_column(title, justify="left" if title in ("class", "taken for") else "right")
        for values in shown:
            classes.add_row(*(cell(values[name]) for name in columns.values()))
        console.print(classes)


def cell(value: Any) -> str:
    """A number for a table; "-" where there is none."""
    if isinstance(value, float):
        return "-" if value < 0 else f"{value:.1f}"
    return "-" if value is None else str(value)


def predict(config: type[Any], name: str, argv: list[str], prog: str) -> None:
    """Predict with the task called `name`: a line for each image, with at most five classes; or JSON."""
    options = parse(config, prog, argv)
    rows = importlib.import_module(f"everytoken_lab.dense.{name}.infer").predict(options)
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    unit = " %" if name == "segment" else ""
    for row in rows:
        (_, image), *classes = row.items()
        print(f"{image}: {', '.join(f'{title} {value:.0f}{unit}' for title, value in classes[:5]) or 'nothing'}")
    print(f"{len(rows)} pictures and their {'masks' if unit else 'objects'} in {options.out}")
