"""`everytoken eval`: accuracy of a trained model."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.files import plain_json
from everytoken.machine import default_workers


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model: top-1, top-5, loss, calibration, a table of classes, throughput.

    Examples:
        everytoken eval runs/small photos
        everytoken eval lvvit_s.pth.tar imagenet/val --model lvvit_s --token-vote 0.5 --real real.json
        everytoken eval timm:deit_tiny_patch16_224 imagenet/val
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder, a weights file, or timm:NAME for pretrained weights."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Images: a folder with val/, a folder of class folders, tar shards, torchvision:NAME, hf:NAME."""
    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data; all: every image below the folder. Of a folder without a part for validation, val means
    the images that the run held out of it, or all of them if it was trained on something else."""
    model: str = ""
    """timm model name, for weights that do not say it themselves."""
    img_size: int = 0
    """Another input size; position embeddings are resized. 0: the model's own."""
    crop_pct: float = 0.0
    """Part of the resized image that the centre crop shows; 0: the model's own."""
    token_vote: float = 0.0
    """Add this much of the strongest token logit of each class. The papers' LV-ViT numbers used 0.5."""
    real: str = ""
    """ImageNet ReaL labels (real.json)."""
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
    classes: int = 10
    """Rows of the class table, worst first; 0: none."""
    out: str = ""
    """Write predictions to OUT.csv and numbers to OUT.json."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: list[str], prog: str) -> None:
    """Parse, evaluate, print."""
    options = parse(Eval, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.evaluation.run import evaluate
    from everytoken.progress import Progress as Meter

    with Meter("eval", "images") as meter:
        result = evaluate(
            options.source,
            options.data,
            split=options.split,
            architecture=options.model,
            img_size=options.img_size or None,
            crop_pct=options.crop_pct,
            batch_size=options.batch_size,
            workers=options.workers,
            device=pick_device(options.device),
            amp=options.amp,
            token_vote=options.token_vote,
            real=options.real,
            on_bad_image=options.on_bad_image,
            tell=meter,
        )
    rows = [row for row in result.predictions.per_class(result.class_names) if row["images"]]
    if options.out:
        stem = options.out.removesuffix(".json").removesuffix(".csv")
        Path(stem).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.json").write_text(plain_json({**result.numbers, "classes": rows}))
        with Path(f"{stem}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["key", "label", "prediction", "confidence", "loss"])
            p, names = result.predictions, result.class_names
            for i, label, top, sure, loss in zip(p.index, p.label, p.top, p.confidence, p.loss, strict=True):
                writer.writerow([result.keys[i], names[label], names[top[0]], f"{sure:.4f}", f"{loss:.4f}"])
    if options.json:
        print(plain_json(result.numbers))
        return
    console = Console()
    low, high = result.predictions.interval()
    table = Table(title=f"{options.source} on {options.data}", show_header=False)
    labels = {"top1": "top-1", "top5": "top-5", "loss": "loss", "ece": "calibration error",
              "real_top1": "ReaL top-1", "real_top5": "ReaL top-5", "real_images": "ReaL images",
              "images": "images", "images_per_second": "images/s", "parameters": "parameters"}  # fmt: skip
    percent = {"top1", "top5", "ece", "real_top1", "real_top5"}
    for key, value in result.numbers.items():
        text = f"{value:.2f} %" if key in percent else f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
        table.add_row(labels[key], text + (f"  (95 % interval {low:.2f} to {high:.2f})" if key == "top1" else ""))
    if result.skipped:
        table.add_row("unreadable, left out", str(len(result.skipped)))
    console.print(table)
    if options.classes:
        worst = sorted(rows, key=lambda row: row["recall"])[: options.classes]
        classes = Table(title=f"Classes, worst first ({len(worst)} of {len(rows)})")
        for column in ("class", "images", "recall", "precision", "taken for"):
            classes.add_column(column, justify="left" if column in ("class", "taken for") else "right")
        from everytoken.classes import shown_name

        for row in worst:
            values = ["-" if row[c] is None else f"{row[c]:.1f}" for c in ("recall", "precision")]
            classes.add_row(shown_name(row["class"]), str(row["images"]), *values, shown_name(row["taken for"]))
        console.print(classes)
