"""RandAugment and colour operations in timm's words: `rand-m9-mstd0.5-inc1` means here what it means there.

Paper: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2019. The string
format, the lists of operations, the probabilities and the magnitude scales are timm's (tested against its functions).

What differs: the draw is separate from the doing. The geometric steps (rotate, shear, translate) become pixel matrices
that are composed with crop and flips into one warp, the colour ones are done afterwards in the order drawn: statistics
over the whole image (autocontrast, equalize, contrast) are those of the warped image.

Sections of the string: m magnitude (0-10), n operations per image (default 2), p probability of each (0.5),
mstd standard deviation of the magnitude (over 100: uniform in 0..m), mmax upper bound of the magnitude (10),
inc1 use the variants whose strength grows with the magnitude, t set of operations (tweights, t3a, t3aw).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError

_TOP = 10.0  # magnitudes are given on a scale of 0 to 10
_TRANSLATE = 0.45  # of the side, at full magnitude
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")

_PLAIN = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd"),
    *("Color", "Contrast", "Brightness", "Sharpness"),
)
_VARIANTS = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_MOVES = ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel"]
_ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")
_SETS: dict[str, dict[str, float]] = {  # operation -> weight
    "weights": {"Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1}
    | dict.fromkeys(("ColorIncreasing", "SharpnessIncreasing", "AutoContrast"), 0.25)
    | dict.fromkeys(("SolarizeIncreasing", "SolarizeAdd", "ContrastIncreasing", "BrightnessIncreasing"), 0.05)
    | dict.fromkeys(("Equalize", "PosterizeIncreasing", "Invert"), 0.05),
    "3a": {"SolarizeIncreasing": 1.0, "Desaturate": 1, "GaussianBlur": 1},
    "3aw": {"SolarizeIncreasing": 6.0, "Desaturate": 6, "GaussianBlur": 6, "Rotate": 3, "ShearX": 2, "ShearY": 2}
    | dict.fromkeys(("PosterizeIncreasing", "AutoContrast", "ColorIncreasing", "SharpnessIncreasing"), 1)
    | dict.fromkeys(("ContrastIncreasing", "BrightnessIncreasing", "Equalize", "Invert"), 1),
}

Step = tuple[str, tuple[float, ...]]  # operation and its arguments


def _signed(full: float) -> Callable[[float, int], tuple[float, ...]]:
    return lambda level, sign: (sign * level / _TOP * full,)


def _between(low: float, high: float) -> Callable[[float, int], tuple[float, ...]]:
    return lambda level, sign: (max(low, min(high, low + (high - low) * level / _TOP)),)


# operation -> its arguments for a magnitude and a sign
LEVELS: dict[str, Callable[[float, int], tuple[float, ...]]] = {
    "AutoContrast": lambda level, sign: (),
    "Equalize": lambda level, sign: (),
    "Invert": lambda level, sign: (),
    "Rotate": _signed(30.0),
    "Posterize": lambda level, sign: (int(level / _TOP * 4),),
    "PosterizeIncreasing": lambda level, sign: (4 - int(level / _TOP * 4),),
    "Solarize": lambda level, sign: (min(256, int(level / _TOP * 256)),),
    "SolarizeIncreasing": lambda level, sign: (256 - min(256, int(level / _TOP * 256)),),
    "SolarizeAdd": lambda level, sign: (min(128, int(level / _TOP * 110)),),
    **dict.fromkeys(_ENHANCE, lambda level, sign: (level / _TOP * 1.8 + 0.1,)),
    **{f"{name}Increasing": lambda level, sign: (max(0.1, 1.0 + sign * level / _TOP * 0.9),) for name in _ENHANCE},
    "ShearX": _signed(0.3),
    "ShearY": _signed(0.3),
    "TranslateXRel": _signed(_TRANSLATE),
    "TranslateYRel": _signed(_TRANSLATE),
    "Desaturate": _between(0.5, 1.0),
    "GaussianBlur": _between(0.1, 2.0),
}


@dataclass(frozen=True)
class RandAugment:
    """A parsed string.

    Attributes:
        names: the operations to choose from.
        weights: their probabilities (then drawn without replacement), or None: all alike, with replacement.
        count: operations drawn per image.
        prob: probability that a drawn operation is done.
        magnitude, std, top: magnitude ~ N(magnitude, std) clipped to 0..top; std infinite: uniform in 0..magnitude.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...] | None
    count: int = 2
    prob: float = 0.5
    magnitude: float = _TOP
    std: float = 0.0
    top: float = _TOP

    def draw(self, rng: np.random.Generator) -> list[Step]:
        """The steps for one image."""
        if self.weights is None:
            chosen = rng.integers(len(self.names), size=self.count).tolist()
        else:
            chosen = rng.choice(len(self.names), self.count, replace=False, p=self.weights).tolist()
        numbers = rng.random((self.count, 3)).tolist()  # done?, sign, uniform magnitude
        noise = rng.standard_normal(self.count).tolist() if 0 < self.std < math.inf else [0.0] * self.count
        steps: list[Step] = []
        for k, (done, sign, uniform), z in zip(chosen, numbers, noise, strict=True):
            if done >= self.prob:
                continue
            level = self.magnitude * uniform if self.std == math.inf else self.magnitude + self.std * z
            level = max(0.0, min(level, self.top))
            steps.append((self.names[k], LEVELS[self.names[k]](level, 1 if sign < 0.5 else -1)))
        return steps


