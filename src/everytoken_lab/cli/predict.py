"""`everytoken predict`: predict the classes of unlabelled images."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from everytoken_lab.cli._parse import Source, check_source, values_of
from everytoken_lab.evaluation import PredictOptions
from everytoken_lab.schema import counted, one_line, say
from everytoken_lab.terminal import Progress, print_notes


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictOptions):
    """Predict the classes of images: one line per image, or a CSV table; on request also where the objects are.

    Examples:
        everytoken predict runs/small photo.jpg
        everytoken predict runs/small new-photos --out predictions.csv --sure 0.95
        everytoken predict runs/small new-photos --json --locate --pictures located
        everytoken predict exported/model.onnx new-photos
        everytoken predict timm:deit_tiny_patch16_224 photo.jpg --top 3
    """

    source: Source
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders (searched recursively)."""
    out: str = ""
    """Write a CSV table here instead of printing lines: image, class, probability, the next best classes, and whether
    the image is unfamiliar: less like the classes than 95 % of the images that the run held out."""
    json: bool = False
    """Print JSON, one image per line; with --locate also the box and the mask, as COCO's run lengths."""
    pictures: str = ""
    """Write the images with mask and box drawn on them to this folder."""


def main(options: PredictCommand) -> int:
    check_source(options.source)
    from everytoken_lab.classes import shown_name
    from everytoken_lab.data.tree import check_is_no_input, gather_images
    from everytoken_lab.evaluation.predictions import predict

    if options.out and Path(options.out).is_file():
        root, names = gather_images(options.images)
        check_is_no_input([Path(options.out)], [root / name for name in names])
    settings = values_of(options, PredictOptions)
    settings["locate"] |= bool(options.pictures)
    with Progress("predict", "images") as progress:
        result = predict(options.source, options.images, progress=progress, **settings)
    print_notes(result.notes)
    if options.pictures:
        result.save_pictures(options.pictures)
    if options.out:
        result.to_csv(options.out)
    if options.json:
        for image in result:
            say(json.dumps(image.to_json(), ensure_ascii=False))
        for path, reason in result.skipped.items():
            say(json.dumps({"image": path, "error": reason}, ensure_ascii=False))
        return 0 if len(result) else 2
    if options.out:
        often = Counter(name for image in result for name in image.answers).most_common(5)
        say(f"{len(result):,} images in {options.out}: " + ", ".join(f"{shown_name(n)} {c:,}" for n, c in often))
    for image in () if options.out else result:
        pairs = zip(image.classes, image.probabilities, strict=True)
        likely = ", ".join(f"{one_line(shown_name(name))} {100 * p:.1f} %" for name, p in pairs)
        if image.labels is not None or not image.sure:
            likely = f"{one_line(', '.join(map(shown_name, image.answers))) or 'none'} ({likely})"
        box = f" at {' '.join(f'{edge:.0f}' for edge in image.location.pixels)}" if image.location else ""
        familiar = "; unlike the training photos" if image.unfamiliar else ""
        say(f"{one_line(image.path)}: {likely}{box}{familiar}")
    for reason in () if options.out else result.skipped.values():
        say(one_line(reason))
    if bad := list(result.skipped):
        say(f"{counted(len(bad), 'image')} could not be read, the first: {one_line(bad[0])}")
    return 0 if len(result) else 2
