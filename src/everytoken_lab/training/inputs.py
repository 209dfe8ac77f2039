"""What a training opens: its images and its initial weights, each once; what is known is handed on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data import datasets
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, NAMED, DataSet, find_split
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.engine.options import TrainOptions
from everytoken_lab.models.open import Weights, open_weights


class Inputs:
    """Images and weights of a command, opened when they are first asked for."""

    def __init__(self) -> None:
        self._images: dict[tuple[str, str], DataSet] = {}
        self._weights: dict[str, Weights] = {}

    def weights(self, source: str, model: str = "") -> Weights:
        """As `open_weights`."""
        if source not in self._weights:
            found = open_weights(source, model)
            self._weights |= {source: found, found.source: found}
        return self._weights[source]

    def splits(self, options: TrainOptions) -> tuple[DataSet, DataSet, list[str]]:
        """Training and validation images, and what to say about them.

        A tenth is held out where the data has no validation images of its own and nothing was asked for: by the names
        of the images alone, so the same ones for every seed, and for `everytoken annotate`.
        """
        fraction, notes = options.dataset.val_split, []
        if not fraction and not has_validation(options):
            fraction = DEFAULT_VAL_SPLIT
            notes.append(f"{options.data} has no validation images: 10 % of each class are held out (val_split)")
        if fraction:
            train, val = datasets.hold_out(self._open(options.data, "undivided"), options.data, fraction)
        else:
            train, val = self._open(options.data, "train"), self._open(options.data, "val")
        train, val, more = _chosen(options, train, val)
        return train, val, notes + more

    def undivided(self, options: TrainOptions) -> DataSet:
        """All images of data without validation images."""
        whole = self._open(options.data, "undivided")
        return _chosen(options, whole, whole.subset(np.zeros(0, dtype=np.int64)))[0]

    def _open(self, data: str, split: str) -> DataSet:
        if (data, split) not in self._images:
            self._images[data, split] = datasets.open_dataset(data, split)
        return self._images[data, split]


def has_validation(options: TrainOptions) -> bool:
    """Whether the data brings validation images, or some are to be held out."""
    named = options.data.startswith(NAMED)
    return bool(options.dataset.val_split) or named or find_split(options.data, "val") is not None


def _chosen(options: TrainOptions, train: DataSet, val: DataSet) -> tuple[DataSet, DataSet, list[str]]:
    """Without the training images to leave out, and with corrected labels."""
    notes: list[str] = []
    if options.dataset.exclude:
        train = without(train, options.dataset.exclude)
    if options.dataset.corrections:
        (train, val), notes = corrected(train, val, Path(options.dataset.corrections))
    return train, val, notes


def without(data: DataSet, file: str | Path) -> DataSet:
    """The images but for those that the lines of a text file name; what follows a tab is a remark."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise EverytokenError(f"exclude: {file} cannot be read ({error.strerror})") from error
    names = {line.partition("\t")[0] for line in lines}
    keep = [i for i, key in enumerate(data.keys()) if key not in names]
    if not keep:
        raise EverytokenError(f"exclude leaves no images of {data.name}")
    return data if len(keep) == len(data) else data.subset(keep)


def corrected(train: DataSet, val: DataSet, file: Path) -> tuple[tuple[DataSet, DataSet], list[str]]:
    """Both splits with the labels of a CSV file (path, label, perhaps split); images with an empty one are left out."""
    if not file.is_file():
        raise EverytokenError(f"corrections: there is no file {file}")
    rows = list(parse_labels(file, corrections=True))
    out, changed, dropped, found = [], 0, 0, set[int]()
    for name, data in (("train", train), ("val", val)):
        by_path = {row.path: row for row in rows if row.split in ("", name)}
        number = {label: k for k, label in enumerate(data.class_names)}
        labels, keep = data.labels.copy(), np.ones(len(data), dtype=bool)
        for i, key in enumerate(data.keys()):
            row = by_path.get(key)
            if row is None:
                continue
            found.add(row.line)
            unknown = next((label for label in row.labels if label not in number), None)
            if unknown is not None or (len(row.labels) > 1 and not data.multi_label):
                problem = (
                    f"{';'.join(row.labels)!r} is not one label" if unknown is None else f"no class is {unknown!r}"
                )
                raise EverytokenError(
                    f"{file}, line {row.line}: {problem} of {data.name}.{did_you_mean(unknown or '', number)}"
                )
            if not row.labels and not row.several:
                keep[i], dropped = False, dropped + 1
                continue
            if data.multi_label:
                labels[i] = 0
                labels[i, [number[label] for label in row.labels]] = 1
            else:
                labels[i] = number[row.labels[0]]
            changed += not np.array_equal(labels[i], data.labels[i])
        part = data.subset(np.flatnonzero(keep))
        part.labels = labels[keep]
        out.append(part)
    notes = [f"{file}: {changed:,} labels corrected, {dropped:,} images left out"]
    if len(found) < len(rows):
        notes.append(f"{file} names {len(rows) - len(found):,} images that are not there")
    return (out[0], out[1]), notes
