"""`everytoken segment eval`: how good a segmenter is."""

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
from everytoken.tasks.segment.options import EvalOptions, MaskOptions


@dataclass(frozen=True)
class SegmentEval:
    """Evaluate a segmenter: mIoU, mAcc and pixel accuracy from one confusion matrix over the whole set.

    With --head token, the source is a classifier that was trained with token labels, and its token head is read as a
    segmenter without any training.

    Examples:
        everytoken segment eval runs/segment ade20k
        everytoken segment eval runs/segment ade20k --mode slide --scales 0.75 1.0 1.25 1.5 1.75 --flip
        everytoken segment eval runs/lvvit_s voc --head token --class-map voc.json --pictures voc.jpg
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder or a weights file."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of images and masks: ADE20K, COCO panoptic, Pascal VOC, or images/ and masks/ with a class file."""
    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data. Of data without a validation part, val means the images that the run held out of it, or
    all of them if it was trained on something else."""
    head: Literal["segment", "token", "class"] = "segment"
    """segment: of `segment train`. token: a classifier's token head. class: its class head at every cell."""
    class_map: str = ""
    """With --head token or class: JSON {"class of the data": ["class of the head", ...] or "*"}; default: by name."""
    model: str = ""
    """timm model name, for a classifier's weights that do not say it themselves."""
    img_size: int = 0
    """Side of a classifier's windows; 0: the model's own."""
    resize: int = 0
    """Short side that images are resized to; 0: as in training."""
    masks: tyro.conf.OmitArgPrefixes[MaskOptions] = field(default_factory=MaskOptions)
    evaluation: tyro.conf.OmitArgPrefixes[EvalOptions] = field(default_factory=EvalOptions)
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    amp: bool = False
    """Mixed precision (bfloat16)."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image or mask that cannot be read."""
    table: int = 20
    """Rows of the class table, worst first; 0: none, -1: all."""
    pictures: str = ""
    """Write image, truth and answer side by side to this JPEG."""
    picture_count: int = 16
    """How many images it shows."""
    out: str = ""
    """Write numbers and classes to this JSON file."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: list[str], prog: str) -> None:
    """Parse, evaluate, print."""
    options = parse(SegmentEval, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.tasks.segment.evaluate import evaluate

    result = evaluate(
        options.source, options.data, options.evaluation, options.masks, split=options.split, head=options.head,
        class_map=options.class_map, architecture=options.model, img_size=options.img_size, resize=options.resize,
        workers=options.workers, device=pick_device(options.device), amp=options.amp,
        on_bad_image=options.on_bad_image, pictures=options.pictures, picture_count=options.picture_count,
    )  # fmt: skip
    rows = result.confusion.per_class(result.class_names)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(plain_json({**result.numbers, "classes": rows}))
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(plain_json(result.numbers))
        return
    console = Console()
    table = Table(title=f"{options.source} on {options.data}", show_header=False)
    names = {"mIoU": "mIoU", "mAcc": "mean class accuracy", "aAcc": "pixels right", "images": "images"}
    for key, name in names.items():
        value = result.numbers[key]
        table.add_row(name, f"{value:,.0f}" if key == "images" else f"{value:.2f} %")
    table.add_row("images/s", f"{result.numbers['images_per_second']:.2f}")
    if result.skipped:
        table.add_row("unreadable, left out", str(len(result.skipped)))
    console.print(table)
    if options.table:
        shown = sorted(rows, key=lambda row: row["IoU"])[: None if options.table < 0 else options.table]
        classes = Table(title=f"Classes, worst first ({len(shown)} of {len(rows)} that occur)")
        for column in ("class", "IoU", "accuracy", "pixels %", "taken for"):
            classes.add_column(column, justify="left" if column in ("class", "taken for") else "right")
        for row in shown:
            accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.1f}"
            classes.add_row(row["class"], f"{row['IoU']:.1f}", accuracy, f"{row['pixels']:.2f}", row["taken for"])
        console.print(classes)
