"""A batch as it leaves the loader, and its way to the device: bytes until there, normalised there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples of one step.

    Attributes:
        images: [B, 3, H, W], uint8 from the loader, normalised floats after `to_device`.
        labels: int64 [B], -1 where there is none.
        placement: float32 [B, 2, 3], network fractions -> source fractions.
        indices: int64 [B], the samples' numbers in the data set.
        keys: their names.
        erased: float32 [B, R, 4], rectangles (x0, y0, x1, y1) in network fractions that were erased; unused rows are 0.
            None if nothing is ever erased.
        maps: the samples' score maps, as the `collate_maps` hook made them; None without a store. In segmentation, the
            masks: int16 [B, H, W].
        skipped: (key, reason) of samples that should have been here and could not be read.
    """

    images: Tensor
    labels: Tensor
    placement: Tensor
    indices: Tensor
    keys: tuple[str, ...]
    erased: Tensor | None = None
    maps: Any = None
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in self.__dict__.items()
            if hasattr(value, "to")
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a GPU copies while the CPU goes on."""
        return replace(self, **{n: v.pin_memory() for n, v in self.__dict__.items() if hasattr(v, "pin_memory")})


def normalise(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Tensor:
    """uint8 [B, 3, H, W] -> (pixel / 255 - mean) / std in `dtype`, computed in float32, on the images' own device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    centre = torch.tensor(mean, device=images.device).mul_(255).view(1, -1, 1, 1)
    width = torch.tensor(std, device=images.device).mul_(255).view(1, -1, 1, 1)
    return images.to(torch.float32, memory_format=layout).sub_(centre).div_(width).to(dtype)


def to_device(
    batch: Batch,
    device: torch.device | str,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Batch:
    """Move a batch as bytes, and normalise it there (a quarter of the traffic of moving float32)."""
    moved = batch.to(device, non_blocking=True)
    return replace(moved, images=normalise(moved.images, mean, std, dtype, channels_last))


class Prefetcher:
    """Batches on the device, the next one on its way while the current one is worked on; measures the waiting.

    Args:
        batches: of a loader's epoch.
        device: where they go. On CUDA the copy and the normalisation run on a stream of their own.
        mean, std, dtype, channels_last: as for `to_device`.

    Attributes:
        waited: seconds in which the consumer stood still because the loader had no batch ready.
        worked: seconds that the consumer spent between batches.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        device: torch.device | str,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        self.batches, self.device = batches, torch.device(device)
        self.mean, self.std, self.dtype, self.channels_last = mean, std, dtype, channels_last
        self.waited = self.worked = 0.0

    def __iter__(self) -> Iterator[Batch]:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        source = iter(self.batches)
        upcoming = self._next(source, stream)
        while upcoming is not None:
            ready, upcoming = upcoming, None
            if stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(stream)
                self._record(ready, current)
                upcoming = self._next(source, stream)  # on its way before the consumer gets this one
            started = time.perf_counter()
            yield ready
            self.worked += time.perf_counter() - started
            if stream is None:
                upcoming = self._next(source, stream)

    def _next(self, source: Iterator[Batch], stream: torch.cuda.Stream | None) -> Batch | None:
        started = time.perf_counter()
        batch = next(source, None)
        self.waited += time.perf_counter() - started
        if batch is None:
            return None
        options = (self.device, self.mean, self.std, self.dtype, self.channels_last)
        if stream is None:
            return to_device(batch, *options)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # memory that the consumer freed may be reused here
        with torch.cuda.stream(stream):
            return to_device(batch, *options)

    @staticmethod
    def _record(batch: Batch, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that this stream uses the batch's memory too."""
        for value in (batch.images, batch.labels, batch.placement, batch.indices, batch.erased):
            if value is not None:
                value.record_stream(stream)
        maps = batch.maps
        for value in [maps] if isinstance(maps, Tensor) else vars(maps).values() if maps is not None else ():
            if isinstance(value, Tensor):
                value.record_stream(stream)
