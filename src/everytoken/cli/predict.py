"""`everytoken predict`: the classes of images that nobody has labelled."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.machine import default_workers


@dataclass(frozen=True)
class Predict:
    """Say what is on images: a line for each, or a table in a file.

    Examples:
        everytoken predict runs/small photo.jpg
        everytoken predict runs/small new-photos --out predictions.csv
        everytoken predict timm:deit_tiny_patch16_224 photo.jpg --top 3
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder, a weights file, or timm:NAME for pretrained weights."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders, with all that is below them."""
    out: str = ""
    """Write a CSV table here instead of printing lines: image, class, probability, and the next best classes."""
    top: int = 3
    """Classes for each image."""
    model: str = ""
    """timm model name, for weights that do not say it themselves."""
    img_size: int = 0
    """Another input size; position embeddings are resized. 0: the model's own."""
    crop_pct: float = 0.0
    """Part of the resized image that the centre crop shows; 0: the model's own."""
    token_vote: float = 0.0
    """Add this much of the strongest token logit of each class."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 64
    """Images per step."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    amp: bool = False
    """Mixed precision (bfloat16)."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image that cannot be read."""
    json: bool = False
    """Print JSON, one image per line."""


def main(argv: list[str], prog: str) -> None:
    """Parse, predict, print or write."""
    options = parse(Predict, prog, argv)
    from everytoken.classes import shown_name
    from everytoken.data.datasets import check_is_no_input
    from everytoken.engine.distributed import pick_device
    from everytoken.errors import EverytokenError
    from everytoken.evaluation.predict import predict_images
    from everytoken.files import write_atomically
    from everytoken.progress import Progress as Meter

    if options.top < 1:
        raise EverytokenError(f"--top is {options.top}; it takes 1 or more")
    if options.out:
        check_is_no_input(Path(options.out), options.images)
    with Meter("predict", "images") as meter:
        answers, bad = predict_images(
            options.source, options.images, top=options.top, architecture=options.model,
            img_size=options.img_size or None, crop_pct=options.crop_pct, token_vote=options.token_vote,
            batch_size=options.batch_size, workers=options.workers, device=pick_device(options.device),
            amp=options.amp, on_bad_image=options.on_bad_image, tell=meter,
        )  # fmt: skip
    if options.out:
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        count = max((len(a.classes) for a in answers), default=options.top)
        more = [f"{what} {i}" for i in range(2, count + 1) for what in ("class", "probability")]
        writer.writerow(["image", "class", "probability", *more])
        for answer in answers:
            writer.writerow([answer.image, *(v for name, p in answer.classes for v in (name, f"{p:.4f}"))])
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(options.out), table.getvalue().encode())
    if options.json:
        for answer in answers:
            print(json.dumps({"image": answer.image, "classes": dict(answer.classes)}, ensure_ascii=False))
        return
    for answer in [] if options.out else answers:
        said = ", ".join(f"{shown_name(name)} {100 * p:.1f} %" for name, p in answer.classes)
        print(f"{answer.image}: {said}")
    if options.out:
        often = Counter(answer.classes[0][0] for answer in answers).most_common(5)
        print(f"{len(answers):,} images in {options.out}: " + ", ".join(f"{shown_name(n)} {c:,}" for n, c in often))
    if bad:
        print(f"{len(bad)} images could not be read and were left out, the first: {next(iter(bad))}")
