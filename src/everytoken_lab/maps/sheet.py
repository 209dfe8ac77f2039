"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from PIL import Image, ImageOps

from everytoken.errors import EverytokenError
from everytoken.files import write_picture
from everytoken.maps.score_map import ScoreMap
from everytoken.maps.store import Maps
from everytoken_lab import draw
from everytoken_lab.data.decode import ImageError, naming_errors, open_image
from everytoken_lab.maps.summary import MapSummary, folder_label, pick, summarize

log = logging.getLogger(__name__)
SUBTITLE = "colour: best class of each cell, stronger where surer · legend: main classes with their part of the cells"


@dataclass(frozen=True)
class SheetOptions:
    """Which maps to draw, and how."""

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
    scan: int = 5000
    """Maps to look through for interesting ones, spread over the store."""
    names: Path | None = None
    """Text file with one readable class name per line, in the order of the ids, to use in the legend."""
    columns: int = 2
    """Images side by side."""


def make_sheet(options: SheetOptions) -> Path:
    """Draw images with their maps into one picture: those that are named, or first those where map and folder
    disagree, then mixed ones, then others. Returns the picture's path."""
    picture = sheet_picture(Maps(options.maps, partial=True), options)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_picture(options.out, picture)
    except OSError as error:
        raise EverytokenError(f"cannot write {options.out}: {error}.") from error
    log.info(f"wrote {options.out}")
    return options.out


def sheet_picture(maps: Maps, options: SheetOptions) -> Image.Image:
    """The picture that `make_sheet` writes."""
    from everytoken_lab.classes import class_finder

    chosen = [(key, "") for key in options.keys]
    if not chosen:
        if not len(maps) or options.count < 1:
            raise EverytokenError(f"{options.maps} has no maps to show, or count is {options.count}.")
        picks, counts = pick(maps, options.count, options.scan)
        scanned = sum(counts.values())
        chosen = [(key, f"{reason} ({counts[reason]:,} of {scanned:,} looked at)") for key, reason in picks]
    keys = [key for key, _ in chosen]
    folder, missing = (None, 0) if options.images is None else find_images(options.images, keys)
    name_of, find = namer(maps, options.names), class_finder(maps.class_names)
    tiles = []
    for key, section in chosen:
        score_map = maps[key]
        photo, remark = (None, "") if folder is None else load_photo(folder / key, score_map.size)
        summary = summarize(score_map, maps.num_classes)
        tiles.append(Tile(key, section, score_map, summary, folder_label(key, find), photo, remark))
    title = f"{maps.path.resolve().name} · {len(maps):,} maps of {maps.grid[0]}x{maps.grid[1]} cells"
    if isinstance(maps.manifest.annotator.get("name"), str):
        title += f" · {maps.manifest.annotator['name']}"
    if missing:
        log.info(f"note: {missing} of {len(tiles)} images were not found under {folder}; their cells are drawn on grey")
    return draw_sheet(tiles, name_of, title, options.columns, map(name_of, range(maps.num_classes)))


def find_images(images: Path, keys: Sequence[str]) -> tuple[Path, int]:
    """The folder that the keys are relative to (the given one, or the folder of its training images or of another
    split), and how many of them are not there."""
    from everytoken_lab.data.datasets import SPLITS, find_split

    if not images.is_dir():
        raise EverytokenError(f"there is no image folder {images}.")
    parts = [find_split(str(images), split) for split in SPLITS]
    folders = [place.folder for place in parts if place is not None and place.folder is not None] + [images]
    there = [sum((folder / key).is_file() for key in keys) for folder in folders]
    best = folders[there.index(max(there))]
    if keys and not max(there):
        where = " or ".join(map(str, dict.fromkeys(folders)))
        raise EverytokenError(
            f"{len(keys)} of {len(keys)} images were not found under {where}: for example, there is no "
            f"{best / keys[0]}. Give the folder that was annotated; without images the cells are drawn on grey."
        )
    return best, len(keys) - max(there)


