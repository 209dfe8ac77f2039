"""A linear classifier on frozen features: scikit-learn's logistic regression, its penalty chosen by cross-validation.

Minimised is mean H(softmax(Wx + b), y) + strength / 2 · |W|² over features x that are centred and scaled so that |x|²
is 1 on average. The strength with the least out-of-fold cross entropy is taken. Folds hold out the same fraction of
every class, images with the same content are in the same fold, and nothing that is used for the images of a fold was
fitted on any of them: neither the weights, nor their starting point, nor the centre of the features.

With multi-label images, [n, K], every class is a logistic regression of its own with the same strength.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from everytoken.keyed import uniform
from everytoken_lab.engine.accuracy import MultiLabelPredictions

STRENGTHS = tuple(10 ** (-k / 2) for k in range(2, 17))
_USUAL = STRENGTHS.index(1e-6)  # where the search begins
FOLDS = 5
SEARCHED = 1000
"""Images that the strength is chosen with, at most."""
_SMALL = 2e9
"""Images x features x classes up to which one thread is used: on a busy machine, two wait for each other."""


@dataclass(frozen=True)
class LinearHead:
    """weight [K, D] and bias [K], of features as the backbone gives them."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Features [..., D] -> logits [..., K]."""
        return features @ self.weight.T + self.bias


@dataclass(frozen=True)
class LinearFit:
    """A head that was fitted on all images, and what cross-validation says about it.

    Attributes:
        head: fitted on all images; fold_heads: number k was not fitted on the images of fold k.
        fold: [n] int64.
        out_of_fold: [n, K] float32, logits of each image by the head of its fold.
        labels: [n], or [n, K] of multi-label images.
        strength: of the penalty.
    """

    head: LinearHead
    fold_heads: tuple[LinearHead, ...]
    fold: np.ndarray
    out_of_fold: np.ndarray
    labels: np.ndarray
    strength: float

    @property
    def accuracy(self) -> float:
        """Out-of-fold accuracy, 0..1; of multi-label images the mean average precision."""
        if self.labels.ndim == 2:
            return MultiLabelPredictions(np.arange(len(self.labels)), self.labels > 0, self.out_of_fold).mean_ap / 100
        return float((self.out_of_fold.argmax(1) == self.labels).mean())

    @property
    def losses(self) -> np.ndarray:
        """[n] out-of-fold cross entropy of each image."""
        return cross_entropy(self.out_of_fold, self.labels)

    @property
    def loss(self) -> float:
        """Their mean."""
        return float(self.losses.mean())


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[n] cross entropy of logits [n, K] with labels [n]; multi-label [n, K]: added up over the classes."""
    scores, target = torch.from_numpy(np.asarray(logits)).double(), torch.from_numpy(np.asarray(labels))
    if target.dim() == 2:
        each = F.binary_cross_entropy_with_logits(scores, target.double(), reduction="none").sum(1)
    else:
        each = F.cross_entropy(scores, target.long(), reduction="none")
    return each.numpy()


def stratified_folds(labels: np.ndarray, keys: Sequence[str], count: int, seed: int = 0) -> np.ndarray:
    """[n] fold of each image: within each class, images are ranked by a hash of seed and key and dealt out in turn.

    Args:
        labels: [n] classes; of multi-label images one each (`DataSet.strata`).
        keys: what identifies each image; images with the same key are in the same fold.
    """
    draws = np.array([uniform(seed, "fold", key) for key in keys])
    # shifted, so that small classes do not all lack the same fold
    fold = (class_ranks(draws, labels) + labels) % count
    _, first, inverse = np.unique(np.asarray(keys), return_index=True, return_inverse=True)
    joined: np.ndarray = fold[first[inverse.reshape(-1)]]
    return joined


def class_ranks(draws: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[n] int64: how many images of the same class have a smaller draw."""
    ranks = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        ranks[members] = np.argsort(np.argsort(draws[members], kind="stable"), kind="stable")
    return ranks


