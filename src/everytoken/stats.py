"""Values with their 95 % intervals: of one proportion, of a mean over seeds, of anything else by the bootstrap.

- A proportion (accuracy on n images): Wilson's interval.
- A mean over n seeds: Student's, mean ± t · s / √n; with few seeds it is wide. Differences between two groups of runs
  are taken seed by seed first, so that what a seed does to both (the order of images, the first weights) cancels.
- Means over corruptions, corruption errors, differences between two models on the same images: the bootstrap. Images
  are drawn again and again, the same ones for both models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from everytoken import keyed

Z = 1.959964  # 97.5 % quantile of the normal distribution
DRAWS = 2000

# 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom; beyond, by the expansion in 1 / degrees.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Estimate:
    """A value; low and high are its 95 % interval, None where there is none (a single value).

    Attributes:
        values: that it is the mean of, if it is one.
    """

    value: float
    low: float | None = None
    high: float | None = None
    values: tuple[float, ...] = ()

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t."""
    if degrees < 1:
        raise ValueError(f"an interval needs one degree of freedom at least, not {degrees}")
    return _T[degrees - 1] if degrees <= len(_T) else Z + 2.372 / degrees + 2.82 / degrees**2


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, with Student's interval."""
    centre = statistics.mean(values)
    if len(values) < 2:
        return Estimate(centre, values=tuple(values))
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half, tuple(values))


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p of paired differences, one per seed: how often random signs give a mean as far from zero.

    Of n seeds the smallest possible value is 2 / 2^n, so fewer than six seeds never reach 0.05. Up to 20 seeds.
    """
    if not 0 < len(differences) <= 20:
        raise ValueError(f"sign_flip takes 1 to 20 differences, not {len(differences)}")
    values = np.asarray(differences, np.float64)
    signs = 1 - 2.0 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
    sums = np.abs(signs @ values)
    return float((sums >= abs(values.sum()) - 1e-9).mean())


def percentage(correct: np.ndarray) -> Estimate:
    """Percent of True in [n], with Wilson's interval."""
    n, p = len(correct), float(np.mean(correct))
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return Estimate(100 * p, 100 * (centre - half), 100 * (centre + half))


def bootstrap(columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], draws: int = DRAWS) -> Estimate:
    """A statistic of column means, with its percentile interval.

    Args:
        columns: [images, k].
        statistic: means [..., k] -> [...].
    """
    value = float(statistic(np.asarray(columns, np.float64).mean(0)))
    low, high = np.percentile(statistic(bootstrap_means(columns, draws)), [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def paired_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Mean of second - first in percentage points; both are right or wrong [images], the same images in one order.

    The interval is that of Agresti and Min (2005): half an image is added to each of the four outcomes, so that a few
    images, or none, that only one of them gets right do not make it too narrow.
    """
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    count = len(first)
    if not count:
        raise ValueError("there are no images to compare")
    won, lost = int((second & ~first).sum()) + 0.5, int((first & ~second).sum()) + 0.5
    middle = (won - lost) / (count + 2)
    half = Z * math.sqrt(max(0.0, (won + lost) / (count + 2) - middle**2) / (count + 2))
    return Estimate(100 * (won - lost) / count, 100 * max(-1.0, middle - half), 100 * min(1.0, middle + half))


def bootstrap_means(columns: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Means of the columns [images, k] over images drawn with replacement -> [draws, k]."""
    count = len(columns)
    values = np.asarray(columns, np.float32)
    means = np.empty((draws, values.shape[1]))
    for start, weights in bootstrap_weights(count, draws, seed):
        means[start : start + len(weights)] = weights @ values / count
    return means


def bootstrap_weights(count: int, draws: int, seed: int = 0, part: int = 64) -> Iterator[tuple[int, np.ndarray]]:
    """How often each image was drawn, [part, count] at a time; keyed by the number of images alone, hence paired."""
    rng = keyed.generator(seed, "bootstrap", count)
    for start in range(0, draws, part):
        rows = min(part, draws - start)
        drawn = rng.integers(0, count, (rows, count))
        flat = np.bincount((drawn + np.arange(rows)[:, None] * count).ravel(), minlength=rows * count)
        yield start, flat.reshape(rows, count).astype(np.float32)