def namer(maps: Maps, path: Path | None) -> Callable[[int], str]:
    """From class ids to names for people; `path`: a file of names to use instead of the store's."""
    from everytoken_lab.classes import read_class_names, shown_name

    names = read_class_names(path)
    if path is not None and len(names) != maps.num_classes:
        raise EverytokenError(f"{path} has {len(names)} lines; {maps.path} has {maps.num_classes} classes.")
    return names.__getitem__ if names else lambda number: shown_name(maps.manifest.class_name(number))


@dataclass(frozen=True)
class Tile:
    """One image of a sheet. ``photo`` is None when it cannot be shown; ``remark`` says why, or something else."""

    key: str
    section: str
    score_map: ScoreMap
    summary: MapSummary
    label: int | None = None
    photo: Image.Image | None = None
    remark: str = ""


def load_photo(path: Path, size: tuple[int, int]) -> tuple[Image.Image | None, str]:
    """An upright RGB image as large as a panel, and a remark when something is odd about it."""
    try:
        with open_image(path, path.name) as opened, naming_errors(path.name):
            opened.draft("RGB", (2 * draw.PANEL, 2 * draw.PANEL))  # JPEG: decode no more than needed
            full = opened.size
            photo = ImageOps.exif_transpose(opened).convert("RGB")
    except ImageError as error:
        return None, f"cannot show {error}"
    remark = ""
    if size != (0, 0) and abs(photo.width / photo.height - size[0] / size[1]) > 0.02 * size[0] / size[1]:
        remark = f"the image is not the annotated one: it was {size[0]}x{size[1]}, is {full[0]}x{full[1]}"
    return draw.fit_photo(photo), remark


def draw_sheet(
    tiles: Sequence[Tile], name_of: Callable[[int], str], title: str, columns: int = 2, classes: Iterable[str] = ()
) -> Image.Image:
    """The whole sheet; tiles of one section stand together under its name. `classes`: all names, for their colours."""
    colours = draw.ClassColours(list(classes))
    return draw.draw_sheet(title, SUBTITLE, [_card(tile, name_of, colours) for tile in tiles], columns)


def _card(tile: Tile, name_of: Callable[[int], str], colours: draw.ClassColours) -> draw.Card:
    summary = tile.summary
    label, ink = f"map: {name_of(summary.image_class)} {summary.image_confidence:.0%}", draw.FAINT
    if tile.label is not None:
        same = tile.label == summary.image_class
        label += ", like its folder" if same else f"      folder: {name_of(tile.label)}"
        ink = draw.GREEN if same else draw.RED
    photo = tile.photo or _blank(tile.score_map)
    area = tile.score_map.area
    chosen = colours.choose([name_of(c) for c, _ in summary.shares])
    legend = {c: chosen[name_of(c)] for c, _ in summary.shares if name_of(c) in chosen}
    shown = sorted(((c, share) for c, share in summary.shares if c in legend), key=lambda pair: -pair[1])
    entries = [draw.Entry(legend[c], name_of(c), share) for c, share in shown]
    others = len(summary.shares) - len(shown)
    if others > 0:
        rest = 1 - sum(share for _, share in shown)
        entries.append(draw.Entry(draw.OTHER, f"{others} other{'s' if others > 1 else ''}", rest))
    confidence = summary.confidence[summary.inside]
    row = draw.Row(
        label,
        [
            draw.Panel("photo", photo),
            draw.Panel("what the map says", draw.class_overlay(photo, summary.top, summary.confidence, legend, area)),
            draw.Panel("how sure it is", draw.confidence_overlay(photo, summary.confidence, area)),
        ],
        entries,
        [("0 %", "100 %", "heat")],
        tile.remark or f"sure {confidence.min():.0%} to {confidence.max():.0%} · {summary.vocabulary} classes",
        ink,
        draw.RED if tile.remark else draw.FAINT,
    )
    return draw.Card(tile.key, [row], tile.section)


def _blank(score_map: ScoreMap) -> Image.Image:
    """A stand-in of the right shape for a photo that is not there."""
    width, height = score_map.size if min(score_map.size) > 0 else (draw.PANEL, draw.PANEL)
    scale = draw.PANEL / max(width, height)
    return Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), "#d0d0d4")
