"""Images with objects, and batches of them.

An `InstanceSet` is a `data.DataSet` whose samples also have objects: a box, a class, perhaps a segmentation. Objects
are kept as arrays, and segmentations as text in one block of memory, so that a large data set costs little and worker
processes share it. `coco` reads them.

Images of a batch have different sizes; they lie in the top left corner of a canvas that holds the largest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everytoken import keyed
from everytoken.data import placement as pl
from everytoken.data.batch import Batch
from everytoken.data.decode import ImageError, Picture
from everytoken.data.sampler import Request
from everytoken.data.sources import DataSet, Strings
from everytoken.tasks.detect.augment import DetectTransform
from everytoken.tasks.detect.masks import AnnotationError, Segmentation, boxes_through, encode, through


@dataclass(frozen=True)
class Annotations:
    """Objects of a data set, sorted by image.

    Attributes:
        first: int64 [images + 1]; the objects of image i are first[i] to first[i + 1].
        ids: int64 [n], of the annotations in their file.
        boxes: float64 [n, 4], x0, y0, x1, y1 in pixels of the source, as in the file.
        labels: int64 [n], classes from 0.
        crowd: bool [n], regions of many objects that are not told apart.
        area: float64 [n], as in the file.
        segments: JSON of each segmentation, "" where there is none.
    """

    first: np.ndarray
    ids: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    area: np.ndarray
    segments: Strings


class InstanceSet(DataSet):
    """Images of a folder and their objects.

    Args:
        root: the folder; images: paths below it. sizes: int64 [n, 2], (width, height) of each.
        image_ids: of the images in `source`, the file of the annotations.
        category_ids, class_names: of the classes.
        found: the objects; None: images alone.
        notes: what the reader left out, in words.
    """

    def __init__(
        self,
        root: Path,
        images: Sequence[str],
        sizes: np.ndarray,
        image_ids: np.ndarray,
        category_ids: Sequence[int],
        class_names: Sequence[str],
        found: Annotations | None = None,
        source: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.root, self.name, self.source = root, source or str(root), source
        self.images, self.sizes, self.image_ids = Strings(images), sizes, image_ids
        self.category_ids, self.class_names = list(category_ids), list(class_names)
        self.labels = np.full(len(images), -1, dtype=np.int64)  # of whole images: none
        self.found, self.notes = found, list(notes)

    def key(self, i: int) -> str:
        """The image's path below the root."""
        return self.images[i]

    def where(self, i: int) -> str:
        """The image's path."""
        return f"{self.root}/{self.images[i]}"

    def open_bytes(self, i: int) -> bytes:
        """The image file."""
        return Path(self.where(i)).read_bytes()

    def objects(self, i: int) -> range:
        """Numbers of the objects of image i."""
        if self.found is None:
            return range(0)
        return range(int(self.found.first[i]), int(self.found.first[i + 1]))

    def trained(self, i: int) -> list[int]:
        """Objects of image i that are trained on: no crowds, and at least a pixel wide and high inside the image."""
        if self.found is None:
            return []
        width, height = self.sizes[i].tolist()
        out = []
        for k in self.objects(i):
            x0, y0, x1, y1 = self.found.boxes[k].tolist()
            large = min(x1, width) - max(x0, 0) >= 1 and min(y1, height) - max(y0, 0) >= 1
            if large and not self.found.crowd[k]:
                out.append(k)
        return out

    def segmentation(self, k: int) -> Segmentation | None:
        """Of object k."""
        assert self.found is not None
        text = self.found.segments[k]
        return json.loads(text) if text else None

    def describe(self, k: int) -> str:
        """File and annotation, for messages."""
        assert self.found is not None
        return f"{self.source}: annotation {int(self.found.ids[k])}"

    def check_size(self, i: int, picture: Picture) -> None:
        """The image must have the size that its annotations were made for."""
        width, height = self.sizes[i].tolist()
        if picture.size != (width, height):
            hint = " (the image is turned by its EXIF tag)" if picture.size == (height, width) else ""
            raise AnnotationError(
                f"{self.where(i)} is {picture.size[0]} x {picture.size[1]} pixels, and {self.source} says {width} x "
                f"{height}{hint}. Boxes and masks would be in the wrong place; mend one of the two."
            )

    def as_coco(self, samples: Sequence[int], masks: bool) -> dict[str, Any]:
        """Truth for the COCO evaluator: images `samples`, whose ids become their place in the list (from 1)."""
        annotations: list[dict[str, Any]] = []
        for number, i in enumerate(samples):
            size = (int(self.sizes[i][0]), int(self.sizes[i][1]))
            for k in self.objects(i):
                assert self.found is not None
                x0, y0, x1, y1 = self.found.boxes[k].tolist()
                one: dict[str, Any] = {
                    "id": len(annotations) + 1,
                    "image_id": number + 1,
                    "category_id": int(self.found.labels[k]) + 1,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": float(self.found.area[k]),
                    "iscrowd": int(self.found.crowd[k]),
                }
                if masks:
                    drawn = self.segmentation(k)
                    if drawn is None:
                        drawn = [[x0, y0, x1, y0, x1, y1, x0, y1]]
                    one["segmentation"] = encode(drawn, size, self.describe(k))
                annotations.append(one)
        images = [
            {"id": n + 1, "width": int(self.sizes[i][0]), "height": int(self.sizes[i][1])}
            for n, i in enumerate(samples)
        ]
        categories = [{"id": c + 1, "name": name} for c, name in enumerate(self.class_names)]
        return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def base_of(data: Any, i: int) -> tuple[InstanceSet, int]:
    """The whole data set, and the number of sample i in it, of a set or of a subset of one."""
    while not isinstance(data, InstanceSet):
        data, i = data.base, int(data.indices[i])
    return data, i


