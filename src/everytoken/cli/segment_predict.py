"""`everytoken segment predict`: masks and pictures of images."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.tasks.segment.options import EvalOptions


@dataclass(frozen=True)
class SegmentPredict:
    """Write, for every image, NAME.png (a palette picture whose values are classes) and NAME.overlay.jpg.

    classes.json in the same folder names the classes. Images whose names differ in the ending alone keep it
    (photo.jpg.png), and no image is ever overwritten.

    Examples:
        everytoken segment predict runs/segment photo.jpg --output masks
        everytoken segment predict runs/segment photos --output masks --mode slide --flip
        everytoken segment predict runs/lvvit_s photos --output masks --head token --class-map animals.json
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder or a weights file."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders."""
    output: str
    """Folder for the results."""
    head: Literal["segment", "token", "class"] = "segment"
    """segment: of `segment train`. token: a classifier's token head. class: its class head at every cell."""
    class_map: str = ""
    """With --head token or class: JSON {"class to draw": ["class of the head", ...] or "*"}."""
    model: str = ""
    """timm model name, for a classifier's weights that do not say it themselves."""
    img_size: int = 0
    """Side of a classifier's windows; 0: the model's own."""
    resize: int = 0
    """Short side that images are resized to; 0: as in training."""
    evaluation: tyro.conf.OmitArgPrefixes[EvalOptions] = field(default_factory=EvalOptions)
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
    options = parse(SegmentPredict, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.tasks.segment.evaluate import predict

    rows, notes = predict(
        options.source, options.images, options.output, options.evaluation, head=options.head,
        class_map=options.class_map, architecture=options.model, img_size=options.img_size, resize=options.resize,
        workers=options.workers, device=pick_device(options.device), amp=options.amp,
    )  # fmt: skip
    for note in () if options.json else notes:
        print(f"note: {note}")
    for row in rows:
        if options.json:
            print(json.dumps(row))
            continue
        parts = [f"{name} {share:.0f} %" for name, share in list(row.items())[1:6]]
        print(f"{row['image']}: {', '.join(parts)}")
    if not options.json:
        print(f"{len(rows)} masks and pictures in {options.output}")
