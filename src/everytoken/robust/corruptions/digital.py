"""Digital corruptions of ImageNet-C: contrast, elastic, pixelate, JPEG; and saturate from the extra set. As published.

Lengths are pixels of a 224 px view and are multiplied by `scale` for other sizes (the elastic transform's numbers are
multiples of 244 there, by a slip that its authors kept).
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from everytoken.robust.corruptions import filters

CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)  # part of the contrast that is left
PIXELATE = (0.6, 0.5, 0.4, 0.3, 0.25)  # size of the small image
JPEG = (25, 18, 15, 10, 7)  # quality
SATURATE = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))  # factor and summand of the saturation
ELASTIC = ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
_UNIT = 244.0  # of: strength of the displacement, its blur, jitter of the three points of the affine map


def contrast(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """(x - mean) c + mean, the mean of each channel."""
    mean = image.mean(axis=(0, 1), keepdims=True, dtype=np.float64).astype(np.float32)
    return (image - mean) * CONTRAST[severity - 1] + mean


def elastic_transform(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """A small random affine map, then smooth random displacements."""
    strength, blur, jitter = (_UNIT * scale * value for value in ELASTIC[severity - 1])
    height, width = image.shape[:2]
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    middle = np.array([height // 2, width // 2], np.float64)  # as published, although the first axis is then x
    third = min(height, width) // 3
    before = middle + np.array([[third, third], [third, -third], [-third, -third]])
    after = before + rng.uniform(-jitter, jitter, before.shape)
    matrix = inverse_affine(before, after)
    x = matrix[0, 0] * columns + matrix[0, 1] * rows + matrix[0, 2]
    y = matrix[1, 0] * columns + matrix[1, 1] * rows + matrix[1, 2]
    moved = filters.sample(image, y, x, "mirror")
    shifts = [
        filters.gaussian(rng.uniform(-1, 1, (height, width)).astype(np.float32), blur, "reflect", 3.0) * strength
        for _ in range(2)
    ]
    return filters.sample(moved, rows + shifts[1], columns + shifts[0], "reflect")


def inverse_affine(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[2, 3] matrix that takes the three points (x, y) of `after` back to those of `before`."""
    known = np.concatenate([after, np.ones((3, 1))], axis=1)
    solved: np.ndarray = np.linalg.solve(known, before)
    return solved.T


def saturate(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Saturation times a plus b, hue and value kept. Grey has hue 0, so where b > 0 it turns reddish, as published."""
    factor, summand = SATURATE[severity - 1]
    value = image.max(axis=2, keepdims=True)
    gap = value - image
    spread = gap.max(axis=2, keepdims=True)
    saturation = spread / np.maximum(value, 1e-12)
    wanted = np.clip(saturation * factor + summand, 0, 1)
    direction = np.where(spread > 0, gap / np.maximum(spread, 1e-12), np.array([0, 1, 1], np.float32))
    return value * (1 - wanted * direction)


def pixelate(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Made smaller and larger again with a box filter."""
    factor = PIXELATE[severity - 1]
    height, width = image.shape[:2]
    small = _picture(image).resize((max(1, int(width * factor)), max(1, int(height * factor))), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX), np.float32) / 255


def jpeg_compression(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Pillow's JPEG at a low quality."""
    return np.asarray(stored(_picture(image), JPEG[severity - 1]), np.float32) / 255


def stored(picture: Image.Image, quality: int) -> Image.Image:
    """A picture as it comes back from a JPEG file."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    back = Image.open(file, formats=("JPEG",))
    back.load()
    return back


def _picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(np.round(image * 255).astype(np.uint8))
