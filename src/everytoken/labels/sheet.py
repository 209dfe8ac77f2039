"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from everytoken.labels.scoremap import ScoreMap
from everytoken.labels.summary import MapSummary

# Seven colours that can be told apart on a grey photograph; grey is for the rest.
PALETTE = ("#e6194b", "#3cb4ff", "#ffd21e", "#2fbf71", "#b15be3", "#ff8c1a", "#1f4ed8")
OTHER = "#8a8a8a"
HOW = "photo · best class of each cell, stronger where surer · confidence · main classes with their part of the cells"
INK, FAINT, PAPER, CARD, RED, GREEN = "#1c1c1e", "#6b6b70", "#f2f2f4", "#ffffff", "#c62828", "#2e7d32"
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
        with Image.open(path) as opened:
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
    _text(draw, (PAD * 2, 14), title, 22, INK, width - 4 * PAD)
    _text(draw, (PAD * 2, 44), HOW, 15, FAINT, width - 4 * PAD)
    colours: dict[int, str] = {}
    y = head
    for name, group in sections.items():
        if name:
            _text(draw, (PAD * 2, y + 10), name, 18, FAINT, width - 4 * PAD)
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
    _text(draw, (PAD, PAD - 2), tile.key, 15, INK, TILE[0] - 2 * PAD, middle=True)
    said = f"map: {name_of(summary.image_class)} {summary.image_confidence:.0%}"
    if tile.label is None:
        line, colour = said, FAINT
    elif tile.label == summary.image_class:
        line, colour = f"{said}, like its folder", GREEN
    else:
        line, colour = f"{said}      folder: {name_of(tile.label)}", RED
    _text(draw, (PAD, PAD + LINE - 2), line, 15, colour, TILE[0] - 2 * PAD)
    photo = tile.photo or _blank(tile.score_map)
    cells, inside = _cells(photo.size, tile.score_map)
    legend = _colours([c for c, _ in summary.shares], colours)
    top = PAD + 2 * LINE + 6
    panels = (
        photo,
        _class_panel(photo, cells, inside, summary, legend),
        _confidence_panel(photo, cells, inside, summary),
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
        _swatch(draw, x, y, legend[class_id], name_of(class_id), share)
        y, rest = y + LINE, rest - share
    others = len(summary.shares) - len(legend)
    if others > 0:
        _swatch(draw, x, y, OTHER, f"{others} other{'s' if others > 1 else ''}", rest)
        y += LINE
    y = PAD + 2 * LINE + 6 + PANEL - 2 * LINE - 6
    sure = summary.confidence[summary.inside]
    ramp = np.linspace(0, 1, LEGEND - 90)[None, :].repeat(10, axis=0)
    bar = Image.fromarray(_heat(ramp))
    draw._image.paste(bar, (x + 38, y + 5))
    _text(draw, (x, y), "0 %", 13, FAINT, 40)
    _text(draw, (x + LEGEND - 46, y), "100 %", 13, FAINT, 48)
    words = tile.remark or f"confidence {sure.min():.0%} to {sure.max():.0%} · {summary.vocabulary} classes"
    _text(draw, (x, y + LINE), words, 13, RED if tile.remark else FAINT, LEGEND)


def _swatch(draw: ImageDraw.ImageDraw, x: int, y: int, colour: str, name: str, share: float) -> None:
    draw.rounded_rectangle((x, y + 2, x + 15, y + 16), 3, fill=colour)
    percent = f"{share:.0%}" if share >= 0.005 else "<1%"
    draw.text((x + 56, y), percent, fill=FAINT, font=_font(14), anchor="ra")
    _text(draw, (x + 63, y), name, 14, INK, LEGEND - 63)


def _colours(classes: Sequence[int], known: dict[int, str]) -> dict[int, str]:
    """Colours of a tile's main classes; a class keeps the colour it has elsewhere on the sheet if that is free."""
    chosen = list(classes[: len(PALETTE)])
    result = {c: known[c] for c in chosen if c in known}
    taken: set[str] = set()
    for class_id in list(result):
        if result[class_id] in taken:
            del result[class_id]
        else:
            taken.add(result[class_id])
    free = iter(colour for colour in PALETTE if colour not in taken)
    for class_id in chosen:
        if class_id not in result:
            result[class_id] = next(free)
            known.setdefault(class_id, result[class_id])
    return result


def _cells(size: tuple[int, int], score_map: ScoreMap) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each pixel of a photo: the number of its cell (row-major), and whether the map covers it. Both [h, w]."""
    (width, height), (rows, columns) = size, score_map.scores.shape[:2]
    x0, y0, x1, y1 = score_map.area
    column = np.floor(((np.arange(width) + 0.5) / width - x0) / (x1 - x0) * columns).astype(np.int64)
    row = np.floor(((np.arange(height) + 0.5) / height - y0) / (y1 - y0) * rows).astype(np.int64)
    inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None, :]
    cells = row.clip(0, rows - 1)[:, None] * columns + column.clip(0, columns - 1)[None, :]
    return cells, inside


def _class_panel(
    photo: Image.Image, cells: NDArray[np.int64], inside: NDArray[np.bool_], summary: MapSummary, legend: dict[int, str]
) -> Image.Image:
    top = summary.top.ravel()
    rgb = np.array([_rgb(legend.get(int(c), OTHER)) for c in top], np.float32)[cells]
    strength = (0.25 + 0.5 * np.sqrt(summary.confidence.ravel()))[cells][..., None]
    base = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    mixed = np.where(inside[..., None], (1 - strength) * base + strength * rgb, 0.5 * base + 40)
    edge = np.zeros(inside.shape, bool)  # a dark line where the colour changes
    edge[:, 1:] |= (rgb[:, 1:] != rgb[:, :-1]).any(axis=-1)
    edge[1:, :] |= (rgb[1:, :] != rgb[:-1, :]).any(axis=-1)
    mixed[edge & inside] *= 0.4
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def _confidence_panel(
    photo: Image.Image, cells: NDArray[np.int64], inside: NDArray[np.bool_], summary: MapSummary
) -> Image.Image:
    heat = _heat(summary.confidence.ravel()[cells]).astype(np.float32)
    base = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    mixed = np.where(inside[..., None], 0.25 * base + 0.75 * heat, 0.5 * base + 40)
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def _heat(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Dark blue through teal to yellow, for 0..1; ends up [..., 3]."""
    stops = np.array([_rgb(c) for c in ("#20124d", "#2c5fa8", "#2aa198", "#8fd14f", "#fff36b")], np.float32)
    at = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(values, at, stops[:, i]) for i in range(3)], axis=-1).astype(np.uint8)


def _blank(score_map: ScoreMap) -> Image.Image:
    """A stand-in of the right shape for a photo that is not there."""
    width, height = score_map.size if min(score_map.size) > 0 else (PANEL, PANEL)
    scale = PANEL / max(width, height)
    return Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), "#d0d0d4")


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@lru_cache(maxsize=64)
def _font(size: int, latin: bool = True) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; for other scripts, the first of some common fonts that this machine has."""
    for name in () if latin else ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "msyh.ttc"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size=size)


def _text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    fill: str,
    width: float,
    middle: bool = False,
) -> None:
    """Text that is cut to ``width`` with an ellipsis at its end, or in its middle for paths."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    font = _font(size, latin=all(letter < "\u0250" or letter in "…·" for letter in text))
    if draw.textlength(text, font=font) > width:
        keep = len(text)
        while keep > 1:
            keep -= 1
            front = keep // 3 if middle else keep
            cut = text[:front] + "…" + (text[len(text) - (keep - front) :] if middle else "")
            if draw.textlength(cut, font=font) <= width:
                break
        text = cut
    draw.text(at, text, fill=fill, font=font)
