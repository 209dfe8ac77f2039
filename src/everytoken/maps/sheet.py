"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageOps

from everytoken.data.decode import FORMATS
from everytoken.draw import (
    CARD,
    FAINT,
    GREEN,
    INK,
    OTHER,
    PALETTE,
    PAPER,
    RED,
    cells_of,
    choose_colours,
    class_panel,
    confidence_panel,
    draw_swatch,
    draw_text,
    heat_colours,
)
from everytoken.errors import EverytokenError
from everytoken.maps.score_map import ScoreMap
from everytoken.maps.store import Maps
from everytoken.maps.summary import MapSummary, folder_label, pick, summarize

HOW = "photo · best class of each cell, stronger where surer · confidence · main classes with their part of the cells"
PANEL, GAP, LEGEND, PAD, LINE = 232, 8, 236, 14, 21
TILE = (PAD * 2 + PANEL * 3 + GAP * 2 + 14 + LEGEND, PAD * 2 + LINE * 2 + 6 + PANEL)


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


@dataclass(frozen=True)
class SheetResult:
    """A sheet that was written: how many images it has, and how many of them were not found under `folder`."""

    path: Path
    images: int
    missing: int
    folder: Path | None


def make_sheet(options: SheetOptions) -> SheetResult:
    """Draw images with their maps into one picture: those that are named, or first those where map and folder
    disagree, then mixed ones, then others."""
    from everytoken.classes import class_finder

    maps = Maps(options.maps, partial=True)
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
    picture = draw_sheet(tiles, name_of, title, options.columns)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        picture.save(options.out)
    except (OSError, ValueError) as error:
        raise EverytokenError(f"cannot write {options.out}: {error}. Give a name that ends in .png or .jpg.") from error
    return SheetResult(options.out, len(tiles), missing, folder)


