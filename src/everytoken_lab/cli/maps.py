"""`everytoken maps ...`: look at, check and import stores of score maps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from everytoken.errors import EverytokenError
from everytoken.files import write_picture
from everytoken.maps import Maps, verify
from everytoken_lab.maps.released import import_released
from everytoken_lab.maps.summary import StoreSummary, summarize_store
from everytoken_lab.schema import say
from everytoken_lab.terminal import Progress, print_facts, print_notes, print_some

Store = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS", help="Folder of the store.")]


@dataclass(frozen=True)
class Info:
    """Print what is in a store: settings, counts, size and statistics of its maps.

    Examples:
        everytoken maps info maps
    """

    maps: Store
    json: bool = False
    """Print JSON instead of a table."""


def info(options: Info) -> None:
    maps = Maps(options.maps, partial=True)
    facts = describe(maps, summarize_store(maps))
    if options.json:
        say(json.dumps(facts, indent=1))
    else:
        print_store(options.maps, facts)


def describe(maps: Maps, summary: StoreSummary) -> dict[str, Any]:
    """What is in a store, for people: settings, counts, size, and what the maps that were looked at are like."""
    names, size = maps.class_names, sum(path.stat().st_size for path in maps.path.iterdir() if path.is_file())
    facts: dict[str, Any] = {
        "state": "complete" if maps.complete else "not finished: the same command continues it",
        "maps": len(maps),
        "skipped images": maps.skipped,
        "images": maps.total,
        "grid": f"{maps.grid[0]} x {maps.grid[1]}",
        "classes per cell": maps.top_k,
        "classes": maps.num_classes,
        "class names": f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "not known",
        "image to annotator": maps.meta.resize_mode,
        "annotator": maps.meta.annotator or "not known",
        "size": f"{size / 1e6:,.1f} MB",
        "bytes per image": round(size / maps.total),
    }
    if summary.looked_at:
        facts["looked at"] = f"{summary.looked_at:,} maps"
        facts["classes in a map, mean"] = f"{summary.vocabulary:.1f}"
        facts["confidence of a cell, mean"] = f"{summary.confidence:.1%}"
    if summary.images_agree is not None:
        facts["map's class = folder's"] = f"{summary.images_agree:.1%}"
        facts["cell's class = folder's"] = f"{summary.cells_agree:.1%}"
    return facts


def print_store(path: Path, facts: Mapping[str, Any]) -> None:
    """The facts of `describe`, and the first images without a map."""
    from everytoken_lab.engine.options import flat_names

    skipped = facts["skipped images"]
    print_facts(flat_names({**facts, "skipped images": len(skipped)}), str(path))
    print_some([f"skipped {key}: {reason}" for key, reason in skipped.items()], 20)


@dataclass(frozen=True)
class Sheet:
    """Draw images with their maps. First those where map and folder disagree; or those you name.

    Examples:
        everytoken maps sheet maps --images photos --out sheet.png
        everytoken maps sheet maps cat/1.jpg dog/7.jpg --images photos --out two.png
    """

    maps: Store
    keys: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY ...]")] = ()
    """Images to draw: paths relative to the image folder. Default: those most worth looking at."""
    images: Path | None = None
    """The image folder that was annotated. Without it the cells are drawn on grey."""
    out: Path = Path("sheet.png")
    """The picture to write."""
    count: int = 24
    """Images on the sheet, if they are not named."""


def sheet(options: Sheet) -> None:
    from everytoken_lab.maps.sheet import sheet_picture

    drawn = sheet_picture(Maps(options.maps, partial=True), options.keys, options.images, options.count)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_picture(options.out, drawn)
    except OSError as error:
        raise EverytokenError(f"cannot write {options.out}: {error}.") from error
    say(f"wrote {options.out}")


@dataclass(frozen=True)
class Verify:
    """Check every byte of a store. Exit code 1 when something is damaged.

    Examples:
        everytoken maps verify maps
    """

    maps: Store


def verify_store(options: Verify) -> int:
    with Progress("verify", "B") as progress:
        verdict = verify(options.maps, progress)
    for problem in verdict.problems:
        say(f"damaged {problem.file}: {problem.what}")
        print_some(problem.keys, 20)
    state = "" if verdict.complete or not verdict.ok else f" of {verdict.images:,}; the store is not finished"
    count = f"{verdict.maps:,} maps, {verdict.skipped:,} skipped images{state}, {verdict.bytes / 1e6:,.1f} MB"
    if verdict.ok:
        say(f"{options.maps}: intact ({count})")
        return 0
    say(
        f"{options.maps}: {len(verdict.problems)} damaged file(s) ({count}).\n"
        "Restore them from a copy, or delete the damaged shards and run the command that made the store again."
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


def import_maps(options: Import) -> None:
    with Progress("import", "maps") as progress:
        store, notes = import_released(**vars(options), progress=progress)
    say(f"{options.out}: {len(store):,} maps, {len(store.skipped):,} images without one")
    print_some([f"{key}: {reason}" for key, reason in store.skipped.items()], 20)
    print_notes(notes, aside=False)


COMMANDS = {"info": info, "sheet": sheet, "verify": verify_store, "import": import_maps}
