"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
from everytoken.maps.scoremap import ScoreMap
from everytoken.maps.summary import MapSummary

HOW = "photo · best class of each cell, stronger where surer · confidence · main classes with their part of the cells"
PANEL, GAP, LEGEND, PAD, LINE = 232, 8, 236, 14, 21
TILE = (PAD * 2 + PANEL * 3 + GAP * 2 + 14 + LEGEND, PAD * 2 + LINE * 2 + 6 + PANEL)


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
