"""Random crops for segmentation: scale, crop, flip and photometric distortion, of image and mask together.

The papers' set-up, which is Swin's: the short side becomes 512 (the long side at most four times that), times a random
factor in 0.5..2; of ten attempts the first 512 x 512 crop in which no class covers more than 75 %; what lies outside of
the image has the mean colour and is ignored. Pixels and mask are sampled through one placement.

Photometric distortion (Liu et al. 2016, SSD): each with a chance of one half, brightness shifted by up to 32, contrast
multiplied by 0.5..1.5 (before or after the others), saturation multiplied by 0.5..1.5, hue turned by up to 36 degrees.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from everytoken.data import placement as pl
from everytoken.data.placement import sample_mask
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.warp import render
from everytoken_lab.dense.common import resized
from everytoken_lab.dense.segment.options import SegmentAugment

ATTEMPTS = 10
LONGEST = 4  # the long side of an image, in short sides of the network's


class SegmentTransform:
    """A random crop of an image and its mask; outside of the image, `fill` and -1."""

    def __init__(self, options: SegmentAugment, fill: tuple[int, int, int] = (124, 116, 104)) -> None:
        self.options, self.fill = options, fill

    def __call__(
        self, picture: Picture, mask: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, pl.Affine]:
        """(pixels uint8 [s, s, 3], mask [s, s], placement [2, 3])."""
        options, side = self.options, self.options.crop_size
        draws = rng.random((ATTEMPTS + 1, 2))
        scale, flip = draws[0].tolist()
        short = (options.resize or side) * (options.scale[0] + (options.scale[1] - options.scale[0]) * scale)
        width, height = resized(picture.size, short, LONGEST * short)
        per_x, per_y = picture.size[0] / width, picture.size[1] / height
        matrix = np.zeros((2, 3))
        for u, v in draws[1:].tolist():
            x0, y0 = int(u * (max(width - side, 0) + 1)), int(v * (max(height - side, 0) + 1))
            matrix = np.array([[per_x, 0.0, x0 * per_x], [0.0, per_y, y0 * per_y]])
            if options.cat_max_ratio >= 1 or self._varied(mask, matrix):
                break
        if flip < options.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, side], [0.0, 1.0, 0.0]]))
        pixels, used = render(picture, matrix, (side, side), bicubic=False, fill=self.fill)
        placement = pl.from_pixels(used, (side, side), picture.size)
        if options.photometric:
            pixels = distort(pixels, rng).copy()
            beyond = sample_mask(np.zeros(mask.shape, np.int8), placement, (side, side), 1)
            pixels[beyond.astype(bool)] = self.fill
        return pixels, sample_mask(mask, placement, (side, side), -1), placement

    def _varied(self, mask: np.ndarray, matrix: pl.Affine) -> bool:
        """Whether a crop shows two classes or more, none of which covers too much of it."""
        side = self.options.crop_size
        placement = pl.from_pixels(matrix, (side, side), mask.shape[::-1])
        crop = sample_mask(mask, placement, (side, side), -1)[::2, ::2]  # a quarter of the pixels will do
        counts = np.bincount(crop[crop >= 0])
        counts = counts[counts > 0]
        return len(counts) > 1 and bool(counts.max() < self.options.cat_max_ratio * counts.sum())


def distort(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Photometric distortion of uint8 [h, w, 3]."""
    u = rng.random(9).tolist()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    levels = np.arange(256)
    if u[0] < 0.5:
        image = _levels(image, levels + (64 * u[1] - 32))
    contrast = levels * (0.5 + u[3])
    if u[2] < 0.5 and u[8] < 0.5:
        image = _levels(image, contrast)
    if u[4] < 0.5 or u[6] < 0.5:
        hue = (levels + round(51.2 * u[7] - 25.6) * (u[6] < 0.5)) % 256  # a full turn is 256 levels
        saturation = levels * (0.5 + u[5] if u[4] < 0.5 else 1)
        table = [*_bytes(hue), *_bytes(saturation), *range(256)]
        image = image.convert("HSV").point(table).convert("RGB")
    if u[2] < 0.5 <= u[8]:
        image = _levels(image, contrast)
    return np.array(image)


def _levels(image: Image.Image, table: np.ndarray) -> Image.Image:
    return image.point(_bytes(table) * 3)


def _bytes(table: np.ndarray) -> list[int]:
    return table.round().clip(0, 255).astype(int).tolist()
