"""What the commands of segmentation and detection share: train, and the printing of evaluations and predictions."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everytoken.files import plain_json
from everytoken_lab.cli._parse import values_of
from everytoken_lab.cli._tables import print_classes, print_table
from everytoken_lab.schema import counted, say

if TYPE_CHECKING:
    from everytoken_lab.dense.common import Evaluation


@dataclass(frozen=True)
class JsonFlag:
    """How results are shown."""

    json: bool = False
    """Print JSON: of an evaluation numbers and all classes, of predictions one image per line."""


def train(task: str, options: Any, plain: type[Any]) -> None:
    """Train what was asked for."""
    module = importlib.import_module(f"everytoken_lab.dense.{task}.task")
    module.train(plain(**values_of(options, plain)), set(options.given), options.set)


def report(result: Evaluation, options: Any, numbers: Sequence[dict[str, Any]], order: str) -> None:
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


def predict(task: str, options: Any) -> None:
    """A line for each image, with at most five classes; or JSON."""
    rows = importlib.import_module(f"everytoken_lab.dense.{task}.task").predict(options)
    if options.json:
        for row in rows:
            say(json.dumps(row))
        return
    unit = " %" if task == "segment" else ""
    for row in rows:
        (_, image), *classes = row.items()
        say(f"{image}: {', '.join(f'{title} {value:.0f}{unit}' for title, value in classes[:5]) or 'nothing'}")
    say(f"{len(rows)} pictures and their {'masks' if unit else 'objects'} in {options.out}")
