"""Weather of ImageNet-C: snow, frost, fog, brightness; and spatter from the extra set. Parameters as published.

Lengths are pixels of a 224 px view and are multiplied by `scale` for other sizes. What differs:
- Frost: the published program cuts pieces out of five photographs of frost, which are not ours to ship. With a folder
  of textures (`textures`) it is done as published; without one, textures are drawn here by a formula (see `frost`
  module), which look and hurt similarly but are not the same: such frost numbers are ours, not ImageNet-C's.
- Spatter: the distance to the nearest edge is exact; OpenCV's, which was used, is 2 % off at most.
"""

from __future__ import annotations

import numpy as np

from everytoken.robust.corruptions import edges, filters

FOG = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))  # amount, decay of the fractal's steps
FROST = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))  # part of the image, of the texture
SNOW = (  # mean and deviation of the flakes, zoom, threshold, radius and sigma of their motion, part of the image
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
SPATTER = (  # mean and deviation of the liquid, its blur, threshold, strength (or blur of the mud), is it mud
    (0.65, 0.3, 4, 0.69, 0.6, False),
    (0.65, 0.3, 3, 0.68, 0.6, False),
    (0.65, 0.3, 2, 0.68, 0.5, False),
    (0.65, 0.3, 1, 0.65, 1.5, True),
    (0.67, 0.4, 1, 0.65, 1.5, True),
)
BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)  # added to the value of hue, saturation, value
GREY = np.array([0.299, 0.587, 0.114], np.float32)
WATER = np.array([175, 238, 238], np.float32) / 255
MUD = np.array([63, 42, 20], np.float32) / 255


def plasma(size: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """A cloudy field in 0..1, [size, size], size a power of two, by the diamond-square method on a torus.

    A random step is drawn from +-w^2, and w is divided by `decay` after each halving of the grid, as published (there
    the step is w times a uniform number in +-w).
    """
    field = np.zeros((size, size))
    step, wobble = size, 100.0

    def noise(shape: tuple[int, ...]) -> np.ndarray:
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


def fog(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """(x + c plasma) max / (max + c)."""
    amount, decay = FOG[severity - 1]
    height, width = image.shape[:2]
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    field = plasma(size, decay, rng)[:height, :width, None]
    brightest = float(image.max())
    return (image + amount * field) * (brightest / (brightest + amount))


def frost(
    image: np.ndarray, severity: int, rng: np.random.Generator, scale: float, textures: list[np.ndarray]
) -> np.ndarray:
    """a x + b t for a random piece t of a random texture (float32 [H, W, 3], 0..1, at least as large as the image)."""
    own, other = FROST[severity - 1]
    texture = textures[int(rng.integers(len(textures)))]
    height, width = image.shape[:2]
    top = int(rng.integers(texture.shape[0] - height + 1))
    left = int(rng.integers(texture.shape[1] - width + 1))
    return own * image + other * texture[top : top + height, left : left + width]


def snow(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """A whitened image, and flakes with a motion, twice: as they are and turned by 180 degrees."""
    mean, deviation, enlarge, threshold, radius, sigma, own = SNOW[severity - 1]
    height, width = image.shape[:2]
    flakes: np.ndarray = mean + deviation * rng.standard_normal((height, width, 1), np.float32)
    flakes = filters.zoom(flakes, max(1.0, enlarge * scale))
    flakes[flakes < threshold] = 0
    flakes = np.floor(np.clip(flakes, 0, 1) * 255) / 255
    flakes = filters.motion_blur(flakes, radius * scale, sigma * scale, rng.uniform(-135, -45))
    pale = np.maximum(image, (image @ GREY)[..., None] * 1.5 + 0.5)
    return own * image + (1 - own) * pale + flakes + flakes[::-1, ::-1]


def brightness(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Value (the largest of r, g, b) raised by c, hue and saturation kept: all three are multiplied by v' / v."""
    value = image.max(axis=2, keepdims=True)
    raised = np.minimum(value + np.float32(BRIGHTNESS[severity - 1]), 1)
    return np.where(value > 0, image * (raised / np.maximum(value, 1e-12)), raised)


def spatter(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Drops of water (severity 1 to 3) or of mud (4, 5) on the lens."""
    mean, deviation, blur, threshold, strength, is_mud = SPATTER[severity - 1]
    noise = mean + deviation * rng.standard_normal(image.shape[:2], np.float32)
    # at another scale the blur would change how much the noise varies, and so how much lies above the threshold
    smooth = filters.gaussian(noise, blur * scale)
    if scale != 1:
        smooth = mean + (smooth - mean) * (_left_over(blur) / _left_over(blur * scale))
    liquid = np.where(smooth < threshold, 0, smooth)
    if is_mud:
        mask = filters.gaussian((liquid > threshold).astype(np.float32), strength * scale)
        mask = np.where(mask < 0.8, 0, mask)[..., None]
        return image * (1 - mask) + MUD * mask
    bytes_ = np.floor(np.clip(liquid, 0, 1) * 255)
    relief = edges.relief(bytes_, 20 * scale)
    mask = bytes_ * relief
    mask = mask * (strength / max(float(mask.max()), 1e-12))
    return image + mask[..., None] * WATER


def _left_over(sigma: float) -> float:
    """Standard deviation of white noise of deviation 1 after a Gaussian blur."""
    radius = int(4 * sigma + 0.5)
    return float((filters.gaussian_taps(sigma, radius) ** 2).sum()) if radius else 1.0
