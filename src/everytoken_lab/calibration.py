"""Confidence that means something: a temperature for the logits, and the probability from which answers are trusted.

Networks are often too sure. Dividing the logits by one number, the temperature that minimises the cross entropy of
held-out images (Guo et al. 2017, On Calibration of Modern Neural Networks), changes no answer and makes probabilities
those of being right. A label counts as slightly less than certain, 1 - 1 / (N + 2) for N images as in Platt's scaling,
so that a few images that are all right do not mean infinite confidence.

`Calibration` also keeps accuracy and coverage over thresholds on the probability, so that a wanted accuracy can be
turned into a threshold wherever the weights go.

In multi-label data, each class is a decision of its own: the temperature minimises the binary cross entropy, "accuracy"
is the precision and "coverage" the recall of all decisions at or above a threshold. One threshold serves all classes,
because few held-out images say little about a threshold of a rare class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

POINTS = 100  # of the curve
ENOUGH = 500  # images for a calibration error that is worth printing: with 100 its own error is as large
_SHARPEST, _FLATTEST = 20.0, 0.05  # inverse temperatures


@dataclass(frozen=True)
class Calibration:
    """What held-out images say about a network's probabilities.

    Attributes:
        temperature: that logits are divided by.
        images: how many held-out images it is from.
        error_before, error_after: expected calibration error in percent, without and with a temperature; each half of
            the images is measured with the temperature of the other half. Multi-label: of the likeliest class.
        thresholds: probabilities, falling. accuracy: percent of right answers among images at or above a threshold.
        coverage: percent of the images that are.
    """

    temperature: Annotated[float, Interval(gt=0, lt=math.inf)]
    images: int
    error_before: float
    error_after: float
    thresholds: tuple[float, ...]
    accuracy: tuple[float, ...]
    coverage: tuple[float, ...]

    def threshold(self, rate: float) -> tuple[float, float]:
        """(least probability, percent of the held-out images that have it) for answers that are right at a rate.

        Where no threshold reaches the rate (0..1), the probability is above 1: no answer is sure.
        """
        enough = [i for i, right in enumerate(self.accuracy) if right >= 100 * rate - 1e-9]
        return (self.thresholds[enough[-1]], self.coverage[enough[-1]]) if enough else (1.01, 0.0)

    def words(self) -> str:
        """The errors, as the end of a sentence; nothing where so few images would say more about chance."""
        if self.images < ENOUGH:
            return ""
        return f"; calibration error {self.error_before:.1f} % before, {self.error_after:.1f} % after"

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
    before, correct = confidence(logits, labels)
    after = before.astype(np.float64)
    for half in (0, 1) if count > 1 else ():
        other = fit_temperature(logits[1 - half :: 2], labels[1 - half :: 2])
        after[half::2] = confidence(logits[half::2], labels[half::2], other)[0]
    if multi_label:
        probability, right = sigmoid(logits.ravel() / temperature), labels.ravel()
    else:
        probability, right = confidence(logits, labels, temperature)
    order = np.argsort(-probability.astype(np.float64), kind="stable")
    right = right[order]
    asked = np.flatnonzero(right) + 1 if multi_label else np.arange(1, count + 1)  # decisions: recall counts labels
    places = np.ceil(len(asked) * np.arange(1, POINTS + 1) / POINTS).astype(int) - 1
    counts = np.unique(asked[places]) if len(asked) else asked
    found = np.cumsum(right)[counts - 1]
    return Calibration(
        temperature=round(temperature, 5),
        images=count,
        error_before=round(100 * calibration_error(before, correct), 4),
        error_after=round(100 * calibration_error(after, correct), 4),
        # rounded down, so that the image that a threshold is from is above it
        thresholds=tuple((np.floor(probability[order][counts - 1].astype(np.float64) * 1e6) / 1e6).tolist()),
        accuracy=tuple(np.round(100 * found / counts, 4).tolist()),
        coverage=tuple(np.round(100 * (found if multi_label else counts) / max(1, len(asked)), 4).tolist()),
    )


def fit_temperature(logits: NDArray[np.floating], labels: NDArray[np.integer | np.bool_]) -> float:
    """The temperature with the least cross entropy, which is convex in its inverse: where its slope is zero."""
    from scipy.optimize import brentq

    logits = np.asarray(logits, np.float32)
    doubt = 1 / (labels.size + 2)
    if labels.ndim == 2:
        target = (((1 - doubt) * labels + doubt / 2) * logits).sum(1)
    else:
        target = (1 - doubt) * logits[np.arange(len(labels)), labels] + doubt * logits.mean(1)

    def slope(inverse: float) -> float:
        if labels.ndim == 2:
            p = sigmoid(inverse * logits)
        else:
            p = np.exp(inverse * (logits - logits.max(1, keepdims=True)))
            p /= p.sum(1, keepdims=True)
        return float(((p * logits).sum(1) - target).mean())

    if slope(_FLATTEST) > 0:
        return 1 / _FLATTEST
    return 1 / float(brentq(slope, _FLATTEST, _SHARPEST, rtol=1e-6)) if slope(_SHARPEST) > 0 else 1 / _SHARPEST


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """1 / (1 + e^-x), without overflow."""
    positive: NDArray[np.floating] = 0.5 * (1 + np.tanh(0.5 * x))
    return positive


def confidence(
    logits: NDArray[np.floating], labels: NDArray[np.integer | np.bool_], temperature: float = 1.0
) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """Probability [N] of the best class, and whether it is the label, or one of the labels [N]."""
    best = logits.argmax(1)
    if labels.ndim == 2:
        return sigmoid(logits.max(1) / temperature), labels[np.arange(len(logits)), best]
    weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    return 1 / weights.sum(1), best == labels


def calibration_error(confidence: NDArray[np.floating], correct: NDArray[np.bool_], bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| per bin of confidence, weighted by the bin's size."""
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    count = np.bincount(which, minlength=bins)
    gap = np.bincount(which, correct - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / max(1, count.sum()))
