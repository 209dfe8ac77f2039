"""`everytoken annotate`: give every image of a data set a score map."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError
from everytoken.machine import default_workers

if TYPE_CHECKING:
    from everytoken.annotators import Annotator, Outcome, Team
    from everytoken.data.datasets import DataSet
    from everytoken.maps import Maps
    from everytoken.maps.summary import StoreSummary


@dataclass(frozen=True)
class Annotate:
    """Let an annotator look at every image and keep what it says about every cell in a store.

    Kill it and run the same command again: it goes on where it stopped.

    Examples:
        everytoken annotate photos --out maps --annotator fit
        everytoken annotate photos --out maps --annotator registry:efficientnet_lite0 --img-size 448 --foreign-classes
        everytoken annotate photos --out maps2 --annotator self:runs/first
        everytoken annotate photos --out maps3 --annotator self:runs/first --reuse maps2
        everytoken annotate photos --out maps --annotator python:my_labels:score
        everytoken annotate imagenet --out maps --annotator timm:dm_nfnet_f6 --img-size 576 --amp
        torchrun --nproc-per-node 8 -m everytoken annotate imagenet --out maps --annotator timm:dm_nfnet_f6 --amp
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of class folders (with or without train/ and val/), zip, tar, WebDataset, torchvision:NAME, hf:NAME."""
    out: Path
    """Folder of the store, new or begun."""
    annotator: str
    """timm:NAME, registry:efficientnet_lite0|1|2, fit, self:RUN or python:module:function."""
    checkpoint: str = ""
    """For timm:NAME: own weights (file or run folder) instead of pretrained ones."""
    img_size: tuple[int, ...] = ()
    """Side of the annotator's input, or height and width. Default: its own. 576 gives 18x18 cells at stride 32."""
    resize: Literal["squash", "letterbox"] = "squash"
    """squash: stretch the whole image. letterbox: keep its aspect and pad."""
    top_k: int = 0
    """Classes to keep per cell. 0: five, but all where there are no more than 20."""
    class_map: str = ""
    """csv, json or yaml file: class of the data set -> the annotator's. `order`: trust that the orders are equal."""
    foreign_classes: bool = False
    """Keep the annotator's own classes, whatever the folders are called."""
    unlabelled: bool = False
    """The folders are not classes (or there are none); the store gets the annotator's classes."""
    split: str = "train"
    """Part of the data set: train, val, test, or all."""
    val_split: float = 0.0
    """Leave out the part that training with the same --val-split sets aside for validation."""
    class_list: Path | None = None
    """Text file with the data set's class names in the order of their numbers. Default: sorted folder names."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 32
    """Images per step."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Processes that decode images."""
    device: str = ""
    """cpu, cuda, mps. Default: the best there is."""
    amp: bool = False
    """Mixed precision."""
    amp_dtype: Literal["float16", "bfloat16"] = "float16"
    """Its type. float16 is as fine as the stored scores; networks that overflow in it need bfloat16."""
    retry_skipped: bool = False
    """Try images again that could not be read."""
    reuse: str = ""
    """An older store of the same settings: its maps are copied, and only images that came later are looked at. An image
    that was changed under the same name keeps its old map."""
    folds: int = 1
    """fit: train so many networks, so that each image is annotated by one that did not train on it. 5 is usual."""
    fit_model: str = ""
    """fit: a timm name, or registry:efficientnet_lite0. Default: a small CNN."""
    fit_pretrained: bool = False
    """fit: begin with timm's pretrained weights."""
    fit_size: tuple[int, ...] = ()
    """fit: side of the training images. Default: from the images, 128 at most."""
    fit_epochs: int = 0
    """fit: passes over the images. 0: 12 to 100, fewer for more images; 4 to 15 from pretrained weights."""
    fit_lr: float = 0.0
    """fit: highest learning rate. 0: 2e-3, or 5e-4 from pretrained weights."""
    seed: int = 42
    """fit: decides folds, first weights and augmentation."""


def main(argv: list[str], prog: str) -> int:
    """Parse, annotate, print."""
    options = parse(Annotate, prog, argv)
    from everytoken.annotators import Team, annotate
    from everytoken.annotators.job import check_out
    from everytoken.engine.distributed import join_world

    data = _open(options)
    check_out(data, options.out, options.annotator)
    # ranks wait for each other at the beginning and at the end only, and the end can be far
    with join_world(options.device, timeout_minutes=14 * 24 * 60) as world:
        team = Team(world.rank, world.size, world.device, world.barrier)
        annotator = _annotator(options, data, team)
        with _progress("annotating", team) as tell:
            outcome = annotate(data, options.out, annotator, _job(options), team, tell)
        if world.is_main:
            return _report(options, data, annotator, outcome, team)
    return 0


def _open(options: Annotate) -> DataSet:
    from everytoken.data.datasets import DataError, open_dataset

    given: dict[str, Any] = {"val_split": options.val_split, "class_list": options.class_list}
    if options.unlabelled:
        return open_dataset(options.data, options.split, labelled=False, val_split=options.val_split)
    try:
        return open_dataset(options.data, options.split, **given)
    except DataError as error:
        if "no class folders" not in str(error):
            raise
        raise DataError(f"{error} Images without labels: add --unlabelled.") from error


def _job(options: Annotate) -> Any:
    from everytoken.annotators import JobOptions

    return JobOptions(
        top_k=options.top_k,
        resize=options.resize,
        batch_size=options.batch_size,
        workers=options.workers,
        amp_dtype=options.amp_dtype if options.amp else "",
        class_map=options.class_map,
        foreign_classes=options.foreign_classes or options.unlabelled,
        retry_skipped=options.retry_skipped,
        reuse=options.reuse,
    )


