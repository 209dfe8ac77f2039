"""Edges, distances and relief of a grey image: what spatter draws its drops of water with.

Canny's edge detector (thresholds 50 and 150, Sobel 3 x 3, sum of absolute values), the distance to the nearest edge,
cut off, smoothed, equalised, embossed.
"""

from __future__ import annotations

import numpy as np

from everytoken.robust.corruptions.filters import box3

_EMBOSS = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def relief(grey: np.ndarray, limit: float) -> np.ndarray:
    """Grey values 0..255 [h, w] -> relief 0..255 along the edges; distances count up to `limit` pixels."""
    distance = np.minimum(distance_to(canny(grey, 50, 150), limit), limit)
    if limit != 20:  # bytes need the published range
        distance = distance * (20 / limit)
    level = equalise(np.round(box3(distance)).astype(np.uint8)).astype(np.float32)
    padded = np.pad(level, 1, mode="reflect") if min(level.shape) > 1 else np.pad(level, 1, mode="edge")
    height, width = level.shape
    raised = np.zeros_like(level)
    for y, row in enumerate(_EMBOSS):
        for x, weight in enumerate(row):
            if weight:
                raised += weight * padded[y : y + height, x : x + width]
    return np.round(box3(np.clip(raised, 0, 255)))


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
    weak, found = ridge & (size > low), ridge & (size > high)
    while True:
        grown = weak & _dilate(found)
        if np.array_equal(grown, found):
            return found
        found = grown


def _dilate(mask: np.ndarray) -> np.ndarray:
    padded = np.pad(mask, 1)
    rows = padded[:-2] | padded[1:-1] | padded[2:]
    return rows[:, :-2] | rows[:, 1:-1] | rows[:, 2:]


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
