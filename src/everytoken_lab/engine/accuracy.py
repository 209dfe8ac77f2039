"""Accuracy of a classifier over a whole set: every image exactly once, over any number of processes.

`Predictions` keeps what each image got, so that tables, intervals and paired comparisons can be made later; the
calibration error has 15 equal bins of confidence. `MultiLabelPredictions` keeps the logits: mAP is the mean over
classes of the average precision (the mean of the precision at each labelled image in the order of the scores); F1 is
that of all decisions together, each at a probability of a half.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import scipy
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.files import open_regular, writing
from everytoken_lab import schema
from everytoken_lab.calibration import calibration_error
from everytoken_lab.stats import Estimate, bootstrap_weights, percentage, with_added_images


@dataclass(frozen=True)
class _PerImage:
    """Arrays with a row for each image; `index` [N] is its position in the dataset, which they are sorted by."""

    index: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, chosen: np.ndarray) -> Self:
        """Some of the images, by their rows."""
        return type(self)(**{name: values[chosen] for name, values in vars(self).items()})

    def save(self, path: Path, note: str, skipped: Mapping[str, str] | None = None) -> None:
        """Write an .npz file in one step, with unreadable images (key -> reason) and a note of what it belongs to."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as file:
            np.savez_compressed(file, note=note, skipped=json.dumps(dict(skipped or {})), **vars(self))

    @classmethod
    def saved(cls, path: Path, note: str | None = None) -> tuple[Self, dict[str, str]] | None:
        """What `save` wrote, with the unreadable images; None if there is no whole file with this note (None: any)."""
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
                if note is not None and str(arrays["note"]) != note:
                    return None
                skipped: dict[str, str] = json.loads(str(arrays["skipped"]))
                return cls(**{f.name: arrays[f.name] for f in fields(cls)}), skipped
        except (OSError, KeyError, ValueError, EOFError, BadZipFile, zlib.error):
            return None  # torn: it is made again

    @staticmethod
    def _class_row(name: str, labelled: np.ndarray, answered: np.ndarray) -> dict[str, Any]:
        """Images, recall and precision of a class, in percent (None without images); labelled, answered: [N] bool."""
        recall = 100 * float(answered[labelled].mean()) if labelled.any() else None
        precision = 100 * float(labelled[answered].mean()) if answered.any() else None
        return {"class": name, "images": int(labelled.sum()), "recall": recall, "precision": precision}


