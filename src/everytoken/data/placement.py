"""Placements: where in the source image does each point of the network's input come from?

A placement is one affine map, float64 [2, 3]. A point p = (x, y) of the input goes to `A[:, :2] @ p + A[:, 2]`
in the source image. Both sides are fractions: x to the right, y down, (0, 0) the top-left corner and (1, 1) the
bottom-right corner of the image, so resizing and aspect ratio drop out. The source image is upright (EXIF applied).
A result outside 0..1 lies outside the source image.

Steps are composed in the order in which they are done to the pixels: `compose(crop, flip, rotate)` is "crop, then
flip, then rotate the result". One matrix says it all, so score maps, masks and points are sampled once, whatever the
chain was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from everytoken.errors import EverytokenError

Affine = np.ndarray  # float64 [2, 3]


def identity() -> Affine:
    """The whole image, squashed to the network's shape."""
    return np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def from_box(x0: float, y0: float, x1: float, y1: float) -> Affine:
    """A crop: the network sees the rectangle (x0, y0)-(x1, y1) of the source, in fractions; it may reach outside."""
    if not (x1 > x0 and y1 > y0):
        raise ValueError(f"a crop needs x0 < x1 and y0 < y1, got ({x0}, {y0}, {x1}, {y1})")
    return np.array([[x1 - x0, 0.0, x0], [0.0, y1 - y0, y0]])


def hflip() -> Affine:
    """Left and right exchanged."""
    return np.array([[-1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])


def vflip() -> Affine:
    """Top and bottom exchanged."""
    return np.array([[1.0, 0.0, 0.0], [0.0, -1.0, 1.0]])


def from_pixels(matrix: ArrayLike, out_size: Sequence[float], in_size: Sequence[float]) -> Affine:
    """The placement of a warp given in pixels.

    Args:
        matrix: [2, 3] or Pillow's six AFFINE numbers; maps an output pixel position to an input pixel position,
            continuous coordinates (the centre of the first pixel is 0.5).
        out_size: (width, height) of the warp's output.
        in_size: (width, height) of its input.
    """
    placement = np.array(matrix, dtype=np.float64).reshape(2, 3)
    placement[:, 0] *= out_size[0]
    placement[:, 1] *= out_size[1]
    placement[0] /= in_size[0]
    placement[1] /= in_size[1]
    return placement


def to_pixels(placement: Affine, out_size: Sequence[float], in_size: Sequence[float]) -> Affine:
    """The inverse of `from_pixels`: the same map between pixel positions, sizes as (width, height)."""
    return from_pixels(placement, (1 / out_size[0], 1 / out_size[1]), (1 / in_size[0], 1 / in_size[1]))


def from_matrix(matrix: ArrayLike, out_size: Sequence[float], in_size: Sequence[float]) -> Affine:
    """The placement of a warp by OpenCV, kornia or albumentations.

    Args:
        matrix: [2, 3] or [3, 3]; maps an input pixel's indices (x, y) to those of the output, so that the centre of the
            first pixel is 0: kornia's `transform_matrix` of one image.
        out_size, in_size: (width, height) of the warp's output and input.
    """
    forward = np.vstack((np.asarray(matrix, dtype=np.float64)[:2], [0.0, 0.0, 1.0]))
    centre = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    return from_pixels((centre @ np.linalg.inv(forward) @ np.linalg.inv(centre))[:2], out_size, in_size)


def rotation(degrees: float, size: Sequence[float]) -> Affine:
    """The content turns counter-clockwise by `degrees` about the centre of an image of (width, height) pixels.

    The size matters: a rotation of a non-square image is not a rotation in fractions.
    """
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    w, h = size
    cx, cy = w / 2, h / 2
    return from_pixels([c, -s, cx - c * cx + s * cy, s, c, cy - s * cx - c * cy], size, size)


def compose(*steps: Affine) -> Affine:
    """One placement for several steps, given in the order in which the pixels go through them. Associative."""
    total = np.array(steps[0] if steps else identity(), dtype=np.float64)
    for step in steps[1:]:
        shift = total[:, 2]
        total = total[:, :2] @ step
        total[:, 2] += shift
    return total


def invert(placement: Affine) -> Affine:
    """Source fractions to network fractions."""
    (a, b, c), (d, e, f) = placement.tolist()
    det = a * e - b * d
    if det == 0 or not math.isfinite(det):
        raise EverytokenError(f"This placement cannot be inverted, it flattens the image: {placement.tolist()}.")
    return np.array([[e, -b, b * f - e * c], [-d, a, d * c - a * f]]) / det


def apply(placement: Affine, points: ArrayLike) -> np.ndarray:
    """Send points [..., 2] of the network's input to the source image (both as fractions)."""
    p = np.asarray(points, dtype=np.float64)
    return p @ placement[:, :2].T + placement[:, 2]


def is_axis_aligned(placement: Affine, tolerance: float = 1e-9) -> bool:
    """True if the network sees an upright rectangle: crops, flips and shifts, no rotation, shear or transposition."""
    return bool(abs(placement[0, 1]) <= tolerance and abs(placement[1, 0]) <= tolerance)


def box(placement: Affine) -> tuple[float, float, float, float]:
    """(x0, y0, x1, y1): the smallest upright source rectangle, in fractions, that holds all the network sees."""
    corners = apply(placement, [(0, 0), (1, 0), (0, 1), (1, 1)])
    (x0, y0), (x1, y1) = corners.min(0).tolist(), corners.max(0).tolist()
    return x0, y0, x1, y1


def sample_mask(mask: np.ndarray, placement: Affine, size: tuple[int, int], outside: int) -> np.ndarray:
    """What the network's input shows of a mask, by the nearest neighbour.

    Args:
        mask: [H, W], any integer type.
        placement: network fractions -> source fractions, as the pixels' own.
        size: (height, width) of the output.
        outside: value of pixels whose centre lies outside the source.

    Returns:
        [height, width] of the mask's type.
    """
    (height, width), (rows, columns) = size, mask.shape
    matrix = to_pixels(placement, (width, height), (columns, rows))
    (a, b, c), (d, e, f) = matrix.tolist()
    across, down = np.arange(width) + 0.5, np.arange(height) + 0.5
    if is_axis_aligned(placement):
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
