"""Everything that is drawn: colours of classes, overlays on photos, panels with legends, cards and sheets of cards.

A `Card` is about one image: rows of panels (`Panel`) with a legend; `draw_sheet` puts cards under a title. Colours
belong to classes, grey is for the rest, and all palettes can be told apart with any kind of colour vision.
"""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from scipy import ndimage

from everytoken_lab.schema import one_line

# The first ten classes; these colours can be told apart on a photograph. Grey is for the rest.
PALETTE = (
    *("#e6194b", "#3cb4ff", "#ffd21e", "#2fbf71", "#b15be3"),
    *("#ff8c1a", "#1f4ed8", "#00c2b2", "#ff7ab8", "#7a4a1e"),
)
OTHER = "#8a8a8a"
INK, FAINT, PAPER, CARD, RED, GREEN = "#1c1c1e", "#6b6b70", "#f2f2f4", "#ffffff", "#c62828", "#2e7d32"
OWN, PARTNER = "#d55e00", "#0072b2"  # of two mixed images
RAMPS = {"heat": ("#20124d", "#2c5fa8", "#2aa198", "#8fd14f", "#fff36b"), "share": (PARTNER, "#f4f2ee", OWN)}
Area = tuple[float, float, float, float]
WHOLE: Area = (0.0, 0.0, 1.0, 1.0)
rgb = ImageColor.getrgb  # "#rrggbb" as numbers
PANEL, GAP, LEGEND, PAD, LINE = 232, 10, 250, 16, 20  # pixels: side of a panel, between panels, width of a legend


class ClassColours:
    """A class has one colour on all pictures, which its place in `names` decides; others get the next as they come."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.numbers = {name: number for number, name in reversed(list(enumerate(names)))}

    def __getitem__(self, name: str) -> str:
        return colour_of(self.numbers.setdefault(name, len(self.numbers)))

    def choose(self, names: Sequence[str]) -> dict[str, str]:
        """Class -> colour for the classes of one card, the main ones first; more than ten get none."""
        return {name: self[name] for name in list(dict.fromkeys(names))[: len(PALETTE)]}


def colour_of(number: int) -> str:
    """The colour of a class: ten that are told apart easily, then others, whose neighbours are far from each other."""
    if number < len(PALETTE):
        return PALETTE[number]
    hue, light = number * 0.7548776662466927 % 1, number * 0.5698402909980532 % 1  # spread evenly over the square
    red, green, blue = colorsys.hls_to_rgb(hue, 0.34 + 0.36 * light, 0.8)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


# -- overlays ---------------------------------------------------------------------------------------------------------


def cells_of(
    size: tuple[int, int], grid: Sequence[int], area: Area = WHOLE
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each pixel of a photo: the number of its cell (row-major), and whether the map covers it. Both [h, w].

    `size`: (width, height); `grid`: (rows, columns) of the map, which covers `area` (x0, y0, x1, y1), in fractions.
    """
    (width, height), (rows, columns), (x0, y0, x1, y1) = size, grid, area
    column = np.floor(((np.arange(width) + 0.5) / width - x0) / (x1 - x0) * columns).astype(np.int64)
    row = np.floor(((np.arange(height) + 0.5) / height - y0) / (y1 - y0) * rows).astype(np.int64)
    inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None, :]
    cells = row.clip(0, rows - 1)[:, None] * columns + column.clip(0, columns - 1)[None, :]
    return cells, inside


