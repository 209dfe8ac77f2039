"""Filters on float32 images [h, w, c] that the corruptions are made of, each with the borders of the published one.

Weighted sums of shifted images, Fourier transforms and interpolation are torch's, the fastest at hand on one core. A
wide filter along one axis is a matrix (borders included), so that blurring is two matrix products, exact for any sigma.
The second half is what spatter draws its drops of water with: Canny's edge detector (thresholds 50 and 150, Sobel
3 x 3, sum of absolute values), the distance to the nearest edge, cut off, smoothed, equalised, embossed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["nearest", "reflect", "mirror"]  # aaa|abc|ccc, cba|abc|cba, cb|abc|ba


def fold(index: np.ndarray, size: int, border: Border) -> np.ndarray:
    """Positions outside 0..size-1 -> the position inside that stands for them."""
    if border == "nearest" or size == 1:
        return np.clip(index, 0, size - 1)
    period = 2 * size if border == "reflect" else 2 * size - 2
    index = np.mod(index, period)
    return np.where(index < size, index, (period - 1 if border == "reflect" else period) - index)


@lru_cache(maxsize=64)
def gaussian_taps(sigma: float, radius: int) -> np.ndarray:
    """Weights of a Gaussian at -radius..radius, adding up to 1."""
    at = np.arange(-radius, radius + 1)
    weights: np.ndarray = np.exp(-0.5 * (at / max(sigma, 1e-6)) ** 2)
    return weights / weights.sum()


@lru_cache(maxsize=64)
def _matrix(size: int, sigma: float, radius: int, border: Border) -> Tensor:
    """[size, size] matrix of a Gaussian filter along an axis."""
    weights_matrix = np.zeros((size, size))
    rows = np.arange(size)
    for step, weight in zip(range(-radius, radius + 1), gaussian_taps(sigma, radius), strict=True):
        np.add.at(weights_matrix, (rows, fold(rows + step, size, border)), weight)
    return torch.from_numpy(weights_matrix.astype(np.float32))


def gaussian(image: np.ndarray, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> np.ndarray:
    """Gaussian blur of [h, w] or [h, w, c]; taps reach to `truncate` sigmas, as in scipy and scikit-image."""
    return gaussian_taps_of(image, sigma, int(truncate * sigma + 0.5), border)


def gaussian_taps_of(image: np.ndarray, sigma: float, radius: int, border: Border) -> np.ndarray:
    """The same with the number of taps given."""
    blurred = torch.from_numpy(image.astype(np.float32, copy=False))
    if radius < 1:
        return blurred.numpy()
    if radius > 12:
        down, across = (_matrix(size, sigma, radius, border) for size in image.shape[:2])
        if image.ndim == 2:
            return (down @ blurred @ across.T).numpy()
        return np.ascontiguousarray((down @ blurred.permute(2, 0, 1) @ across.T).permute(1, 2, 0).numpy())
    for axis in (0, 1):  # few taps: weighted sums of shifted images
        padded = _pad(blurred, axis, radius, border)
        shifted = (padded.narrow(axis, i, image.shape[axis]) for i in range(2 * radius + 1))
        blurred = _weighted_sum(shifted, gaussian_taps(sigma, radius))
    return blurred.numpy()


def _pad(image: Tensor, axis: int, reach: int, border: Border) -> Tensor:
    size = image.shape[axis]
    return image.index_select(axis, torch.from_numpy(fold(np.arange(-reach, size + reach), size, border)))


def _weighted_sum(images: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    total: Tensor | None = None
    for image, weight in zip(images, weights, strict=True):
        total = image * float(weight) if total is None else total.add_(image, alpha=float(weight))
    assert total is not None
    return total


def correlate3(image: np.ndarray, kernel: Sequence[Sequence[float]]) -> np.ndarray:
    """Correlate [h, w] with 3 x 3 weights, mirrored borders (a single row or column is repeated)."""
    padded = np.pad(image.astype(np.float32), 1, mode="reflect" if min(image.shape) > 1 else "edge")
    weights = torch.tensor(kernel, dtype=torch.float32)
    return F.conv2d(torch.from_numpy(padded)[None, None], weights[None, None])[0, 0].numpy()


def box3(image: np.ndarray) -> np.ndarray:
    """Mean of 3 x 3, mirrored borders."""
    return correlate3(image, [[1.0] * 3] * 3) / 9


def planes(image: np.ndarray) -> Tensor:
    """[h, w, c] -> [1, c, h, w], as torch has it."""
    return torch.from_numpy(image.astype(np.float32, copy=False)).permute(2, 0, 1)[None].contiguous()


def pixels(image: Tensor) -> np.ndarray:
    """[1, c, h, w] -> [h, w, c]."""
    return np.ascontiguousarray(image[0].permute(1, 2, 0).numpy())


def convolve(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlate [h, w, c] with an odd-sized kernel, mirrored borders, by Fourier transform."""
    height, width = image.shape[:2]
    padded = planes(image)
    for axis, size in enumerate(kernel.shape):
        padded = _pad(padded, axis + 2, size // 2, "mirror")
    shape = [_smooth_size(size) for size in padded.shape[2:]]
    spectrum = torch.fft.rfft2(torch.from_numpy(kernel.astype(np.float32)), s=shape).conj()
    product = torch.fft.rfft2(padded, s=shape) * spectrum
    return pixels(torch.fft.irfft2(product, s=shape)[..., :height, :width])


@lru_cache(maxsize=256)
def _smooth_size(size: int) -> int:
    """The next length that a Fourier transform likes: only 2, 3 and 5 as factors."""
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def motion_blur(image: np.ndarray, radius: float, sigma: float, angle: float) -> np.ndarray:
    """ImageMagick's motion blur: half a Gaussian along a line from each pixel; borders repeat the edge.

    Args:
        image: [h, w, c].
        radius: the line has 2 * ceil(radius) + 1 pixels.
        sigma: of the Gaussian. angle: degrees.
    """
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    turn = math.radians(angle)
    downs = np.ceil(steps * math.sin(turn) - 0.5).astype(int)
    rights = np.ceil(steps * math.cos(turn) - 0.5).astype(int)
    reach_y, reach_x = int(np.abs(downs).max()), int(np.abs(rights).max())
    padded = torch.from_numpy(image.astype(np.float32, copy=False))
    padded = _pad(_pad(padded, 0, reach_y, "nearest"), 1, reach_x, "nearest")
    height, width = image.shape[:2]
    shifted = (
        padded[reach_y + down : reach_y + down + height, reach_x + right : reach_x + right + width]
        for down, right in zip(downs, rights, strict=True)
    )
    return _weighted_sum(shifted, weights / weights.sum()).numpy()


def zoom_mean(image: np.ndarray, factors: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean of [h, w, c], enlarged around its centre by each factor with linear interpolation to the old size.

    As published: the centre is ceil(side / factor) pixels, its corner pixels stay in the corners, a surplus is cut off.
    """
    source = planes(image)
    total = torch.zeros_like(source)
    for factor in factors:
        enlarged = source
        for _ in range(2):  # whole rows are selected and mixed; then rows and columns change places
            first, second, weight = _zoom_axis(enlarged.shape[2], factor)
            enlarged = torch.lerp(enlarged.index_select(2, first), enlarged.index_select(2, second), weight)
            enlarged = enlarged.transpose(2, 3).contiguous()
        total += enlarged
    return pixels(total / len(factors))


@lru_cache(maxsize=256)
def _zoom_axis(size: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Where each of the new positions lies: two old positions and the weight of the second, [size, 1]."""
    inner = math.ceil(size / factor)
    start = (size - inner) // 2
    large = max(round(inner * factor), size)
    trim = (large - size) // 2
    at = torch.arange(trim, trim + size, dtype=torch.float64) * ((inner - 1) / max(large - 1, 1))
    low = at.floor().long().clamp(0, max(inner - 2, 0))
    return start + low, start + (low + 1).clamp(max=inner - 1), (at - low).float()[:, None]


def sample(image: np.ndarray, y: np.ndarray, x: np.ndarray, border: Literal["reflect", "mirror"]) -> np.ndarray:
    """Linear interpolation of [h, w, c] at positions y, x [h', w'] (pixel centres are whole numbers)."""
    height, width = image.shape[:2]
    corners = border == "mirror"  # torch reflects at the centres of the corner pixels, or at their edges
    grid = np.empty((1, *y.shape, 2), np.float32)  # in -1..1
    for axis, (place, size) in enumerate(((x, width), (y, height))):
        grid[0, ..., axis] = place * (2 / max(size - 1, 1)) - 1 if corners else place * (2 / size) + (1 / size - 1)
    return pixels(F.grid_sample(planes(image), torch.from_numpy(grid), "bilinear", "reflection", corners))


_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def relief(grey: np.ndarray, limit: float) -> np.ndarray:
    """Grey values 0..255 [h, w] -> relief 0..255 along the edges; distances count up to `limit` pixels."""
    distance = np.minimum(distance_to(canny(grey, 50, 150), limit), limit)
    if limit != 20:  # bytes need the published range
        distance = distance * (20 / limit)
    level = equalise(box3(distance).astype(np.uint8))
    return np.round(box3(np.clip(correlate3(level, _EMBOSS), 0, 255)))


def canny(grey: np.ndarray, low: float, high: float) -> np.ndarray:
    """bool [h, w]: ridges of the gradient above `high`, and those above `low` that touch them."""
    padded = np.pad(grey.astype(np.float32), 1, mode="edge")
    smooth_y = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    smooth_x = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    gx, gy = smooth_y[:, 2:] - smooth_y[:, :-2], smooth_x[2:] - smooth_x[:-2]
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
    weak, edges = ridge & (size > low), ridge & (size > high)
    while True:
        grown = weak & (F.max_pool2d(torch.from_numpy(edges)[None].float(), 3, 1, 1)[0].numpy() > 0)
        if np.array_equal(grown, edges):
            return edges
        edges = grown


def distance_to(mask: np.ndarray, limit: float) -> np.ndarray:
    """float32 [h, w]: distance to the nearest True, exact up to `limit`; anything larger is at least `limit`."""
    reach = int(np.ceil(limit))
    height, width = mask.shape
    # along columns: how far up or down, capped at reach + 1
    above = np.full((height, width), reach + 1, np.float32)
    run = np.full(width, reach + 1, np.float32)
    for y in range(height):
        run = np.where(mask[y], 0, np.minimum(run + 1, reach + 1))
        above[y] = run
    run = np.full(width, reach + 1, np.float32)
    for y in range(height - 1, -1, -1):
        run = np.where(mask[y], 0, np.minimum(run + 1, reach + 1))
        np.minimum(above[y], run, out=above[y])
    squares = np.pad(above**2, ((0, 0), (reach, reach)), constant_values=float((reach + 1) ** 2))
    best = squares[:, reach : reach + width].copy()
    for shift in range(1, reach + 1):
        for at in (reach - shift, reach + shift):
            np.minimum(best, squares[:, at : at + width] + shift**2, out=best)
    return np.sqrt(best)


def equalise(levels: np.ndarray) -> np.ndarray:
    """uint8 -> uint8, cumulative histogram stretched over 0..255 (OpenCV's rule: the lowest level becomes 0)."""
    counts = np.bincount(levels.ravel(), minlength=256)
    lowest = int(np.flatnonzero(counts)[0])
    rest = levels.size - counts[lowest]
    if not rest:
        return levels
    table = np.round((np.cumsum(counts) - counts[lowest]) * (255 / rest))
    return np.clip(table, 0, 255).astype(np.uint8)[levels]
