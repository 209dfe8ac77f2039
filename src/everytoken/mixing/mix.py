"""A mix: which image each pixel or token of a batch comes from. And the interface of everything that draws one.

Equation (CutMix, MixToken, MixUp alike): x̂_b = M_b ⊙ x_b + (1 - M_b) ⊙ x_(partner b); the class label gets mean(M_b) of
its own image and the rest of the partner.
Differently from the released codes: the mask is a tensor, not four Python integers, so compiled models do not recompile
for every box; no global random state; any batch size, odd and 1 included (the middle image is its own partner).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError

Level = Literal["pixels", "tokens"]
GuideKind = Literal["saliency", "attention", "gradient"]
Guide = Callable[[GuideKind], Tensor]
"""A kind -> importance [B, h, w], not negative, on any grid, of the images before they are mixed."""
Mode = Literal["batch", "pair", "elem"]


@dataclass(frozen=True)
class Mix:
    """How the images of a batch are mixed.

    Attributes:
        partner: [B] int64, the other image of each image.
        mask: [B or 1, h, w] float32 on the pixel or token grid (h = w = 1 where it is the same everywhere):
            1 = own image, 0 = partner, between = partly.
        ratio: [B] float32, the own image's part of the label: the mean of the mask, unless the method weighs it.
        level: "pixels" (mixed before the network) or "tokens" (after patch embedding, before positions).
        symmetric: an image and its partner are each other's partners and share one mask.
        soft: the mask has values between 0 and 1.
        moves: [B, 2, h, w] int64 or None, for pixels: which patch (row-major number) of the own image and of the
            partner is shown at each place of a grid, where patches do not stay where they were.
    """

    partner: Tensor
    mask: Tensor
    ratio: Tensor
    level: Level
    symmetric: bool = True
    soft: bool = False
    moves: Tensor | None = None

    def __len__(self) -> int:
        return self.partner.shape[0]

    @property
    def unmixes(self) -> bool:
        """Token outputs can be put back to their own images (`unmix_tokens`), so token targets stay as they are.

        Otherwise an output token keeps the image it shows, and its target is mixed (`mix_token_target`).
        """
        return self.level == "tokens" and self.symmetric and not self.soft

    def at(self, grid: tuple[int, int]) -> Tensor:
        """The mask on another grid, [B or 1, h, w]: averaged over each coarser cell, repeated in finer ones."""
        n, h, w = self.mask.shape
        H, W = grid
        if (h, w) == (H, W):
            return self.mask
        if h % H == 0 and w % W == 0:
            return self.mask.view(n, H, h // H, W, w // W).mean((2, 4))
        if H % h == 0 and W % w == 0:
            return self.mask.repeat_interleave(H // h, 1).repeat_interleave(W // w, 2)
        return F.adaptive_avg_pool2d(self.mask[:, None], grid)[:, 0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Mix:
        """The same mix on another device."""
        return replace(
            self,
            partner=self.partner.to(device, non_blocking=non_blocking),
            mask=self.mask.to(device, non_blocking=non_blocking),
            ratio=self.ratio.to(device, non_blocking=non_blocking),
            moves=None if self.moves is None else self.moves.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True)
class Scene:
    """Where a mix is drawn: size of the images, grid of output tokens, source of randomness, device."""

    image_size: tuple[int, int]
    grid: tuple[int, int]
    rng: np.random.Generator
    device: torch.device | str | None = None


@dataclass(frozen=True)
class Mixer:
    """Draws mixes. Subclasses say how; see `MixToken`, `CutMix`, `MixUp`.

    Args:
        alpha: λ ~ Beta(alpha, alpha), the part that stays, before the box is cut off at the border.
        prob: how often a batch (or pair, or image) is mixed at all.
        mode: "batch" draws once for all, "pair" once for each two partners, "elem" for each image by itself.
    """

    alpha: float = 1.0
    prob: float = 1.0
    mode: Mode = "batch"

    level: ClassVar[Level] = "pixels"
    soft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise EverytokenError(f"{type(self).__name__}: alpha must be above 0, got {self.alpha}.")
        if not 0 <= self.prob <= 1:
            raise EverytokenError(f"{type(self).__name__}: prob must be in 0..1, got {self.prob}.")
        if self.mode not in ("batch", "pair", "elem"):
            raise EverytokenError(f"{type(self).__name__}: mode is 'batch', 'pair' or 'elem', not '{self.mode}'.")

    def draw(
        self,
        batch_size: int,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        rng: np.random.Generator,
        device: torch.device | str | None = None,
        guide: Guide | None = None,
    ) -> Mix | None:
        """A mix for one batch, or None when this batch is left alone.

        Args:
            batch_size: B.
            image_size: (height, width) in pixels of the network's input.
            grid: (h, w) of the network's output tokens.
            rng: where all randomness comes from.
            device: where the mask is made; a few numbers per image travel there.
            guide: what the images show where; only mixers that look at them ask (`guided`).
        """
        count = {"batch": 1, "pair": (batch_size + 1) // 2, "elem": batch_size}[self.mode]
        active = rng.random(count) < self.prob if self.prob < 1 else np.ones(count, dtype=bool)
        if not active.any():
            return None
        mask = self.masks(active, Scene(image_size, grid, rng, device))
        if self.mode == "pair":
            first = np.minimum(np.arange(batch_size), np.arange(batch_size)[::-1])
            mask = mask[torch.from_numpy(first).to(mask.device)]
        return Mix(
            partner=torch.arange(batch_size - 1, -1, -1, device=device),
            mask=mask,
            ratio=mask.mean((1, 2)).expand(batch_size),
            level=self.level,
            symmetric=self.mode != "elem",
            soft=self.soft,
        )

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, h, w] masks, all 1 where `active` [n] is False. What a subclass provides."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to draw masks")
