"""Pictures of objects: masks as colours over the image, boxes around them, class and score above."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from everytoken.tasks.detect.masks import tool
from everytoken.tasks.detect.metrics import Detections

_LINE = 14  # pixels of a line of text
_STRENGTH = 0.45


def colours(count: int) -> np.ndarray:
    """uint8 [count, 3]: bright colours, neighbours far apart, the first ones always the same."""
    shades = [colorsys.hsv_to_rgb((0.08 + 0.618034 * k) % 1.0, (0.9, 0.65)[k % 2], 0.95) for k in range(count)]
    return (np.array(shades).reshape(-1, 3) * 255).round().astype(np.uint8)


def draw_objects(
    image: np.ndarray, detections: Detections, names: Sequence[str], scores: bool = True, side: int = 0
) -> Image.Image:
    """Objects over an image uint8 [H, W, 3]; each has its own colour.

    Args:
        side: make the long side so long first; 0: as it is.
    """
    mixed = image.astype(np.float32)
    shades = colours(len(detections.boxes))
    order = range(len(detections.boxes) - 1, -1, -1)  # the best on top
    for k in order:
        if detections.masks is not None:
            inside = tool().decode(detections.masks[k]).astype(bool)
            mixed[inside] = mixed[inside] * (1 - _STRENGTH) + shades[k].astype(np.float32) * _STRENGTH
    picture = Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))
    factor = side / max(picture.size) if side else 1.0
    if side:
        picture = picture.resize((max(round(picture.width * factor), 1), max(round(picture.height * factor), 1)))
    draw = ImageDraw.Draw(picture)
    for k in order:
        colour = tuple(shades[k].tolist())
        x0, y0, x1, y1 = (detections.boxes[k] * factor).tolist()
        draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), outline=colour, width=2)
    for k in order:
        text = names[int(detections.labels[k])] + (f" {100 * detections.scores[k]:.0f}" if scores else "")
        x, y = (detections.boxes[k, :2] * factor).tolist()
        y = max(y - _LINE, 0)
        box = draw.textbbox((x + 2, y + 1), text)
        draw.rectangle((box[0] - 2, box[1] - 1, box[2] + 2, box[3] + 1), fill=tuple(shades[k].tolist()))
        dark = shades[k].astype(float) @ [0.3, 0.59, 0.11] < 140
        draw.text((x + 2, y + 1), text, fill="white" if dark else "black")
    return picture


def compare(
    image: np.ndarray, truth: Detections, detections: Detections, names: Sequence[str], side: int = 480
) -> Image.Image:
    """Truth and answer side by side, with titles."""
    left = draw_objects(image, truth, names, scores=False, side=side)
    right = draw_objects(image, detections, names, side=side)
    canvas = Image.new("RGB", (left.width + right.width + 4, left.height + _LINE), "white")
    draw = ImageDraw.Draw(canvas)
    for title, picture, x in (("truth", left, 0), ("answer", right, left.width + 4)):
        draw.text((x + 3, 1), title, fill="black")
        canvas.paste(picture, (x, _LINE))
    return canvas
