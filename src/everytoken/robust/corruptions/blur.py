"""Blur of ImageNet-C: defocus, glass, motion, zoom; and Gaussian blur from the extra set. Parameters as published.

Lengths are pixels of a 224 px view and are multiplied by `scale` for other sizes. Glass blur does what the released
program did, not what it meant to do: its exchange of two pixels copied one over the other, because both were views of
the same array. The result depends on the order of the copies; it is found here without a loop over pixels, by following
each pixel's source to the end in a few doublings.
"""

from __future__ import annotations

import math

import numpy as np

from everytoken.robust.corruptions import filters

DEFOCUS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))  # radius of the disk, sigma that smooths its edge
GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))  # sigma, reach, rounds
MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # radius, sigma
ZOOM = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))  # end (not reached), step
GAUSSIAN = (1, 2, 3, 4, 6)  # sigma


def defocus_blur(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Mean over a disk whose edge is smoothed a little."""
    radius, smooth = DEFOCUS[severity - 1]
    return filters.convolve(image, disk(radius * scale, smooth))


def disk(radius: float, smooth: float) -> np.ndarray:
    """The disk as a kernel; the number of cells and of smoothing taps is the published one."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    at = np.arange(-half, half + 1)
    inside = ((at[:, None] ** 2 + at[None] ** 2) <= radius**2).astype(np.float32)
    return filters.gaussian_taps_of(inside / inside.sum(), smooth, reach, "mirror")


def glass_blur(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Blur, let pixels be overwritten by random neighbours, blur again."""
    sigma, reach, rounds = GLASS[severity - 1]
    sigma, reach = sigma * scale, max(1, round(reach * scale))
    soft = np.floor(filters.gaussian(image, sigma) * 255 + 1e-3).astype(np.float32) / 255
    height, width = soft.shape[:2]
    flat = soft.reshape(height * width, -1)
    for _ in range(rounds):
        flat = flat[shuffle_sources(height, width, reach, rng)]
    return filters.gaussian(flat.reshape(soft.shape), sigma)


def shuffle_sources(height: int, width: int, reach: int, rng: np.random.Generator) -> np.ndarray:
    """[h * w] the pixel whose value each pixel has after one round of copies from random neighbours.

    The round goes from the last row and column to the first, and pixel (y, x) takes the value that its neighbour
    (y + dy, x + dx), -reach <= dy, dx < reach, has at that moment. A neighbour that comes later in reading order has
    been overwritten already, so its source is followed; one that comes earlier still has its own value.
    """
    number = np.arange(height * width).reshape(height, width)
    source = number.copy()
    inner = (slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    shape = number[inner].shape
    if not min(shape):
        return number.ravel()
    moves = rng.integers(-reach, reach, (2, *shape))
    source[inner] = number[inner] + moves[0] * width + moves[1]
    touched = np.zeros((height, width), bool)
    touched[inner] = True
    flat, come = number.ravel(), source.ravel()
    # where to look on: the source if it was overwritten before, else nowhere (the pixel itself)
    follow = np.where(touched.ravel()[come] & (come > flat), come, flat)
    while True:
        further = follow[follow]
        if np.array_equal(further, follow):
            break
        follow = further
    return come[follow]


def motion_blur(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Half a Gaussian along a line at an angle between -45 and 45 degrees."""
    radius, sigma = MOTION[severity - 1]
    return filters.motion_blur(image, radius * scale, sigma * scale, rng.uniform(-45, 45))


def zoom_blur(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Mean of the image and of its enlargements (the first of which is the image again)."""
    end, step = ZOOM[severity - 1]
    factors = np.arange(1, end, step)
    total = image.copy()
    for factor in factors:
        total += filters.zoom(image, float(factor))
    return total / (len(factors) + 1)


def gaussian_blur(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Gaussian."""
    return filters.gaussian(image, GAUSSIAN[severity - 1] * scale)
