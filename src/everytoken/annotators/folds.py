"""Who trains on what: a held-out part, or k folds in which every image is held out once.

A network that has memorised an image gives it a label that says no more than its folder. With k folds each image is
annotated by the network that did not train on it (cross-fitting), for k times the training.

Within each class, images are ranked by a hash of seed and key and dealt out to the folds in turn, so folds have the
same share of every class and do not depend on the order of files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everytoken.data.datasets import DataSet
from everytoken.errors import EverytokenError
from everytoken.keyed import uniform

_WHOLE = 10  # with one network, one image in ten is held out to measure it


@dataclass(frozen=True)
class Fold:
    """One network to train: indices into the data set, to train on and to hold out."""

    number: int
    train: np.ndarray
    held_out: np.ndarray


def make_folds(data: DataSet, count: int, seed: int) -> tuple[list[Fold], np.ndarray]:
    """The networks to train, and for each image the number of the one that annotates it.

    Args:
        count: 1: one network, trained on nine tenths, annotates everything. k >= 2: cross-fitting.
    """
    if count < 1:
        raise EverytokenError(f"--folds must be at least 1, got {count}.")
    parts = count if count > 1 else _WHOLE
    part = np.zeros(len(data), dtype=np.int64)
    draws = np.array([uniform(seed, "fold", key) for key in data.keys()])  # noqa: SIM118
    sizes = []
    for label in np.unique(data.labels):
        members = np.flatnonzero(data.labels == label)
        ranks = np.argsort(np.argsort(draws[members], kind="stable"), kind="stable")
        part[members] = (ranks + label) % parts  # shifted, so that small classes do not all lack the same fold
        sizes.append((len(members), int(label)))
    least, label = min(sizes)
    if least < 2:
        raise EverytokenError(
            f"class {data.class_names[label]!r} has only {least} image; `fit` needs two of each class at least, one "
            "to train on and one to hold out."
        )
    folds = [
        Fold(number, np.flatnonzero(part != number), np.flatnonzero(part == number))
        for number in range(parts if count > 1 else 1)
    ]
    empty = next((fold for fold in folds if not len(fold.held_out)), None)
    if empty is not None:
        raise EverytokenError(f"{len(data)} images are too few for {count} folds; use fewer --folds.")
    return folds, part if count > 1 else np.zeros(len(data), dtype=np.int64)
