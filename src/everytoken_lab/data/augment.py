"""Augmentation: what the network sees of an image, random or fixed, and the placement that says where it is.

The training view has the distribution of timm's training transform: random resized crop, flips, RandAugment or colour
jitter, erasing; the field names of `AugmentOptions` are timm's flags. The order of work differs: everything random is
drawn first, the geometric steps become one matrix, `warp.render` makes the pixels from the source once, and colour
operations and erasing follow on the small image. Everything random comes from the generator that is passed in; the
loader keys it by (seed, epoch, sample, "augment").

Random erasing (Zhong et al., 2017) and CutOut (DeVries and Taylor, 2017) have the rectangles of timm's `RandomErasing`:
with probability `reprob`, 1..`recount` rectangles, each of 2 % to a third of the image (divided by their number) with
an aspect ratio in 0.3..3.3; `const` fills with the mean colour (CutOut), `rand` with one random colour, `pixel` with
noise. It is done per sample on uint8; the noise is N(mean, std) of the normalisation, as in timm, in 256 levels.

The evaluation view is timm's resize and centre crop, bit for bit, of the image that is upright by EXIF, which timm
leaves undone. The whole image is resized with Pillow before the crop: boxes in single precision would change pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from PIL import Image

from everytoken.data import placement as pl
from everytoken.data import randaugment
from everytoken.errors import EverytokenError
from everytoken_lab import schema
from everytoken_lab.data.decode import Picture

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = Image.Resampling.__members__
_Chance = Annotated[float, Interval(ge=0, le=1)]
_Area = Annotated[float, Interval(gt=0, le=1)]
_Ratio = Annotated[float, Interval(gt=0, lt=math.inf)]
_ATTEMPTS = 10  # for a crop or rectangle that fits
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_LOG_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_LARGE = 50_000_000  # pixels of a resized image; a 1 x 1000 image becomes 256 x 256,000


@dataclass(frozen=True)
class AugmentOptions:
    """Augmentation."""

    scale: tuple[_Area, _Area] = (0.08, 1.0)
    """Area of the random crop, as a fraction of the image."""
    ratio: tuple[_Ratio, _Ratio] = (0.75, 4 / 3)
    """Proportions of the random crop."""
    hflip: _Chance = 0.5
    """Chance of a left-right flip."""
    vflip: _Chance = 0.0
    """Chance of an up-down flip."""
    aa: str = "rand-m9-mstd0.5-inc1"
    """RandAugment in timm's notation; empty for none."""
    color_jitter: float = 0.0
    """Strength of brightness, contrast and saturation jitter; only without RandAugment or with its 3-Augment sets."""
    reprob: _Chance = 0.25
    """Chance of erasing a rectangle."""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """What erased pixels become: the mean colour, one random colour, or noise."""
    recount: Annotated[int, Interval(ge=1)] = 1
    """Number of rectangles."""
    train_interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    """Resampling in training."""
    interpolation: Literal["", "nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = ""
    """Resampling in validation; empty: the model's own."""
    crop_pct: _Chance = 0.0
    """Centre crop in validation; 0: the model's own."""
    smoothing: float = 0.1
    """Label smoothing."""

    def check(self) -> None:
        """Raise an error that names the first field with a value that makes no sense."""
        schema.parse(AugmentOptions, asdict(self), "augmentation")
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise EverytokenError(f"{name} must be two numbers, the smaller one first, got ({low}, {high}).")
        if self.aa:
            randaugment.parse(self.aa)


def _size(img_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the network's input."""
    return (img_size, img_size) if isinstance(img_size, int) else img_size


def mean_colour(mean: Sequence[float]) -> tuple[int, int, int]:
    """The mean of the normalisation as a colour, 0..255: what the network sees where there is no image."""
    red, green, blue = map(_byte, mean)
    return red, green, blue


# Training -----------------------------------------------------------------------------------------------------------


class TrainTransform:
    """A random view of an image.

    Args:
        img_size: side of the network's input in pixels, or (height, width).
        options: what is random, and how much.
        mean, std: of the normalisation, for each channel, pixels in 0..1; erased pixels and the fill colour need them.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        options: AugmentOptions | None = None,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        self.size = _size(img_size)
        self.options = options = options or AugmentOptions()
        options.check()
        self.mean, self.std = tuple(mean), tuple(std)
        self.policy = randaugment.parse(options.aa) if options.aa else None
        self.jitter = options.color_jitter if not options.aa or "3a" in options.aa else 0.0

    def __call__(self, image: Image.Image | Picture, rng: np.random.Generator) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], placement float64 [2, 3]: network to source fractions) of one view."""
        from everytoken_lab.data.warp import render  # needs torch, which the options do without

        options, (height, width) = self.options, self.size
        picture = image if isinstance(image, Picture) else Picture(image)

        x0, y0, w, h = random_crop(picture.size, options.scale, options.ratio, rng)
        hflip, vflip, filter_draw = rng.random(3).tolist()
        matrix = np.array([[w / width, 0.0, x0], [0.0, h / height, y0]])
        if hflip < options.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, width], [0.0, 1.0, 0.0]]))
        if vflip < options.vflip:
            matrix = pl.compose(matrix, np.array([[1.0, 0.0, 0.0], [0.0, -1.0, height]]))
        steps = self.policy.draw(rng) if self.policy else []
        for step in steps:
            if step[0] in randaugment.GEOMETRIC:
                matrix = pl.compose(matrix, randaugment.matrix(step, (width, height)))
        bicubic = options.train_interpolation == "bicubic" or (
            options.train_interpolation == "random" and filter_draw < 0.5
        )

        pixels, used = render(picture, matrix, (height, width), bicubic=bicubic, fill=mean_colour(self.mean))
        colours = [step for step in steps if step[0] not in randaugment.GEOMETRIC]
        if self.jitter:
            colours += randaugment.jitter(self.jitter, rng)
        if colours:
            small = Image.fromarray(pixels)
            for step in colours:
                small = randaugment.recolour(small, step)
            pixels = np.array(small)
        erase(pixels, rng, options.reprob, options.remode, options.recount, self.mean, self.std)
        return pixels, pl.from_pixels(used, (width, height), picture.size)