def find_images(images: Path, keys: Sequence[str]) -> tuple[Path, int]:
    """The folder that the keys are relative to (the given one, or the folder of its training images or of another
    split), and how many of them are not there."""
    from everytoken.data.places import SPLITS, part

    if not images.is_dir():
        raise EverytokenError(f"there is no image folder {images}.")
    parts = [part(str(images), split) for split in SPLITS]
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
    from everytoken.classes import read_class_names, shown_name

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
    """An upright RGB image small enough for a panel, and a remark when something is odd about it."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            opened.draft("RGB", (2 * PANEL, 2 * PANEL))  # JPEG: decode no more than needed
            full = opened.size
            photo = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return None, f"cannot show {path.name}: {error}"
    remark = ""
    if size != (0, 0) and abs(photo.width / photo.height - size[0] / size[1]) > 0.02 * size[0] / size[1]:
        remark = f"the image is not the annotated one: it was {size[0]}x{size[1]}, is {full[0]}x{full[1]}"
    photo.thumbnail((PANEL, PANEL), Image.Resampling.LANCZOS)
    if max(photo.size) < PANEL:
        photo = ImageOps.contain(photo, (PANEL, PANEL), Image.Resampling.NEAREST)
    return photo, remark


def draw_sheet(tiles: Sequence[Tile], name_of: Callable[[int], str], title: str, columns: int = 2) -> Image.Image:
    """The whole sheet; tiles of one section stand together under its name."""
    columns = max(1, min(columns, len(tiles)))
    sections: dict[str, list[Tile]] = {}
    for tile in tiles:
        sections.setdefault(tile.section, []).append(tile)
    width = columns * (TILE[0] + PAD) + PAD
    head, bar = 76, 40
    rows = sum(-(-len(group) // columns) for group in sections.values())
    height = head + sum(bar for name in sections if name) + rows * (TILE[1] + PAD) + PAD
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw_text(draw, (PAD * 2, 14), title, 22, INK, width - 4 * PAD)
    draw_text(draw, (PAD * 2, 44), HOW, 15, FAINT, width - 4 * PAD)
    colours: dict[int, str] = {}
    y = head
    for name, group in sections.items():
        if name:
            draw_text(draw, (PAD * 2, y + 10), name, 18, FAINT, width - 4 * PAD)
            y += bar
        for i, tile in enumerate(group):
            x = PAD + (i % columns) * (TILE[0] + PAD)
            sheet.paste(_draw_tile(tile, name_of, colours), (x, y + (i // columns) * (TILE[1] + PAD)))
        y += -(-len(group) // columns) * (TILE[1] + PAD)
    return sheet


def _draw_tile(tile: Tile, name_of: Callable[[int], str], colours: dict[int, str]) -> Image.Image:
    card = Image.new("RGB", TILE, CARD)
    draw = ImageDraw.Draw(card)
    summary = tile.summary
    draw_text(draw, (PAD, PAD - 2), tile.key, 15, INK, TILE[0] - 2 * PAD, middle=True)
    said = f"map: {name_of(summary.image_class)} {summary.image_confidence:.0%}"
    if tile.label is None:
        line, colour = said, FAINT
    elif tile.label == summary.image_class:
        line, colour = f"{said}, like its folder", GREEN
    else:
        line, colour = f"{said}      folder: {name_of(tile.label)}", RED
    draw_text(draw, (PAD, PAD + LINE - 2), line, 15, colour, TILE[0] - 2 * PAD)
    photo = tile.photo or _blank(tile.score_map)
    cells, inside = cells_of(photo.size, _grid(tile.score_map), tile.score_map.area)
    legend = choose_colours([c for c, _ in summary.shares], colours)
    top = PAD + 2 * LINE + 6
    panels = (
        photo,
        class_panel(photo, cells, inside, summary, legend),
        confidence_panel(photo, cells, inside, summary),
    )
    for i, panel in enumerate(panels):
        left = PAD + i * (PANEL + GAP)
        card.paste(panel, (left + (PANEL - panel.width) // 2, top + (PANEL - panel.height) // 2))
    _draw_legend(draw, PAD + 3 * PANEL + 2 * GAP + 14, top, tile, legend, name_of)
    return card


def _draw_legend(
    draw: ImageDraw.ImageDraw, x: int, y: int, tile: Tile, legend: dict[int, str], name_of: Callable[[int], str]
) -> None:
    summary, rest = tile.summary, 1.0
    for class_id, share in summary.shares[: len(PALETTE)]:
        draw_swatch(draw, x, y, legend[class_id], name_of(class_id), share)
        y, rest = y + LINE, rest - share
    others = len(summary.shares) - len(legend)
    if others > 0:
        draw_swatch(draw, x, y, OTHER, f"{others} other{'s' if others > 1 else ''}", rest)
        y += LINE
    y = PAD + 2 * LINE + 6 + PANEL - 2 * LINE - 6
    sure = summary.confidence[summary.inside]
    ramp = np.linspace(0, 1, LEGEND - 90)[None, :].repeat(10, axis=0)
    bar = Image.fromarray(heat_colours(ramp))
    draw._image.paste(bar, (x + 38, y + 5))
    draw_text(draw, (x, y), "0 %", 13, FAINT, 40)
    draw_text(draw, (x + LEGEND - 46, y), "100 %", 13, FAINT, 48)
    words = tile.remark or f"confidence {sure.min():.0%} to {sure.max():.0%} · {summary.vocabulary} classes"
    draw_text(draw, (x, y + LINE), words, 13, RED if tile.remark else FAINT, LEGEND)


def _blank(score_map: ScoreMap) -> Image.Image:
    """A stand-in of the right shape for a photo that is not there."""
    width, height = score_map.size if min(score_map.size) > 0 else (PANEL, PANEL)
    scale = PANEL / max(width, height)
    return Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), "#d0d0d4")


def _grid(score_map: ScoreMap) -> tuple[int, int]:
    rows, columns = score_map.scores.shape[:2]
    return rows, columns
