"""`everytoken maps ...`: look at, check and convert stores of score maps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.maps.check import verify
from everytoken.maps.merge import merge_maps
from everytoken.maps.store import Maps
from everytoken_lab.cli import Command, call
from everytoken_lab.cli._parse import parse
from everytoken_lab.maps.released import ExportOptions, ImportOptions, export_released, import_released
from everytoken_lab.maps.sheet import SheetOptions, make_sheet
from everytoken_lab.progress import Progress


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    return call(_COMMANDS, argv, prog, OPTIONS)


@dataclass(frozen=True)
class Info:
    """Print what is in a store: settings, counts, size and statistics of its maps.

    Examples:
        everytoken maps info maps
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    sample: int = 512
    """Maps to sample for the statistics; 0: no statistics."""
    json: bool = False
    """Print JSON instead of a table."""


def info(argv: list[str], prog: str) -> int:
    options = parse(Info, prog, argv)
    from everytoken_lab.engine.recipe import flat_names
    from everytoken_lab.maps.summary import describe

    facts = describe(Maps(options.maps, partial=True), options.sample)
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    table = Table(title=str(options.maps), show_header=False)
    for name, value in flat_names(facts).items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(_plain(name), _plain(text))
    Console(markup=False).print(table)
    return 0


@dataclass(frozen=True)
class Sheet(SheetOptions):
    """Draw images with their maps. First those where map and folder disagree, then mixed ones; or those you name.

    Examples:
        everytoken maps sheet maps --images photos --out sheet.png
        everytoken maps sheet maps cat/1.jpg dog/7.jpg --images photos --out two.png
    """


def sheet(argv: list[str], prog: str) -> int:
    make_sheet(parse(Sheet, prog, argv))
    return 0


@dataclass(frozen=True)
class Verify:
    """Check every byte of a store. Exit code 1 when something is damaged.

    Examples:
        everytoken maps verify maps
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    list: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Damaged images to name per file."""


def verify_store(argv: list[str], prog: str) -> int:
    options = parse(Verify, prog, argv)
    with Progress("verify", "B") as progress:
        verdict = verify(options.maps, progress)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for problem in verdict.problems:
        console.print("damaged ", style="red", end="")
        console.print(_plain(f"{problem.file}: {problem.what}"))
        _list(problem.keys, options.list)
    state = "" if verdict.complete or not verdict.ok else f" of {verdict.images:,}; the store is not finished"
    count = f"{verdict.maps:,} maps, {verdict.skipped:,} skipped images{state}, {verdict.bytes / 1e6:,.1f} MB"
    if verdict.ok:
        print(f"{options.maps}: intact ({count})")
        return 0
    print(
        f"{options.maps}: {len(verdict.problems)} damaged file(s) ({count}).\n"
        "Restore them from a copy; or delete damaged shard-*.npy files and run the command that made the store again: "
        "it makes only those."
    )
    return 1


@dataclass(frozen=True)
class Import(ImportOptions):
    """Make a store of a folder of released .pt maps: token labeling [2, 5, 18, 18], ReLabel [2, 5, 15, 15].

    Nothing in the files is executed; files that are not what they should be are refused and listed.

    Examples:
        everytoken maps import label_top5_train_nfnet --out maps --images imagenet/train
        everytoken maps import relabel --out maps --images imagenet/train
    """


def import_maps(argv: list[str], prog: str) -> int:
    options = parse(Import, prog, argv)
    with Progress("import", "maps") as progress:
        result = import_released(options, progress)
    print(f"{result.store}: {result.maps:,} maps")
    for note in result.notes:
        print(f"  {note}")
    for names, what in (
        ([f"{name} {reason}" for name, reason in result.refused.items()], "label files refused"),
        (result.ambiguous, "label files that several images claim; none of them gets it"),
        (result.without_label, "images without a label file"),
        (result.without_image, "label files without an image"),
    ):
        if names:
            print(f"{len(names):,} {what}:")
            _list(names, 10)
    if result.refused or result.ambiguous or result.without_label:
        print(f"All images without a map are listed in {result.store / 'skipped.csv'}.")
    return 0


@dataclass(frozen=True)
class Export(ExportOptions):
    """Write a store as released .pt maps [2, k, height, width], for other code that reads them.

    Examples:
        everytoken maps export maps --out pt_maps
    """


def export_maps(argv: list[str], prog: str) -> int:
    options = parse(Export, prog, argv)
    with Progress("export", "maps") as progress:
        notes = export_released(options, progress)
    print(f"{options.out}: {len(Maps(options.maps)):,} maps")
    for note in notes:
        print(f"  note: {note}")
    return 0


@dataclass(frozen=True)
class Merge:
    """Make one store of several: parts that machines with a disk each have annotated, or stores of different images.

    The stores must come from the same annotator with the same settings and classes. An interrupted merge resumes when
    the same command is run again.

    Examples:
        everytoken maps merge node0/maps node1/maps --out maps
    """

    maps: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folders of two stores or more; unfinished ones, too, if together they have all images."""
    out: Path
    """Folder of the new store."""


def merge(argv: list[str], prog: str) -> int:
    options = parse(Merge, prog, argv)
    with Progress("merge", "maps") as progress:
        store = merge_maps(options.maps, options.out, progress)
    print(f"{options.out}: {len(store):,} maps, {store.manifest.skipped:,} skipped images")
    return 0


def _list(lines: Iterable[str], limit: int) -> None:
    lines = list(lines)
    for line in lines[:limit]:
        print(f"  {_plain(line)}")
    if len(lines) > limit:
        print(f"  and {len(lines) - limit:,} more")


def _plain(text: str) -> str:
    """Text that can be printed: file names that are not UTF-8 have characters that cannot."""
    return text.encode("utf-8", "replace").decode()


OPTIONS = {"info": Info, "sheet": Sheet, "verify": Verify, "import": Import, "export": Export}
_COMMANDS: dict[str, Command] = {
    "info": ("what is in a store, as a table", info),
    "sheet": ("a picture of many maps on their images: wrong and interesting ones first, or those you name", sheet),
    "verify": ("check every byte; names the images whose maps are damaged", verify_store),
    "merge": ("make one store of several", merge),
    "import": ("make a store of released .pt maps (token labeling, ReLabel)", import_maps),
    "export": ("write a store as released .pt maps", export_maps),
}
