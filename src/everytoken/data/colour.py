"""Colour operations on small RGB images, by timm's names. None of them moves a pixel.

The arithmetic is Pillow's (`ImageOps`, `ImageEnhance`), as in timm and torchvision, so that recipes keep their meaning.
Two exceptions, both tested against Pillow: sharpness is computed on arrays (a third of the time, same values to within
one grey level), and posterizing to 0 bits is black, as it always was (Pillow 13 refuses it, and timm then crashes).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Operation = Callable[..., Image.Image]


def auto_contrast(image: Image.Image) -> Image.Image:
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image) -> Image.Image:
    return ImageOps.equalize(image)


def invert(image: Image.Image) -> Image.Image:
    return ImageOps.invert(image)


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep the `bits` highest bits of each channel; 0 gives black, 8 and more change nothing."""
    if bits >= 8:
        return image
    mask = 256 - 2 ** (8 - bits)
    return image.point([value & mask for value in range(256)] * 3)


def solarize(image: Image.Image, threshold: int) -> Image.Image:
    return ImageOps.solarize(image, threshold)


def solarize_add(image: Image.Image, add: int, threshold: int = 128) -> Image.Image:
    """Add to the dark values only."""
    return image.point([min(255, value + add) if value < threshold else value for value in range(256)] * 3)


def saturate(image: Image.Image, factor: float) -> Image.Image:
    """0: grey, 1: no change."""
    return ImageEnhance.Color(image).enhance(factor)


def contrast(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(factor)


def brightness(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Blend with a 3x3 smoothing (weights 1, centre 5): 0 smooth, 1 no change, above 1 sharper. The border stays."""
    pixels = np.asarray(image)
    if min(pixels.shape[:2]) < 3:
        return image
    wide = pixels.astype(np.uint16)
    rows = wide[:-2] + wide[1:-1]
    rows += wide[2:]
    smooth = rows[:, :-2] + rows[:, 1:-1]
    smooth += rows[:, 2:]
    centre = wide[1:-1, 1:-1]
    smooth += 4 * centre + 6  # + 6: rounds the division by 13
    smooth //= 13
    # smooth + factor * (centre - smooth), in fixed point with 8 bits: two factors need 17 bits of product
    blend = centre.astype(np.int32)
    blend -= smooth
    blend *= round(factor * 256)
    blend >>= 8
    blend += smooth
    made = pixels.copy()
    made[1:-1, 1:-1] = blend.clip(0, 255, out=blend)
    return Image.fromarray(made)


def hue(image: Image.Image, shift: float) -> Image.Image:
    """Turn the hue by `shift` of a full circle (-0.5..0.5)."""
    h, s, v = image.convert("HSV").split()
    turn = round(shift * 255)
    return Image.merge("HSV", (h.point([(value + turn) % 256 for value in range(256)]), s, v)).convert("RGB")


def desaturate(image: Image.Image, amount: float) -> Image.Image:
    """Take away `amount` (0..1) of the colour."""
    return saturate(image, min(1.0, max(0.0, 1.0 - amount)))


def gaussian_blur(image: Image.Image, radius: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius=radius))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Invert": invert,
    "Posterize": posterize,
    "PosterizeIncreasing": posterize,
    "Solarize": solarize,
    "SolarizeIncreasing": solarize,
    "SolarizeAdd": solarize_add,
    "Color": saturate,
    "ColorIncreasing": saturate,
    "Contrast": contrast,
    "ContrastIncreasing": contrast,
    "Brightness": brightness,
    "BrightnessIncreasing": brightness,
    "Sharpness": sharpness,
    "SharpnessIncreasing": sharpness,
    "Desaturate": desaturate,
    "GaussianBlur": gaussian_blur,
    "Hue": hue,
}


def jitter(strength: tuple[float, ...], rng: np.random.Generator) -> list[tuple[str, float]]:
    """Draw a colour jitter as torchvision's `ColorJitter` does: one factor each, applied in random order.

    Args:
        strength: (brightness, contrast, saturation) or with hue as a fourth; factors are uniform in 1 - s..1 + s (not
            below 0), the hue shift in -s..s.
    """
    names = ("Brightness", "Contrast", "Color", "Hue")
    drawn = []
    for name, s, u in zip(names, strength, rng.random(4).tolist(), strict=False):
        if s > 0:
            low = -s if name == "Hue" else max(0.0, 1.0 - s)
            high = s if name == "Hue" else 1.0 + s
            drawn.append((name, low + (high - low) * u))
    return [drawn[k] for k in rng.permutation(len(drawn)).tolist()]
