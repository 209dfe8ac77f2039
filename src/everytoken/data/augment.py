"""Augmentation: one random view of an image, and the placement that says what the view shows.

The distribution is timm's training transform: random resized crop, flips, RandAugment or colour jitter, erasing; the
field names of `AugmentConfig` are timm's flags. The order of work differs: everything random is drawn first, the
geometric steps become one matrix, `warp.render` makes the pixels from the source once, and colour operations and
erasing follow on the small image. See `warp`, `randaugment` and `erase` for what that changes.

Everything random comes from the generator that is passed in; the loader keys it by (seed, epoch, sample, "augment").

Cost, one core, 640 x 480 JPEG to 224 px with `rand-m9-mstd0.5-inc1`: 1.1 ms besides 2.3 ms of decoding (timm: 2.7 ms
besides 2.6 ms).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from everytoken.data import colour, erase, randaugment
from everytoken.data import placement as pl
from everytoken.data.decode import Picture
from everytoken.data.pixels import to_image, view
from everytoken.data.warp import render
from everytoken.errors import EverytokenError, did_you_mean

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}
_ATTEMPTS = 10  # for a crop that fits, before the centre is taken


@dataclass(frozen=True)
class AugmentConfig:
    """How images become network input. Names and meanings are those of timm's flags.

    Attributes:
        img_size: side of the network's input in pixels, or (height, width).
        scale: area of the random crop, smallest and largest, as a part of the image.
        ratio: aspect ratio (width / height) of the random crop, smallest and largest.
        hflip: probability of exchanging left and right.
        vflip: probability of exchanging top and bottom.
        aa: RandAugment string such as "rand-m9-mstd0.5-inc1", or None.
        color_jitter: strength of brightness, contrast and saturation changes, one number or 3 or 4 (with hue); used
            when `aa` is None or a 3-Augment set, as in timm.
        reprob: probability of random erasing.
        remode: what erased pixels become: "pixel" (noise), "const" (the mean colour) or "rand" (one random colour).
        recount: largest number of erased rectangles.
        train_interpolation: "bilinear", "bicubic" or "random" (one of the two for each image).
        interpolation: filter for evaluation.
        crop_pct: part of the resized image's side that the evaluation crop shows.
        crop_mode: evaluation: "center" (short side to img_size / crop_pct, then the centre), "squash" (both sides) or
            "border" (long side, padded with the mean colour).
        mean: of the normalisation, for each channel, pixels in 0..1; also the fill colour.
        std: of the normalisation.
    """

    img_size: int | tuple[int, int] = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    aa: str | None = None
    color_jitter: float | tuple[float, ...] | None = 0.4
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1
    train_interpolation: str = "random"
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        sizes = self.size
        if min(sizes) < 1:
            raise EverytokenError(f"img_size must be at least 1 pixel, got {self.img_size}.")
        for name, low, high in (("scale", 0.0, 1.0), ("ratio", 0.0, math.inf)):
            first, second = getattr(self, name)
            if not low < first <= second <= high:
                raise EverytokenError(f"{name} must be two numbers with {low} < first <= second <= {high}, "
                                      f"got ({first}, {second}).")  # fmt: skip
        for name in ("hflip", "vflip", "reprob"):
            if not 0 <= getattr(self, name) <= 1:
                raise EverytokenError(f"{name} is a probability, 0..1, got {getattr(self, name)}.")
        _one_of("remode", self.remode, erase.MODES)
        _one_of("train_interpolation", self.train_interpolation, ("random", "bilinear", "bicubic"))
        _one_of("interpolation", self.interpolation, tuple(FILTERS))
        _one_of("crop_mode", self.crop_mode, ("center", "squash", "border"))
        if not 0 < self.crop_pct <= 1:
            raise EverytokenError(f"crop_pct must be in 0..1, got {self.crop_pct}.")
        if self.recount < 1:
            raise EverytokenError(f"recount must be at least 1, got {self.recount}.")
        if min(self.std) <= 0:
            raise EverytokenError(f"std must be positive for each channel, got {self.std}.")
        if isinstance(self.color_jitter, tuple) and len(self.color_jitter) not in (3, 4):
            raise EverytokenError(f"color_jitter takes 1, 3 or 4 numbers, got {self.color_jitter}.")
        if self.aa:
            randaugment.parse(self.aa)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the network's input."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def fill(self) -> tuple[int, int, int]:
        """The mean colour, 0..255: what the network sees where there is no image."""
        red, green, blue = (min(255, round(255 * value)) for value in self.mean)
        return red, green, blue


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise EverytokenError(f"{name}: {value!r} is none of {', '.join(choices)}.{did_you_mean(value, choices)}")


class View(NamedTuple):
    """What the network gets to see of one image.

    Attributes:
        pixels: uint8 [h, w, 3].
        placement: float64 [2, 3], network fractions -> source fractions.
        erased: rectangles (x0, y0, x1, y1) in network fractions where there is nothing to see.
    """

    pixels: np.ndarray
    placement: pl.Affine
    erased: list[tuple[float, float, float, float]]


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


class TrainTransform:
    """A random view of an image, as `AugmentConfig` says."""

    def __init__(self, config: AugmentConfig | None = None) -> None:
        self.config = config = config or AugmentConfig()
        self.policy = randaugment.parse(config.aa) if config.aa else None
        jitter = config.color_jitter if config.aa is None or "3a" in config.aa else None
        self.jitter = (jitter,) * 3 if isinstance(jitter, (int, float)) else jitter

    def __call__(self, image: Image.Image | Picture, rng: np.random.Generator) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], placement float64 [2, 3]) of one view."""
        pixels, placement, _ = self.view(image, rng)
        return pixels, placement

    def view(self, image: Image.Image | Picture, rng: np.random.Generator) -> View:
        """One view, with its erased rectangles."""
        config = self.config
        picture = image if isinstance(image, Picture) else Picture(image)
        height, width = config.size

        x0, y0, w, h = random_crop(picture.size, config.scale, config.ratio, rng)
        hflip, vflip, filter_draw = rng.random(3).tolist()
        matrix = np.array([[w / width, 0.0, x0], [0.0, h / height, y0]])
        if hflip < config.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, width], [0.0, 1.0, 0.0]]))
        if vflip < config.vflip:
            matrix = pl.compose(matrix, np.array([[1.0, 0.0, 0.0], [0.0, -1.0, height]]))
        steps = self.policy.draw(rng) if self.policy else []
        for step in steps:
            if step[0] in randaugment.GEOMETRIC:
                matrix = pl.compose(matrix, randaugment.matrix(step, (width, height)))
        bicubic = config.train_interpolation == "bicubic" or (
            config.train_interpolation == "random" and filter_draw < 0.5
        )

        pixels, used = render(picture, matrix, (height, width), bicubic=bicubic, fill=config.fill)
        colours = [step for step in steps if step[0] not in randaugment.GEOMETRIC]
        if self.jitter:
            colours += [(name, (value,)) for name, value in colour.jitter(self.jitter, rng)]
        if colours:
            small = to_image(pixels)
            for name, arguments in colours:
                small = colour.OPERATIONS[name](small, *arguments)
            pixels = view(small)
        erased = erase.erase(
            pixels, rng, prob=config.reprob, mode=config.remode, count=config.recount, mean=config.mean, std=config.std
        )
        return View(pixels, pl.from_pixels(used, (width, height), picture.size), erased)
