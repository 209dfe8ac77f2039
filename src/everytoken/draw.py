"""Pieces of pictures: cells and heat on a photo, legends, text that fits; for sheets of maps and for explanations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from everytoken.maps.summary import MapSummary

# Seven colours that can be told apart on a grey photograph; grey is for the rest.
PALETTE = ("#e6194b", "#3cb4ff", "#ffd21e", "#2fbf71", "#b15be3", "#ff8c1a", "#1f4ed8")
OTHER = "#8a8a8a"
INK, FAINT, PAPER, CARD, RED, GREEN = "#1c1c1e", "#6b6b70", "#f2f2f4", "#ffffff", "#c62828", "#2e7d32"


def choose_colours(classes: Sequence[int], known: dict[int, str]) -> dict[int, str]:
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


def cells_of(
    size: tuple[int, int], grid: tuple[int, int], area: tuple[float, float, float, float]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each pixel of a photo: the number of its cell (row-major), and whether the map covers it. Both [h, w].

    Args:
        size: (width, height) of the photo.
        grid: (rows, columns) of the map, which covers
        area: (x0, y0, x1, y1) of the photo, in fractions.
    """
    (width, height), (rows, columns) = size, grid
    x0, y0, x1, y1 = area
    column = np.floor(((np.arange(width) + 0.5) / width - x0) / (x1 - x0) * columns).astype(np.int64)
    row = np.floor(((np.arange(height) + 0.5) / height - y0) / (y1 - y0) * rows).astype(np.int64)
    inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None, :]
    cells = row.clip(0, rows - 1)[:, None] * columns + column.clip(0, columns - 1)[None, :]
    return cells, inside


def class_panel(
    photo: Image.Image, cells: NDArray[np.int64], inside: NDArray[np.bool_], summary: MapSummary, legend: dict[int, str]
) -> Image.Image:
    """The best class of each cell in its colour, stronger where it is surer, on the photo in grey."""
    top = summary.top.ravel()
    paint = np.array([rgb(legend.get(int(c), OTHER)) for c in top], np.float32)[cells]
    strength = (0.25 + 0.5 * np.sqrt(summary.confidence.ravel()))[cells][..., None]
    base = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    mixed = np.where(inside[..., None], (1 - strength) * base + strength * paint, 0.5 * base + 40)
    edge = np.zeros(inside.shape, bool)  # a dark line where the colour changes
    edge[:, 1:] |= (paint[:, 1:] != paint[:, :-1]).any(axis=-1)
    edge[1:, :] |= (paint[1:, :] != paint[:-1, :]).any(axis=-1)
    mixed[edge & inside] *= 0.4
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def confidence_panel(
    photo: Image.Image, cells: NDArray[np.int64], inside: NDArray[np.bool_], summary: MapSummary
) -> Image.Image:
    """How sure each cell is, as heat on the photo."""
    heat = heat_colours(summary.confidence.ravel()[cells]).astype(np.float32)
    base = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    mixed = np.where(inside[..., None], 0.25 * base + 0.75 * heat, 0.5 * base + 40)
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def heat_colours(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Dark blue through teal to yellow, for 0..1; ends up [..., 3]."""
    stops = np.array([rgb(c) for c in ("#20124d", "#2c5fa8", "#2aa198", "#8fd14f", "#fff36b")], np.float32)
    at = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(values, at, stops[:, i]) for i in range(3)], axis=-1).astype(np.uint8)


def draw_swatch(
    draw: ImageDraw.ImageDraw, x: int, y: int, colour: str, name: str, share: float, width: int = 236
) -> None:
    """A line of a legend: colour, part of the cells, name."""
    draw.rounded_rectangle((x, y + 2, x + 15, y + 16), 3, fill=colour)
    percent = f"{share:.0%}" if share >= 0.005 else "<1%"
    draw.text((x + 56, y), percent, fill=FAINT, font=font_of(14), anchor="ra")
    draw_text(draw, (x + 63, y), name, 14, INK, width - 63)


def rgb(colour: str) -> tuple[int, int, int]:
    """'#rrggbb' as numbers."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@lru_cache(maxsize=64)
def font_of(size: int, latin: bool = True) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; for other scripts, the first of some common fonts that this machine has."""
    for name in () if latin else ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "msyh.ttc"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size=size)


def draw_text(
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
    font = font_of(size, latin=all(letter < "\u0250" or letter in "…·" for letter in text))
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
