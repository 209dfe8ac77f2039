"""The corruptions of ImageNet-C, made on the fly: 15 in four groups, 5 severities each, for any image size.

Paper: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations (ICLR
2019). Parameters are those of the published program, for 224 px; for another size, lengths in pixels are multiplied by
`scale`, its short side / 224. Everything random comes from the generator that is passed in.

    pixels = corrupt(pixels, "fog", 3, keyed.generator(0, key))

What differs:

- Frost: the published program cuts pieces out of five photographs, which are not ours to ship. Textures are generated
  with their mean (0.64) and spread (0.13), and the numbers are not ImageNet-C's.
- Glass blur does what the released program did, not what it meant to do: its exchange of two pixels copied one over the
  other, because both were views of the same array.
- The elastic transform's numbers are multiples of 244, by a slip that its authors kept.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from scipy import ndimage, signal
from torch.nn import functional as F

from everytoken import keyed

Array = np.ndarray
Rng = np.random.Generator
Border = Literal["nearest", "reflect", "mirror"]  # aaa|abc|ccc, cba|abc|cba, cb|abc|ba
SIDE = 224  # of the images that the published parameters are for
SEVERITIES = (1, 2, 3, 4, 5)
CORRUPTIONS: dict[str, Callable[..., Array]] = {}
GROUPS: dict[str, list[str]] = {}  # and the folders that the published images are in


def corruption(group: str, *parameters: Any) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register a function with its parameters for each severity, which it gets behind image, generator and scale.

    Images are float32 [h, w, 3] in 0..1; what it returns may be outside (`corrupt` clips).
    """

    def register(function: Callable[..., Array]) -> Callable[..., Array]:
        @functools.wraps(function)
        def at_severity(image: Array, severity: int, rng: Rng, scale: float) -> Array:
            own = parameters[severity - 1]
            return function(image, rng, scale, *(own if isinstance(own, tuple) else (own,)))

        CORRUPTIONS[function.__name__] = at_severity
        GROUPS.setdefault(group, []).append(function.__name__)
        return at_severity

    return register


# Noise


@corruption("noise", 0.08, 0.12, 0.18, 0.26, 0.38)
def gaussian_noise(image: Array, rng: Rng, scale: float, deviation: float) -> Array:
    """x + N(0, c^2), each value on its own."""
    return image + deviation * rng.standard_normal(image.shape, np.float32)


@corruption("noise", 60, 25, 12, 5, 3)
def shot_noise(image: Array, rng: Rng, scale: float, photons: int) -> Array:
    """Poisson(x c) / c, with c photons at full brightness."""
    return (rng.poisson(image * photons) / photons).astype(np.float32)


@corruption("noise", 0.03, 0.06, 0.09, 0.17, 0.27)
def impulse_noise(image: Array, rng: Rng, scale: float, amount: float) -> Array:
    """Salt and pepper in equal parts, each value (not each pixel) on its own; `amount` is the fraction of values."""
    draw = rng.random(image.shape, np.float32)
    return np.where(draw < amount, (draw < amount / 2).astype(np.float32), image)


# Blur


