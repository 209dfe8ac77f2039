"""Logistic regression on the features of one frozen network, of several joined, and on whitened features.

    python benchmarks/study/joined.py --work DIR       after `against_timm.py prepare --work DIR ...`

8 photos per class of Flowers-102, Caltech-101 and Grocery Store, the first draw; whole photos squashed. The penalty has
the lowest cross-validated log loss. Prints test accuracy, that log loss in brackets, and the CPU time of one photo's
features. *Mean*: of the probabilities of three heads. *Whitened*: principal axes divided by their spread, of which the
mean was added first so that small ones do not explode.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from against_timm import DATASETS, NETWORKS, Cell, features
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict

PENALTIES = (30.0, 100.0, 300.0, 1000.0, 3000.0)
Pair = tuple[np.ndarray, np.ndarray]  # features of the training and of the test photos


def scaled(pair: Pair) -> Pair:
    """Centred, and all divided by one number, so that a photo's features have a length of about 1."""
    centre = pair[0].mean(0)
    scale = 1 / ((pair[0] - centre).std() * pair[0].shape[1] ** 0.5)
    return (pair[0] - centre) * scale, (pair[1] - centre) * scale


def joined(pairs: list[Pair]) -> Pair:
    first, second = zip(*map(scaled, pairs), strict=True)
    return np.concatenate(first, 1), np.concatenate(second, 1)


def whitened(pair: Pair) -> Pair:
    first, second = scaled(pair)
    _, spread, axes = np.linalg.svd(first, full_matrices=False)
    turn = axes.T / (spread + spread.mean())
    return first @ turn, second @ turn


def fitted(pair: Pair, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Probabilities of the test photos, and the cross-validated log loss of the best penalty."""
    first, second = scaled(pair)
    losses = {}
    for penalty in PENALTIES:
        folds = StratifiedKFold(5, shuffle=True, random_state=1)
        odds = cross_val_predict(
            LogisticRegression(C=penalty, max_iter=200), first, y, cv=folds, method="predict_proba"
        )
        losses[penalty] = -float(np.log(np.maximum(odds[np.arange(len(y)), y], 1e-12)).mean())
    best = min(losses, key=losses.__getitem__)
    return LogisticRegression(C=best, max_iter=1000).fit(first, y).predict_proba(second), losses[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for dataset in DATASETS:
        cell = Cell(options.work, dataset, 8, 1)
        y, truth = (np.array([k for _, k in photos]) for photos in (cell.train, cell.test))
        found, seconds = {}, {}
        for network in NETWORKS:
            first, seconds[network] = features(cell, network, cell.train)
            found[network] = (first, features(cell, network, cell.test)[0])
        one, two, three = found.values()
        kinds = {**found, "lite1 and lite2 joined": joined([two, three]), "all three joined": joined([one, two, three])}
        kinds |= {f"{network} whitened": whitened(found[network]) for network in NETWORKS}
        odds = {}
        for name, pair in kinds.items():
            odds[name], loss = fitted(pair, y)
            per_photo = f", {1000 * seconds[name] / len(y):.0f} ms" if name in seconds else ""
            accuracy = 100 * (odds[name].argmax(1) == truth).mean()
            print(f"{dataset}: {name}: {accuracy:.1f} ({loss:.3f}){per_photo}", flush=True)
        mean = sum(odds[network] for network in NETWORKS)
        print(f"{dataset}: mean of three: {100 * (mean.argmax(1) == truth).mean():.1f}", flush=True)


if __name__ == "__main__":
    main()