def _annotator(options: Annotate, data: DataSet, team: Team) -> Annotator:
    from everytoken.annotators import FitOptions, build_annotator, fit_annotator
    from everytoken.annotators.networks import image_size

    size = image_size(options.img_size)
    if options.annotator != "fit":
        used = [
            name
            for name in ("fit_model", "fit_pretrained", "fit_size", "fit_epochs", "fit_lr")
            if getattr(options, name)
        ]
        used += ["folds"] if options.folds != 1 else []
        if used:
            flags = ", ".join("--" + name.replace("_", "-") for name in used)
            raise EverytokenError(f"{flags} can only be used with --annotator fit, not with {options.annotator}.")
        return build_annotator(options.annotator, size, options.checkpoint)
    if options.reuse:
        raise EverytokenError("--reuse is not for --annotator fit, which learns from all images, the new ones too.")
    if options.checkpoint:
        raise EverytokenError(
            "--annotator fit trains its own weights; for yours use --annotator timm:NAME --checkpoint FILE."
        )
    fit = FitOptions(
        model=options.fit_model,
        pretrained=options.fit_pretrained,
        size=image_size(options.fit_size),
        epochs=options.fit_epochs,
        lr=options.fit_lr,
        folds=options.folds,
        seed=options.seed,
        workers=options.workers,
    )
    return fit_annotator(data, options.out, fit, size, options.resize, team, _say, lambda what: _progress(what, team))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _progress(what: str, team: Team) -> Iterator[Any]:
    """Progress of one process; in a team, rank 0 speaks for all (its share is done as fast as the others')."""
    from everytoken.progress import Progress

    if team.rank == 0:
        with Progress(what, "images") as progress:
            yield progress
    else:
        yield lambda done, total: None


def _report(options: Annotate, data: DataSet, annotator: Annotator, outcome: Outcome, team: Team) -> int:
    """Print what came out; exit code 1 if nothing did."""
    from rich.console import Console
    from rich.table import Table

    from everytoken.annotators import summarise
    from everytoken.maps import Maps

    manifest, made = Maps(options.out).manifest, summarise(options.out, data, outcome.plan.label_to_class)
    table = Table(title=str(options.out), show_header=False)
    grid = f"{manifest.grid[0]} x {manifest.grid[1]} cells"
    table.add_row(
        "maps", f"{made.maps:,} of {grid}, the best {manifest.top_k} of {manifest.num_classes:,} classes in each"
    )
    table.add_row("skipped images", f"{made.skipped:,}" + (" (listed in skipped.csv)" if made.skipped else ""))
    if made.images_agree is not None:
        table.add_row("map's class is the folder's", f"{made.images_agree:.1%} of {made.labelled:,} maps")
        table.add_row("cell's class is the folder's", f"{made.cells_agree:.1%} of their cells")
    if made.maps:
        table.add_row("classes in a map, mean", f"{made.vocabulary:.1f}")
        table.add_row("confidence of a cell, mean", f"{made.confidence:.1%}")
    table.add_row("bytes per image", f"{made.bytes_per_image:,.0f}")
    rate = f", {outcome.done / outcome.seconds:,.1f} images/s" if outcome.done else ""
    whose = " by this process" if team.size > 1 else ""
    if outcome.copied:
        table.add_row("copied", f"{outcome.copied:,} maps of {options.reuse}")
    table.add_row("this run", f"{outcome.done:,} images{whose} in {outcome.seconds:,.1f} s{rate}")
    console = Console()
    console.print(table)
    for key, reason in made.skipped_examples:
        print(f"skipped {key}: {reason}")
    for note in [*outcome.notes, *_advice(annotator, made, manifest.grid)]:
        print(f"note: {note}")
    if not made.maps:
        print("none of the images could be read, so there are no maps.", file=sys.stderr)
        return 1
    print("next:")
    maps = quote(str(options.out))
    images = f" --images {quote(data.name)}" if Path(data.name).is_dir() else ""  # an archive cannot be shown
    print(f"  everytoken maps sheet {maps}{images} --out sheet.png    # look at them")
    if data.class_names:
        held = f" --val-split {options.val_split:g}" if options.val_split else ""
        recipe = f"small_{_usual_side(Maps(options.out))}_token"
        print(f"  everytoken train {quote(options.data)} --labels {maps} --recipe {recipe}{held}")
    return 0


def _usual_side(store: Maps) -> int:
    """The size of the recipe that suits images of this size."""
    some = range(0, len(store), max(1, len(store) // 50))
    side = sorted(min(store.read(i).size) for i in some)[len(some) // 2]
    return 32 if side < 48 else 64 if side < 80 else 96


def _advice(annotator: Annotator, made: StoreSummary, grid: tuple[int, int]) -> Iterator[str]:
    """What the numbers suggest."""
    held_out = annotator.settings.get("held_out_accuracy")
    if held_out is not None and made.images_agree is not None and len(annotator.settings["weights_sha256"]) == 1:
        if made.images_agree > held_out + 0.1:
            yield (
                f"the annotator knows its training images by heart ({made.images_agree:.0%} right, {held_out:.0%} of "
                "images it has not seen), so their maps say little more than the folder. --folds 5 cures that."
            )
    elif made.images_agree is not None and made.images_agree < 0.3:
        yield (
            f"only {made.images_agree:.0%} of the maps agree with their folders. Look at them before you train; "
            "another annotator, --img-size or --class-map may be needed."
        )
    if min(grid) < 8:
        yield f"the maps have {grid[0]} x {grid[1]} cells; twice the --img-size gives twice as many each way."
