"""RandAugment in timm's words: `rand-m9-mstd0.5-inc1` means here what it means there.

Paper: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2019. The string
format, the lists of operations, the probabilities and the magnitude scales are timm's (tested against its functions).

What differs: the draw is separate from the doing. `draw` gives the sample's steps from a keyed generator; the geometric
ones (rotate, shear, translate) become pixel matrices that are composed with crop and flips into one warp, the colour
ones are done afterwards in the order drawn. Colour and geometry commute except at the fill colour and in statistics
over the whole image (autocontrast, equalize, contrast), where the warped image now counts.

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

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError, did_you_mean

_TOP = 10.0  # magnitudes are given on a scale of 0 to 10
_TRANSLATE = 0.45  # of the side, at full magnitude
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")

_PLAIN = [
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd",
    "Color", "Contrast", "Brightness", "Sharpness",
]  # fmt: skip
_VARIANTS = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
_MOVES = ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel"]
_SETS: dict[str, dict[str, float]] = {
    "weights": {
        "Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1, "ColorIncreasing": 0.25,
        "SharpnessIncreasing": 0.25, "AutoContrast": 0.25, "SolarizeIncreasing": 0.05, "SolarizeAdd": 0.05,
        "ContrastIncreasing": 0.05, "BrightnessIncreasing": 0.05, "Equalize": 0.05, "PosterizeIncreasing": 0.05,
        "Invert": 0.05,
    },
    "3a": {"SolarizeIncreasing": 1, "Desaturate": 1, "GaussianBlur": 1},
    "3aw": {
        "SolarizeIncreasing": 6, "Desaturate": 6, "GaussianBlur": 6, "Rotate": 3, "ShearX": 2, "ShearY": 2,
        "PosterizeIncreasing": 1, "AutoContrast": 1, "ColorIncreasing": 1, "SharpnessIncreasing": 1,
        "ContrastIncreasing": 1, "BrightnessIncreasing": 1, "Equalize": 1, "Invert": 1,
    },
}  # fmt: skip

Step = tuple[str, tuple[float, ...]]  # operation and its arguments


def _enhance(level: float, sign: int) -> tuple[float, ...]:
    return (level / _TOP * 1.8 + 0.1,)


def _enhance_increasing(level: float, sign: int) -> tuple[float, ...]:
    return (max(0.1, 1.0 + sign * level / _TOP * 0.9),)


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
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), _enhance),
    **{f"{name}Increasing": _enhance_increasing for name in ("Color", "Contrast", "Brightness", "Sharpness")},
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
        raise EverytokenError(
            f"aa: {text!r} is not supported: only RandAugment strings are, such as 'rand-m9-mstd0.5-inc1'."
            f"{did_you_mean(text, ['rand-m9-mstd0.5-inc1', 'rand-m7-mstd0.5-inc1'])}"
        )
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
                f"aa: section {section!r} in {text!r} is unknown. Known: m9, n2, p0.5, mstd0.5, mmax10, inc1, tweights."
            )
        values[match[1]] = float(match[2])
    if group:
        weighted = group != "3a"
        names, raw = tuple(_SETS[group]), np.array(list(_SETS[group].values()))
        weights = tuple((raw / raw.sum()).tolist()) if weighted else None
    else:
        grow = bool(values.get("inc", 0))
        names = tuple(f"{n}Increasing" if grow and n in _VARIANTS else n for n in _PLAIN) + tuple(_MOVES)
        weights = None
    std = values.get("mstd", 0.0)
    made = RandAugment(
        names,
        weights,
        count=int(values.get("n", 2)),
        prob=values.get("p", 0.5),
        magnitude=values.get("m", _TOP),
        std=math.inf if std > 100 else std,
        top=values.get("mmax", _TOP),
    )
    if weights is not None and made.count > len(names):
        raise EverytokenError(f"aa: {text!r} draws {made.count} different operations from a set of {len(names)}.")
    if not 0 <= made.prob <= 1:
        raise EverytokenError(f"aa: the probability p{made.prob} in {text!r} is not in 0..1.")
    return made


def matrix(step: Step, size: tuple[int, int]) -> pl.Affine:
    """The pixel matrix (output position -> input position) of a geometric step on an image of (width, height)."""
    name, (value, *_) = step
    width, height = size
    if name == "Rotate":
        return pl.to_pixels(pl.rotation(value, size), size, size)
    if name == "ShearX":
        return np.array([[1.0, value, 0.0], [0.0, 1.0, 0.0]])
    if name == "ShearY":
        return np.array([[1.0, 0.0, 0.0], [value, 1.0, 0.0]])
    if name == "TranslateXRel":
        return np.array([[1.0, 0.0, value * width], [0.0, 1.0, 0.0]])
    return np.array([[1.0, 0.0, 0.0], [0.0, 1.0, value * height]])
