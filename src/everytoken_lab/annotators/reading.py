"""Batches of decoded images for annotators and features.

A batch always has the same images, whatever is still to be done and however many processes share the work: what a
network answers for an image can depend, in the last bit, on its batch. For the same reason an image that cannot be read
leaves a black place in its batch; it is reported in `failures`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.loader import Workers


@dataclass(frozen=True)
class ImageBatch:
    """Images of one batch.

    Attributes:
        positions: [n] as they were asked for.
        indices: int64 [n] in the dataset's order.
        images: uint8 [n, 3, H, W]; black where an image could not be read.
        sizes: int64 [n, 2] (width, height) of the upright source images; 0 where one could not be read.
        areas: float64 [n, 4], what the input covers of the image, in fractions.
        failures: place in the batch -> why the image could not be read.
    """

    positions: Sequence[int]
    indices: np.ndarray
    images: Tensor
    sizes: np.ndarray
    areas: np.ndarray
    failures: dict[int, str]

    def __len__(self) -> int:
        return len(self.positions)

    def pin_memory(self) -> ImageBatch:
        """The same with the images in page-locked memory; torch's loader calls this."""
        return replace(self, images=self.images.pin_memory())


class ImageReader:
    """Batches by their positions: `order` [n] has the index in `data` of each."""

    def __init__(self, data: DataSet, order: np.ndarray, transform: EvalTransform) -> None:
        self.data, self.order, self.transform = data, order, transform

    def __getitems__(self, positions: Sequence[int]) -> ImageBatch:
        images = np.zeros((len(positions), 3, *self.transform.size), dtype=np.uint8)
        sizes = np.zeros((len(positions), 2), dtype=np.int64)
        areas = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(positions), 1))
        failures: dict[int, str] = {}
        indices = self.order[np.asarray(positions)]
        for place, index in enumerate(indices.tolist()):
            try:
                picture = self.data.picture(index)
                pixels, placement = self.transform(picture)
                images[place], sizes[place], areas[place] = pixels.transpose(2, 0, 1), picture.size, pl.box(placement)
            except (EverytokenError, OSError) as error:  # a store holds no paths of this machine
                reason = str(error).replace(self.data.where(index), "").strip(" :.\n")
                failures[place] = reason or "cannot be read"
        return ImageBatch(positions, indices, torch.from_numpy(images), sizes, areas, failures)


def read_batches(
    reader: ImageReader, spans: Iterable[Sequence[int]], workers: int, pin: bool = False
) -> Iterator[ImageBatch]:
    """The batch of each span of positions, decoded ahead by `workers` processes (0: in this one, when asked for)."""
    with closing(Workers(reader, spans, workers, pin, ahead=2)) as ahead:
        yield from ahead
