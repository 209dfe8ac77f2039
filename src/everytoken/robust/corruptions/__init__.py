"""The corruptions of ImageNet-C, made on the fly: 15 in four groups and 4 extra, 5 severities each, for any image size.

Paper: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations (ICLR
2019). Parameters are those of the published program, for a 224 px view; for a view of another size, lengths in pixels
are multiplied by its short side / 224, so that a corruption looks alike at all sizes. Everything random comes from the
generator that is passed in. No OpenCV, scikit-image or ImageMagick: `filters` has what is needed of them.

    pixels = corrupt(pixels, "fog", 3, keyed.generator(0, key))

What differs from the published program is said in each file: frost's textures, spatter's distances. Cost:
`benchmarks/corrupt.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.robust.corruptions import blur, digital, frost, noise, weather

SIDE = 224  # of the view that the published parameters are for
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Corruption:
    """One kind of corruption.

    Attributes:
        function: (image float32 [h, w, 3] in 0..1, severity, generator, scale) -> the same kind of image.
        group: noise, blur, weather or digital; the folder that the published images are in.
        extra: one of the four that are not part of the mean corruption error.
    """

    function: Callable[..., np.ndarray]
    group: str
    extra: bool = False


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(noise.gaussian_noise, "noise"),
    "shot_noise": Corruption(noise.shot_noise, "noise"),
    "impulse_noise": Corruption(noise.impulse_noise, "noise"),
    "defocus_blur": Corruption(blur.defocus_blur, "blur"),
    "glass_blur": Corruption(blur.glass_blur, "blur"),
    "motion_blur": Corruption(blur.motion_blur, "blur"),
    "zoom_blur": Corruption(blur.zoom_blur, "blur"),
    "snow": Corruption(weather.snow, "weather"),
    "frost": Corruption(weather.frost, "weather"),
    "fog": Corruption(weather.fog, "weather"),
    "brightness": Corruption(weather.brightness, "weather"),
    "contrast": Corruption(digital.contrast, "digital"),
    "elastic_transform": Corruption(digital.elastic_transform, "digital"),
    "pixelate": Corruption(digital.pixelate, "digital"),
    "jpeg_compression": Corruption(digital.jpeg_compression, "digital"),
    "speckle_noise": Corruption(noise.speckle_noise, "extra", True),
    "gaussian_blur": Corruption(blur.gaussian_blur, "extra", True),
    "spatter": Corruption(weather.spatter, "extra", True),
    "saturate": Corruption(digital.saturate, "extra", True),
}
STANDARD = tuple(name for name, kind in CORRUPTIONS.items() if not kind.extra)
EXTRA = tuple(name for name, kind in CORRUPTIONS.items() if kind.extra)


def corrupt(
    pixels: np.ndarray, name: str, severity: int, rng: np.random.Generator, *, frost_textures: str = ""
) -> np.ndarray:
    """A corrupted copy of an image.

    Args:
        pixels: uint8 [h, w, 3].
        name: one of CORRUPTIONS.
        severity: 1 to 5.
        rng: decides everything random.
        frost_textures: folder of photographs for frost; empty: drawn textures.

    Returns:
        uint8 [h, w, 3]; fractions are cut off, as published.
    """
    check(name, severity)
    height, width = pixels.shape[:2]
    options: dict[str, Any] = {}
    if name == "frost":
        found = frost.photographs(frost_textures, height, width) if frost_textures else frost.drawn(height, width)
        options["textures"] = found
    image = pixels.astype(np.float32) / 255
    made = CORRUPTIONS[name].function(image, severity, rng, min(height, width) / SIDE, **options)
    # a thousandth of a level more, so that single precision does not turn 200.0 into 199
    return (np.clip(made, 0, 1) * 255 + 1e-3).astype(np.uint8)


def check(name: str, severity: int) -> None:
    """Refuse what there is not."""
    if name not in CORRUPTIONS:
        raise EverytokenError(
            f"there is no corruption {name!r}.{did_you_mean(name, CORRUPTIONS)} There are {', '.join(CORRUPTIONS)}."
        )
    if severity not in SEVERITIES:
        raise EverytokenError(f"the severity of {name} is 1, 2, 3, 4 or 5, not {severity!r}")
