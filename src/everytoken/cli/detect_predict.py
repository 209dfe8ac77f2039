"""`everytoken detect predict`: objects of images."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from everytoken.cli._parse import parse
from everytoken.tasks.detect.options import FindOptions


@dataclass(frozen=True)
class DetectPredict:
    """Write, for every image, NAME.objects.jpg; and predictions.json with all boxes and masks (COCO run lengths).

    Images whose names differ in the ending alone keep it (photo.jpg.objects.jpg), and no image is ever overwritten.

    Examples:
        everytoken detect predict runs/detect photo.jpg --output found
        everytoken detect predict runs/detect photos --output found --sure 0.7 --size 640
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder or a weights file."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders."""
    output: str
    """Folder for the results."""
    sure: float = 0.5
    """Score of the objects that are drawn and counted; the file has all above --score-thresh."""
    find: tyro.conf.OmitArgPrefixes[FindOptions] = field(default_factory=FindOptions)
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = 0
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    amp: bool = False
    """Mixed precision (bfloat16)."""
    json: bool = False
    """Print JSON, one image per line."""


def main(argv: list[str], prog: str) -> None:
    """Parse, predict, print."""
    options = parse(DetectPredict, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.tasks.detect.evaluate import predict

    rows = predict(
        options.source, options.images, options.output, options.find, workers=options.workers,
        device=pick_device(options.device), amp=options.amp, sure=options.sure,
    )  # fmt: skip
    for row in rows:
        if options.json:
            print(json.dumps(row))
            continue
        parts = [f"{count} {name}" for name, count in list(row.items())[1:]]
        print(f"{row['image']}: {', '.join(parts) or 'nothing'}")
    if not options.json:
        print(f"{len(rows)} pictures and predictions.json in {options.output}")