@corruption("blur", (3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
def defocus_blur(image: Array, rng: Rng, scale: float, radius: float, smooth: float) -> Array:
    """Mean over a disk whose edge is smoothed a little."""
    return convolve(image, disk(radius * scale, smooth))


@functools.lru_cache(maxsize=64)
def disk(radius: float, smooth: float) -> Array:
    """The disk as a kernel; the number of cells and of smoothing taps is the published one."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    at = np.arange(-half, half + 1)
    inside = ((at[:, None] ** 2 + at[None] ** 2) <= radius**2).astype(np.float32)
    return gaussian(inside / inside.sum(), smooth, "mirror", radius=reach)


@corruption("blur", (0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
def glass_blur(image: Array, rng: Rng, scale: float, sigma: float, reach: int, rounds: int) -> Array:
    """Blur, let pixels be overwritten by random neighbours, blur again."""
    sigma, reach = sigma * scale, max(1, round(reach * scale))
    soft = np.floor(gaussian(image, sigma) * 255 + 1e-3).astype(np.float32) / 255
    height, width = soft.shape[:2]
    source = np.arange(height * width)
    for _ in range(rounds):
        source = source.take(shuffle_sources(height, width, reach, rng))
    return gaussian(soft.reshape(height * width, -1).take(source, axis=0).reshape(soft.shape), sigma)


def shuffle_sources(height: int, width: int, reach: int, rng: Rng) -> Array:
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
    follow = np.where(touched.take(come) & (come > flat), come, flat)
    while not np.array_equal(further := follow.take(follow), follow):
        follow = further
    return come.take(follow)


@corruption("blur", (10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
def motion_blur(image: Array, rng: Rng, scale: float, radius: float, sigma: float) -> Array:
    """Half a Gaussian along a line at an angle between -45 and 45 degrees."""
    return line_blur(image, radius * scale, sigma * scale, rng.uniform(-45, 45))


@corruption("blur", (1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
def zoom_blur(image: Array, rng: Rng, scale: float, end: float, step: float) -> Array:
    """Mean of the image and of its enlargements up to `end`, the first of which (by 1) is the image again."""
    factors = np.arange(1, end, step)[1:]
    return (2 * image + len(factors) * zoom_mean(image, factors)) / (len(factors) + 2)


# Weather


@corruption(
    "weather",
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
def snow(image: Array, rng: Rng, scale: float, *parameters: float) -> Array:
    """A whitened image, and flakes with a motion, twice: as they are and turned by 180 degrees."""
    mean, deviation, enlarge, threshold, radius, sigma, image_weight = parameters
    height, width = image.shape[:2]
    flakes: Array = mean + deviation * rng.standard_normal((height, width, 1), np.float32)
    flakes = zoom_mean(flakes, [max(1.0, enlarge * scale)])
    flakes[flakes < threshold] = 0
    flakes = np.floor(np.clip(flakes, 0, 1) * 255) / 255
    flakes = line_blur(flakes, radius * scale, sigma * scale, rng.uniform(-135, -45))
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    pale = np.maximum(image, grey[..., None] * 1.5 + 0.5)
    return image_weight * image + (1 - image_weight) * pale + flakes + flakes[::-1, ::-1]


@corruption("weather", (1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
def frost(image: Array, rng: Rng, scale: float, image_weight: float, texture_weight: float) -> Array:
    """a x + b t for a random piece t of a random texture."""
    height, width = image.shape[:2]
    texture = drawn_frost(height, width, int(rng.integers(5)))
    top = int(rng.integers(texture.shape[0] - height + 1))
    left = int(rng.integers(texture.shape[1] - width + 1))
    return image_weight * image + texture_weight * texture[top : top + height, left : left + width]


@functools.lru_cache(maxsize=40)
def drawn_frost(height: int, width: int, number: int) -> Array:
    """One of five textures for images of this size, 1.5 times as large, float32 [H, W, 3], 0..1."""
    rng = keyed.generator(0, "frost", number)
    height, width = round(1.5 * height) + 1, round(1.5 * width) + 1
    short = min(height, width)
    total = np.zeros((height, width), np.float32)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    for grain, weight in ((short / 12, 0.5), (short / 30, 0.35), (short / 80, 0.25)):
        for _ in range(2):
            turn = rng.uniform(0, np.pi)
            along, across = y * np.sin(turn) + x * np.cos(turn), x * np.sin(turn) - y * np.cos(turn)
            cells = rng.standard_normal((64, 64, 1)).astype(np.float32)
            # long in one direction
            field = sample(cells, along / (3 * grain), across / grain, "mirror")[..., 0]
            total += weight * np.maximum(1 - np.abs(field), 0) ** 3
    cover = gaussian(rng.standard_normal((height, width)).astype(np.float32), short / 6, "reflect")
    cover = (cover - cover.min()) / max(float(np.ptp(cover)), 1e-6)
    total *= 0.4 + 0.6 * cover
    total = (total - total.mean()) / max(float(total.std()), 1e-6)
    tint = np.array([0.96, 1.0, 1.04], np.float32)
    return np.clip((0.64 + 0.13 * total)[..., None] * tint, 0, 1).astype(np.float32)


@corruption("weather", (1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))
def fog(image: Array, rng: Rng, scale: float, amount: float, decay: float) -> Array:
    """(x + c plasma) max / (max + c)."""
    height, width = image.shape[:2]
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    field = plasma(size, decay, rng)[:height, :width, None]
    brightest = float(image.max())
    return (image + amount * field) * (brightest / (brightest + amount))


def plasma(size: int, decay: float, rng: Rng) -> Array:
    """A cloudy field in 0..1, [size, size], size a power of two, by the diamond-square method on a torus.

    A random step is drawn from +-w^2, and w is divided by `decay` after each halving of the grid, as published (there
    the step is w times a uniform number in +-w).
    """
    field = np.zeros((size, size))
    step, wobble = size, 100.0

    def noise(shape: tuple[int, ...]) -> Array:
        return wobble * rng.uniform(-wobble, wobble, shape)

    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        field[half::step, half::step] = (pairs + np.roll(pairs, -1, 1)) / 4 + noise(corners.shape)
        centres = field[half::step, half::step]
        across = centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1)
        field[::step, half::step] = across / 4 + noise(corners.shape)
        down = centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0)
        field[half::step, ::step] = down / 4 + noise(corners.shape)
        step, wobble = half, wobble / decay
    field -= field.min()
    return (field / max(field.max(), 1e-12)).astype(np.float32)


@corruption("weather", 0.1, 0.2, 0.3, 0.4, 0.5)
def brightness(image: Array, rng: Rng, scale: float, added: float) -> Array:
    """Value (the largest of r, g, b) raised by c, hue and saturation kept: all three are multiplied by v' / v."""
    value = image.max(-1, keepdims=True)
    raised = np.minimum(value + np.float32(added), 1)
    return np.where(value > 0, image * (raised / np.maximum(value, 1e-12)), raised)


# Digital


@corruption("digital", 0.4, 0.3, 0.2, 0.1, 0.05)
def contrast(image: Array, rng: Rng, scale: float, left: float) -> Array:
    """(x - mean) c + mean, the mean of each channel."""
    mean = np.array([image[..., i].mean(dtype=np.float64) for i in range(3)], np.float32)
    return (image - mean) * left + mean


@corruption("digital", (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
def elastic_transform(image: Array, rng: Rng, scale: float, *parameters: float) -> Array:
    """A small random affine map, whose three points are jittered, then smooth random displacements."""
    strength, blur, jitter = (244.0 * scale * value for value in parameters)
    height, width = image.shape[:2]
    rows, columns = np.arange(height, dtype=np.float64)[:, None], np.arange(width, dtype=np.float64)
    middle = np.array([height // 2, width // 2], np.float64)  # as published, although the first axis is then x
    third = min(height, width) // 3
    before = middle + np.array([[third, third], [third, -third], [-third, -third]])
    after = before + rng.uniform(-jitter, jitter, before.shape)
    x, y = (a * columns + b * rows + c for a, b, c in inverse_affine(before, after))
    moved = sample(image, y, x, "mirror")
    draws = rng.uniform(-1, 1, (2, height, width)).astype(np.float32)
    right, down = (strength * gaussian(draw, blur, "reflect", 3.0) for draw in draws)
    return sample(moved, rows + down, columns + right, "reflect")


def inverse_affine(before: Array, after: Array) -> Array:
    """[2, 3] matrix that takes the three points (x, y) of `after` back to those of `before`."""
    solved: Array = np.linalg.solve(np.column_stack([after, np.ones(3)]), before)
    return solved.T


@corruption("digital", 0.6, 0.5, 0.4, 0.3, 0.25)
def pixelate(image: Array, rng: Rng, scale: float, factor: float) -> Array:
    """Made smaller and larger again with a box filter."""
    size = image.shape[1::-1]
    small = _picture(image).resize([max(1, int(side * factor)) for side in size], Image.Resampling.BOX)
    return np.asarray(small.resize(size, Image.Resampling.BOX), np.float32) / 255


@corruption("digital", 25, 18, 15, 10, 7)
def jpeg_compression(image: Array, rng: Rng, scale: float, quality: int) -> Array:
    """Pillow's JPEG at a low quality."""
    return np.asarray(stored(_picture(image), quality), np.float32) / 255


def stored(picture: Image.Image, quality: int) -> Image.Image:
    """A picture as it comes back from a JPEG file."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file, formats=("JPEG",))


def _picture(image: Array) -> Image.Image:
    return Image.fromarray(np.round(image * 255).astype(np.uint8))


def corrupt(pixels: Array, name: str, severity: int, rng: Rng) -> Array:
    """A corrupted copy of an image, uint8 [h, w, 3], by one of CORRUPTIONS; fractions are cut off, as published."""
    image = pixels.astype(np.float32) / 255
    corrupted = CORRUPTIONS[name](image, severity, rng, min(pixels.shape[:2]) / SIDE)
    # a thousandth of a level more, so that single precision does not turn 200.0 into 199
    return (np.clip(corrupted, 0, 1) * 255 + 1e-3).astype(np.uint8)


# Filters of float32 images [h, w, c], each with the borders of the published one


def gaussian(
    image: Array, sigma: float, border: Border = "nearest", truncate: float = 4.0, radius: int | None = None
) -> Array:
    """Gaussian blur of [h, w] or [h, w, c]; taps reach to `truncate` sigmas, or to `radius`."""
    image = image.astype(np.float32, copy=False)
    blurred: Array = ndimage.gaussian_filter(image, sigma, mode=border, truncate=truncate, radius=radius, axes=(0, 1))
    return blurred


def convolve(image: Array, kernel: Array) -> Array:
    """Correlate [h, w, c] with an odd-sized kernel, mirrored borders, by Fourier transform."""
    reach_y, reach_x = (size // 2 for size in kernel.shape)
    padded = np.pad(image, ((reach_y, reach_y), (reach_x, reach_x), (0, 0)), "reflect")
    out: Array = signal.fftconvolve(padded, kernel[::-1, ::-1, None], mode="valid", axes=(0, 1))
    return out


def line_blur(image: Array, radius: float, sigma: float, angle: float) -> Array:
    """ImageMagick's motion blur: half a Gaussian along a line from each pixel; borders repeat the edge.

    Args:
        image: [h, w, c].
        radius: the line has 2 * ceil(radius) + 1 pixels.
        sigma: of the Gaussian. angle: degrees.
    """
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2).astype(np.float32)
    turn = math.radians(angle)
    downs = np.ceil(steps * math.sin(turn) - 0.5).astype(int)
    rights = np.ceil(steps * math.cos(turn) - 0.5).astype(int)
    y, x = int(np.abs(downs).max()), int(np.abs(rights).max())
    padded = np.pad(image, ((y, y), (x, x), (0, 0)), "edge")
    height, width = image.shape[:2]
    blurred = np.zeros_like(image)
    for weight, down, right in zip(weights / weights.sum(), downs, rights, strict=True):
        blurred += weight * padded[y + down : y + down + height, x + right : x + right + width]
    return blurred


def zoom_mean(image: Array, factors: Sequence[float] | Array) -> Array:
    """The mean of [h, w, c], enlarged around its centre by each factor with linear interpolation to the old size.

    As published: the centre is ceil(side / factor) pixels, its corner pixels stay in the corners, a surplus is cut off.
    """
    sides = image.shape[:2]
    source = torch.from_numpy(image.astype(np.float32, copy=False)).permute(2, 0, 1)[None]
    total = torch.zeros_like(source)
    for factor in factors:
        inner = [math.ceil(side / factor) for side in sides]
        large = [max(round(part * factor), side) for part, side in zip(inner, sides, strict=True)]
        y, x = ((side - part) // 2 for side, part in zip(sides, inner, strict=True))
        centre = source[..., y : y + inner[0], x : x + inner[1]]
        zoomed = F.interpolate(centre, large, mode="bilinear", align_corners=True)
        y, x = ((big - side) // 2 for big, side in zip(large, sides, strict=True))
        total += zoomed[..., y : y + sides[0], x : x + sides[1]]
    return np.ascontiguousarray((total / len(factors))[0].permute(1, 2, 0).numpy())


def sample(image: Array, y: Array, x: Array, border: Border) -> Array:
    """Linear interpolation of [h, w, c] at positions y, x [h', w'] (pixel centres are whole numbers)."""
    channels = np.moveaxis(image, -1, 0)
    return np.stack([ndimage.map_coordinates(c, (y, x), order=1, mode=border) for c in channels], -1)
