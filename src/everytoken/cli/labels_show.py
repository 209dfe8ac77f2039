"""`everytoken labels info | sheet | show`: what is in a store, for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.cli.labels_files import read_names
from everytoken.errors import EverytokenError
from everytoken.maps.store import Maps


@dataclass(frozen=True)
class Info:
    """Print what is in a store: settings, counts, size, and what its maps are like.

    Examples:
        everytoken labels info maps
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    sample: int = 512
    """Maps to look at for the means; 0 leaves them out."""
    json: bool = False
    """Print JSON instead of a table."""


def info_main(argv: list[str], prog: str) -> int:
    """Parse, collect, print."""
    options = parse(Info, prog, argv)
    facts = _facts(Maps(options.maps, partial=True), options.sample)
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    table = Table(title=str(options.maps), show_header=False)
    for name, value in facts.items():
        for inner, part in _flat(name, value):
            table.add_row(inner, f"{part:,}" if isinstance(part, int) and not isinstance(part, bool) else str(part))
    Console().print(table)
    return 0


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}", inner)]


def _facts(store: Maps, sample: int) -> dict[str, Any]:
    from everytoken.classes import class_finder
    from everytoken.maps.summary import summarize_store

    manifest = store.manifest
    names = list(manifest.class_names)
    used = sum(path.stat().st_size for path in store.path.iterdir() if path.is_file())
    facts: dict[str, Any] = {
        "state": "complete" if manifest.complete else "not finished: run the same command again to go on",
        "maps": len(store),
        "skipped images": len(store.skipped),
        "images": manifest.total,
        "grid": f"{manifest.grid[0]} x {manifest.grid[1]}",
        "classes per cell": manifest.top_k,
        "classes": manifest.num_classes,
        "class names": f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "not known",
        "class names' hash": manifest.class_names_sha256[:16],
        "image to annotator": manifest.resize_mode,
        "annotator": manifest.annotator or "not known",
        "shards": f"{manifest.num_shards} of {manifest.shard_size:,} images",
        "size": f"{used / 1e6:,.1f} MB",
        "bytes per map": round(used / len(store)) if len(store) else 0,
    }
    if store.skipped:
        facts["skipped, for example"] = "; ".join(f"{key}: {why}" for key, why in list(store.skipped.items())[:3])
    seen = summarize_store(store, sample, class_finder(names)) if sample > 0 and len(store) else None
    if seen is not None:
        facts["looked at"] = f"{seen.looked_at:,} maps"
        facts["classes in a map, mean"] = f"{seen.vocabulary:.1f}"
        facts["confidence of a cell, mean"] = f"{seen.confidence:.1%}"
        agreement = "folder names are no class names" if seen.agreement is None else f"{seen.agreement:.1%}"
        facts["map's class = folder's"] = agreement
    return facts


@dataclass(frozen=True)
class Sheet:
    """Draw a sheet of many images with their maps. First those where map and folder disagree, then mixed ones.

    Examples:
        everytoken labels sheet maps --images photos --out sheet.png
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    images: Path | None = None
    """The image folder that was annotated. Without it the cells are drawn on grey."""
    out: Path = Path("sheet.png")
    """Picture to write."""
    count: int = 24
    """Images on the sheet."""
    scan: int = 5000
    """Maps to look through for interesting ones, spread over the store."""
    names: Path | None = None
    """Text file with one readable class name per line, in the order of the ids, to use in the legend."""
    columns: int = 2
    """Images side by side."""


@dataclass(frozen=True)
class Show:
    """Draw the maps of named images. Without a name, the same as `labels sheet`.

    Examples:
        everytoken labels show maps cat/1.jpg dog/7.jpg --images photos --out two.png
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    keys: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[KEY ...]")] = ()
    """Paths of images relative to the image folder."""
    images: Path | None = None
    """The image folder that was annotated. Without it the cells are drawn on grey."""
    out: Path = Path("maps.png")
    """Picture to write."""
    names: Path | None = None
    """Text file with one readable class name per line, in the order of the ids, to use in the legend."""
    columns: int = 1
    """Images side by side."""


