"""Batches of decoded images for the annotator, in an order that depends on the plan alone.

A batch lies inside one shard and always has the same images, whichever shards are still to be done and however many
processes share them: what a network answers for an image can depend, in the last bit, on the batch it is in. An image
that cannot be read leaves a black place in its batch, for the same reason, and is reported.

Decoding, EXIF rotation and resizing happen in worker processes: the whole image, squashed or letterboxed on the mean
colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError
from everytoken.maps import MapWriter
from everytoken_lab.annotators.annotator import Preprocessing
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.loader import close_workers, read_ahead, receive

Area = tuple[float, float, float, float]
_CROP_MODES = {"squash": "squash", "letterbox": "border", "center": "center"}


def eval_view(preprocessing: Preprocessing, resize: str) -> EvalTransform:
    """The view of an image: all of it ("squash", "letterbox") or its middle ("center")."""
    if resize not in _CROP_MODES:
        raise EverytokenError(f"resize is {resize!r}; it can be {', '.join(_CROP_MODES)}.")
    return EvalTransform(
        img_size=preprocessing.size,
        crop_pct=1.0,
        crop_mode=_CROP_MODES[resize],
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
    )


@dataclass(frozen=True)
class ImageBatch:
    """Images of one batch.

    Attributes:
        positions: [n] in the store's order.
        indices: int64 [n] in the dataset's order.
        pixels: uint8 [n, H, W, 3]; black where an image could not be read.
        sizes: int64 [n, 2] (width, height) of the upright source images; 0 where one could not be read.
        areas: float64 [n, 4], what the input covers of the image, in fractions.
        failures: place in the batch -> why the image could not be read.
    """

    positions: Sequence[int]
    indices: np.ndarray
    pixels: Tensor
    sizes: np.ndarray
    areas: np.ndarray
    failures: dict[int, str]

    def __len__(self) -> int:
        return len(self.positions)

    def pin_memory(self) -> ImageBatch:
        """The same with the pixels in page-locked memory; the loader calls this."""
        return replace(self, pixels=self.pixels.pin_memory())


class BatchReader:
    """Batches by their positions.

    Args:
        data: the images.
        order: [n] index in `data` of each position of the store.
        view: what of each image, and how large.
    """

    def __init__(self, data: DataSet, order: np.ndarray, view: EvalTransform) -> None:
        self.data, self.order, self.view = data, order, view

    def __getitems__(self, positions: Sequence[int]) -> ImageBatch:
        """The batch of some positions."""
        height, width = self.view.size
        pixels = np.zeros((len(positions), height, width, 3), dtype=np.uint8)
        sizes = np.zeros((len(positions), 2), dtype=np.int64)
        areas = np.tile(np.array([0.0, 0.0, 1.0, 1.0]), (len(positions), 1))
        failures: dict[int, str] = {}
        indices = self.order[np.asarray(positions)]
        for place, index in enumerate(indices.tolist()):
            try:
                picture = self.data.picture(index)
                pixels[place], placement = self.view(picture)
                sizes[place], areas[place] = picture.size, pl.box(placement)
            except (EverytokenError, OSError) as error:
                pixels[place] = 0
                failures[place] = _reason(str(error), self.data.where(index))
        return ImageBatch(positions, indices, torch.from_numpy(pixels), sizes, areas, failures)


def _reason(message: str, where: str) -> str:
    """Why, without where: a store names images by their keys and holds no paths of this machine."""
    short = message.replace(where, "").strip(" :.\n")
    return short or "cannot be read"


def store_order(data: DataSet) -> np.ndarray:
    """[n] index in the dataset of each position of the store, which sorts keys by their bytes."""
    keys = [key.encode("utf-8", "surrogateescape") for key in data.keys()]  # noqa: SIM118
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


class _Batches:
    """Positions, batch after batch, shard after shard; a sampler that holds no list."""

    def __init__(self, writer: MapWriter, shards: Sequence[int], batch_size: int, done: frozenset[int]) -> None:
        self.writer, self.shards, self.batch_size, self.done = writer, shards, batch_size, done

    def __iter__(self) -> Iterator[Sequence[int]]:
        for shard in self.shards:
            span: Sequence[int] = self.writer.shard_range(shard)
            left = [position for position in span if position not in self.done] if self.done else span
            for start in range(0, len(left), self.batch_size):
                yield left[start : start + self.batch_size]


def batches(
    reader: BatchReader,
    writer: MapWriter,
    shards: Sequence[int],
    batch_size: int,
    workers: int,
    pin: bool,
    done: frozenset[int] = frozenset(),
) -> Iterator[ImageBatch]:
    """All batches of some shards without the positions that are `done`, decoded ahead by `workers` processes (0: in
    this one, when asked for)."""
    yield from read_batches(reader, _Batches(writer, shards, batch_size, done), workers, pin)


def read_batches(
    reader: BatchReader, spans: Iterable[Sequence[int]], workers: int, pin: bool = False
) -> Iterator[ImageBatch]:
    """The batch of each span of positions, decoded ahead by `workers` processes."""
    generator = torch.Generator()  # workers are seeded, though nothing here is random; not from the global numbers
    loader = read_ahead(reader, spans, workers, generator=generator, pin_memory=pin, ahead=2)
    try:
        yield from receive(loader)
    finally:
        close_workers(loader)
