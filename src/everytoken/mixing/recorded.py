"""Mixing by other libraries: which pixels their CutMix and MixUp take from which image, found by mixing a record.

The record is two more "channels": image b of n is the point at angle 2πb/n of the unit circle. A mixed pixel then lies
on the chord from its own image's point to the partner's: the chord's direction is the partner, and how far along it the
pixel lies is the partner's part. So whatever mixes two images linearly is understood, without knowing its code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

import torch

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Device, Guide, Mix, Mixer, Rng, Size


class Recorded(Mixer):
    """A mixer of timm or torchvision as one of ours: `images, mix = mixer(images)`; labels stay class numbers.

    Args:
        mixer: called with (images [B, 2, H, W], labels [B]), answers (mixed images, ...): timm's `Mixup`, torchvision's
            `v2.CutMix`, `v2.MixUp`, `v2.RandomChoice` of them. It draws from its own generator, so not from keys.

    Example:
        mixer = Recorded(timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000))
        mixed, mix = mixer(images)
        with aligned(model, mix) as shares:
            logits = model(mixed)
        loss = shares.cross_entropy(logits, labels)
    """

    needs_grid = False

    def __init__(self, mixer: Callable[..., Any]) -> None:
        self.mixer = mixer

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """As `Mixer.draw`."""
        angle = torch.arange(batch_size, device=device) * (2 * pi / batch_size)
        points = torch.stack((angle.cos(), angle.sin()), dim=1)  # [B, 2]
        record = points[:, :, None, None].expand(-1, -1, *image_size).clone()
        mixed = self.mixer(record, torch.zeros(batch_size, dtype=torch.int64, device=device))[0]
        away = (mixed - points[:, :, None, None]).flatten(2)
        farthest = away.norm(dim=1).argmax(1)
        x, y = away.gather(2, farthest[:, None, None].expand(-1, 2, 1))[..., 0].unbind(1)
        # the chord between two points of a circle is at right angles to the mean of their angles
        other = 2 * torch.atan2(y, x) - pi - angle
        partner = (other * (batch_size / (2 * pi))).round().long() % batch_size
        alone = torch.stack((x, y)).norm(dim=0) < 1e-5
        partner = torch.where(alone, torch.arange(batch_size, device=device), partner)
        chord = (points[partner] - points)[..., None]
        length = chord.square().sum(1)
        taken = (away * chord).sum(1) / torch.where(length > 0, length, 1)
        if not torch.allclose(away, chord * taken[:, None], atol=1e-4):
            raise EverytokenError(f"{type(self.mixer).__name__} does more than mix every image with one other.")
        return Mix.from_mask(1 - taken.clamp(0, 1).view(batch_size, *image_size), partner)
