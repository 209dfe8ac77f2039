"""Segmentation metrics from one confusion matrix over the whole set.

With N[t, p] pixels of class t that were called p: IoU_c = N[c,c] / (sum_p N[c,p] + sum_t N[t,c] - N[c,c]), accuracy of
a class N[c,c] / sum_p N[c,p]; mIoU and mAcc are their means over the classes that occur (in truth or prediction; in
truth), aAcc is the part of all pixels that is right. Ignored pixels are not counted. A mean of per-image numbers is
something else, and not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Confusion:
    """Counts of (truth, prediction).

    Attributes:
        counts: int64 [K, K], on the CPU.
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, truth: Tensor, prediction: Tensor) -> None:
        """Count pixels; truth below 0 is ignored. Both of one shape, any integer type, predictions 0..K-1."""
        k = self.counts.shape[0]
        truth, prediction = truth.reshape(-1).long(), prediction.reshape(-1).long()
        counted = truth >= 0
        pairs = truth[counted] * k + prediction[counted].to(truth.device)
        self.counts += torch.bincount(pairs, minlength=k * k).reshape(k, k).cpu()

    def iou(self) -> Tensor:
        """float64 [K]; NaN for classes that occur neither in truth nor in prediction."""
        hit = self.counts.diagonal().double()
        return hit / (self.counts.sum(0) + self.counts.sum(1) - hit)

    def accuracy(self) -> Tensor:
        """float64 [K]: recall of each class; NaN for classes that do not occur."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def summary(self) -> dict[str, float]:
        """mIoU, mAcc and aAcc in percent."""
        total = int(self.counts.sum())
        right = int(self.counts.diagonal().sum())
        return {
            "mIoU": 100 * float(self.iou().nanmean()),
            "mAcc": 100 * float(self.accuracy().nanmean()),
            "aAcc": 100 * right / total if total else float("nan"),
        }

    def per_class(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each class that occurs: IoU and accuracy in percent, part of all pixels, what it is taken for.

        The accuracy of a class that is answered but is not in the truth is None.
        """
        rows: list[dict[str, Any]] = []
        iou, accuracy = (100 * self.iou()).tolist(), (100 * self.accuracy()).tolist()
        truth = self.counts.sum(1)
        total = max(1, int(self.counts.sum()))
        off = self.counts.clone().fill_diagonal_(0)
        for i, name in enumerate(names):
            if iou[i] != iou[i]:
                continue
            other = int(off[i].argmax())
            rows.append(
                {
                    "class": name,
                    "IoU": iou[i],
                    "accuracy": accuracy[i] if int(truth[i]) else None,
                    "pixels": 100 * int(truth[i]) / total,
                    "taken for": names[other] if int(off[i, other]) else "",
                }
            )
        return rows