def random_crop(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw a crop as timm and torchvision do (Inception's): area and log aspect ratio uniform, ten attempts to fit.

    Args:
        size: (width, height) of the image in pixels.

    Returns:
        (x0, y0, width, height) in whole pixels, inside the image.
    """
    width, height = size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area, shape, u, v in rng.random((_ATTEMPTS, 4)).tolist():
        target = (scale[0] + (scale[1] - scale[0]) * area) * width * height
        aspect = math.exp(low + (high - low) * shape)
        w, h = max(round(math.sqrt(target * aspect)), 1), max(round(math.sqrt(target / aspect)), 1)
        if w <= width and h <= height:
            return int(u * (width - w + 1)), int(v * (height - h + 1)), w, h
    # the image is too long: the largest central part with an allowed aspect ratio
    aspect = min(max(width / height, ratio[0]), ratio[1])
    w = min(max(round(height * aspect), 1), width)
    h = min(max(round(width / aspect), 1), height)
    return (width - w) // 2, (height - h) // 2, w, h


def erase(
    pixels: np.ndarray,
    rng: np.random.Generator,
    prob: float,
    mode: str,
    count: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> None:
    """Erase rectangles of `pixels`, uint8 [h, w, 3], in place."""
    if prob <= 0 or rng.random() >= prob:
        return
    height, width = pixels.shape[:2]
    number = int(rng.integers(1, count + 1))
    for _ in range(number):
        for area, aspect, u, v in rng.random((_ATTEMPTS, 4)).tolist():
            area = (_ERASED_AREA[0] + (_ERASED_AREA[1] - _ERASED_AREA[0]) * area) * height * width / number
            aspect = math.exp(_ERASED_LOG_ASPECT[0] + (_ERASED_LOG_ASPECT[1] - _ERASED_LOG_ASPECT[0]) * aspect)
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (0 < h < height and 0 < w < width):
                continue
            top, left = int(u * (height - h + 1)), int(v * (width - w + 1))
            pixels[top : top + h, left : left + w] = _erased_pixels(mode, h, w, mean, std, rng)
            break


def _erased_pixels(
    mode: str, h: int, w: int, mean: Sequence[float], std: Sequence[float], rng: np.random.Generator
) -> np.ndarray:
    if mode == "const":
        return np.array([_byte(m) for m in mean], dtype=np.uint8)
    if mode == "rand":
        drawn = rng.standard_normal(3).tolist()
        return np.array([_byte(m + s * z) for m, s, z in zip(mean, std, drawn, strict=True)], dtype=np.uint8)
    noise = np.frombuffer(rng.bytes(3 * h * w), dtype=np.uint8).reshape(3, h, w)
    tables = _noise_tables(tuple(mean), tuple(std))
    return np.stack([table.take(plane) for table, plane in zip(tables, noise, strict=True)], axis=-1)


def _byte(value: float) -> int:
    return min(255, max(0, round(255 * value)))


@lru_cache(maxsize=8)
def _noise_tables(mean: tuple[float, ...], std: tuple[float, ...]) -> list[np.ndarray]:
    """Uniform byte -> pixel of normal noise, for each channel: the 256 quantiles' middles (5 times faster to draw)."""
    quantiles = [NormalDist().inv_cdf((k + 0.5) / 256) for k in range(256)]
    return [np.array([_byte(m + s * z) for z in quantiles], dtype=np.uint8) for m, s in zip(mean, std, strict=True)]


# Evaluation ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvalTransform:
    """The fixed view of an image that evaluation and annotation use. Names and meanings are those of timm's flags.

    Attributes:
        img_size: side of the network's input in pixels, or (height, width).
        crop_pct: part of the resized image's side that the crop shows.
        crop_mode: "center" (short side to img_size / crop_pct, then the centre), "squash" (both sides) or "border"
            (long side, padded with the mean colour).
        interpolation: one of Pillow's filters, in small letters.
        mean, std: of the normalisation, which is done on the device.
    """

    img_size: int | tuple[int, int] = 224
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        known = self.crop_mode in ("center", "squash", "border") and self.interpolation.upper() in FILTERS
        if not known or not 0 < self.crop_pct <= 1:
            asked = f"crop_mode {self.crop_mode!r}, crop_pct {self.crop_pct}, interpolation {self.interpolation!r}"
            raise EverytokenError(f"there is no view of images with {asked}.")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the network's input."""
        return _size(self.img_size)

    def __call__(
        self, image: Image.Image | Picture, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], placement float64 [2, 3]); the generator is not used."""
        picture = image if isinstance(image, Picture) else Picture(image)
        width, height = picture.size
        crop_h, crop_w = self.size
        new_w, new_h = self.resized(width, height)
        left, top = _centre(new_w, crop_w), _centre(new_h, crop_h)

        resample = FILTERS[self.interpolation.upper()]
        upright = picture.upright()
        if new_w * new_h <= _LARGE:
            part = upright.resize((new_w, new_h), resample).crop((left, top, left + crop_w, top + crop_h))
        else:  # a very long image: only what is needed, at the price of a few differing pixels
            sx, sy = width / new_w, height / new_h
            box = (left * sx, top * sy, (left + crop_w) * sx, (top + crop_h) * sy)
            part = upright.resize((crop_w, crop_h), resample, box=box)
        if left < 0 or top < 0:  # the crop is larger than the image: padding
            fill = mean_colour(self.mean) if self.crop_mode == "border" else 0
            canvas = Image.new("RGB", (crop_w, crop_h), fill)
            x, y = max(-left, 0), max(-top, 0)
            canvas.paste(part.crop((x, y, min(x + new_w, crop_w), min(y + new_h, crop_h))), (x, y))
            part = canvas
        placement = pl.from_box(left / new_w, top / new_h, (left + crop_w) / new_w, (top + crop_h) / new_h)
        return np.array(part), placement

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the whole image after the resize, before the crop; rounded as timm and torchvision do."""
        target_h, target_w = (math.floor(side / self.crop_pct) for side in self.size)
        if self.crop_mode == "squash":
            return target_w, target_h
        if self.crop_mode == "center" and target_h == target_w:
            if width <= height:
                return target_w, int(target_w * height / width)
            return int(target_w * width / height), target_w
        pick = max if self.crop_mode == "border" else min
        ratio = pick(height / target_h, width / target_w)
        return max(round(width / ratio), 1), max(round(height / ratio), 1)


def eval_view(info: Any) -> EvalTransform:
    """How a model wants to see images in evaluation; `info` is its `Description`."""
    size = (info.img_size[0], info.img_size[1])
    return EvalTransform(size, info.crop_pct, info.crop_mode, info.interpolation, info.mean, info.std)


def _centre(full: int, part: int) -> int:
    """Where the part starts; below 0 if it is larger than the whole (padding, split as torchvision and timm do)."""
    return round((full - part) / 2.0) if full >= part else -((part - full) // 2)
