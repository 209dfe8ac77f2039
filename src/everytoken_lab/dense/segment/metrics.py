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
from PIL import Image
from torch import Tensor

from everytoken.data.batch import Batch
from everytoken_lab.dense.common import Score
from everytoken_lab.draw import Card, Panel, Row, fit_photo, mask_legend, mask_overlay
from everytoken_lab.engine.distributed import World


class SegmentScore(Score[Tensor]):
    """Counts of (truth, prediction).

    Attributes:
        counts: int64 [K, K], on the CPU.
    """

    def __init__(self, class_names: Sequence[str], pictures: int = 0) -> None:
        super().__init__(pictures)
        self.class_names = class_names
        self.counts = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)

    def count(self, batch: Batch, answer: Tensor) -> None:
        """Pixels of an image."""
        self.count_pixels(batch.targets[0], answer)

    def count_pixels(self, truth: Tensor, prediction: Tensor) -> None:
        """Truth below 0 is ignored. Both of one shape, any integer type, predictions 0..K-1."""
        k = self.counts.shape[0]
        truth, prediction = truth.reshape(-1).long(), prediction.reshape(-1).long()
        counted = truth >= 0
        pairs = truth[counted] * k + prediction[counted].to(truth.device)
        self.counts += torch.bincount(pairs, minlength=k * k).reshape(k, k).cpu()

    def join(self, world: World) -> None:
        """The sum of all matrices."""
        self.counts = world.add(self.counts.to(world.device)).cpu()

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """mIoU, mAcc and aAcc; and of each class that occurs, IoU, accuracy, part of all pixels, what it is taken for.

        The accuracy of a class that is answered but is not in the truth is None.
        """
        truth, answered, hit = self.counts.sum(1), self.counts.sum(0), self.counts.diagonal()
        iou = 100 * hit.double() / (truth + answered - hit)  # NaN where a class occurs in neither
        accuracy = 100 * hit.double() / truth
        total = int(truth.sum())
        right = 100 * int(hit.sum()) / total if total else float("nan")
        numbers = {"mIoU": float(iou.nanmean()), "mAcc": float(accuracy.nanmean()), "aAcc": right}
        off = self.counts.clone().fill_diagonal_(0)
        rows: list[dict[str, Any]] = []
        for i in torch.where(~iou.isnan())[0].tolist():
            other = int(off[i].argmax())
            row = {"class": self.class_names[i], "IoU": float(iou[i])}
            row["accuracy"] = float(accuracy[i]) if int(truth[i]) else None
            row["pixels"] = 100 * int(truth[i]) / max(total, 1)
            rows.append({**row, "taken for": self.class_names[other] if int(off[i, other]) else ""})
        return numbers, rows

    def card(self, batch: Batch, answer: Tensor) -> Card:
        """The image, its mask and the answer."""
        pixels, side, count = batch.images[0].permute(1, 2, 0).numpy(), 360, len(self.class_names)
        masks = {"truth": batch.targets[0].numpy(), "answer": answer.numpy()}
        pictures = {"image": Image.fromarray(pixels)}
        pictures |= {title: mask_overlay(pixels, mask, count) for title, mask in masks.items()}
        panels = [Panel(title, fit_photo(picture, side)) for title, picture in pictures.items()]
        return Card(batch.keys[0], [Row("", panels, mask_legend(list(masks.values()), self.class_names))], side=side)
