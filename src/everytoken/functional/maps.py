"""Score maps of a batch, as tensors, each image with its own short list of classes.

Paper: All Tokens Matter (token labeling), 4.1: the top five scores of every cell are stored, in half precision.
Differently: nothing here is as wide as the number of classes K. One image's map names a few tens of classes, its
*vocabulary*; a cell then keeps small indices into it, one byte each. Class numbers stay integers: the released
format stores them as float16, which is wrong from class 2049 on.
Cost: about 20 µs and 5-6 KB per image (18x18 cells, five scores), in the loader's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError

# A rectangle that no image reaches: an image without a map gets it, and so its weight is 0 everywhere.
NOWHERE = (2.0, 2.0, 3.0, 3.0)


class ScoreMapLike(Protocol):
    """What `everytoken.maps.ScoreMap` offers; any object with these attributes will do."""

    @property
    def scores(self) -> np.ndarray:
        """[h, w, k] float, the k best scores of each cell."""

    @property
    def classes(self) -> np.ndarray:
        """[h, w, k] integer, their classes; distinct within a cell."""

    @property
    def area(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) of the grid in fractions of the image."""


@dataclass(frozen=True)
class MapBatch:
    """The score maps of a batch.

    Attributes:
        scores: [B, h, w, k] float16 or float32, annotator logits.
        local: [B, h, w, k] uint8 or int16, position of each score's class in the image's row of `classes`.
        classes: [B, U] int64, the vocabulary; -1 fills up short rows.
        area: [B, 4] float32, (x0, y0, x1, y1): what the grid covers, in fractions of the image.
        num_classes: K, the number of classes the annotator knows.
        cut: vocabularies hold only what given placements show; cells beyond them mean nothing.
    """

    scores: Tensor
    local: Tensor
    classes: Tensor
    area: Tensor
    num_classes: int
    cut: bool = False

    def __len__(self) -> int:
        return self.scores.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """(h, w): rows and columns of the grid."""
        return self.scores.shape[1], self.scores.shape[2]

    def apply(self, change: Callable[[Tensor], Tensor]) -> MapBatch:
        """The same maps with every tensor changed in one way."""
        scores, local, classes, area = map(change, (self.scores, self.local, self.classes, self.area))
        return MapBatch(scores, local, classes, area, self.num_classes, self.cut)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MapBatch:
        """The same maps on another device."""
        return self.apply(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MapBatch:
        """The same maps in page-locked memory; torch's DataLoader calls this."""
        return self.apply(lambda t: t.pin_memory())


def vocabulary(classes: np.ndarray, num_classes: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The distinct classes of one map, and every cell's classes as positions among them.

    Args:
        classes: [h, w, k] (any shape) integer class numbers of one record.
        num_classes: K; class numbers must be below it. None takes the largest number found.

    Returns:
        (vocabulary [U] int64 ascending, local: same shape as `classes`, uint8 when U <= 256, else int16), with
        ``vocabulary[local] == classes``.
    """
    flat = classes.reshape(-1).astype(np.intp)
    if num_classes is None:
        num_classes = int(flat.max(initial=0)) + 1
    # A table of K marks is several times faster than sorting (np.unique).
    seen = np.zeros(num_classes, dtype=bool)
    lowest, highest = int(flat.min(initial=0)), int(flat.max(initial=0))
    if lowest < 0 or highest >= num_classes:
        raise EverytokenError(
            f"a score map names class {lowest if lowest < 0 else highest}, but there are only {num_classes} classes "
            f"(0 to {num_classes - 1}). The map is of another annotator or damaged: "
            "run `everytoken labels verify` on its store."
        )
    seen[flat] = True
    words = np.flatnonzero(seen)
    table = np.zeros(num_classes, dtype=np.uint8 if len(words) <= 256 else np.int16)
    table[words] = np.arange(len(words))
    return words, table.take(flat).reshape(classes.shape)


def collate_maps(
    maps: Sequence[ScoreMapLike | None],
    num_classes: int,
    placements: Sequence[np.ndarray] | np.ndarray | None = None,
    multiple: int = 8,
) -> MapBatch:
    """Stack the records of a batch, with vocabularies filled up to one length.

    Args:
        maps: one record per image, or None for an image without a map (its weight is 0 everywhere). All grids of a
            batch have one shape.
        num_classes: K of the annotator.
        placements: [B, 2, 3], if the maps will be sampled through just these: vocabularies then hold only classes
            that the network's input shows, which makes targets smaller. Results are the same, but not with
            `legacy`, which looks elsewhere and refuses such maps.
        multiple: U is rounded up to a multiple of this, so that compiled code sees few different shapes.
    """
    shapes = {m.scores.shape for m in maps if m is not None}
    if len(shapes) > 1:
        raise EverytokenError(
            f"one batch has score maps of different shapes {sorted(shapes)}; a store has one grid for all its images, "
            "so these maps are of different stores. Annotate all images into one store."
        )
    h, w, k = shapes.pop() if shapes else (1, 1, 1)
    area = np.array([NOWHERE if m is None else m.area for m in maps], np.float32).reshape(-1, 4)
    windows = None if placements is None else _windows(np.asarray(placements, np.float64), area, (h, w))
    found: list[tuple[np.ndarray, np.ndarray] | None] = []
    for i, record in enumerate(maps):
        if record is None:
            found.append(None)
        elif windows is None:
            found.append(vocabulary(record.classes, num_classes))
        else:
            top, bottom, left, right = windows[i]
            found.append(_shown(record.classes, num_classes, slice(top, bottom), slice(left, right)))
    longest = max((len(f[0]) for f in found if f is not None), default=0)
    width = max(multiple, -(-longest // multiple) * multiple)
    kind = np.result_type(np.float16, *(m.scores.dtype for m in maps if m is not None))
    scores = np.zeros((len(maps), h, w, k), kind)
    local = np.zeros((len(maps), h, w, k), np.uint8 if longest <= 256 else np.int16)
    classes = np.full((len(maps), width), -1, np.int64)
    for i, (record, words) in enumerate(zip(maps, found, strict=True)):
        if record is not None and words is not None:
            scores[i] = record.scores
            classes[i, : len(words[0])] = words[0]
            local[i] = words[1]
    arrays = (torch.from_numpy(a) for a in (scores, local, classes, area))
    scores_, local_, classes_, area_ = arrays
    return MapBatch(scores_, local_, classes_, area_, num_classes, placements is not None)


def _shown(classes: np.ndarray, num_classes: int, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
    """As `vocabulary`, of a window of the map; cells beyond it are never sampled and may point anywhere."""
    words, inner = vocabulary(classes[rows, columns], num_classes)
    local = np.zeros(classes.shape, inner.dtype)
    local[rows, columns] = inner
    return words, local


def _windows(placements: np.ndarray, area: np.ndarray, size: tuple[int, int]) -> list[list[int]]:
    """(first row, last row + 1, first column, last column + 1) of the cells that each placement can touch."""
    corners = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]], np.float64).T
    points = placements @ corners  # [B, 2, 4]: x and y of the input's corners, in fractions of the image
    start, extent = area[:, :2, None], (area[:, 2:] - area[:, :2])[:, :, None]
    cells = (points - start) / extent * np.array([[size[1]], [size[0]]]) - 0.5
    limit = np.array([size[1], size[0]]) - 1
    # One cell more on each side: borders repeat the outermost cell, and rounding must not lose one.
    low = np.clip(np.floor(cells.min(2)) - 1, 0, limit).astype(np.int64)
    high = np.clip(np.floor(cells.max(2)) + 2, 0, limit).astype(np.int64) + 1
    return np.stack([low[:, 1], high[:, 1], low[:, 0], high[:, 0]], axis=1).tolist()
