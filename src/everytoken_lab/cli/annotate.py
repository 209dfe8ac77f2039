"""`everytoken annotate`: give every image of a dataset a score map."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import tyro

from everytoken_lab import schema
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.cli._parse import values_of
from everytoken_lab.schema import say
from everytoken_lab.terminal import Progress, print_notes

if TYPE_CHECKING:
    from everytoken.maps import Maps
    from everytoken_lab.annotators.job import Outcome


@dataclass(frozen=True, kw_only=True)
class Annotate(AnnotateOptions):
    """Run an annotator on every image and store its class scores for every cell.

    An interrupted job resumes when the same command is run again.

    Examples:
        everytoken annotate photos --out maps --annotator fit
        everytoken annotate photos --out maps --annotator registry:efficientnet_lite0 --img-size 448 --foreign-classes
        everytoken annotate photos --out maps2 --annotator self:runs/first
        everytoken annotate imagenet --out maps --annotator timm:dm_nfnet_f6 --img-size 576 --amp
        torchrun --nproc-per-node 8 -m everytoken_lab annotate imagenet --out maps --annotator timm:dm_nfnet_f6 --amp
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Folder of class folders (with or without train/ and val/), tar, WebDataset, torchvision:NAME."""
    out: Path
    """Folder of the store: a new one, or an unfinished one to resume."""
    annotator: str
    """timm:NAME, registry:efficientnet_lite0|1|2, fit or self:RUN."""


def main(options: Annotate) -> int:
    from everytoken_lab.annotators.job import run_job

    with Progress("annotating", "images") as progress:
        plain = schema.from_keywords(AnnotateOptions, values_of(options, AnnotateOptions), "annotate")
        outcome = run_job(options.data, options.out, options.annotator, plain, progress)
    return _report(options, outcome) if outcome.world.is_main else 0


def _report(options: Annotate, outcome: Outcome) -> int:
    from everytoken.maps import Maps
    from everytoken_lab.annotators.job import summarise
    from everytoken_lab.cli.maps import describe, print_store

    data, store = outcome.data, Maps(options.out)
    summary = summarise(options.out, data, outcome.plan.label_to_class)
    facts = describe(store, summary)
    rate = f", {outcome.done / outcome.seconds:,.1f} images/s" if outcome.done else ""
    whose = " by this process" if outcome.world.size > 1 else ""
    facts["this run"] = f"{outcome.done:,} images{whose} in {outcome.seconds:,.1f} s{rate}"
    print_store(options.out, facts)
    notes, (rows, columns) = [*outcome.notes], store.grid
    if summary.images_agree is not None and summary.images_agree < 0.3:
        notes.append(
            f"only {summary.images_agree:.0%} of the maps agree with their folders. Look at them before you train; "
            "another annotator, --img-size or --class-map may be needed."
        )
    if min(rows, columns) < 8:
        notes.append(f"the maps have {rows} x {columns} cells; twice the --img-size gives twice as many each way.")
    print_notes(notes, aside=False)
    if not len(store):
        say("none of the images could be read, so there are no maps.", file=sys.stderr)
        return 1
    maps = quote(str(options.out))
    images = f" --images {quote(data.name)}" if Path(data.name).is_dir() else ""  # an archive cannot be shown
    say(f"next:\n  everytoken maps sheet {maps}{images} --out sheet.png    # look at them")
    held = f" --val-split {options.val_split:g}" if options.val_split else ""
    say(f"  everytoken train {quote(options.data)} --maps {maps} --recipe {_recipe(store)}{held}")
    return 0


def _recipe(store: Maps) -> str:
    """The recipe that suits images of this size."""
    some = range(0, len(store), max(1, len(store) // 50))
    side = sorted(min(store.read(i).size) for i in some)[len(some) // 2]
    return f"small_{32 if side < 48 else 64 if side < 80 else 96}_token"
