"""The pictures: panels in a row with titles and a legend, cards of rows, a sheet of cards. Pillow only.

Heat goes from dark blue to yellow and the mix from orange to blue: both can be told apart with any kind of colour
vision, and in grey (heat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from everytoken.draw import CARD, FAINT, INK, PAPER, draw_swatch, draw_text, heat_colours, rgb

PANEL, GAP, LEGEND, PAD, LINE = 232, 10, 250, 16, 20
OWN, PARTNER, MIDDLE = "#d55e00", "#0072b2", "#f4f2ee"
DIFFER = "#e66100"


@dataclass(frozen=True)
class Panel:
    """A picture with a title above it and a line below."""

    title: str
    image: Image.Image
    caption: str = ""


@dataclass(frozen=True)
class Entry:
    """A line of a legend: colour and name; with the part of the cells, if there is one to tell."""

    colour: str
    name: str
    share: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels side by side. `label` says of what model; `bars` are (left word, right word, colours) of colour bars."""

    label: str
    panels: Sequence[Panel]
    legend: Sequence[Entry] = ()
    bars: Sequence[tuple[str, str, str]] = ()
    remark: str = ""


@dataclass(frozen=True)
class Card:
    """Everything about one image."""

    title: str
    rows: Sequence[Row] = field(default_factory=tuple)


def photo_of(pixels: NDArray[np.uint8], side: int = PANEL) -> Image.Image:
    """The network's input, its longer side as long as a panel; small ones keep their pixels."""
    image = Image.fromarray(pixels)
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS)


def heat_panel(photo: Image.Image, values: NDArray[np.floating]) -> Image.Image:
    """Values [h, w], 0 or more, as heat on the photo; smooth between cells, the highest is the brightest."""
    values = np.asarray(values, np.float32)
    values = values / max(float(values.max()), 1e-12)
    smooth = np.asarray(Image.fromarray(values).resize(photo.size, Image.Resampling.BICUBIC)).clip(0, 1)
    base = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    strength = (0.45 + 0.3 * smooth)[..., None]
    return _picture((1 - strength) * base + strength * heat_colours(smooth))


def difference_panel(photo: Image.Image, same: NDArray[np.bool_], inside: NDArray[np.bool_]) -> Image.Image:
    """The photo in grey, with colour on the cells [h, w] where two maps differ; dark where there is only one map."""
    strength = _spread((0.7 * (inside & ~same)).astype(np.float32)[..., None], photo.size)
    light = _spread(np.where(inside, 1.0, 0.4).astype(np.float32)[..., None], photo.size)
    base = light * np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    return _picture((1 - strength) * base + strength * np.array(rgb(DIFFER), np.float32))


def share_panel(values: NDArray[np.floating], size: tuple[int, int]) -> Image.Image:
    """Shares [h, w]: orange is the first image's, blue the second's, light is half and half."""
    return _picture(_spread(share_colours(values), size))


