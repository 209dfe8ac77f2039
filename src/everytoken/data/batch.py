"""One batch, from the loader to the loss, and its way to the device: bytes until there, normalised there.

    batch = Batch(images, labels, placement=placement, maps=maps)
    for name, term in TokenLabeling()(model(batch.images), batch).items(): ...

The loader fills the first half; training adds the key of its randomness, the mix and the teacher's answer. Objectives
read it; nothing changes it in place (`dataclasses.replace`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everytoken.functional import CompactTarget, MapBatch, SamplingPlan, plan_sampling
from everytoken.keyed import StepKey

if TYPE_CHECKING:
    from everytoken.mixing.mix import Mix


@dataclass(frozen=True)
class TeacherView:
    """What a teacher answered to the pixels that the student saw, before tokens were mixed.

    Attributes:
        logits: [B, K].
        token_logits: [B, h, w, C] on any grid, or None.
    """

    logits: Tensor
    token_logits: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Samples of one step. Only `images` is always there; objectives say what else they need.

    Attributes:
        images: [B, 3, H, W], uint8 from the loader, normalised floats after `to_device`.
        labels: int64 [B], classes of the dataset, -1 where there is none; or [B, K], 1 for each class of an image that
            may have several.
        placement: float32 [B, 2, 3], network input to source image, in fractions; needed with maps.
        maps: score maps of the images.
        keys: the samples' names.
        indices: int64 [B], the samples' numbers in the dataset.
        targets: of dense tasks: masks int16 [B, H, W], or objects.
        skipped: (key, reason) of samples that should have been here and could not be read.
        sampling: from `plan`; without it, sampling maps on a GPU waits for the placements.
        token_target, class_target: ready-made targets [B, h, w] and [B], instead of maps.
        mix: how the images are mixed. Pixels have been mixed already; targets never.
        teacher: a teacher's answer.
        teacher_tokens: [B, h, w, D] a teacher's tokens of these images before any mixing, on a grid of its own.
        key: what repeats the random draws of this step; None: objectives draw from torch's generator.
    """

    images: Tensor
    labels: Tensor | None = None
    placement: Tensor | None = None
    maps: MapBatch | None = None
    keys: tuple[str, ...] = ()
    indices: Tensor | None = None
    targets: Any = None
    skipped: tuple[tuple[str, str], ...] = ()
    sampling: SamplingPlan | None = None
    token_target: CompactTarget | None = None
    class_target: CompactTarget | None = None
    mix: Mix | None = None
    teacher: TeacherView | None = None
    teacher_tokens: Tensor | None = None
    key: StepKey | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def plan(self, grid: tuple[int, int]) -> Batch:
        """The batch with its sampling planned for a token grid. Call it on the host, before `to`."""
        if self.maps is None or self.placement is None:
            return self
        return replace(self, sampling=plan_sampling(self.placement, self.maps.area, self.maps.size, grid))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self._change("to", lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a GPU copies while the CPU works."""
        return self._change("pin_memory", lambda part: part.pin_memory())

    def _change(self, method: str, change: Callable[[Any], Any]) -> Batch:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(part) for name, part in parts.items() if hasattr(part, method)})


def normalise(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Tensor:
    """uint8 [B, 3, H, W] -> (pixel / 255 - mean) / std in `dtype`, computed in float32, on the images' own device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    centre, width = (
        torch.tensor(values).mul_(255).view(1, -1, 1, 1).to(images.device, non_blocking=True) for values in (mean, std)
    )
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
    """Batches on the device, the next one on its way while the current one is worked on.

    Args:
        batches: of a loader's epoch.
        device: where they go. On CUDA the copy and the normalisation run on a stream of their own.
        mean, std, channels_last: as for `to_device`.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        device: torch.device | str,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool = False,
    ) -> None:
        self.batches, self.device = batches, torch.device(device)
        self.mean, self.std, self.channels_last = mean, std, channels_last

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type != "cuda":
            for batch in self.batches:
                yield self._ready(batch)
            return
        stream, source = torch.cuda.Stream(self.device), iter(self.batches)
        upcoming = self._send(next(source, None), stream)
        while upcoming is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(stream)
            for tensor in tensors_in(upcoming):
                tensor.record_stream(current)  # the allocator must know that this stream uses the memory too
            ready, upcoming = upcoming, self._send(next(source, None), stream)
            yield ready

    def _ready(self, batch: Batch) -> Batch:
        return to_device(batch, self.device, self.mean, self.std, channels_last=self.channels_last)

    def _send(self, batch: Batch | None, stream: torch.cuda.Stream) -> Batch | None:
        if batch is None:
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))  # memory that the consumer freed may be reused here
        with torch.cuda.stream(stream):
            return self._ready(batch)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, also inside its maps, targets and mix."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)
