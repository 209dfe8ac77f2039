"""Pictures of masks: classes as colours over the image, with a legend of what can be seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

_LINE = 14  # pixels of a line of text
_LEGEND = 12  # classes in a legend


def palette(classes: int) -> np.ndarray:
    """uint8 [K, 3]: the colours of Pascal VOC's masks, which spread the bits of the class over red, green and blue.

    They stay the same whatever the number of classes. VOC's own first colour, black, is left out.
    """
    numbers = np.arange(1, classes + 1)
    colours = np.zeros((classes, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((numbers >> channel & 1) << (7 - bit)).astype(np.uint8)
        numbers = numbers >> 3
    return colours


def overlay(image: np.ndarray, mask: np.ndarray, classes: int, strength: float = 0.6) -> np.ndarray:
    """Colours over an image: uint8 [H, W, 3] and classes [H, W] -> uint8 [H, W, 3]. What is ignored becomes darker."""
    colours = np.concatenate([palette(classes), np.zeros((1, 3), np.uint8)])  # -1 is the last
    grey = image.mean(-1, keepdims=True) * 0.5 + image * 0.5
    mixed = grey * (1 - strength) + colours[mask].astype(np.float32) * strength
    return mixed.round().clip(0, 255).astype(np.uint8)


def as_palette_image(mask: np.ndarray, classes: int) -> Image.Image:
    """A mask as a PNG that viewers show in colours and programs read as classes (16-bit grey above 255 classes)."""
    if classes > 255:
        return Image.fromarray(mask.astype(np.uint16))
    image = Image.fromarray(mask.astype(np.uint8))
    image.putpalette(np.concatenate([palette(classes), np.zeros((256 - classes, 3), np.uint8)]).tobytes())
    return image


def panel(
    image: np.ndarray, masks: Sequence[tuple[str, np.ndarray]], names: Sequence[str], side: int = 360
) -> Image.Image:
    """The image and each mask over it, side by side, with titles and a legend of the classes in them.

    Args:
        masks: (title, classes [H, W]).
        side: the longest side of each picture.
    """
    factor = side / max(image.shape[:2])
    size = (max(round(image.shape[1] * factor), 1), max(round(image.shape[0] * factor), 1))
    pictures = [("image", image), *((title, overlay(image, mask, len(names))) for title, mask in masks)]
    counts = np.zeros(len(names) + 1, dtype=np.int64)
    for _, mask in masks:
        counts += np.bincount(mask.reshape(-1) + 1, minlength=len(names) + 1)
    present = [int(i) for i in np.argsort(-counts[1:], kind="stable") if counts[i + 1]]
    more = len(present) - _LEGEND
    rows = [
        (tuple(palette(len(names))[i].tolist()), names[i].split(";")[0].split(",")[0][:24]) for i in present[:_LEGEND]
    ]
    if more > 0:
        rows.append(((255, 255, 255), f"and {more} more"))
    height = max(size[1] + _LINE, _LINE * (len(rows) + 1))
    canvas = Image.new("RGB", (size[0] * len(pictures) + 170, height), "white")
    draw = ImageDraw.Draw(canvas)
    for k, (title, pixels) in enumerate(pictures):
        draw.text((k * size[0] + 3, 1), title, fill="black")
        canvas.paste(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR), (k * size[0], _LINE))
    left = size[0] * len(pictures) + 6
    for k, (colour, name) in enumerate(rows):
        top = _LINE * (k + 1)
        draw.rectangle((left, top + 2, left + 10, top + 12), fill=colour)
        draw.text((left + 15, top + 1), name, fill="black")
    return canvas
