"""Values with their 95 % intervals: of one proportion, of a mean over seeds, of anything else by the bootstrap.

- A proportion (accuracy on n images): Wilson's interval.
- A mean over n seeds: Student's, mean ± t · s / √n; with few seeds it is wide. Differences between two groups of runs
  are taken seed by seed first, so that what a seed does to both (the order of images, the first weights) cancels.
- Differences between two models on the same images: Bonett and Price's interval, one image won and one lost added.
- Means over corruptions, corruption errors: the bootstrap. Images are drawn again and again.

Where all values or draws are equal there is no interval, rather than one of width zero.

`compared` words a difference: "better" and "worse" only where the interval leaves zero out.
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
    """A value; low and high are its 95 % interval, None where there is none (a single value, or all equal).

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


def compared(difference: Estimate, other: str, base: str, digits: int = 2) -> str:
    """What `other` has more than `base`, in points: better or worse only where the interval leaves zero out."""
    e, points = difference, f"{difference.value:+.{digits}f} points"
    if e.low is None or e.high is None:
        seeds = f"{len(e.values)} seed{'s' if len(e.values) > 1 else ''}, " if e.values else ""
        return f"{other} against {base}: {points} ({seeds}no interval)"
    interval = f"(95 % interval {e.low:+.{digits}f} to {e.high:+.{digits}f})"
    if not e.clear:
        return f"{other} and {base} show no clear difference: {points} {interval}"
    return f"{other} is {abs(e.value):.{digits}f} points {'better' if e.value > 0 else 'worse'} than {base} {interval}"


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t."""
    if degrees < 1:
        raise ValueError(f"an interval needs one degree of freedom at least, not {degrees}")
    return _T[degrees - 1] if degrees <= len(_T) else Z + 2.372 / degrees + 2.82 / degrees**2


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, with Student's interval."""
    centre = statistics.mean(values)
    if len(set(values)) < 2:
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
    return Estimate(value, float(low), float(high)) if low < high else Estimate(value)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Mean of second - first in percentage points; both are right or wrong [images], the same images in one order."""
    if not len(first):
        raise ValueError("there are no images to compare")
    change = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    return with_added_images(float(change.mean()), float(change.var()), len(change), (-1, 1))


def with_added_images(mean: float, variance: float, count: float, added: Sequence[float]) -> Estimate:
    """A mean over images in percent, with the normal interval after a few made-up images are added to the real ones.

    With (0, 0, 1, 1) that is the interval of Agresti and Coull for a proportion, with (-1, 1) that of Bonett and Price
    for a paired difference. Few images that all agree get a wide interval, where the bootstrap's has a width of zero.

    Args:
        mean, variance: of what one image contributes. count: of images.
    """
    total = count + len(added)
    centre = (count * mean + sum(added)) / total
    spread = (count * (variance + mean**2) + sum(x * x for x in added)) / total - centre**2
    half = Z * math.sqrt(spread / total)
    return Estimate(100 * mean, 100 * max(centre - half, min(added)), 100 * min(centre + half, max(added)))


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
