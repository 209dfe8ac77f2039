"""Confidence that means something: a temperature for the logits, and the probability from which answers are trusted.

Networks are often too sure. Dividing the logits by one number, the temperature that minimises the cross entropy of
held-out images (Guo et al. 2017, On Calibration of Modern Neural Networks), changes no answer and makes probabilities
those of being right. A label counts as slightly less than certain, 1 - 1 / (N + 2) for N images as in Platt's scaling,
so that a few images that are all right do not mean infinite confidence.

`Calibration` also keeps accuracy and coverage over thresholds on the probability, so that a wanted accuracy can be
turned into a threshold wherever the weights go.

How familiar an image looks is told by the energy of its logits, log sum exp (Liu et al. 2020, Energy-based
Out-of-distribution Detection), as the fraction of held-out images with less of it: below `UNFAMILIAR`, the image may
show none of the classes, and that fraction of the images that do show one is below, too.

In multi-label data, each class is a decision of its own: the temperature minimises the binary cross entropy, "accuracy"
is the precision and "coverage" the recall of all decisions at or above a threshold. One threshold serves all classes,
because few held-out images say little about a threshold of a rare class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import scipy  # its parts are loaded when they are first used
from annotated_types import Interval
from numpy.typing import NDArray

POINTS = 100  # of the curve
UNFAMILIAR = 0.05
_SHARPEST, _FLATTEST = 20.0, 0.05  # inverse temperatures


@dataclass(frozen=True)
class Calibration:
    """What held-out images say about a network's probabilities.

    Attributes:
        temperature: that logits are divided by.
        images: how many held-out images it is from.
        thresholds: probabilities, falling. accuracy: percent of right answers among images at or above a threshold.
        coverage: percent of the images that are.
        energies: quantiles of the energy, rising; none of multi-label images.
    """

    temperature: Annotated[float, Interval(gt=0, lt=math.inf)]
    images: int
    thresholds: tuple[float, ...]
    accuracy: tuple[float, ...]
    coverage: tuple[float, ...]
    energies: tuple[float, ...] = ()

    def familiarity(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        """[N] fraction of the held-out images with less energy than logits [N, K]."""
        return np.searchsorted(self.energies, energy(logits), side="right") / max(1, len(self.energies))

    def threshold(self, rate: float) -> tuple[float, float]:
        """(least probability, percent of the held-out images that have it) for answers that are right at a rate.

        Where no threshold reaches the rate (0..1), the probability is above 1: no answer is sure.
        """
        enough = [i for i, right in enumerate(self.accuracy) if right >= 100 * rate - 1e-9]
        return (self.thresholds[enough[-1]], self.coverage[enough[-1]]) if enough else (1.01, 0.0)

    def best_threshold(self) -> tuple[float, float, float]:
        """(probability, precision, recall in percent) with the best F1, of a multi-label network."""
        p, r = np.asarray(self.accuracy), np.asarray(self.coverage)
        best = int(np.argmax(p * r / np.maximum(p + r, 1e-9))) if len(p) else -1
        return (self.thresholds[best], self.accuracy[best], self.coverage[best]) if best >= 0 else (0.5, 0.0, 0.0)


def calibrate(logits: NDArray[np.floating], labels: NDArray[np.integer | np.bool_]) -> Calibration:
    """The calibration of a network by logits [N, K] and labels of images that it was not trained on.

    Labels are class numbers [N], or 0 and 1 [N, K] in multi-label data.
    """
    logits = np.asarray(logits, np.float32)
    count, multi_label = len(labels), labels.ndim == 2
    labels = labels.astype(bool) if multi_label else labels
    temperature = fit_temperature(logits, labels)
    if multi_label:
        probability, right = scipy.special.expit(logits.ravel() / temperature), labels.ravel()
    else:
        probability, right = confidence(logits, labels, temperature)
    order = np.argsort(-probability.astype(np.float64), kind="stable")
    right = right[order]
    asked = np.flatnonzero(right) + 1 if multi_label else np.arange(1, count + 1)  # decisions: recall counts labels
    places = np.ceil(len(asked) * np.arange(1, POINTS + 1) / POINTS).astype(int) - 1
    counts = np.unique(asked[places]) if len(asked) else asked
    found = np.cumsum(right)[counts - 1]
    quantiles = (np.arange(POINTS) + 0.5) / POINTS
    return Calibration(
        temperature=round(temperature, 5),
        images=count,
        # rounded down, so that the image that a threshold is from is above it
        thresholds=tuple((np.floor(probability[order][counts - 1].astype(np.float64) * 1e6) / 1e6).tolist()),
        accuracy=tuple(np.round(100 * found / counts, 4).tolist()),
        coverage=tuple(np.round(100 * (found if multi_label else counts) / max(1, len(asked)), 4).tolist()),
        energies=() if multi_label else tuple(np.round(np.quantile(energy(logits), quantiles), 4).tolist()),
    )


def energy(logits: NDArray[np.floating]) -> NDArray[np.floating]:
    """[N] log of the sum of the exponentials of logits [N, K]."""
    most: NDArray[np.floating] = logits.max(1)
    return most + np.log(np.exp(logits - most[:, None]).sum(1))


def fit_temperature(logits: NDArray[np.floating], labels: NDArray[np.integer | np.bool_]) -> float:
    """The temperature with the least cross entropy, which is convex in its inverse: where its slope is zero."""
    logits = np.asarray(logits, np.float32)
    doubt = 1 / (labels.size + 2)
    if labels.ndim == 2:
        target = (((1 - doubt) * labels + doubt / 2) * logits).sum(1)
    else:
        target = (1 - doubt) * logits[np.arange(len(labels)), labels] + doubt * logits.mean(1)

    def slope(inverse: float) -> float:
        z = inverse * logits
        p = scipy.special.expit(z) if labels.ndim == 2 else scipy.special.softmax(z, axis=1)
        return float(((p * logits).sum(1) - target).mean())

    if slope(_FLATTEST) > 0:
        return 1 / _FLATTEST
    if slope(_SHARPEST) <= 0:
        return 1 / _SHARPEST
    return 1 / float(scipy.optimize.brentq(slope, _FLATTEST, _SHARPEST, rtol=1e-6))


def confidence(
    logits: NDArray[np.floating], labels: NDArray[np.integer | np.bool_], temperature: float = 1.0
) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """Probability [N] of the best class, and whether it is the label, or one of the labels [N]."""
    best = logits.argmax(1)
    if labels.ndim == 2:
        return scipy.special.expit(logits.max(1) / temperature), labels[np.arange(len(logits)), best]
    weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    return 1 / weights.sum(1), best == labels


def calibration_error(confidence: NDArray[np.floating], correct: NDArray[np.bool_], bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| per bin of confidence, weighted by the bin's size."""
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    gap = np.bincount(which, correct - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / max(1, count.sum()))
