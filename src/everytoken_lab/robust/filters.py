"""Filters on float32 images [h, w, c] that the corruptions are made of, each with the borders of the published one.

Most are SciPy's, as in the published program. The second half is what spatter draws its drops of water with: Canny's
edge detector (Sobel 3 x 3, sum of absolute values), the distance to the nearest edge, smoothed, equalised, embossed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from scipy import ndimage, signal
from torch.nn import functional as F

Border = Literal["nearest", "reflect", "mirror"]  # aaa|abc|ccc, cba|abc|cba, cb|abc|ba


def gaussian(
    image: np.ndarray, sigma: float, border: Border = "nearest", truncate: float = 4.0, radius: int | None = None
) -> np.ndarray:
    """Gaussian blur of [h, w] or [h, w, c]; taps reach to `truncate` sigmas, or to `radius`."""
    image = image.astype(np.float32, copy=False)
    blurred: np.ndarray = ndimage.gaussian_filter(
        image, sigma, mode=border, truncate=truncate, radius=radius, axes=(0, 1)
    )
    return blurred


def correlate3(image: np.ndarray, kernel: Sequence[Sequence[float]]) -> np.ndarray:
    """Correlate [h, w] with 3 x 3 weights, mirrored borders."""
    out: np.ndarray = ndimage.correlate(image.astype(np.float32), np.array(kernel), mode="mirror")
    return out


def box3(image: np.ndarray) -> np.ndarray:
    """Mean of 3 x 3, mirrored borders."""
    return correlate3(image, [[1.0] * 3] * 3) / 9


def convolve(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlate [h, w, c] with an odd-sized kernel, mirrored borders, by Fourier transform."""
    reach_y, reach_x = (size // 2 for size in kernel.shape)
    padded = np.pad(image, ((reach_y, reach_y), (reach_x, reach_x), (0, 0)), "reflect")
    out: np.ndarray = signal.fftconvolve(padded, kernel[::-1, ::-1, None], mode="valid", axes=(0, 1))
    return out


def motion_blur(image: np.ndarray, radius: float, sigma: float, angle: float) -> np.ndarray:
    """ImageMagick's motion blur: half a Gaussian along a line from each pixel; borders repeat the edge.

    Args:
        image: [h, w, c].
        radius: the line has 2 * ceil(radius) + 1 pixels.
        sigma: of the Gaussian. angle: degrees.
    """
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2).astype(np.float32)
    turn = math.radians(angle)
    downs = np.ceil(steps * math.sin(turn) - 0.5).astype(int)
    rights = np.ceil(steps * math.cos(turn) - 0.5).astype(int)
    y, x = int(np.abs(downs).max()), int(np.abs(rights).max())
    padded = np.pad(image, ((y, y), (x, x), (0, 0)), "edge")
    height, width = image.shape[:2]
    blurred = np.zeros_like(image)
    for weight, down, right in zip(weights / weights.sum(), downs, rights, strict=True):
        blurred += weight * padded[y + down : y + down + height, x + right : x + right + width]
    return blurred


def zoom_mean(image: np.ndarray, factors: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean of [h, w, c], enlarged around its centre by each factor with linear interpolation to the old size.

    As published: the centre is ceil(side / factor) pixels, its corner pixels stay in the corners, a surplus is cut off.
    """
    sides = image.shape[:2]
    source = torch.from_numpy(image.astype(np.float32, copy=False)).permute(2, 0, 1)[None]
    total = torch.zeros_like(source)
    for factor in factors:
        inner = [math.ceil(side / factor) for side in sides]
        large = [max(round(part * factor), side) for part, side in zip(inner, sides, strict=True)]
        y, x = ((side - part) // 2 for side, part in zip(sides, inner, strict=True))
        centre = source[..., y : y + inner[0], x : x + inner[1]]
        zoomed = F.interpolate(centre, large, mode="bilinear", align_corners=True)
        y, x = ((big - side) // 2 for big, side in zip(large, sides, strict=True))
        total += zoomed[..., y : y + sides[0], x : x + sides[1]]
    return np.ascontiguousarray((total / len(factors))[0].permute(1, 2, 0).numpy())


def sample(image: np.ndarray, y: np.ndarray, x: np.ndarray, border: Border) -> np.ndarray:
    """Linear interpolation of [h, w, c] at positions y, x [h', w'] (pixel centres are whole numbers)."""
    channels = np.moveaxis(image, -1, 0)
    return np.stack([ndimage.map_coordinates(c, (y, x), order=1, mode=border) for c in channels], -1)


_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def relief(grey: np.ndarray, limit: float) -> np.ndarray:
    """Grey values 0..255 [h, w] -> relief 0..255 along the edges; distances count up to `limit` pixels."""
    distance = distance_to(canny(grey, 50, 150), limit)
    if limit != 20:  # bytes need the published range
        distance = distance * (20 / limit)
    level = equalise(box3(distance).astype(np.uint8))
    return np.round(box3(np.clip(correlate3(level, _EMBOSS), 0, 255)))


def canny(grey: np.ndarray, low: float, high: float) -> np.ndarray:
    """bool [h, w]: ridges of the gradient above `high`, and those above `low` that touch them."""
    gy, gx = (ndimage.sobel(grey.astype(np.float32), axis, mode="nearest") for axis in (0, 1))
    size = np.abs(gx) + np.abs(gy)
    around = np.pad(size, 1)
    height, width = size.shape

    def near(dy: int, dx: int) -> np.ndarray:
        return around[1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]

    flat = np.abs(gy) < np.tan(np.pi / 8) * np.abs(gx)  # gradient along x: compare with left and right
    steep = np.abs(gy) > np.tan(3 * np.pi / 8) * np.abs(gx)
    falling = gx * gy < 0
    before = np.where(flat, near(0, -1), np.where(steep, near(-1, 0), np.where(falling, near(-1, 1), near(-1, -1))))
    after = np.where(flat, near(0, 1), np.where(steep, near(1, 0), np.where(falling, near(1, -1), near(1, 1))))
    diagonal = ~flat & ~steep
    ridge = (size > before) & np.where(diagonal, size > after, size >= after)
    edges: np.ndarray = ndimage.binary_propagation(ridge & (size > high), np.ones((3, 3)), ridge & (size > low))
    return edges


def distance_to(mask: np.ndarray, limit: float) -> np.ndarray:
    """float32 [h, w]: distance to the nearest True, at most `limit`."""
    if not mask.any():
        return np.full(mask.shape, limit, np.float32)
    return np.minimum(ndimage.distance_transform_edt(~mask), limit).astype(np.float32)


def equalise(levels: np.ndarray) -> np.ndarray:
    """uint8 -> uint8, cumulative histogram stretched over 0..255 (OpenCV's rule: the lowest level becomes 0)."""
    counts = np.bincount(levels.ravel(), minlength=256)
    lowest = int(np.flatnonzero(counts)[0])
    rest = levels.size - counts[lowest]
    if not rest:
        return levels
    table = np.round((np.cumsum(counts) - counts[lowest]) * (255 / rest))
    return np.clip(table, 0, 255).astype(np.uint8)[levels]
