"""`everytoken detect eval`: how good a detector is."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.files import plain_json
from everytoken.machine import default_workers
from everytoken.tasks.detect.options import CocoOptions, FindOptions


@dataclass(frozen=True)
class DetectEval:
    """Evaluate a detector: AP, AP50 and AP75 of boxes and masks, by COCO's evaluator, and a table of classes.

    Examples:
        everytoken detect eval runs/detect coco
        everytoken detect eval runs/detect photos --split all --pictures photos.jpg
        everytoken detect eval runs/detect coco --size 640 --results results.json
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder or a weights file."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """COCO's folder, a folder with images/ and one json, a folder with parts of such, or a json file."""
    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data. Of data without a validation part, val means the images that the run held out of it, or
    all of them if it was trained on something else."""
    coco: tyro.conf.OmitArgPrefixes[CocoOptions] = field(default_factory=CocoOptions)
    find: tyro.conf.OmitArgPrefixes[FindOptions] = field(default_factory=FindOptions)
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    amp: bool = False
    """Mixed precision (bfloat16)."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image that cannot be read."""
    table: int = 20
    """Rows of the class table, worst first; 0: none, -1: all."""
    pictures: str = ""
    """Write truth and answer side by side to this JPEG."""
    picture_count: int = 8
    """How many images it shows."""
    sure: float = 0.5
    """Score of the objects that are drawn."""
    results: str = ""
    """Write all objects to this file, in COCO's format of results."""
    out: str = ""
    """Write numbers and classes to this JSON file."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: list[str], prog: str) -> None:
    """Parse, evaluate, print."""
    options = parse(DetectEval, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.tasks.detect.evaluate import evaluate

    result = evaluate(
        options.source, options.data, options.find, options.coco, split=options.split, workers=options.workers,
        device=pick_device(options.device), amp=options.amp, on_bad_image=options.on_bad_image,
        pictures=options.pictures, picture_count=options.picture_count, sure=options.sure, results=options.results,
    )  # fmt: skip
    rows = result.precision.classes
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(plain_json({**result.numbers, "classes": rows}))
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(plain_json(result.numbers))
        return
    console = Console()
    kinds = [kind for kind in ("box", "mask") if f"{kind} AP" in result.numbers]
    table = Table(title=f"{options.source} on {options.data}: {result.numbers['images']:,.0f} images")
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    for column in ("", *names):
        table.add_column(column, justify="right")
    for kind in kinds:
        table.add_row(kind, *(_number(result.numbers[f"{kind} {name}"]) for name in names))
    console.print(table)
    console.print(f"{result.numbers['images_per_second']:.2f} images/s")
    if result.skipped:
        console.print(f"{len(result.skipped)} unreadable images left out")
    if options.table:
        main_kind = kinds[-1]
        order = sorted(rows, key=lambda row: row[f"{main_kind} AP"])
        shown = order[: None if options.table < 0 else options.table]
        classes = Table(title=f"Classes, worst first ({len(shown)} of {len(rows)} that occur)")
        columns = [f"{kind} {name}" for kind in kinds for name in ("AP", "AP50")]
        for column in ("class", "objects", *columns):
            classes.add_column(column, justify="left" if column == "class" else "right")
        for row in shown:
            classes.add_row(row["class"], str(row["objects"]), *(_number(row[column]) for column in columns))
        console.print(classes)


def _number(value: float) -> str:
    return "-" if value < 0 else f"{value:.1f}"
