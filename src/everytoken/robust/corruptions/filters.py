"""Filters on float32 images [h, w, c] that the corruptions are made of, each with the borders of the published one.

A filter along one axis is a matrix (borders included), so that blurring is two matrix products, exact for any sigma.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np

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
def _matrix(size: int, sigma: float, radius: int, border: Border) -> np.ndarray:
    """[size, size] matrix of a Gaussian filter along an axis."""
    made = np.zeros((size, size))
    rows = np.arange(size)
    for step, weight in zip(range(-radius, radius + 1), gaussian_taps(sigma, radius), strict=True):
        np.add.at(made, (rows, fold(rows + step, size, border)), weight)
    return made.astype(np.float32)


def gaussian(image: np.ndarray, sigma: float, border: Border = "nearest", truncate: float = 4.0) -> np.ndarray:
    """Gaussian blur of [h, w] or [h, w, c]; taps reach to `truncate` sigmas, as in scipy and scikit-image."""
    return gaussian_taps_of(image, sigma, int(truncate * sigma + 0.5), border)


def gaussian_taps_of(image: np.ndarray, sigma: float, radius: int, border: Border) -> np.ndarray:
    """The same with the number of taps given."""
    if radius < 1:
        return image.astype(np.float32)
    flat = image.astype(np.float32, copy=False)
    height, width = flat.shape[:2]
    down = _matrix(height, sigma, radius, border) @ flat.reshape(height, -1)
    turned = down.reshape(height, width, -1)
    out = np.matmul(_matrix(width, sigma, radius, border), turned)
    return out.reshape(image.shape)


def box3(image: np.ndarray) -> np.ndarray:
    """Mean of 3 x 3, mirrored borders."""
    padded = np.pad(image, 1, mode="reflect") if min(image.shape[:2]) > 1 else np.pad(image, 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9


def convolve(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlate [h, w, c] with an odd-sized kernel, mirrored borders, by Fourier transform."""
    height, width = image.shape[:2]
    ky, kx = kernel.shape[0] // 2, kernel.shape[1] // 2
    rows = fold(np.arange(-ky, height + ky), height, "mirror")
    columns = fold(np.arange(-kx, width + kx), width, "mirror")
    padded = image[rows][:, columns].transpose(2, 0, 1)
    shape = (_smooth_size(padded.shape[1]), _smooth_size(padded.shape[2]))
    other = np.conj(np.fft.rfft2(kernel.astype(np.float32), shape))
    made = np.fft.irfft2(np.fft.rfft2(padded, shape) * other, shape)
    return np.ascontiguousarray(made[:, :height, :width].transpose(1, 2, 0)).astype(np.float32)


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
    count = 2 * math.ceil(radius) + 1
    weights = np.exp(-0.5 * (np.arange(count) / sigma) ** 2)
    weights /= weights.sum()
    height, width = image.shape[:2]
    turn = math.radians(angle)
    downs = [math.ceil(i * math.sin(turn) - 0.5) for i in range(count)]
    rights = [math.ceil(i * math.cos(turn) - 0.5) for i in range(count)]
    reach_y, reach_x = max(map(abs, downs)), max(map(abs, rights))
    rows = fold(np.arange(-reach_y, height + reach_y), height, "nearest")
    columns = fold(np.arange(-reach_x, width + reach_x), width, "nearest")
    padded = image[rows][:, columns].astype(np.float32, copy=False)
    out = np.zeros(image.shape, np.float32)
    part = np.empty_like(out)
    for weight, down, right in zip(weights.astype(np.float32), downs, rights, strict=True):
        y, x = reach_y + down, reach_x + right
        np.multiply(padded[y : y + height, x : x + width], weight, out=part)
        out += part
    return out


def zoom(image: np.ndarray, factor: float) -> np.ndarray:
    """The centre of [h, w, c], enlarged by `factor` with linear interpolation to the old size.

    As published: the centre is ceil(side / factor) pixels, its corner pixels stay in the corners, a surplus is cut off.
    """
    first, second, weight = _zoom_axis(image.shape[0], factor)
    rows = image[first] + (image[second] - image[first]) * weight[:, None, None]
    first, second, weight = _zoom_axis(image.shape[1], factor)
    left = rows[:, first]
    return left + (rows[:, second] - left) * weight[None, :, None]


@lru_cache(maxsize=256)
def _zoom_axis(size: int, factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inner = math.ceil(size / factor)
    start = (size - inner) // 2
    large = max(round(inner * factor), size)
    trim = (large - size) // 2
    at = np.arange(trim, trim + size) * ((inner - 1) / max(large - 1, 1))
    low = np.clip(np.floor(at).astype(np.int64), 0, max(inner - 2, 0))
    return start + low, start + np.minimum(low + 1, inner - 1), (at - low).astype(np.float32)


def sample(image: np.ndarray, y: np.ndarray, x: np.ndarray, border: Border) -> np.ndarray:
    """Linear interpolation of [h, w, c] at positions y, x [h', w'] (pixel centres are whole numbers)."""
    height, width = image.shape[:2]
    top, left = np.floor(y), np.floor(x)
    wy, wx = (y - top).astype(np.float32)[..., None], (x - left).astype(np.float32)[..., None]
    rows = [fold(top.astype(np.int64) + i, height, border) * width for i in (0, 1)]
    columns = [fold(left.astype(np.int64) + i, width, border) for i in (0, 1)]
    flat = image.reshape(height * width, -1)
    upper = flat[rows[0] + columns[0]] * (1 - wx) + flat[rows[0] + columns[1]] * wx
    lower = flat[rows[1] + columns[0]] * (1 - wx) + flat[rows[1] + columns[1]] * wx
    return upper * (1 - wy) + lower * wy
