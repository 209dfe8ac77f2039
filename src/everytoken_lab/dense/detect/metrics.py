"""Detections, and average precision as COCO defines it, computed by COCO's own evaluator (pycocotools).

AP is the mean over IoU 0.50, 0.55, ..., 0.95; AP50 and AP75 are at one IoU; APs, APm, APl are of objects up to 32 x 32,
up to 96 x 96, and larger. All in percent. Objects found inside crowd regions are neither right nor wrong.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everytoken.errors import need
from everytoken_lab.dense.detect.data import InstanceSet

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


@dataclass(frozen=True)
class Detections:
    """Objects of one image, best first.

    Attributes:
        boxes: float64 [n, 4], x0, y0, x1, y1 in pixels of the source. scores: float64 [n].
        labels: int64 [n], classes from 0.
        masks: COCO run lengths at the source's size; None without masks.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: list[dict[str, Any]] | None

    def better_than(self, score: float) -> Detections:
        """Those that score at least so much."""
        return self.take(np.flatnonzero(self.scores >= score).tolist())

    def take(self, numbers: list[int]) -> Detections:
        """Some of them."""
        masks = None if self.masks is None else [self.masks[k] for k in numbers]
        return Detections(self.boxes[numbers], self.scores[numbers], self.labels[numbers], masks)

    def rows(self, image: int | str, classes: Sequence[int | str | None]) -> list[dict[str, Any]]:
        """As COCO's result files have it. `classes`: what to call each class."""
        rows = []
        for k, (x0, y0, x1, y1) in enumerate(self.boxes.tolist()):
            row: dict[str, Any] = {
                "image_id": image,
                "category_id": classes[int(self.labels[k])],
                "bbox": [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)],
                "score": round(float(self.scores[k]), 5),
            }
            if self.masks is not None:
                row["segmentation"] = self.masks[k]
            rows.append(row)
        return rows


def average_precision(
    data: InstanceSet, detections: Mapping[int, Detections], columns: Sequence[int] | None = None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compare detections with the truth.

    Args:
        data: the truth. detections: by number of the image in `data`; images that are not there do not count.
        columns: class of the data for each class of the detector, -1 for none; default: the same.

    Returns:
        "box AP", "box AP50", ..., "mask AP", ... in percent, -1 where no object is of that kind; and a row for each
        class that occurs: class, objects, and AP and AP50 of boxes and masks.
    """
    api, evaluator = (need(f"pycocotools.{name}", "detect", "everytoken detect") for name in ("coco", "cocoeval"))
    samples = sorted(detections)
    masks = any(image.masks is not None for image in detections.values())
    categories = [c + 1 for c in (columns if columns is not None else range(data.num_classes))]
    rows = [row for number, i in enumerate(samples) for row in detections[i].rows(number + 1, categories)]
    rows = [row for row in rows if row["category_id"] > 0]
    numbers: dict[str, float] = {}
    table: dict[int, dict[str, Any]] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # the evaluator talks
        truth = api.COCO()
        truth.dataset = data.as_coco(samples, masks)
        truth.createIndex()
        for row in truth.dataset["annotations"]:
            if not row["iscrowd"]:
                name = data.class_names[row["category_id"] - 1]
                entry = table.setdefault(row["category_id"], {"class": name, "objects": 0})
                entry["objects"] += 1
        for kind, what in (("box", "bbox"), ("mask", "segm")):
            if kind == "mask" and not masks:
                continue
            if not rows:
                numbers.update({f"{kind} {name}": 0.0 for name in NAMES})
                for entry in table.values():
                    entry.update({f"{kind} AP": 0.0, f"{kind} AP50": 0.0})
                continue
            evaluation = evaluator.COCOeval(truth, truth.loadRes([dict(row) for row in rows]), what)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            values = [float(v) for v in evaluation.stats[:6]]
            numbers.update({f"{kind} {n}": 100 * v if v >= 0 else -1.0 for n, v in zip(NAMES, values, strict=True)})
            curves = evaluation.eval["precision"]  # [IoU, recall, class, area, limit]
            for k, category in enumerate(evaluation.params.catIds):
                if category in table:
                    table[category][f"{kind} AP"] = _mean(curves[:, :, k, 0, -1])
                    table[category][f"{kind} AP50"] = _mean(curves[0, :, k, 0, -1])
    return numbers, [table[c] for c in sorted(table)]


def _mean(values: np.ndarray) -> float:
    defined = values[values > -1]
    return round(100 * float(defined.mean()), 3) if defined.size else -1.0
