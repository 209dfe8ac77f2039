"""Noise of ImageNet-C: Gaussian, shot, impulse; and speckle from the extra set. Parameters as published.

Images are float32 [h, w, 3] in 0..1; each function returns the same, perhaps outside 0..1 (clipped by the caller).
"""

from __future__ import annotations

import numpy as np

GAUSSIAN = (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation
SHOT = (60, 25, 12, 5, 3)  # photons at full brightness
IMPULSE = (0.03, 0.06, 0.09, 0.17, 0.27)  # part of the values
SPECKLE = (0.15, 0.2, 0.35, 0.45, 0.6)  # standard deviation, relative to the value


def gaussian_noise(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """x + N(0, c^2), each value on its own."""
    return image + GAUSSIAN[severity - 1] * rng.standard_normal(image.shape, np.float32)


def shot_noise(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Poisson(x c) / c."""
    photons = SHOT[severity - 1]
    return rng.poisson(image * photons).astype(np.float32) / photons


def impulse_noise(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """Salt and pepper in equal parts, each value (not each pixel) on its own."""
    draw = rng.random(image.shape, np.float32)
    amount = IMPULSE[severity - 1]
    return np.where(draw < amount, (draw < amount / 2).astype(np.float32), image)


def speckle_noise(image: np.ndarray, severity: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """x + x N(0, c^2)."""
    return image * (1 + SPECKLE[severity - 1] * rng.standard_normal(image.shape, np.float32))
