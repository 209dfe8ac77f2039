"""`everytoken plan`: storage, bandwidth, cores and time for a training of a given size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError, did_you_mean


@dataclass(frozen=True)
class Plan:
    """Calculate what a training needs, from per-image costs.

    Examples:
        everytoken plan imagenet-1k --train-rate 900 --devices 8
        everytoken plan 3000 --train-rate 15 --devices 1 --epochs 100 --loader-rate 300

    Measure the rates with `everytoken model NAME` (training) and `everytoken annotate` (it prints images/s).
    """

    images: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGES]")] = ""
    """A number of images, or imagenet-1k, imagenet-21k, billion. Default: all three."""
    epochs: int = 300
    """Passes over the data."""
    devices: int = 8
    """GPUs (or machines, if the rates are per machine)."""
    train_rate: float = 1000.0
    """Training images per second and device."""
    annotator_rate: float = 100.0
    """Annotated images per second and device."""
    loader_rate: float = 250.0
    """Images per second that one core decodes and augments."""
    image_bytes: float = 110_000
    """Average size of an image file."""
    map_size: int = 18
    """Side of the score map, in cells."""
    top_k: int = 5
    """Scores kept per cell."""
    num_classes: int = 1000
    """Classes of the annotator; above 65,535 their numbers need four bytes."""
    parameters: float = 26e6
    """Of the model."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: list[str], prog: str) -> None:
    """Parse, calculate, print."""
    options = parse(Plan, prog, argv)
    from everytoken.engine.plan import DATA_SETS, Costs, plan

    costs = Costs(
        image_bytes=options.image_bytes,
        map_cells=options.map_size**2,
        top_k=options.top_k,
        class_bytes=2 if options.num_classes <= 65_535 else 4,
        loader_rate=options.loader_rate,
        annotator_rate=options.annotator_rate,
        train_rate=options.train_rate,
        devices=options.devices,
        weights=options.parameters,
    )
    sizes = dict(DATA_SETS)
    if options.images:
        text = options.images.replace(",", "").replace("_", "")
        if not text.isdigit() and options.images not in DATA_SETS:
            near = did_you_mean(options.images, DATA_SETS) or f" Known: {', '.join(DATA_SETS)}."
            raise EverytokenError(f"{options.images!r} is neither a number of images nor a known data set.{near}")
        sizes = {options.images: int(text) if text.isdigit() else DATA_SETS[options.images]}
    for name in ("epochs", "devices", "train_rate", "annotator_rate", "loader_rate"):
        if getattr(options, name) <= 0:
            raise EverytokenError(f"--{name.replace('_', '-')} must be above 0")
    plans = {name: plan(count, options.epochs, costs) for name, count in sizes.items()}
    if options.json:
        print(json.dumps(plans, indent=1))
        return
    table = Table(title=f"{options.epochs} epochs on {options.devices} devices")
    table.add_column("")
    for name in plans:
        table.add_column(name, justify="right")
    for row in next(iter(plans.values())):
        unit = row.rsplit(", ", 1)[-1] if ", " in row else ""
        table.add_row(row.replace(", bytes per second", "").replace(", bytes", "").replace(", hours", ""),
                      *(_human(values[row], unit) for values in plans.values()))  # fmt: skip
    Console().print(table)


def _human(value: float, unit: str) -> str:
    if unit.startswith("bytes"):
        names = ["B", "kB", "MB", "GB", "TB", "PB"]
        while value >= 1000 and len(names) > 1:
            value /= 1000
            names.pop(0)
        return f"{value:.3g} {names[0]}" + ("/s" if "second" in unit else "")
    if unit == "hours":
        return f"{value * 60:.0f} min" if value < 2 else f"{value:.0f} h" if value < 72 else f"{value / 24:.0f} days"
    return f"{value:,.0f}"
