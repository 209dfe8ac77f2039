"""The evaluation view: timm's resize and centre crop, bit for bit, with its placement.

The whole image is resized with Pillow, and then the centre is cut out. Giving Pillow only the centre's box would save
10-40 % of the work, but it keeps boxes in single precision and the pixels then differ; for the same reason nothing of
the training view's faster decoding and resizing is used. The image is upright by EXIF first, which timm leaves undone.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from everytoken.data import placement as pl
from everytoken.data.augment import FILTERS, AugmentConfig, View
from everytoken.data.decode import Picture
from everytoken.data.pixels import view

_LARGE = 50_000_000  # pixels of a resized image; a 1 x 1000 image becomes 256 x 256,000


class EvalTransform:
    """The fixed view of an image that evaluation and annotation use."""

    def __init__(self, config: AugmentConfig | None = None) -> None:
        self.config = config or AugmentConfig()

    def __call__(
        self, image: Image.Image | Picture, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], placement float64 [2, 3]); the generator is not used."""
        pixels, placement, _ = self.view(image)
        return pixels, placement

    def view(self, image: Image.Image | Picture, rng: np.random.Generator | None = None) -> View:
        """The view; nothing is erased."""
        config = self.config
        picture = image if isinstance(image, Picture) else Picture(image)
        width, height = picture.size
        crop_h, crop_w = config.size
        new_w, new_h = self.resized(width, height)
        left, top = _centre(new_w, crop_w), _centre(new_h, crop_h)

        resample = FILTERS[config.interpolation]
        if config.crop_mode == "center" and crop_h != crop_w:
            resample = FILTERS["bilinear"]  # so does timm for a non-square input in this mode, whatever is asked for
        upright = picture.upright()
        if new_w * new_h <= _LARGE:
            part = upright.resize((new_w, new_h), resample).crop((left, top, left + crop_w, top + crop_h))
        else:  # a very long image: only what is needed, at the price of a few differing pixels
            sx, sy = width / new_w, height / new_h
            box = (left * sx, top * sy, (left + crop_w) * sx, (top + crop_h) * sy)
            part = upright.resize((crop_w, crop_h), resample, box=box)
        if left < 0 or top < 0:  # the crop is larger than the image: padding
            canvas = Image.new("RGB", (crop_w, crop_h), config.fill if config.crop_mode == "border" else 0)
            x, y = max(-left, 0), max(-top, 0)
            canvas.paste(part.crop((x, y, min(x + new_w, crop_w), min(y + new_h, crop_h))), (x, y))
            part = canvas
        placement = pl.from_box(left / new_w, top / new_h, (left + crop_w) / new_w, (top + crop_h) / new_h)
        return View(view(part), placement, [])

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the whole image after the resize, before the crop; rounded as timm and torchvision do."""
        config = self.config
        target_h, target_w = (math.floor(side / config.crop_pct) for side in config.size)
        if config.crop_mode == "squash":
            return target_w, target_h
        if config.crop_mode == "center" and target_h == target_w:
            if width <= height:
                return target_w, int(target_w * height / width)
            return int(target_w * width / height), target_w
        pick = max if config.crop_mode == "border" else min
        ratio = pick(height / target_h, width / target_w)
        return max(round(width / ratio), 1), max(round(height / ratio), 1)


def _centre(full: int, part: int) -> int:
    """Where the part starts; below 0 if it is larger than the whole (padding, split as torchvision and timm do)."""
    return round((full - part) / 2.0) if full >= part else -((part - full) // 2)
