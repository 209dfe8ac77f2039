"""Mean corruption error and its relative kind.

Paper: Hendrycks and Dietterich 2019, section 4. CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c}; mCE is its mean over the
15 corruptions. Relative: (E_{s,c} - E_clean) in place of E_{s,c}, likewise for AlexNet. AlexNet's errors are the
published ones, for each severity, so that a part of the severities can be normalised by the same part; its clean error
is published as 43.5 %.

The numbers compare with the paper's only on ImageNet, with all 15 corruptions and 5 severities of the published images.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ALEXNET_CLEAN = 0.435
ALEXNET: dict[str, tuple[float, ...]] = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.9487, 0.9872, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.5843, 0.70048, 0.82108, 0.8975, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.9187, 0.94952),
    "frost": (0.6139, 0.79734, 0.8879, 0.89942, 0.9343),
    "fog": (0.67474, 0.7605, 0.84378, 0.8726, 0.945),
    "brightness": (0.4514, 0.48502, 0.54048, 0.62166, 0.7244),
    "contrast": (0.64548, 0.7615, 0.88874, 0.9776, 0.9927),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.5462, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}
Errors = Mapping[tuple[str, int], float | np.ndarray]  # (corruption, severity) -> error in 0..1, or many draws of it


def corruption_errors(errors: Errors, clean: float | np.ndarray | None = None) -> dict[str, float | np.ndarray]:
    """CE of each corruption in percent; with the clean error (0..1), the relative CE. Extra ones are left out."""
    out: dict[str, float | np.ndarray] = {}
    for name, alexnet in ALEXNET.items():
        severities = [s for c, s in errors if c == name]
        if not severities:
            continue
        own: float | np.ndarray = sum(errors[name, s] for s in severities)
        other = sum(alexnet[s - 1] for s in severities)
        if clean is not None:
            own, other = own - len(severities) * clean, other - len(severities) * ALEXNET_CLEAN
        out[name] = 100 * own / other
    return out


def mean_corruption_error(errors: Errors, clean: float | np.ndarray | None = None) -> float | np.ndarray | None:
    """mCE in percent over the corruptions that are there; relative with the clean error. None without any."""
    found = corruption_errors(errors, clean)
    if not found:
        return None
    total: float | np.ndarray = sum(found.values())
    return total / len(found)
