"""Masks through a placement: each output pixel takes the value of the source pixel that its centre falls on."""

from __future__ import annotations

import numpy as np

from everytoken.data import placement as pl


def sample_mask(mask: np.ndarray, placement: pl.Affine, size: tuple[int, int], outside: int) -> np.ndarray:
    """What the network's input shows of a mask, by the nearest neighbour.

    Args:
        mask: [H, W], any integer type.
        placement: network fractions -> source fractions, as the pixels' own.
        size: (height, width) of the output.
        outside: value of pixels whose centre lies outside the source.

    Returns:
        [height, width] of the mask's type. Cost at 512 px, one core: 0.3 ms upright, 8 ms rotated.
    """
    (height, width), (rows, columns) = size, mask.shape
    matrix = pl.to_pixels(placement, (width, height), (columns, rows))
    (a, b, c), (d, e, f) = matrix.tolist()
    across, down = np.arange(width) + 0.5, np.arange(height) + 0.5
    if pl.is_axis_aligned(placement):
        x = np.floor(a * across + c).astype(np.int64)
        y = np.floor(e * down + f).astype(np.int64)
        out = mask[np.ix_(y.clip(0, rows - 1), x.clip(0, columns - 1))]
        out[(y < 0) | (y >= rows)] = outside
        out[:, (x < 0) | (x >= columns)] = outside
        return out
    u, v = np.meshgrid(across, down)
    x = np.floor(a * u + b * v + c).astype(np.int64)
    y = np.floor(d * u + e * v + f).astype(np.int64)
    out = mask[y.clip(0, rows - 1), x.clip(0, columns - 1)]
    out[(x < 0) | (x >= columns) | (y < 0) | (y >= rows)] = outside
    return out