def sheet_main(argv: list[str], prog: str) -> int:
    """Parse, pick, draw."""
    return _sheet(parse(Sheet, prog, argv))


def show_main(argv: list[str], prog: str) -> int:
    """Parse, draw."""
    options = parse(Show, prog, argv)
    if not options.keys:
        return _sheet(Sheet(options.maps, options.images, options.out, names=options.names))
    store = Maps(options.maps, check=True, partial=True)
    _draw(store, [(key, "") for key in options.keys], options.images, options.names, options.out, options.columns)
    return 0


def _sheet(options: Sheet) -> int:
    from everytoken.classes import class_finder
    from everytoken.maps.summary import pick

    store = Maps(options.maps, partial=True)
    if not len(store) or options.count < 1:
        raise EverytokenError(f"{options.maps} has no maps to show, or --count is {options.count}.")
    picks, counts = pick(store, options.count, options.scan, class_finder(store.manifest.class_names))
    scanned = sum(counts.values())
    chosen = [(one.key, f"{one.why} ({counts[one.why]:,} of {scanned:,} looked at)") for one in picks]
    _draw(store, chosen, options.images, options.names, options.out, options.columns)
    return 0


def _draw(
    store: Maps, chosen: Sequence[tuple[str, str]], images: Path | None, names: Path | None, out: Path, columns: int
) -> None:
    from everytoken.classes import class_finder
    from everytoken.maps.sheet import Tile, draw_sheet, load_photo
    from everytoken.maps.summary import folder_label, summarize

    manifest = store.manifest
    name_of = _namer(store, names)
    folder, missing = (None, 0) if images is None else _find_images(images, [key for key, _ in chosen])
    find = class_finder(manifest.class_names)
    tiles = []
    for key, section in chosen:
        one = store[key]
        photo, remark = (None, "") if folder is None else load_photo(folder / key, one.size)
        summary = summarize(one, manifest.num_classes)
        tiles.append(Tile(key, section, one, summary, folder_label(key, find), photo, remark))
    title = f"{store.path.resolve().name} · {len(store):,} maps of {manifest.grid[0]}x{manifest.grid[1]} cells"
    if isinstance(manifest.annotator.get("name"), str):
        title += f" · {manifest.annotator['name']}"
    picture = draw_sheet(tiles, name_of, title, columns)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        picture.save(out)
    except (OSError, ValueError) as error:
        raise EverytokenError(f"cannot write {out}: {error}. Give a name that ends in .png or .jpg.") from error
    print(f"{out}: {len(tiles)} image{'s' if len(tiles) > 1 else ''}")
    if missing:
        print(f"note: {missing} of {len(tiles)} images were not found under {folder}; their cells are drawn on grey")


def _find_images(images: Path, keys: Sequence[str]) -> tuple[Path, int]:
    """The folder that the keys are relative to (the given one, or the folder of its training images or of another
    part), and how many of them are not there."""
    from everytoken.data.places import SPLITS, part

    if not images.is_dir():
        raise EverytokenError(f"there is no image folder {images}.")
    parts = [part(str(images), split) for split in SPLITS]
    places = [place.folder for place in parts if place is not None and place.folder is not None] + [images]
    found = [sum((place / key).is_file() for key in keys) for place in places]
    best = places[found.index(max(found))]
    if keys and not max(found):
        where = " or ".join(map(str, dict.fromkeys(places)))
        raise EverytokenError(
            f"{len(keys)} of {len(keys)} images were not found under {where}: for example, there is no "
            f"{best / keys[0]}. Give the folder that was annotated as --images; without it the cells are drawn on grey."
        )
    return best, len(keys) - max(found)


def _namer(store: Maps, path: Path | None) -> Callable[[int], str]:
    names = read_names(path)
    if path is not None and len(names) != store.manifest.num_classes:
        raise EverytokenError(f"{path} has {len(names)} lines; {store.path} has {store.manifest.num_classes} classes.")
    if names:
        return names.__getitem__
    from everytoken.classes import shown_name

    return lambda number: shown_name(store.manifest.class_name(number))
