"""The mixing methods of the papers: MixToken, CutMix, MixUp, and a choice among several.

- MixToken (All Tokens Matter, eq. 5-7): a box on the token grid, swapped after patch embedding and before the position
  embedding, so every token is clean. One box per batch. Outputs are un-mixed before the token head, which equals
  mixing the labels (eq. 6) and is cheaper; the class label is mixed by area (eq. 7).
- CutMix: a box of pixels. MixUp: all pixels blended with λ.
Differently from the released code, which blends all token targets with one λ under CutMix: token targets are mixed
where the pixels are, and a token that the box's edge crosses gets the true ratio of its two images.
Cost: one gather of the batch; the masks are made on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.mixing.boxes import box_masks, draw_boxes
from everytoken.mixing.mix import Guide, Level, Mix, Mixer, Scene


@dataclass(frozen=True)
class MixToken(Mixer):
    """A box of tokens from the partner. Use it with `mode="batch"` for the paper's method."""

    level: ClassVar[Level] = "tokens"

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, h, w] on the token grid."""
        boxes = draw_boxes(len(active), scene.grid, self.alpha, scene.rng) * active[:, None]  # a box of zeros is empty
        return box_masks(boxes, scene.grid, scene.device)


@dataclass(frozen=True)
class CutMix(Mixer):
    """A box of pixels from the partner."""

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, H, W] on the pixel grid."""
        boxes = draw_boxes(len(active), scene.image_size, self.alpha, scene.rng) * active[:, None]
        return box_masks(boxes, scene.image_size, scene.device)


@dataclass(frozen=True)
class MixUp(Mixer):
    """All pixels blended: λ of the own image, 1-λ of the partner."""

    soft: ClassVar[bool] = True

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, 1, 1]: the same everywhere."""
        lam = np.where(active, scene.rng.beta(self.alpha, self.alpha, size=len(active)), 1.0)
        return torch.from_numpy(lam).float().to(scene.device).view(-1, 1, 1)


@dataclass(frozen=True)
class OneOf:
    """One of several mixers for each batch, as timm's switch between MixUp and CutMix.

    Args:
        mixers: what to choose from.
        odds: how often each is chosen, in proportion; None = equally often.
    """

    mixers: Sequence[Mixer]
    odds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not self.mixers or (self.odds is not None and len(self.odds) != len(self.mixers)):
            raise EverytokenError(f"OneOf needs mixers and as many odds, got {len(self.mixers)} and {self.odds}.")

    def draw(
        self,
        batch_size: int,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        rng: np.random.Generator,
        device: torch.device | str | None = None,
        guide: Guide | None = None,
    ) -> Mix | None:
        """As `Mixer.draw`."""
        odds = np.ones(len(self.mixers)) if self.odds is None else np.asarray(self.odds, dtype=np.float64)
        chosen = self.mixers[int(rng.choice(len(odds), p=odds / odds.sum()))]
        return chosen.draw(batch_size, image_size, grid, rng, device, guide)
