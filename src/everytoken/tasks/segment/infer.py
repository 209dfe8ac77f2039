"""From an image to a class for every pixel: whole or by windows, at several scales, mirrored too.

An image is resized so that its short side is that of training (its long side at most four times that), times each
scale. Logits of overlapping windows are averaged; of scales and mirrored images, probabilities. The result is
interpolated to the image's own size, a few classes at a time so that memory stays bounded, and the best class taken.
As in the papers' set-ups: windows of 512 every 341 pixels; scales 0.5 or 0.75 to 1.75 with mirroring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everytoken.data.batch import normalise
from everytoken.tasks.segment.augment import resized
from everytoken.tasks.segment.heads import resize
from everytoken.tasks.segment.options import EvalOptions

Network = Callable[[Tensor], Tensor]
_WINDOWS = 8  # that go through the network together
_CHUNK = 2**26  # numbers that are interpolated together


@dataclass(frozen=True)
class Inference:
    """How a network is asked.

    Attributes:
        network: images [B, 3, H, W] -> logits [B, K, H, W].
        short: length of the short side at scale 1. window: side of the windows.
        mean, std: normalisation.
        options: whole or windows, their step, scales, mirroring.
        fixed: the network takes windows of exactly this size; smaller images are padded.
        columns: of the network's classes, those wanted, in this order; None: all.
    """

    network: Network
    short: int
    window: int
    mean: Sequence[float]
    std: Sequence[float]
    options: EvalOptions
    fixed: bool = False
    columns: Tensor | None = None

    @torch.no_grad()
    def __call__(self, image: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """uint8 [1, 3, H, W] -> int64 [H, W] of classes, or of another (height, width)."""
        size = size or (image.shape[-2], image.shape[-1])
        return best_class(self.scores(image), size)

    @torch.no_grad()
    def scores(self, image: Tensor) -> Tensor:
        """[1, K, h, w] at scale 1: logits of a single pass, else mean probabilities."""
        width, height = resized((image.shape[-1], image.shape[-2]), self.short)
        many = len(self.options.scales) > 1 or self.options.flip
        total: Tensor | None = None
        for scale in self.options.scales:
            at = (max(round(height * scale), 1), max(round(width * scale), 1))
            view = normalise(_resized_bytes(image, at), self.mean, self.std)
            for mirrored in (False, True) if self.options.flip else (False,):
                logits = self._logits(view.flip(-1) if mirrored else view)
                logits = logits.flip(-1) if mirrored else logits
                answer = resize(logits, (height, width))
                answer = answer.softmax(1) if many else answer
                total = answer if total is None else total + answer
        assert total is not None
        return total

    def _logits(self, view: Tensor) -> Tensor:
        if self.options.mode == "whole":
            out = self.network(view)
        else:
            out = slide(self.network, view, self.window, self.options.stride or -(-2 * self.window // 3), self.fixed)
        out = out.float()
        return out if self.columns is None else out[:, self.columns.to(out.device)]


def _resized_bytes(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Anti-aliased, rounded to whole levels, as an image editor would."""
    if (image.shape[-2], image.shape[-1]) == size:
        return image
    made = F.interpolate(image.float(), size, mode="bilinear", antialias=True)
    return made.round_().clamp_(0, 255)


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along an axis: every `stride`, the last one at the end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def slide(network: Network, images: Tensor, window: int, stride: int, fixed: bool = False) -> Tensor:
    """The mean of the logits of overlapping windows. [1, 3, H, W] -> [1, K, H, W].

    Args:
        fixed: pad images that are smaller than a window; otherwise the window shrinks.
    """
    height, width = images.shape[-2:]
    if fixed:
        images = F.pad(images, (0, max(window - width, 0), 0, max(window - height, 0)))
    rows, columns = images.shape[-2:]
    h, w = min(rows, window), min(columns, window)
    places = [(y, x) for y in starts(rows, window, stride) for x in starts(columns, window, stride)]
    total: Tensor | None = None
    count = torch.zeros(1, 1, rows, columns, device=images.device)
    for first in range(0, len(places), _WINDOWS):
        part = places[first : first + _WINDOWS]
        logits = network(torch.cat([images[..., y : y + h, x : x + w] for y, x in part])).float()
        if total is None:
            total = logits.new_zeros(1, logits.shape[1], rows, columns)
        for k, (y, x) in enumerate(part):
            total[..., y : y + h, x : x + w] += logits[k]
            count[..., y : y + h, x : x + w] += 1
    assert total is not None
    return (total / count)[..., :height, :width]


def best_class(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """[1, K, h, w] -> int64 [H, W]: the class with the largest interpolated score."""
    step = max(1, _CHUNK // (size[0] * size[1]))
    best: Tensor | None = None
    index = torch.zeros(size, dtype=torch.int64, device=scores.device)
    for first in range(0, scores.shape[1], step):
        value, where = resize(scores[:, first : first + step], size)[0].max(0)
        if best is None:
            best, index = value, where
            continue
        better = value > best
        index = torch.where(better, where + first, index)
        best = torch.where(better, value, best)
    return index
