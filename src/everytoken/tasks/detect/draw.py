"""Pictures of objects: masks as colours over the image, boxes around them, class and score above."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from everytoken.tasks.detect.data import InstanceSet
from everytoken.tasks.detect.infer import Found
from everytoken.tasks.detect.masks import encode, tool

_LINE = 14  # pixels of a line of text
_STRENGTH = 0.45


def colours(count: int) -> np.ndarray:
    """uint8 [count, 3]: bright colours, neighbours far apart, the first ones always the same."""
    made = [colorsys.hsv_to_rgb((0.08 + 0.618034 * k) % 1.0, (0.9, 0.65)[k % 2], 0.95) for k in range(count)]
    return (np.array(made).reshape(-1, 3) * 255).round().astype(np.uint8)


def truth_of(data: InstanceSet, i: int, masks: bool) -> Found:
    """The objects that an image has, as if they had been found; crowds are left out."""
    assert data.found is not None
    numbers = [k for k in data.objects(i) if not data.found.crowd[k]]
    size = (int(data.sizes[i][0]), int(data.sizes[i][1]))
    drawn = None
    if masks:
        drawn = []
        for k in numbers:
            x0, y0, x1, y1 = data.found.boxes[k].tolist()
            shape = data.segmentation(k) or [[x0, y0, x1, y0, x1, y1, x0, y1]]
            drawn.append(encode(shape, size, data.describe(k)))
    return Found(data.found.boxes[numbers], np.ones(len(numbers)), data.found.labels[numbers], drawn)


def draw_objects(
    image: np.ndarray, found: Found, names: Sequence[str], scores: bool = True, side: int = 0
) -> Image.Image:
    """Objects over an image uint8 [H, W, 3]; each has a colour of its own.

    Args:
        side: make the long side so long first; 0: as it is.
    """
    mixed = image.astype(np.float32)
    shades = colours(len(found.boxes))
    order = range(len(found.boxes) - 1, -1, -1)  # the best on top
    for k in order:
        if found.masks is not None:
            inside = tool().decode(found.masks[k]).astype(bool)
            mixed[inside] = mixed[inside] * (1 - _STRENGTH) + shades[k].astype(np.float32) * _STRENGTH
    made = Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))
    factor = side / max(made.size) if side else 1.0
    if side:
        made = made.resize((max(round(made.width * factor), 1), max(round(made.height * factor), 1)))
    draw = ImageDraw.Draw(made)
    for k in order:
        colour = tuple(shades[k].tolist())
        x0, y0, x1, y1 = (found.boxes[k] * factor).tolist()
        draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), outline=colour, width=2)
    for k in order:
        text = names[int(found.labels[k])] + (f" {100 * found.scores[k]:.0f}" if scores else "")
        x, y = (found.boxes[k, :2] * factor).tolist()
        y = max(y - _LINE, 0)
        box = draw.textbbox((x + 2, y + 1), text)
        draw.rectangle((box[0] - 2, box[1] - 1, box[2] + 2, box[3] + 1), fill=tuple(shades[k].tolist()))
        dark = shades[k].astype(float) @ [0.3, 0.59, 0.11] < 140
        draw.text((x + 2, y + 1), text, fill="white" if dark else "black")
    return made


def compare(image: np.ndarray, truth: Found, found: Found, names: Sequence[str], side: int = 480) -> Image.Image:
    """Truth and answer side by side, with titles."""
    left = draw_objects(image, truth, names, scores=False, side=side)
    right = draw_objects(image, found, names, side=side)
    canvas = Image.new("RGB", (left.width + right.width + 4, left.height + _LINE), "white")
    draw = ImageDraw.Draw(canvas)
    for title, picture, at in (("truth", left, 0), ("found", right, left.width + 4)):
        draw.text((at + 3, 1), title, fill="black")
        canvas.paste(picture, (at, _LINE))
    return canvas
