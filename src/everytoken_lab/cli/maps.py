"""`everytoken maps ...`: look at, check and import stores of score maps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.errors import EverytokenError
from everytoken.files import write_picture
from everytoken.maps import Maps, verify
from everytoken_lab.cli import Command, call
from everytoken_lab.cli._parse import parse
from everytoken_lab.maps.released import import_released
from everytoken_lab.maps.sheet import sheet_picture
from everytoken_lab.maps.summary import summarize_store
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

    facts = describe(Maps(options.maps, partial=True), options.sample)
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    table = Table(title=str(options.maps), show_header=False)
    skipped = facts["skipped images"]
    facts["skipped images"] = len(skipped)
    for name, value in flat_names(facts).items():
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(_plain(name), _plain(text))
    Console(markup=False).print(table)
    _list((f"skipped {key}: {reason}" for key, reason in skipped.items()), 20)
    return 0


def describe(maps: Maps, sample: int = 512) -> dict[str, Any]:
    """What is in a store, for people: settings, counts, size, and what up to `sample` of its maps are like."""
    names, summary = maps.class_names, summarize_store(maps, sample)
    facts: dict[str, Any] = {
        "state": "complete" if maps.complete else "not finished: the same command continues it",
        "maps": len(maps),
        "skipped images": summary.skipped,
        "images": maps.total,
        "grid": f"{maps.grid[0]} x {maps.grid[1]}",
        "classes per cell": maps.top_k,
        "classes": maps.num_classes,
        "class names": f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "not known",
        "image to annotator": maps.meta.resize_mode,
        "annotator": maps.meta.annotator or "not known",
        "size": f"{summary.bytes_per_image * maps.total / 1e6:,.1f} MB",
        "bytes per image": round(summary.bytes_per_image),
    }
    if summary.looked_at:
        agree = summary.images_agree
        facts["looked at"] = f"{summary.looked_at:,} maps"
        facts["classes in a map, mean"] = f"{summary.vocabulary:.1f}"
        facts["confidence of a cell, mean"] = f"{summary.confidence:.1%}"
        facts["map's class = folder's"] = "folder names are no class names" if agree is None else f"{agree:.1%}"
    return facts


@dataclass(frozen=True)
class Sheet:
    """Draw images with their maps. First those where map and folder disagree, then mixed ones; or those you name.

    Examples:
        everytoken maps sheet maps --images photos --out sheet.png
        everytoken maps sheet maps cat/1.jpg dog/7.jpg --images photos --out two.png
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    keys: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY ...]")] = ()
    """Images to draw: paths relative to the image folder. Default: those most worth looking at."""
    images: Path | None = None
    """The image folder that was annotated. Without it the cells are drawn on grey."""
    out: Path = Path("sheet.png")
    """Picture to write."""
    count: int = 24
    """Images on the sheet, if they are not named."""


def sheet(argv: list[str], prog: str) -> int:
    options = parse(Sheet, prog, argv)
    maps = Maps(options.maps, partial=True)
    picture = sheet_picture(maps, options.keys, options.images, options.count)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_picture(options.out, picture)
    except OSError as error:
        raise EverytokenError(f"cannot write {options.out}: {error}.") from error
    print(f"wrote {options.out}")
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
        "Restore them from a copy; or delete the damaged shards and run the command that made the store again: it "
        "makes only those."
    )
    return 1


@dataclass(frozen=True)
class Import:
    """Make a store of a folder of released .pt maps: token labeling [2, 5, 18, 18], ReLabel [2, 5, 15, 15].

    Nothing in the files is executed; files that are not what they should be are refused and listed.

    Examples:
        everytoken maps import label_top5_train_nfnet --out maps --images imagenet/train
        everytoken maps import relabel --out maps --images imagenet/train
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the released maps, with one folder per class."""
    out: Path
    """Folder of the new store."""
    images: Path | None = None
    """Image folder; keys become its images' paths. Without it, keys are the maps' paths without .pt."""
    num_classes: int = 1000
    """Classes of the annotator."""
    class_names: Path | None = None
    """Text file with one class name per line, in order. Default: the class folders, if they are as many."""
    resize_mode: Literal["squash", "center", "letterbox"] | None = None
    """How images went into the annotator. Default: squash for 15x15 (ReLabel), else center (token labeling)."""


def import_maps(argv: list[str], prog: str) -> int:
    options = parse(Import, prog, argv)
    with Progress("import", "maps") as progress:
        store, notes = import_released(**vars(options), progress=progress)
    skipped = store.skipped
    print(f"{options.out}: {len(store):,} maps, {len(skipped):,} images without one")
    _list((f"{key}: {reason}" for key, reason in skipped.items()), 10)
    for note in notes:
        print(f"note: {note}")
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


OPTIONS = {"info": Info, "sheet": Sheet, "verify": Verify, "import": Import}
_COMMANDS: dict[str, Command] = {
    "info": ("what is in a store, as a table", info),
    "sheet": ("a picture of many maps on their images: wrong and interesting ones first, or those you name", sheet),
    "verify": ("check every byte; names the images whose maps are damaged", verify_store),
    "import": ("make a store of released .pt maps (token labeling, ReLabel)", import_maps),
}
