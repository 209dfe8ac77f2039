"""`everytoken predict`: predict the classes of unlabelled images."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from everytoken.cli._parse import parse, values_of
from everytoken.evaluation import PredictOptions, predict
from everytoken.progress import Progress


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictOptions):
    """Predict the classes of images: one line per image, or a CSV table.

    Examples:
        everytoken predict runs/small photo.jpg
        everytoken predict runs/small new-photos --out predictions.csv
        everytoken predict timm:deit_tiny_patch16_224 photo.jpg --top 3
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder, a weights file, timm:NAME (pretrained weights), hf-hub:USER/NAME, registry:efficientnet_lite0."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders (searched recursively)."""
    out: str = ""
    """Write a CSV table here instead of printing lines: image, class, probability, and the next best classes."""
    json: bool = False
    """Print JSON, one image per line."""


def main(argv: list[str], prog: str) -> None:
    """Parse, predict, print or write."""
    command = parse(PredictCommand, prog, argv)
    from everytoken.classes import shown_name
    from everytoken.data.datasets import check_is_no_input

    if command.out:
        check_is_no_input(Path(command.out), command.images)
    with Progress("predict", "images") as progress:
        result = predict(command.source, command.images, progress=progress, **values_of(command, PredictOptions))
    if command.out:
        result.to_csv(command.out)
        often = Counter(image.classes[0] for image in result).most_common(5)
        print(f"{len(result):,} images in {command.out}: " + ", ".join(f"{shown_name(n)} {c:,}" for n, c in often))
    for image in result if command.json else ():
        classes = dict(zip(image.classes, image.probabilities, strict=True))
        print(json.dumps({"image": image.path, "classes": classes}, ensure_ascii=False))
    for image in () if command.json or command.out else result:
        pairs = zip(image.classes, image.probabilities, strict=True)
        print(f"{image.path}: " + ", ".join(f"{shown_name(name)} {100 * p:.1f} %" for name, p in pairs))
    if result.skipped and not command.json:
        print(
            f"{len(result.skipped)} images could not be read and were left out, the first: {next(iter(result.skipped))}"
        )