@dataclass(frozen=True)
class Objects:
    """Objects of a batch, those of the first image first.

    Attributes:
        boxes: float32 [n, 4] in pixels of the canvas. labels: int64 [n], classes from 1 (0 is none of them).
        masks: uint8 [n, H, W] on the canvas; None without masks.
        counts: objects of each image. sizes: (height, width) of each image on the canvas.
        matrices: float64 [B, 2, 3], pixel of the canvas -> pixel of the source. sources: (height, width) of each.
    """

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    counts: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    matrices: np.ndarray
    sources: tuple[tuple[int, int], ...]

    def _with(self, change: Any) -> Objects:
        masks = None if self.masks is None else change(self.masks)
        return Objects(
            change(self.boxes), change(self.labels), masks, self.counts, self.sizes, self.matrices, self.sources
        )

    def to(self, device: Any, non_blocking: bool = False) -> Objects:
        """The same on another device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Objects:
        """The same in page-locked memory."""
        return self._with(lambda tensor: tensor.pin_memory())

    def per_image(self) -> list[dict[str, Tensor]]:
        """As torchvision's detection parts want them: boxes, labels and masks of each image."""
        boxes, labels = self.boxes.split(self.counts), self.labels.split(self.counts)
        out = [{"boxes": b, "labels": c} for b, c in zip(boxes, labels, strict=True)]
        if self.masks is not None:
            for one, masks in zip(out, self.masks.split(self.counts), strict=True):
                one["masks"] = masks
        return out


