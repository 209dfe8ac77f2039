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
import scipy

from everytoken import keyed

Z = 1.959964  # 97.5 % quantile of the normal distribution
DRAWS = 2000


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


def compared(e: Estimate, other: str, base: str) -> str:
    """What `other` has more than `base`, in points: better or worse only where the interval leaves zero out."""
    points = f"{e.value:+.2f} points"
    if e.low is None or e.high is None:
        seeds = f"{len(e.values)} seed{'s' if len(e.values) > 1 else ''}, " if e.values else ""
        return f"{other} against {base}: {points} ({seeds}no interval)"
    interval = f"(95 % interval {e.low:+.2f} to {e.high:+.2f})"
    if not e.clear:
        return f"{other} and {base} show no clear difference: {points} {interval}"
    return f"{other} is {abs(e.value):.2f} points {'better' if e.value > 0 else 'worse'} than {base} {interval}"


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, with Student's interval."""
    centre = statistics.mean(values)
    if len(set(values)) < 2:
        return Estimate(centre, values=tuple(values))
    half = float(scipy.special.stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half, tuple(values))


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
    values = np.asarray(columns, np.float32)
    means = [weights @ values / len(values) for weights in bootstrap_weights(len(values), draws)]
    low, high = np.percentile(statistic(np.concatenate(means).astype(np.float64)), [2.5, 97.5])
    return Estimate(value, float(low), float(high)) if low < high else Estimate(value)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Mean of second - first in percentage points; both are right or wrong [images], the same images in one order."""
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


def bootstrap_weights(count: int, draws: int) -> Iterator[np.ndarray]:
    """How often each image was drawn, [64, count] at a time; keyed by the number of images alone, hence paired."""
    rng = keyed.generator(0, "bootstrap", count)
    for start in range(0, draws, 64):
        rows = min(64, draws - start)
        drawn = rng.integers(0, count, (rows, count))
        flat = np.bincount((drawn + np.arange(rows)[:, None] * count).ravel(), minlength=rows * count)
        yield flat.reshape(rows, count).astype(np.float32)
