"""The one resampler: source pixels to the network's input through one affine map, with anti-aliasing.

All geometric steps of a sample (EXIF rotation, crop, resize, flips, rotate, shear, translate) arrive as one matrix.
- If the network sees an upright rectangle inside the image (about three of four samples), that rectangle is cut out
  and resized with an anti-aliasing filter; flips are nearly free. Its edges are first moved to whole stored pixels (by
  at most half an output pixel), and the matrix that was really used is returned: pixels and placement always agree.
- Otherwise the visible part is first reduced to about the network's resolution with the same filter, and then sampled
  once, bilinearly. For bicubic samples the middle image is 1.5 times finer, which keeps the sharpness. Where the scale
  is near 1, sampling goes straight to the source.

Content that a rotation or shift brings in from beyond the crop is real image content; only what lies outside the
source image gets the fill colour. timm fills everything beyond the crop, but then a token could see the fill where its
score map has a label; here pixels and map show the same thing everywhere.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
import torch.nn.functional as F

from everytoken.data.placement import Affine, compose, invert
from everytoken_lab.data.decode import Picture

_MARGIN = 2  # middle-image pixels beyond the visible part, so that interpolation never sees a false edge
_STRAIGHT = 1.25  # source pixels per middle-image pixel up to which no reduction is needed
_FINER = 1.5  # how much finer than the output the middle image of a bicubic sample is


_scratch = threading.local()  # memory that is used again for each image: new pages cost more than the work itself


def _floats(pixels: np.ndarray) -> torch.Tensor:
    """The pixels as float32, valid until the next call in this thread."""
    if not hasattr(_scratch, "memory") or _scratch.memory.numel() < pixels.size:
        _scratch.memory = torch.empty(pixels.size)
    floats: torch.Tensor = _scratch.memory[: pixels.size].view(pixels.shape)
    return floats.copy_(torch.from_numpy(pixels))


def render(
    picture: Picture, matrix: Affine, size: tuple[int, int], *, bicubic: bool, fill: tuple[int, int, int]
) -> tuple[np.ndarray, Affine]:
    """What the network sees.

    Args:
        picture: the source; decoded here, as far as needed.
        matrix: [2, 3], output pixel position -> upright source pixel position (continuous coordinates).
        size: (height, width) of the output.
        bicubic: the filter; bilinear otherwise.
        fill: colour of what lies outside the source image.

    Returns:
        uint8 [height, width, 3], and the matrix that was really used (within half an output pixel of the wanted one).
    """
    raw = compose(picture.to_raw, matrix)
    (a, b, _), (d, e, _) = raw.tolist()
    per_pixel = math.hypot(a, b), math.hypot(d, e)  # stored pixels per output pixel, along stored x and y
    reduce = picture.reduction(min(per_pixel))
    if (b == 0 and d == 0) or (a == 0 and e == 0):
        cut = _cut(picture, raw, size, reduce, bicubic)
        if cut is not None:
            pixels, used = cut
            return pixels, compose(invert(picture.to_raw), used) if picture.orientation != 1 else used
    return _warp(picture, raw, size, per_pixel, reduce, bicubic, fill), matrix


def resize(pixels: np.ndarray, size: tuple[int, int], bicubic: bool) -> np.ndarray:
    """Anti-aliased resize of uint8 [h, w, 3] to (height, width).

    Equal to Pillow's filters to one grey level, a little more at a few pixels if one side grows and the other shrinks
    (the order of the two passes differs, and bicubic overshoots are clipped in between).
    """
    if pixels.shape[:2] == size:
        return pixels
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(image, size, mode="bicubic" if bicubic else "bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _cut(
    picture: Picture, raw: Affine, size: tuple[int, int], reduce: int, bicubic: bool
) -> tuple[np.ndarray, Affine] | None:
    """Cut out and resize an upright rectangle, or None if it is not inside the image."""
    height, width = size
    (a, b, c), (d, e, f) = raw.tolist()
    x = _snap(c, c + a * width + b * height, picture.raw_size[0], reduce)
    y = _snap(f, f + d * width + e * height, picture.raw_size[1], reduce)
    if x is None or y is None:
        return None
    turned = a == 0
    part = picture.region((min(x), min(y), max(x), max(y)), reduce)
    out = resize(part, (width, height) if turned else size, bicubic)
    backwards = (y[0] > y[1], x[0] > x[1])  # along stored y and x, which are the output's rows and columns, or turned
    down, across = backwards[::-1] if turned else backwards
    out = np.ascontiguousarray(out.swapaxes(0, 1) if turned else out)
    if down or across:
        axes = [axis for axis, reverse in enumerate((down, across)) if reverse]
        out = torch.from_numpy(out).flip(axes).numpy()  # ten times faster than NumPy
    dx, dy = x[1] - x[0], y[1] - y[0]
    if turned:
        used = np.array([[0.0, dx / height, x[0]], [dy / width, 0.0, y[0]]])
    else:
        used = np.array([[dx / width, 0.0, x[0]], [0.0, dy / height, y[0]]])
    return out, used


def _snap(start: float, end: float, limit: int, step: int) -> tuple[int, int] | None:
    """Move an interval's ends to multiples of `step`; None if it is not inside 0..limit. The direction is kept."""
    low, high = min(start, end), max(start, end)
    if low < -0.5 or high > limit + 0.5:
        return None
    last = limit // step * step
    first = min(max(round(low / step), 0) * step, last - step)
    second = max(min(round(high / step) * step, last), first + step)
    return (first, second) if start < end else (second, first)