def parse(text: str) -> RandAugment:
    """Read timm's string, or say which section is wrong."""
    head, *sections = text.split("-")
    if head != "rand":
        raise EverytokenError(f"aa: {text!r} is not a RandAugment string, such as 'rand-m9-mstd0.5-inc1'.")
    values: dict[str, float] = {}
    group = None
    for section in sections:
        if section.startswith("t"):
            group = section[1:]
            if group not in _SETS:
                raise EverytokenError(f"aa: set of operations {group!r} in {text!r} is none of {', '.join(_SETS)}.")
            continue
        match = re.fullmatch(r"(mstd|mmax|inc|m|n|p)(\d+(?:\.\d+)?)", section)
        if match is None:
            raise EverytokenError(
                f"aa: unknown section {section!r} in {text!r}; there are m, n, p, mstd, mmax, inc, t."
            )
        values[match[1]] = float(match[2])
    weights = None
    if group:
        names, raw = tuple(_SETS[group]), np.array(list(_SETS[group].values()))
        weights = None if group == "3a" else tuple((raw / raw.sum()).tolist())
    else:
        grow = bool(values.get("inc", 0))
        names = tuple(f"{n}Increasing" if grow and n in _VARIANTS else n for n in _PLAIN) + tuple(_MOVES)
    std, magnitude, top = values.get("mstd", 0.0), values.get("m", _TOP), values.get("mmax", _TOP)
    std = math.inf if std > 100 else std
    policy = RandAugment(names, weights, int(values.get("n", 2)), values.get("p", 0.5), magnitude, std, top)
    if weights is not None and policy.count > len(names):
        raise EverytokenError(f"aa: {text!r} draws {policy.count} different operations from a set of {len(names)}.")
    if not 0 <= policy.prob <= 1:
        raise EverytokenError(f"aa: the probability p{policy.prob} in {text!r} is not in 0..1.")
    return policy


def matrix(step: Step, size: tuple[int, int]) -> pl.Affine:
    """The pixel matrix (output position -> input position) of a geometric step on an image of (width, height)."""
    name, (value, *_) = step
    if name == "Rotate":
        return pl.to_pixels(pl.rotation(value, size), size, size)
    place = {"ShearX": (0, 1), "ShearY": (1, 0), "TranslateXRel": (0, 2), "TranslateYRel": (1, 2)}[name]
    moved = pl.identity()
    moved[place] = value * size[place[0]] if place[1] == 2 else value
    return moved


# Colour operations ----------------------------------------------------------------------------------------------------
# None of them moves a pixel. The arithmetic is Pillow's, as in timm and torchvision, so that recipes mean the same,
# with two exceptions, both tested against Pillow: sharpness is computed on arrays (a third of the time, the same values
# to within one grey level), and posterizing to 0 bits is black, as it always was (Pillow 13 refuses it).


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep the `bits` highest bits of each channel; 0 gives black, 8 and more change nothing."""
    if bits >= 8:
        return image
    mask = 256 - 2 ** (8 - bits)
    return image.point([value & mask for value in range(256)] * 3)


def solarize_add(image: Image.Image, add: int, threshold: int = 128) -> Image.Image:
    """Add to the dark values only."""
    return image.point([min(255, value + add) if value < threshold else value for value in range(256)] * 3)


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
    sharpened = pixels.copy()
    sharpened[1:-1, 1:-1] = blend.clip(0, 255, out=blend)
    return Image.fromarray(sharpened)


def _enhance_with(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[..., Image.Image]:
    return lambda image, factor: kind(image).enhance(factor)


# operation (its variant "...Increasing" differs in the arguments only) -> function of an RGB image and the arguments
OPERATIONS: dict[str, Callable[..., Image.Image]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
    "Posterize": posterize,
    "Solarize": ImageOps.solarize,
    "SolarizeAdd": solarize_add,
    "Color": _enhance_with(ImageEnhance.Color),  # 0: grey, 1: no change
    "Contrast": _enhance_with(ImageEnhance.Contrast),
    "Brightness": _enhance_with(ImageEnhance.Brightness),
    "Sharpness": sharpness,
    "Desaturate": lambda image, amount: ImageEnhance.Color(image).enhance(min(1.0, max(0.0, 1.0 - amount))),
    "GaussianBlur": lambda image, radius: image.filter(ImageFilter.GaussianBlur(radius)),
}


def recolour(image: Image.Image, step: Step) -> Image.Image:
    """Do a colour operation."""
    name, arguments = step
    return OPERATIONS[name.removesuffix("Increasing")](image, *arguments)


def jitter(strength: float, rng: np.random.Generator) -> list[Step]:
    """Draw a colour jitter as torchvision's `ColorJitter` does: brightness, contrast and saturation in random order.

    Args:
        strength: the factors are uniform in 1 - strength..1 + strength (not below 0).
    """
    low, high = max(0.0, 1.0 - strength), 1.0 + strength
    factors = (low + (high - low) * rng.random(4)).tolist()  # the fourth was the hue's once; runs stay the same
    steps: list[Step] = [(name, (u,)) for name, u in zip(("Brightness", "Contrast", "Color"), factors, strict=False)]
    return [steps[k] for k in rng.permutation(3).tolist()]