class Samples:
    """Makes batches of views; see `Loader(samples=...)`. Views are keyed by (seed, epoch, key).

    Args:
        seed: None: no randomness. masks: with masks of the objects. truth: with objects at all.
    """

    def __init__(
        self, data: Any, transform: DetectTransform, seed: int | None, *, masks: bool = True, truth: bool = True,
        skip: bool = False,
    ) -> None:  # fmt: skip
        self.data, self.transform, self.seed = data, transform, seed
        self.masks, self.truth, self.skip = masks and truth, truth, skip

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, requests: list[Request]) -> Batch:
        made: list[_View] = []
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for request in requests:
            key = self.data.key(request.sample)
            try:
                made.append(self._view(request, key))
            except ImageError as error:
                if not self.skip:
                    raise
                skipped.append((key, str(error)))
                continue
            kept.append(request.sample)
        return _collate(self.data, made, kept, skipped, self.transform.fill, self.masks)

    def _view(self, request: Request, key: str) -> _View:
        data, i = base_of(self.data, request.sample)
        rng = None if self.seed is None else keyed.generator(self.seed, request.epoch, key, "detect")
        picture = data.picture(i)
        if self.truth:
            data.check_size(i, picture)
        pixels, matrix = self.transform(picture, rng)
        height, width = pixels.shape[:2]
        numbers = data.trained(i) if self.truth else []
        found = data.found
        if not numbers or found is None:
            return _View(pixels, np.zeros((0, 4)), np.zeros(0, np.int64), [], matrix, picture.size)
        boxes = boxes_through(found.boxes[numbers], matrix)
        boxes[:, 0::2] = boxes[:, 0::2].clip(0, width)
        boxes[:, 1::2] = boxes[:, 1::2].clip(0, height)
        inside = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        chosen = [k for k, good in zip(numbers, inside.tolist(), strict=True) if good]
        masks = []
        for k in chosen if self.masks else ():
            drawn, where = data.segmentation(k), data.describe(k)
            if drawn is None:
                raise AnnotationError(f"{where} has no segmentation. --no-masks trains on boxes alone.")
            masks.append(through(drawn, picture.size, matrix, (height, width), where))
        return _View(pixels, boxes[inside], found.labels[chosen] + 1, masks, matrix, picture.size)


@dataclass(frozen=True)
class _View:
    pixels: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    masks: list[np.ndarray]
    matrix: np.ndarray
    source: tuple[int, int]  # width, height


def _collate(
    data: DataSet, made: list[_View], kept: list[int], skipped: list[tuple[str, str]], fill: tuple[int, int, int],
    masks: bool,
) -> Batch:  # fmt: skip
    height = max((view.pixels.shape[0] for view in made), default=1)
    width = max((view.pixels.shape[1] for view in made), default=1)
    images = np.empty((len(made), 3, height, width), dtype=np.uint8)
    images[:] = np.array(fill, dtype=np.uint8)[:, None, None]
    total = sum(len(view.labels) for view in made)
    drawn = np.zeros((total, height, width), dtype=np.uint8) if masks else None
    at = 0
    for canvas, view in zip(images, made, strict=True):
        h, w = view.pixels.shape[:2]
        canvas[:, :h, :w] = view.pixels.transpose(2, 0, 1)
        for mask in view.masks if drawn is not None else ():
            drawn[at, :h, :w] = mask  # type: ignore[index]
            at += 1
    objects = Objects(
        boxes=torch.from_numpy(np.concatenate([np.zeros((0, 4)), *(view.boxes for view in made)]).astype(np.float32)),
        labels=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(view.labels for view in made)])),
        masks=None if drawn is None else torch.from_numpy(drawn),
        counts=tuple(len(view.labels) for view in made),
        sizes=tuple((view.pixels.shape[0], view.pixels.shape[1]) for view in made),
        matrices=np.array([view.matrix for view in made]).reshape(-1, 2, 3),
        sources=tuple((view.source[1], view.source[0]) for view in made),
    )
    placement = [pl.from_pixels(view.matrix, view.pixels.shape[1::-1], view.source) for view in made]
    return Batch(
        images=torch.from_numpy(images),
        labels=torch.from_numpy(data.labels[kept]),
        placement=torch.tensor(
            np.array(placement).reshape(-1, 2, 3), dtype=torch.float32
        ),  # of the image, not the canvas
        indices=torch.tensor(kept, dtype=torch.int64),
        keys=tuple(data.key(i) for i in kept),
        targets=objects,
        skipped=tuple(skipped),
    )