def class_overlay(
    photo: Image.Image,
    classes: NDArray[np.integer],
    confidence: NDArray[np.floating],
    colours: Mapping[int, str],
    area: Area = WHOLE,
) -> Image.Image:
    """The best class of each cell [h, w] in its colour: a contour, and a tint that is stronger where it is surer.

    Classes without a colour are grey, and what lies outside of `area` becomes dark and grey.
    """
    cells, inside = cells_of(photo.size, classes.shape, area)
    numbers, where = np.unique(classes, return_inverse=True)
    paint = np.array([rgb(colours.get(c, OTHER)) for c in numbers.tolist()], np.float32)[where.ravel()[cells]]
    strength = (0.35 * np.sqrt(confidence.ravel()))[cells][..., None]
    edge = np.zeros(inside.shape, bool)  # where the colour changes
    edge[:, 1:] |= (paint[:, 1:] != paint[:, :-1]).any(axis=-1)
    edge[1:, :] |= (paint[1:, :] != paint[:-1, :]).any(axis=-1)
    contour = ndimage.binary_dilation(edge, iterations=max(1, max(photo.size) // 120))
    strength[contour] = 0.85
    mixed = (1 - strength) * np.asarray(photo.convert("RGB"), np.float32) + strength * paint
    mixed[edge] *= 0.4
    grey = np.asarray(photo.convert("L"), np.float32)[..., None]
    return _image(np.where(inside[..., None], mixed, 0.5 * grey + 40))


def class_picture(
    photo: Image.Image,
    classes: NDArray[np.integer],
    confidence: NDArray[np.floating],
    name_of: Callable[[int], str],
    colours: ClassColours,
    area: Area = WHOLE,
) -> tuple[Image.Image, list[Entry]]:
    """`class_overlay` with names on large areas, and its legend: classes with the most cells first; -1 is none."""
    numbers, counts = np.unique(classes[classes >= 0], return_counts=True)
    names = {c: name_of(c) for c in numbers.tolist()}
    fractions = dict.fromkeys(names.values(), 0.0)
    for name, count in zip(names.values(), counts.tolist(), strict=True):
        fractions[name] += count / counts.sum()
    chosen = colours.choose(sorted(fractions, key=lambda name: -fractions[name]))
    paint = {c: chosen[name] for c, name in names.items() if name in chosen}
    legend = [Entry(colour, name, fractions.pop(name)) for name, colour in chosen.items()]
    legend += [Entry(OTHER, "others", sum(fractions.values()))] if fractions else []
    picture = class_overlay(photo, classes, confidence, paint, area)
    cells, inside = cells_of(photo.size, classes.shape, area)
    of_pixels = classes.ravel()[cells]
    for c in paint:
        _name_area(picture, inside & (of_pixels == c), names[c])
    return picture, legend


def _name_area(picture: Image.Image, covered: NDArray[np.bool_], name: str) -> None:
    """Write a name into the widest place of an area [h, w], if the area is large enough for it."""
    depth = ndimage.distance_transform_edt(np.pad(covered, 1))[1:-1, 1:-1]
    size = max(12, max(picture.size) // 18)
    if depth.max() < size:
        return
    y, x = np.unravel_index(depth.argmax(), depth.shape)
    text, font = one_line(name.split(",")[0][:24]), font_of(size, latin=name.isascii())
    draw = ImageDraw.Draw(picture)
    half = draw.textlength(text, font=font) / 2 + 3
    left = min(max(float(x), half), max(half, picture.width - half))
    draw.text((left, int(y)), text, fill="white", font=font, anchor="mm", stroke_width=2, stroke_fill="black")


def heat_overlay(
    photo: Image.Image, values: NDArray[np.floating], area: Area = WHOLE, smooth: bool = False
) -> Image.Image:
    """Values [h, w] of 0..1 as heat on the photo; `smooth`: between cells, and stronger where they are high."""
    if smooth:
        small = Image.fromarray(np.asarray(values, np.float32))
        values = np.asarray(small.resize(photo.size, Image.Resampling.BICUBIC)).clip(0, 1)
        return _image(_on_grey(photo, ramp(values, "heat"), (0.45 + 0.3 * values)[..., None]))
    cells, inside = cells_of(photo.size, values.shape, area)
    return _image(_on_grey(photo, ramp(values.ravel()[cells], "heat"), 0.6, inside))


def share_picture(values: NDArray[np.floating], size: tuple[int, int]) -> Image.Image:
    """Shares [h, w]: orange is the first image's, blue the second's, light is half and half."""
    cells, _ = cells_of(size, values.shape)
    return _image(ramp(values.ravel()[cells], "share"))


def ramp(values: NDArray[np.floating], kind: str) -> NDArray[np.float32]:
    """Colours [..., 3] of values in 0..1."""
    stops = np.array([rgb(c) for c in RAMPS[kind]], np.float32)
    at = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(values, at, stops[:, i]) for i in range(3)], axis=-1).astype(np.float32)


def _on_grey(
    photo: Image.Image, paint: NDArray[Any], strength: Any, inside: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Colours [h, w, 3] over the photo in grey, which is dark where nothing covers it."""
    grey = np.asarray(photo.convert("L"), np.float32)[..., None].repeat(3, axis=-1)
    mixed = (1 - strength) * grey + strength * paint
    return mixed if inside is None else np.where(inside[..., None], mixed, 0.5 * grey + 40)


def _image(values: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


# -- masks and objects ------------------------------------------------------------------------------------------------


def palette_image(mask: NDArray[np.integer], classes: int) -> Image.Image:
    """A mask as a PNG that viewers show in colours and programs read as classes (16-bit grey above 255 classes)."""
    if classes > 255:
        return Image.fromarray(mask.astype(np.uint16))
    image = Image.fromarray(mask.astype(np.uint8))
    image.putpalette([value for number in range(classes) for value in rgb(colour_of(number))])
    return image


def object_overlay(
    pixels: NDArray[np.uint8],
    boxes: NDArray[np.floating],
    captions: Sequence[str],
    classes: Sequence[int],
    masks: Sequence[NDArray[np.bool_]] = (),
    side: int = 0,
) -> Image.Image:
    """Objects over an image uint8 [H, W, 3] in the colours of their classes, the first one on top.

    Args:
        boxes: [n, 4], x0, y0, x1, y1. captions: of the boxes. classes: their numbers.
        masks: [H, W] each; their contours are drawn.
        side: make the long side so long before anything is drawn; 0: as it is.
    """
    picture = Image.fromarray(pixels)
    picture = fit_photo(picture, side) if side else picture
    colours = [rgb(colour_of(number)) for number in classes]
    mixed, width = np.array(picture, np.float32), max(2, max(picture.size) // 250)
    for mask, colour in reversed(list(zip(masks, colours, strict=False))):
        shown = np.asarray(Image.fromarray(mask).resize(picture.size, Image.Resampling.NEAREST))
        contour = shown & ~ndimage.binary_erosion(shown, iterations=width, border_value=1)
        strength = np.where(contour, 1.0, 0.2 * shown)[..., None]
        mixed = (1 - strength) * mixed + strength * np.array(colour, np.float32)
    picture = _image(mixed.round())
    draw, font = ImageDraw.Draw(picture), font_of(max(13, max(picture.size) // 36), latin="".join(captions).isascii())
    scaled = (boxes * (max(picture.size) / max(pixels.shape[:2]))).tolist()
    for (x0, y0, x1, y1), colour, caption in reversed(list(zip(scaled, colours, captions, strict=True))):
        draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), outline=colour, width=width)
        if not (text := one_line(caption)):
            continue
        left, _, right, bottom = draw.textbbox((x0 + 5, 0), text, font=font)
        y = max(y0 - bottom - 4, 0)  # above the box, where there is room
        draw.rectangle((left - 5, y, right + 5, y + bottom + 4), fill=colour)
        bright = np.dot(colour, [0.3, 0.59, 0.11]) >= 140
        draw.text((x0 + 5, y + 1), text, fill="black" if bright else "white", font=font)
    return picture


# -- text and charts --------------------------------------------------------------------------------------------------


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
    text = one_line(text)
    font = font_of(size, latin=all(letter < "\u0250" or letter in "…·" for letter in text))
    cut, keep = text, len(text)
    while draw.textlength(cut, font=font) > width and keep > 1:
        keep -= 1
        front = keep // 3 if middle else keep
        cut = text[:front] + "…" + (text[len(text) - (keep - front) :] if middle else "")
    draw.text(at, cut, fill=fill, font=font)


def layer_chart(values: Sequence[float], level: float) -> Image.Image:
    """A line of values from layer 0 on, and a dashed level by area."""
    image = Image.new("RGB", (2 * PANEL, 2 * PANEL), CARD)  # drawn twice as large, then smoothed
    draw = ImageDraw.Draw(image)
    left, right, top, bottom = 68, 2 * PANEL - 16, 16, 2 * PANEL - 48
    low, high = max(0.0, min(*values, level) - 0.08), min(1.0, max(*values, level) + 0.08)
    layers = len(values) - 1

    def at(layer: float, value: float) -> tuple[float, float]:
        return left + (right - left) * layer / max(layers, 1), bottom - (bottom - top) * (value - low) / (high - low)

    for value in np.linspace(low, high, 4).tolist():
        draw.line((at(0, value), at(layers, value)), fill="#e4e4e8", width=2)
        draw_text(draw, (4, at(0, value)[1] - 14), f"{value:.2f}", 24, FAINT, left)
    for layer in sorted({0, layers // 2, layers}):
        draw_text(draw, (at(layer, low)[0] - 8, bottom + 6), str(layer), 24, FAINT, 60)
    for x in range(left, right, 24):
        draw.line((x, at(0, level)[1], min(x + 14, right), at(0, level)[1]), fill="#55555a", width=4)
    draw.line([at(layer, value) for layer, value in enumerate(values)], fill=OWN, width=4, joint="curve")
    return image.resize((PANEL, PANEL), Image.Resampling.LANCZOS)


def data_address(image: Image.Image, side: int) -> str:
    """An image as `data:` text; small ones stay exact, larger ones become JPEG."""
    image = image.copy()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file, kind = io.BytesIO(), "png" if max(image.size) <= 64 else "jpeg"
    image.save(file, kind, optimize=True, quality=80)  # which PNG does not have
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


# -- panels, cards, sheets --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A picture with a title above it and a line below."""

    title: str
    image: Image.Image
    caption: str = ""


@dataclass(frozen=True)
class Entry:
    """A line of a legend: colour and name; with the fraction of the cells, if there is one."""

    colour: str
    name: str
    fraction: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels side by side with a legend."""

    label: str  # a line above them, in the colour `ink`
    panels: Sequence[Panel]
    legend: Sequence[Entry] = ()
    bars: Sequence[tuple[str, str, str]] = ()  # below the legend: left word, right word, kind of `RAMPS`
    ink: str = FAINT


@dataclass(frozen=True)
class Card:
    """Everything about one image; cards of one `section` stand together under its name. `side`: of its panels."""

    title: str
    rows: Sequence[Row] = field(default_factory=tuple)
    section: str = ""
    side: int = PANEL


def fit_photo(image: Image.Image, side: int = PANEL) -> Image.Image:
    """A photo whose longer side is as long as a panel; small ones keep their pixels."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS)


def draw_card(card: Card) -> Image.Image:
    """One card."""
    panels, side = max(len(row.panels) for row in card.rows), card.side
    legend = any(row.legend or row.bars for row in card.rows)
    width = 2 * PAD + panels * side + (panels - 1) * GAP + (GAP + LEGEND if legend else 0)
    heights = [LINE * 3 + 14 + max(panel.image.height for panel in row.panels) for row in card.rows]
    image = Image.new("RGB", (width, PAD + LINE + sum(heights) + 6 * len(heights) + PAD), CARD)
    draw = ImageDraw.Draw(image)
    draw_text(draw, (PAD, PAD - 4), card.title, 17, INK, width - 2 * PAD, middle=True)
    y = PAD + LINE + 4
    for row, height in zip(card.rows, heights, strict=True):
        draw_text(draw, (PAD, y), row.label, 14, row.ink, width - 2 * PAD)
        for i, panel in enumerate(row.panels):
            x = PAD + i * (side + GAP)
            draw_text(draw, (x, y + LINE + 4), panel.title, 15, INK, side)
            image.paste(panel.image, (x, y + 2 * LINE + 6))
            draw_text(draw, (x, y + 2 * LINE + 9 + panel.image.height), panel.caption, 13, FAINT, side)
        _draw_legend(image, draw, row, PAD + panels * (side + GAP) + 6, y + 2 * LINE + 6)
        y += height + 6
    return image


def _draw_legend(image: Image.Image, draw: ImageDraw.ImageDraw, row: Row, x: int, top: int) -> None:
    bottom = top + max(panel.image.height for panel in row.panels)
    bottom -= (LINE + 8) * len(row.bars)
    y = top
    for entry in row.legend[: (bottom - top) // LINE]:
        draw.rounded_rectangle((x, y + 2, x + 15, y + 16), 3, fill=entry.colour)
        left = x + 24
        if entry.fraction is not None:
            percent = f"{entry.fraction:.0%}" if entry.fraction >= 0.005 else "<1%"
            draw.text((x + 56, y), percent, fill=FAINT, font=font_of(14), anchor="ra")
            left = x + 63
        draw_text(draw, (left, y), entry.name, 14, INK, LEGEND - (left - x))
        y += LINE
    y = bottom
    for low, high, kind in row.bars:
        words = 64
        values = np.linspace(*((0, 1) if kind == "heat" else (1, 0)), LEGEND - 2 * words)
        draw_text(draw, (x, y + 4), low, 13, FAINT, words)
        image.paste(_image(ramp(values[None].repeat(12, axis=0), kind)), (x + words, y + 6))
        draw_text(draw, (x + LEGEND - words + 6, y + 4), high, 13, FAINT, words)
        y += LINE + 8


def draw_sheet(
    title: str, subtitle: str, cards: Sequence[Card] | Sequence[Image.Image], columns: int = 1
) -> Image.Image:
    """Cards in columns under a title; sections have a heading each."""
    sections: dict[str, list[Image.Image]] = {}
    for card in cards:
        section, image = (card.section, draw_card(card)) if isinstance(card, Card) else ("", card)
        sections.setdefault(section, []).append(image)
    columns = max(1, min(columns, len(cards)))
    cell = max(image.width for images in sections.values() for image in images) + PAD
    width, y = columns * cell + PAD, 76
    places: list[tuple[Image.Image | str, int, int]] = []
    for name, images in sections.items():
        if name:
            places.append((name, PAD * 2, y + 10))
            y += 40
        for start in range(0, len(images), columns):
            row = images[start : start + columns]
            places += [(image, PAD + i * cell, y) for i, image in enumerate(row)]
            y += max(image.height for image in row) + PAD
    sheet = Image.new("RGB", (width, y), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw_text(draw, (PAD * 2, 14), title, 22, INK, width - 4 * PAD)
    draw_text(draw, (PAD * 2, 46), subtitle, 15, FAINT, width - 4 * PAD)
    for what, x, top in places:
        if isinstance(what, str):
            draw_text(draw, (x, top), what, 18, FAINT, width - 4 * PAD)
        else:
            sheet.paste(what, (x, top))
    return sheet
