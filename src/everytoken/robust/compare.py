"""Intervals and paired differences by the bootstrap: images are drawn again and again, the same for both models.

A statistic is computed from columns of right and wrong, one row per image. For one proportion, Wilson's interval is
used (`evaluate.accuracy`); the bootstrap serves the others: means over corruptions, corruption errors, differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from everytoken import keyed

DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def draws_of_means(columns: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Means of the columns [images, k] over images drawn with replacement -> [draws, k]."""
    count = len(columns)
    values = np.asarray(columns, np.float32)
    out = np.empty((draws, values.shape[1]))
    for at, weights in _weights(count, draws, seed):
        out[at : at + len(weights)] = weights @ values / count
    return out


def _weights(count: int, draws: int, seed: int, part: int = 64) -> Iterator[tuple[int, np.ndarray]]:
    """How often each image was drawn, [part, count] at a time; keyed by the number of images alone, hence paired."""
    rng = keyed.generator(seed, "bootstrap", count)
    for at in range(0, draws, part):
        rows = min(part, draws - at)
        drawn = rng.integers(0, count, (rows, count))
        flat = np.bincount((drawn + np.arange(rows)[:, None] * count).ravel(), minlength=rows * count)
        yield at, flat.reshape(rows, count).astype(np.float32)


def bootstrap(columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], draws: int = DRAWS) -> Estimate:
    """A statistic of column means ([..., k] -> [...]) with its percentile interval."""
    value = float(statistic(np.asarray(columns, np.float64).mean(0)))
    many = statistic(draws_of_means(columns, draws))
    low, high = np.percentile(many, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def difference(first: np.ndarray, second: np.ndarray, draws: int = DRAWS) -> Estimate:
    """Mean of second - first in percent points; both are right or wrong [images], of the same images in one order."""
    pair = np.stack([first, second], 1)
    return bootstrap(pair, lambda means: 100 * (means[..., 1] - means[..., 0]), draws)