@dataclass(frozen=True)
class Predictions(_PerImage):
    """What a model answered for each labelled image, in the dataset's order; `label` [N] is the folder's class."""

    top: np.ndarray  # [N, 5] (or fewer) predicted classes, best first
    confidence: np.ndarray  # [N] softmax probability of the first
    loss: np.ndarray  # [N] cross entropy with the label

    @property
    def correct(self) -> np.ndarray:
        """[N] bool: the first prediction is the label."""
        return self.top[:, 0] == self.label

    def summary(self) -> dict[str, float]:
        """Top-1, top-5 (percent), loss, calibration error (percent)."""
        hits = self.top == self.label[:, None]
        return {
            "top1": 100 * float(hits[:, 0].mean()),
            "top5": 100 * float(hits.any(1).mean()),
            "loss": float(self.loss.mean()),
            "ece": 100 * calibration_error(self.confidence, self.correct),
        }

    def per_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each class: images, recall and precision in percent, and what it is taken for most."""
        rows = [self._class_row(name, self.label == k, self.top[:, 0] == k) for k, name in enumerate(names)]
        for k, row in enumerate(rows):
            wrong = self.top[(self.label == k) & ~self.correct, 0]
            row["taken for"] = names[int(np.bincount(wrong).argmax())] if len(wrong) else ""
        return rows

    @property
    def accuracy(self) -> Estimate:
        """Top-1 in percent with its 95 % interval."""
        return percentage(self.correct)


@dataclass(frozen=True)
class MultiLabelPredictions(_PerImage):
    """What a model answered for each multi-label image, in the dataset's order; `label` [N, K] is bool."""

    logits: np.ndarray  # [N, K] float32; their sigmoids are probabilities

    @property
    def correct(self) -> np.ndarray:
        """[N] bool: exactly the labels are above a half."""
        return ((self.logits > 0) == self.label).all(1)

    @property
    def confidence(self) -> np.ndarray:
        """[N] probability of the likeliest class."""
        return scipy.special.expit(self.logits.max(1))

    def summary(self) -> dict[str, float]:
        """mAP, F1 (percent), loss (per image, added up over the classes)."""
        x, y = self.logits.astype(np.float64), self.label
        f1 = 200 * float(((x > 0) & y).sum()) / max(1.0, float((x > 0).sum() + y.sum()))
        return {"mAP": self.mean_ap, "f1": f1, "loss": float((np.logaddexp(0, x) - x * y).sum(1).mean())}

    @property
    def mean_ap(self) -> float:
        """mAP in percent over the classes that have images; 0 if none has."""
        values = [average_precision(self.logits[:, k], self.label[:, k]) for k in self._with_images()]
        return 100 * float(np.mean(values)) if values else 0.0

    @property
    def accuracy(self) -> Estimate:
        """mAP in percent with its 95 % interval: by the bootstrap's variance, and four images added."""
        return self._estimate(self.mean_ap, self._bootstrap(), (0, 0, 1, 1))

    def difference(self, other: MultiLabelPredictions) -> Estimate:
        """mAP of this minus that of another model on the same images, in points, paired by the bootstrap."""
        return self._estimate(self.mean_ap - other.mean_ap, self._bootstrap() - other._bootstrap(), (-1, 1))

    def _estimate(self, value: float, draws: np.ndarray, added: Sequence[float]) -> Estimate:
        """With an interval that counts all images, or fewer if small classes weigh more than others."""
        # a positive of one of k classes, with m of them, has the weight 1 / (k m) in mAP
        positives = self.label.sum(0)[self._with_images()]
        if not len(positives):
            return Estimate(value, 100 * min(added), 100 * max(added))
        count = min(int(self.label.any(1).sum()), len(positives) ** 2 / float((1 / positives).sum()))
        return with_added_images(value / 100, count * float(np.nanvar(draws)), count, added)

    def _with_images(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.label.any(0)).tolist()
        return found

    def _bootstrap(self) -> np.ndarray:
        """mAP (0..1) over images drawn again and again; a class that is not drawn does not count, nan without any."""
        draws = int(np.clip(5e7 / max(1, self.logits.size), 100, 1000))
        values = []
        for weights in bootstrap_weights(len(self), draws):
            each = [average_precisions(self.logits[:, k], self.label[:, k], weights) for k in self._with_images()]
            table = np.reshape(each, (-1, len(weights)))
            with np.errstate(invalid="ignore"):
                values.append(np.nansum(table, 0) / np.isfinite(table).sum(0))
        return np.concatenate(values)

    def per_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each class: images; recall and precision at a probability of a half, average precision, in percent."""
        rows = [self._class_row(name, self.label[:, k], self.logits[:, k] > 0) for k, name in enumerate(names)]
        for k, row in enumerate(rows):
            row["AP"] = 100 * average_precision(self.logits[:, k], self.label[:, k]) if row["images"] else None
        return rows


AnyPredictions = Predictions | MultiLabelPredictions


def predictions_of(index: Tensor | np.ndarray, label: Tensor | np.ndarray, logits: Tensor) -> AnyPredictions:
    """Predictions of images with logits [B, K] and labels [B], or multi-label [B, K]."""
    index, label, logits = torch.as_tensor(index), torch.as_tensor(label), logits.detach().float()
    if label.dim() == 2:
        return MultiLabelPredictions(*(t.cpu().numpy() for t in (index, label.bool(), logits)))
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    spread = torch.logsumexp(logits, dim=1)
    confidence = (logits.gather(1, best[:, :1])[:, 0] - spread).exp()
    loss = spread - logits.gather(1, label[:, None])[:, 0]
    return Predictions(*(t.cpu().numpy() for t in (index, label, best, confidence, loss)))


def join_predictions(parts: Sequence[AnyPredictions]) -> AnyPredictions:
    """Parts of a set, from batches or processes -> the whole, sorted by index, without repetitions."""
    if not parts:
        raise EverytokenError("there are no images to evaluate")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])}
    _, first = np.unique(joined["index"], return_index=True)
    return type(parts[0])(**{name: values[first] for name, values in joined.items()})


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Mean of the precision at each positive in the order of the scores [n], highest first; nan without positives."""
    return float(average_precisions(scores, positive, np.ones((1, len(scores))))[0])


def average_precisions(scores: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The same for images that count several times or never, [draws, n] -> [draws]; equal scores count together."""
    order = np.argsort(-scores, kind="stable")
    ranked = -scores[order]
    ends = np.searchsorted(ranked, ranked, side="right") - 1
    weights = weights[:, order]
    hits = weights * positive[order]
    right, total = hits.cumsum(1), weights.cumsum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        values: np.ndarray = np.nansum(hits * (right / total)[:, ends], 1) / right[:, -1]
    return values


def real_accuracy(
    predictions: Predictions,
    keys: Sequence[str],
    labels: Mapping[str, Sequence[int]],
    numbers: np.ndarray | None = None,
) -> dict[str, float]:
    """ReaL accuracy: a prediction is right if it is among an image's labels; images without labels are left out.

    Args:
        keys: of all images.
        labels: an image's file name -> its right classes among ImageNet's 1,000.
        numbers: ImageNet's class for each class that was answered (`imagenet_numbers`); None: the same.
    """
    sets = real_sets([keys[i] for i in predictions.index], labels)
    top = predictions.top if numbers is None else numbers[predictions.top]
    judged = [np.isin(row, s) for row, s in zip(top, sets, strict=True) if s]
    hits = np.reshape(judged, (len(judged), top.shape[1]))
    first, any_of_five = hits[:, 0].mean(), hits.any(1).mean()
    return {"real_top1": 100 * float(first), "real_top5": 100 * float(any_of_five), "real_images": len(hits)}


def real_sets(keys: Sequence[str], labels: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """The right classes of each image, found by its file name with any ending; () for images without labels."""
    names = [PurePosixPath(key) for key in keys]
    sets = [labels.get(name.name, labels.get(f"{name.stem}.JPEG")) for name in names]
    if all(entry is None for entry in sets):
        where = "the names of the original validation files (ILSVRC2012_val_00000001.JPEG)"
        raise EverytokenError(f"none of the images has ReaL labels, found by {where}; the first image is {keys[0]}")
    return [entry or () for entry in sets]


def read_real(path: str | Path) -> dict[str, list[int]]:
    """`real.json`: 50,000 lists in the order of the validation files -> file name -> classes."""
    lists = schema.read_json(Path(path), list[list[int]])
    return {f"ILSVRC2012_val_{number:08d}.JPEG": entry for number, entry in enumerate(lists, start=1)}
