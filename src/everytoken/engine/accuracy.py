"""Accuracy of a classifier over a whole set: every image exactly once, over any number of processes.

`Predictions` keeps what each image got, so that tables, intervals and paired comparisons can be made later. Top-k
counts a hit when the label is among the k largest logits; calibration error is the usual one with 15 equal bins of
confidence; with ReaL labels an image is right when its prediction is among its labels, and images without labels are
left out.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from everytoken import schema
from everytoken.calibration import calibration_error
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically
from everytoken.stats import Estimate, percentage


@dataclass(frozen=True)
class Predictions:
    """What a model answered for each labelled image, in the dataset's order.

    Attributes:
        index: [N] position in the dataset.
        label: [N] the folder's class.
        top: [N, 5] (or fewer) predicted classes, best first.
        confidence: [N] softmax probability of the first.
        loss: [N] cross entropy with the label.
    """

    index: np.ndarray
    label: np.ndarray
    top: np.ndarray
    confidence: np.ndarray
    loss: np.ndarray

    @staticmethod
    def of_batch(index: Tensor, label: Tensor, logits: Tensor) -> Predictions:
        """From one batch: logits [B, K], labels [B]."""
        logits = logits.float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        spread = torch.logsumexp(logits, dim=1)
        confidence = (logits.gather(1, best[:, :1])[:, 0] - spread).exp()
        loss = spread - logits.gather(1, label[:, None])[:, 0]
        arrays = (index, label, best, confidence, loss)
        return Predictions(*(t.detach().cpu().numpy() for t in arrays))

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """Parts of a set, from batches or processes -> the whole, sorted by index, without repetitions."""
        if not parts:
            raise EverytokenError("there are no images to evaluate")
        fields = ("index", "label", "top", "confidence", "loss")
        joined = {f: np.concatenate([getattr(p, f) for p in parts]) for f in fields}
        _, first = np.unique(joined["index"], return_index=True)
        return Predictions(**{f: joined[f][first] for f in fields})

    def __len__(self) -> int:
        return len(self.index)

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
        """For each class: images, recall, precision (percent; None without images) and what it is taken for most."""
        rows = []
        guess = self.top[:, 0]
        for number, name in enumerate(names):
            labelled, predicted = self.label == number, guess == number
            wrong = guess[labelled & ~predicted]
            taken = names[int(np.bincount(wrong).argmax())] if len(wrong) else ""
            rows.append(
                {
                    "class": name,
                    "images": int(labelled.sum()),
                    "recall": 100 * float(predicted[labelled].mean()) if labelled.any() else None,
                    "precision": 100 * float(labelled[predicted].mean()) if predicted.any() else None,
                    "taken for": taken,
                }
            )
        return rows

    @property
    def accuracy(self) -> Estimate:
        """Top-1 in percent with its 95 % interval."""
        return percentage(self.correct)

    def save(self, path: Path, note: str, skipped: Mapping[str, str] | None = None) -> None:
        """Write an .npz file in one step, with unreadable images (key -> reason) and a note of what it belongs to."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        np.savez_compressed(file, note=note, skipped=json.dumps(dict(skipped or {})), **vars(self))
        write_atomically(path, file.getbuffer())

    @staticmethod
    def saved(path: Path, note: str) -> tuple[Predictions, dict[str, str]] | None:
        """What `save` wrote, with the unreadable images; None if there is no whole file with this very note."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                if str(arrays["note"]) != note:
                    return None
                skipped: dict[str, str] = json.loads(str(arrays["skipped"]))
                return Predictions(**{field.name: arrays[field.name] for field in fields(Predictions)}), skipped
        except (OSError, KeyError, ValueError, EOFError, BadZipFile, zlib.error):
            return None  # torn or of an older version: it is made again


def real_accuracy(
    predictions: Predictions,
    keys: Sequence[str],
    labels: Mapping[str, Sequence[int]],
    numbers: np.ndarray | None = None,
) -> dict[str, float]:
    """ReaL accuracy; images without labels are left out.

    Args:
        predictions: of a model; keys: of all images.
        labels: an image's file name -> its right classes among ImageNet's 1,000.
        numbers: ImageNet's class for each class that was answered (`imagenet_numbers`); None: the same.
    """
    sets = real_sets([keys[i] for i in predictions.index], labels)
    top = predictions.top if numbers is None else numbers[predictions.top]
    judged = [(row, s) for row, s in zip(top, sets, strict=True) if s]
    hits = [row[0] in s for row, s in judged]
    hits5 = [any(c in s for c in row) for row, s in judged]
    return {"real_top1": 100 * float(np.mean(hits)), "real_top5": 100 * float(np.mean(hits5)), "real_images": len(hits)}


def real_sets(keys: Sequence[str], labels: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """The right classes of each image, found by its file name with any ending; () for images without labels."""
    names = [PurePosixPath(key) for key in keys]
    sets = [labels.get(name.name, labels.get(f"{name.stem}.JPEG")) for name in names]
    if all(entry is None for entry in sets):
        raise EverytokenError(
            "none of the images has ReaL labels: they are found by the names of the original validation files "
            f"(ILSVRC2012_val_00000001.JPEG), the first image here is {keys[0]}"
        )
    return [entry or () for entry in sets]


def read_real(path: str | Path) -> dict[str, list[int]]:
    """`real.json`: 50,000 lists in the order of the validation files -> file name -> classes."""
    lists = schema.read_json(Path(path), list[list[int]])
    return {f"ILSVRC2012_val_{number:08d}.JPEG": entry for number, entry in enumerate(lists, start=1)}