def share_colours(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Colours [..., 3] of shares 0..1."""
    stops = np.array([rgb(c) for c in (PARTNER, MIDDLE, OWN)], np.float32)
    return np.stack([np.interp(values, (0, 0.5, 1), stops[:, i]) for i in range(3)], axis=-1).astype(np.float32)


def chart(
    lines: Sequence[tuple[str, str, Sequence[float]]], level: float, size: tuple[int, int] = (PANEL, PANEL)
) -> Image.Image:
    """Lines (name, colour, values from layer 0; a shorter one ends at the last layer) and a dashed level by area."""
    scale = 2  # drawn twice as large, then smoothed
    width, height = (side * scale for side in size)
    image = Image.new("RGB", (width, height), CARD)
    draw = ImageDraw.Draw(image)
    left, right, top, bottom = 34 * scale, width - 8 * scale, 8 * scale, height - 40 * scale
    values = [v for _, _, line in lines for v in line] + [level]
    low, high = max(0.0, min(values) - 0.08), min(1.0, max(values) + 0.08)
    layers = max(len(line) for _, _, line in lines) - 1

    def at(layer: float, value: float) -> tuple[float, float]:
        return left + (right - left) * layer / max(layers, 1), bottom - (bottom - top) * (value - low) / (high - low)

    for i in range(4):
        value = low + (high - low) * i / 3
        y = at(0, value)[1]
        draw.line((left, y, right, y), fill="#e4e4e8", width=scale)
        draw_text(draw, (2 * scale, y - 7 * scale), f"{value:.2f}", 12 * scale, FAINT, left)
    for layer in sorted({0, layers // 2, layers}):
        draw_text(draw, (at(layer, low)[0] - 4 * scale, bottom + 3 * scale), str(layer), 12 * scale, FAINT, 60)
    y = at(0, level)[1]
    for start in range(left, right, 12 * scale):
        draw.line((start, y, min(start + 7 * scale, right), y), fill="#55555a", width=2 * scale)
    for i, (name, colour, line) in enumerate(lines):
        first = layers + 1 - len(line)
        points = [at(first + j, value) for j, value in enumerate(line)]
        draw.line(points, fill=colour, width=2 * scale, joint="curve")
        for x, y in points:
            radius = 2.6 * scale
            box = (x - radius, y - radius, x + radius, y + radius)
            draw.ellipse(box, fill=colour) if i == 0 else draw.rectangle(box, fill=colour)
        draw_text(draw, (left + i * 92 * scale, height - 19 * scale), name, 13 * scale, colour, 120 * scale)
    return image.resize(size, Image.Resampling.LANCZOS)


def draw_card(card: Card) -> Image.Image:
    """One card."""
    panels = max(len(row.panels) for row in card.rows)
    legend = any(row.legend or row.bars for row in card.rows)
    width = 2 * PAD + panels * PANEL + (panels - 1) * GAP + (GAP + LEGEND if legend else 0)
    heights = [LINE * 3 + 14 + max(panel.image.height for panel in row.panels) for row in card.rows]
    image = Image.new("RGB", (width, PAD + LINE + sum(heights) + 6 * len(heights) + PAD), CARD)
    draw = ImageDraw.Draw(image)
    draw_text(draw, (PAD, PAD - 4), card.title, 17, INK, width - 2 * PAD, middle=True)
    y = PAD + LINE + 4
    for row, height in zip(card.rows, heights, strict=True):
        draw_text(draw, (PAD, y), row.label, 14, FAINT, width - 2 * PAD)
        _draw_row(image, draw, row, y + LINE + 4, PAD + panels * (PANEL + GAP) + 6)
        y += height + 6
    return image


def _draw_row(image: Image.Image, draw: ImageDraw.ImageDraw, row: Row, y: int, legend_x: int) -> None:
    for i, panel in enumerate(row.panels):
        x = PAD + i * (PANEL + GAP)
        draw_text(draw, (x, y), panel.title, 15, INK, PANEL)
        image.paste(panel.image, (x, y + LINE + 2))
        draw_text(draw, (x, y + LINE + 5 + panel.image.height), panel.caption, 13, FAINT, PANEL)
    height = max(panel.image.height for panel in row.panels)
    room = (height - (LINE + 8) * len(row.bars) - (LINE if row.remark else 0)) // LINE
    at = y + LINE + 2
    for entry in row.legend[:room]:
        if entry.share is None:
            draw.rounded_rectangle((legend_x, at + 2, legend_x + 15, at + 16), 3, fill=entry.colour)
            draw_text(draw, (legend_x + 24, at), entry.name, 14, INK, LEGEND - 24)
        else:
            draw_swatch(draw, legend_x, at, entry.colour, entry.name, entry.share, LEGEND)
        at += LINE
    at = y + LINE + 2 + height - (LINE + 8) * len(row.bars) - (LINE if row.remark else 0)
    for low, high, kind in row.bars:
        words = 64
        ramp = np.linspace(0, 1, LEGEND - 2 * words)[None, :].repeat(12, axis=0)
        colours = heat_colours(ramp) if kind == "heat" else share_colours(1 - ramp).astype(np.uint8)
        draw_text(draw, (legend_x, at + 4), low, 13, FAINT, words)
        image.paste(Image.fromarray(colours), (legend_x + words, at + 6))
        draw_text(draw, (legend_x + LEGEND - words + 6, at + 4), high, 13, FAINT, words)
        at += LINE + 8
    if row.remark:
        draw_text(draw, (legend_x, at), row.remark, 13, "#c62828", LEGEND)


def draw_overview(title: str, how: str, cards: Sequence[Image.Image]) -> Image.Image:
    """All cards under one another, under a title."""
    width = max(card.width for card in cards) + 2 * PAD
    sheet = Image.new("RGB", (width, 76 + sum(card.height + PAD for card in cards)), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw_text(draw, (PAD * 2, 14), title, 22, INK, width - 4 * PAD)
    draw_text(draw, (PAD * 2, 46), how, 15, FAINT, width - 4 * PAD)
    y = 76
    for card in cards:
        sheet.paste(card, (PAD, y))
        y += card.height + PAD
    return sheet


def _spread(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Cells [h, w, c] as blocks of pixels of a picture of (width, height)."""
    width, height = size
    rows = (np.arange(height) * values.shape[0]) // height
    columns = (np.arange(width) * values.shape[1]) // width
    return values[rows][:, columns]


def _picture(values: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))
