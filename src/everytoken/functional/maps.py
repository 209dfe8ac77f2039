"""Score maps of a batch, as tensors, each image with its own short list of classes.

Paper: All Tokens Matter (token labeling), 4.1: the top five scores of every cell are stored, in half precision.
Differently: nothing here is as wide as the number of classes K. One image's map names a few tens of classes, its
*vocabulary*; a cell then keeps small indices into it, one byte each. Class numbers stay integers: the released
format stores them as float16, which is wrong from class 2049 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError

if TYPE_CHECKING:
    from everytoken.maps import ScoreMap

# A rectangle that no image reaches: an image without a map gets it, and so its weight is 0 everywhere.
NOWHERE = (2.0, 2.0, 3.0, 3.0)


@dataclass(frozen=True)
class MapBatch:
    """The score maps of a batch.

    Attributes:
        scores: [B, h, w, k] float16 or float32, annotator logits.
        local: [B, h, w, k] uint8 or int16, position of each score's class in the image's row of `classes`.
        classes: [B, U] int64, the vocabulary; -1 fills up short rows.
        area: [B, 4] float32, (x0, y0, x1, y1): what the grid covers, in fractions of the image.
        num_classes: K, the number of classes the annotator knows.
    """

    scores: Tensor
    local: Tensor
    classes: Tensor
    area: Tensor
    num_classes: int

    def __len__(self) -> int:
        return self.scores.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """(h, w): rows and columns of the grid."""
        return self.scores.shape[1], self.scores.shape[2]

    def apply(self, change: Callable[[Tensor], Tensor]) -> MapBatch:
        """The same maps with every tensor changed in one way."""
        scores, local, classes, area = map(change, (self.scores, self.local, self.classes, self.area))
        return MapBatch(scores, local, classes, area, self.num_classes)

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
    present = np.zeros(num_classes, dtype=bool)
    lowest, highest = int(flat.min(initial=0)), int(flat.max(initial=0))
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise EverytokenError(f"a score map names class {wrong}, but there are only {num_classes} classes.")
    present[flat] = True
    words = np.flatnonzero(present)
    table = np.zeros(num_classes, dtype=np.uint8 if len(words) <= 256 else np.int16)
    table[words] = np.arange(len(words))
    return words, table.take(flat).reshape(classes.shape)


def collate_maps(maps: Sequence[ScoreMap | None], num_classes: int, multiple: int = 8) -> MapBatch:
    """Stack the records of a batch, with vocabularies filled up to one length.

    Args:
        maps: one record per image, or None for an image without a map (its weight is 0 everywhere). All grids of a
            batch have one shape.
        num_classes: K of the annotator.
        multiple: U is rounded up to a multiple of this, so that compiled code sees few different shapes.
    """
    shapes = {m.scores.shape for m in maps if m is not None}
    if len(shapes) > 1:
        raise EverytokenError(f"one batch has score maps of different shapes {sorted(shapes)}, so of different stores.")
    h, w, k = shapes.pop() if shapes else (1, 1, 1)
    vocabularies = [None if m is None else vocabulary(m.classes, num_classes) for m in maps]
    longest = max((len(v[0]) for v in vocabularies if v is not None), default=0)
    width = max(multiple, -(-longest // multiple) * multiple)
    dtype = np.result_type(np.float16, *(m.scores.dtype for m in maps if m is not None))
    scores = np.zeros((len(maps), h, w, k), dtype)
    local = np.zeros((len(maps), h, w, k), np.uint8 if longest <= 256 else np.int16)
    classes = np.full((len(maps), width), -1, np.int64)
    area = np.array([NOWHERE if m is None else m.area for m in maps], np.float32).reshape(-1, 4)
    for i, (score_map, words) in enumerate(zip(maps, vocabularies, strict=True)):
        if score_map is not None and words is not None:
            scores[i] = score_map.scores
            classes[i, : len(words[0])], local[i] = words
    tensors = [torch.from_numpy(array) for array in (scores, local, classes, area)]
    return MapBatch(tensors[0], tensors[1], tensors[2], tensors[3], num_classes)