def fit_linear(
    features: np.ndarray | Tensor, labels: np.ndarray, num_classes: int, fold: np.ndarray, strength: float = 0.0
) -> LinearFit:
    """Fit the head, with cross-validation over the folds.

    Args:
        features: [n, D]. labels: [n], or [n, K] of multi-label images. fold: [n], see `stratified_folds`.
        strength: of the penalty; 0: chosen.
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    with threadpool_limits(1) if x.size * num_classes < _SMALL else nullcontext():
        strength = strength or _choose_strength(x, y, num_classes, fold)
        head = _Problem(x, y, num_classes).solve(strength)
        fold_heads = tuple(problem.solve(strength) for problem in _folds(x, y, num_classes, fold))
    out = np.zeros((len(y), num_classes), dtype=np.float32)
    for number, one in enumerate(fold_heads):
        out[fold == number] = one(torch.from_numpy(x[fold == number]).float()).numpy()
    return LinearFit(head, fold_heads, fold, out, y, strength)


def fit_head(features: np.ndarray, labels: np.ndarray, num_classes: int, strength: float) -> LinearHead:
    """The head alone, with a penalty that is known."""
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    with threadpool_limits(1) if x.size * num_classes < _SMALL else nullcontext():
        return _Problem(x, y, num_classes).solve(strength)


def _folds(x: np.ndarray, y: np.ndarray, num_classes: int, fold: np.ndarray) -> list[_Problem]:
    """For each fold, the problem of fitting on the others."""
    return [_Problem(x[fold != k], y[fold != k], num_classes) for k in range(int(fold.max()) + 1)]


def _choose_strength(x: np.ndarray, y: np.ndarray, num_classes: int, fold: np.ndarray) -> float:
    """The strength with the least out-of-fold cross entropy, from the usual one on to both sides.

    A side ends when two in a row are worse than the best.
    """
    if len(x) > SEARCHED:  # evenly over the classes
        order = np.argsort(y, kind="stable") if y.ndim == 1 else np.arange(len(y))
        some = order[np.linspace(0, len(order) - 1, SEARCHED).astype(int)]
        x, y, fold = x[some], y[some], np.unique(fold[some], return_inverse=True)[1]
    folds = _folds(x, y, num_classes, fold)

    @cache
    def loss(at: int) -> float:
        heads = (problem.solve(STRENGTHS[at]) for problem in folds)
        logits = [head(torch.from_numpy(x[fold == k]).float()).numpy() for k, head in enumerate(heads)]
        losses = [cross_entropy(answers, y[fold == k]) for k, answers in enumerate(logits)]
        return float(np.concatenate(losses).mean())

    best = _USUAL
    for step in (1, -1):
        at, worse = best + step, 0
        while worse < 2 and 0 <= at < len(STRENGTHS):
            best, worse = (at, 0) if loss(at) < loss(best) else (best, worse + 1)
            at += step
    return STRENGTHS[best]


class _Problem:
    """Images to fit a head on: centred, scaled and, if they are fewer than the features, in the space they span."""

    def __init__(self, x: np.ndarray, y: np.ndarray, num_classes: int) -> None:
        self.y, self.num_classes, self.mean = y, num_classes, x.mean(0)
        x = x - self.mean
        self.scale = 1 / max(float(x.std()), 1e-6) / x.shape[1] ** 0.5  # one for all: scales of their own cost accuracy
        self.basis = np.linalg.qr(x.T)[0] if len(x) < x.shape[1] else None
        self.x = self.scale * (x if self.basis is None else x @ self.basis)

    def solve(self, strength: float) -> LinearHead:
        """The head with the least penalised cross entropy."""
        if self.y.ndim == 1:
            weight, bias = _softmax_regression(self.x, self.y, self.num_classes, strength)
        else:
            each = [_softmax_regression(self.x, self.y[:, k], 2, strength) for k in range(self.num_classes)]
            weight = np.stack([w[1] - w[0] for w, _ in each])
            bias = np.array([b[1] - b[0] for _, b in each])
        weight = (weight if self.basis is None else weight @ self.basis.T) * self.scale
        return LinearHead(torch.from_numpy(weight).float(), torch.from_numpy(bias - weight @ self.mean).float())


def _softmax_regression(
    x: np.ndarray, y: np.ndarray, num_classes: int, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [K, d] and biases [K]; a class without images gets a bias far below the others."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((num_classes, x.shape[1])), np.zeros(num_classes)
    classes = np.unique(y)
    if len(classes) > 1:
        regression = LogisticRegression(C=1 / (strength * len(x)), tol=1e-4, max_iter=200)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            regression.fit(x, y)
        found, offsets = regression.coef_, regression.intercept_
        if len(classes) == 2:  # of the second class against the first
            found, offsets = np.concatenate([-found, found]) / 2, np.concatenate([-offsets, offsets]) / 2
        weight[classes], bias[classes] = found, offsets
    bias[np.setdiff1d(np.arange(num_classes), classes)] = bias[classes].min() - 10
    return weight, bias
