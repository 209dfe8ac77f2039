"""How many exchanged labels are found among the most doubtful ones, by which score, at which cost: `everytoken doctor`.

    python benchmarks/mislabelled.py photos --exchange 0.05 --seeds 5 --cache features

Some labels are exchanged for another class (uniformly, or with --like for the class that the network finds likeliest
after the right one, as a tired person would), and the linear head is cross-fitted on frozen features. Printed for each
score are the percentages of exchanged labels among the first N and the first 2N of the list, where N is the number of
exchanged ones, and the average precision of the list, each with its standard deviation over seeds. Labels that were
wrong before count as false alarms, so the numbers are a little too low.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from everytoken_lab.annotators.features import FrozenBackbone, compute_features
from everytoken_lab.annotators.linear import fit_linear, stratified_folds
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.engine.accuracy import average_precision

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def given(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Probability of the given label [n]."""
    chosen: np.ndarray = p[np.arange(len(p)), labels]
    return chosen


def best_other(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The largest probability of another class [n]."""
    others = p.copy()
    others[np.arange(len(p)), labels] = -1
    best: np.ndarray = others.max(1)
    return best


def usual(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[K] confident learning's thresholds: the mean probability of a class among images with its label."""
    return np.array([p[labels == k, k].mean() if (labels == k).any() else 1.0 for k in range(p.shape[1])])


def confident(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Confident learning: first the images that reach another class's threshold and not their own, by margin."""
    passed = p >= usual(p, labels)
    own = given(passed, labels)
    elsewhere = passed.sum(1) - own > 0
    return (elsewhere & ~own) + (1 + best_other(p, labels) - given(p, labels)) / 2


SCORES: dict[str, Score] = {
    "1 - p(label)": lambda p, y: 1 - given(p, y),
    "p(best other) - p(label)": lambda p, y: best_other(p, y) - given(p, y),
    "log p(best other) - log p(label)": lambda p, y: np.log(best_other(p, y) + 1e-12) - np.log(given(p, y) + 1e-12),
    "threshold of the class - p(label)": lambda p, y: usual(p, y)[y] - given(p, y),
    "p - thresholds, best other - label": lambda p, y: (
        best_other(p - usual(p, y) + 1, y) - given(p - usual(p, y) + 1, y)
    ),
    "confident learning, then margin": confident,
}


def exchange(labels: np.ndarray, part: float, classes: int, likely: np.ndarray | None, seed: int) -> np.ndarray:
    """Labels of which a part is another class: any, or the likeliest wrong one."""
    rng = np.random.default_rng(seed)
    out = labels.copy()
    chosen = rng.permutation(len(labels))[: round(part * len(labels))]
    if likely is None:
        out[chosen] = (labels[chosen] + rng.integers(1, classes, len(chosen))) % classes
    else:
        scores = likely[chosen].copy()
        scores[np.arange(len(chosen)), labels[chosen]] = -np.inf
        out[chosen] = scores.argmax(1)
    return out


def softmax(logits: np.ndarray) -> np.ndarray:
    """[n, K]"""
    p = np.exp(logits - logits.max(1, keepdims=True))
    normalised: np.ndarray = p / p.sum(1, keepdims=True)
    return normalised


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--split", default="train")
    parser.add_argument("--exchange", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--weights", default="registry:efficientnet_lite0")
    parser.add_argument("--img-size", type=int, default=0)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--like", action="store_true", help="exchange for the likeliest wrong class")
    arguments = parser.parse_args()
    data = open_dataset(arguments.data, arguments.split)
    backbone = FrozenBackbone(arguments.weights, arguments.img_size)
    before = time.process_time()
    features = compute_features(data, backbone, arguments.cache, workers=0)
    spent = time.process_time() - before
    folds = stratified_folds(data.labels, features.digests, 5)
    clean = fit_linear(features.values, data.labels, data.num_classes, folds)
    print(
        f"{arguments.data}: {len(data):,} images, {data.num_classes} classes, {backbone.info.img_size[0]} px; out of "
        f"fold {clean.accuracy:.1%} right with the labels as they are; features {spent:.1f} CPU s for "
        f"{features.computed:,} images"
    )
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SCORES}
    fitting = 0.0
    for seed in range(arguments.seeds):
        likely = clean.out_of_fold if arguments.like else None
        labels = exchange(data.labels, arguments.exchange, data.num_classes, likely, seed)
        wrong = labels != data.labels
        before = time.process_time()
        fold = stratified_folds(labels, features.digests, 5, seed)
        fit = fit_linear(features.values, labels, data.num_classes, fold)
        fitting += time.process_time() - before
        p = softmax(fit.out_of_fold.astype(np.float64))
        for name, score in SCORES.items():
            doubt = score(p, labels)
            order = np.argsort(-doubt, kind="stable")
            n = int(wrong.sum())
            first, twice = wrong[order[:n]].sum() / n, wrong[order[: 2 * n]].sum() / n
            results[name].append((float(first), float(twice), average_precision(doubt, wrong)))
    print(f"{n} labels exchanged ({arguments.exchange:.0%}); {fitting / arguments.seeds:.1f} CPU s for each fit")
    print(f"{'score':40} {'first N':>14} {'first 2N':>14} {'AP':>14}")
    for name, rows in results.items():
        mean, spread = 100 * np.mean(rows, 0), 100 * np.std(rows, 0, ddof=1)
        print(f"{name:40} " + " ".join(f"{m:8.1f} ± {s:3.1f}" for m, s in zip(mean, spread, strict=True)))


if __name__ == "__main__":
    main()
