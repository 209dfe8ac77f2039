"""Ask a detector about images: objects in pixels of the source, with masks as run lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image

from everytoken.data.batch import Batch, normalise
from everytoken.tasks.detect.augment import DetectTransform
from everytoken.tasks.detect.masks import run_lengths
from everytoken.tasks.detect.model import Detector, DetectorDescription
from everytoken.tasks.detect.options import DetectAugment, FindOptions


@dataclass(frozen=True)
class Found:
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

    def better_than(self, score: float) -> Found:
        """Those that score at least so much."""
        keep = np.flatnonzero(self.scores >= score)
        masks = None if self.masks is None else [self.masks[i] for i in keep.tolist()]
        return Found(self.boxes[keep], self.scores[keep], self.labels[keep], masks)

    def rows(self, image: int | str, classes: Sequence[int | str]) -> list[dict[str, Any]]:
        """As COCO's result files have it. `classes`: what to call each class."""
        out = []
        for k, (x0, y0, x1, y1) in enumerate(self.boxes.tolist()):
            row: dict[str, Any] = {
                "image_id": image,
                "category_id": classes[int(self.labels[k])],
                "bbox": [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)],
                "score": round(float(self.scores[k]), 5),
            }
            if self.masks is not None:
                row["segmentation"] = self.masks[k]
            out.append(row)
        return out


def resolve(find: FindOptions, augment: DetectAugment) -> FindOptions:
    """With the sizes of evaluation filled in from those of training."""
    size = find.size or min(800, max(augment.sizes))
    return replace(find, size=size, max_size=find.max_size or augment.longest)


@dataclass(frozen=True)
class Inference:
    """A detector, and how it is asked. `mean`, `std`: of the images' normalisation."""

    model: Detector
    find: FindOptions
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(model: Detector, about: DetectorDescription, find: FindOptions) -> Inference:
        """As a description says."""
        return Inference(model, find, tuple(about.backbone.mean), tuple(about.backbone.std))

    @property
    def transform(self) -> DetectTransform:
        """Makes the views that it wants."""
        return DetectTransform((self.find.size,), self.find.max_size)

    def __call__(self, batch: Batch, device: torch.device | str) -> list[Found]:
        """Objects of each image of a batch of bytes."""
        images = normalise(batch.images.to(device), self.mean, self.std)
        answers = self.model.detect(images, batch.targets.sizes, self.find)
        out = []
        for one, matrix, size in zip(answers, batch.targets.matrices, batch.targets.sources, strict=True):
            boxes = one["boxes"].float().cpu().numpy().astype(np.float64)
            scale = np.array([matrix[0, 0], matrix[1, 1]] * 2)  # the view is upright
            boxes = boxes * scale + np.array([matrix[0, 2], matrix[1, 2]] * 2)
            masks = None
            if "masks" in one:
                masks = _paste(one["masks"].cpu(), boxes, size)
            out.append(
                Found(boxes, one["scores"].cpu().numpy().astype(np.float64), one["labels"].cpu().numpy() - 1, masks)
            )
        return out


def _paste(masks: torch.Tensor, boxes: np.ndarray, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Masks [n, 28, 28] put into their boxes on an image of (height, width), one after the other to save memory."""
    out = []
    for mask, box in zip(masks, boxes, strict=True):
        where = torch.from_numpy(box[None]).float()
        whole = paste_masks_in_image(mask[None, None].float(), where, size)[0, 0]
        out += run_lengths((whole >= 0.5).numpy()[None])
    return out