def _warp(
    picture: Picture,
    raw: Affine,
    size: tuple[int, int],
    per_pixel: tuple[float, float],
    reduce: int,
    bicubic: bool,
    fill: tuple[int, int, int],
) -> np.ndarray:
    """Reduce the visible part to about the output's resolution, then sample it once."""
    height, width = size
    origin, scale = [0, 0], [1.0, 1.0]  # middle-image pixel = (stored pixel - origin) * scale, for x and y
    box, middle, outside = [0, 0, 0, 0], [1, 1], False
    for k in range(2):
        p, q, r = raw[k].tolist()
        ends = (r, r + p * width, r + q * height, r + p * width + q * height)
        cell = per_pixel[k] / (_FINER if bicubic else 1.0)  # stored pixels per pixel of the middle image
        if (1 / _FINER if bicubic else 0.0) <= cell <= _STRAIGHT:
            cell = 1.0
        margin = _MARGIN * max(cell, reduce)
        last = -(-picture.raw_size[k] // reduce) * reduce
        low = max(math.floor((min(ends) - margin) / reduce) * reduce, 0)
        high = min(math.ceil((max(ends) + margin) / reduce) * reduce, last)
        if high <= low:  # nothing of the image is in view
            return np.broadcast_to(np.array(fill, dtype=np.uint8), (height, width, 3)).copy()
        middle[k] = max(round((high - low) / max(cell, 0 if bicubic else reduce)), 1)
        origin[k], scale[k] = low, middle[k] / (high - low)
        outside = outside or min(ends) < 0 or max(ends) > picture.raw_size[k]
        box[k], box[k + 2] = low, high
    pixels = resize(picture.region((box[0], box[1], box[2], box[3]), reduce), (middle[1], middle[0]), bicubic)

    source = _floats(pixels)[None].permute(0, 3, 1, 2)
    grid = np.empty((1, height, width, 2), dtype=np.float32)
    beyond = np.zeros((height, width), dtype=bool)
    across, down = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)
    for k in range(2):
        p, q, r = raw[k].tolist()
        unit = 2 * scale[k] / middle[k]  # the sampler's coordinates run from -1 to 1
        r = (r + 0.5 * (p + q) - origin[k]) * unit - 1
        place = (across * (p * unit))[None] + (down * (q * unit) + r)[:, None]
        grid[0, :, :, k] = place
        if outside:
            beyond |= np.abs(place) > 1
    edge = "border" if outside else "zeros"  # both are the same inside, and zeros are faster
    sampled = F.grid_sample(source, torch.from_numpy(grid), mode="bilinear", padding_mode=edge, align_corners=False)
    out = np.empty((height, width, 3), dtype=np.uint8)
    for k, plane in enumerate(sampled[0].add_(0.5).numpy().astype(np.uint8)):
        plane[beyond] = fill[k]
        out[:, :, k] = plane
    return out
