"""Filters on float32 images [h, w, c] that the corruptions are made of, each with the borders of the published one."""

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
