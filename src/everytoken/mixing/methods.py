"""Mixing that does not look at the images: boxes, blends, patches, and a choice among several.

- MixToken (All Tokens Matter, eq. 5-7): a box on the token grid, swapped after patch embedding and before the position
  embedding, so every token is clean. One box per batch. Outputs are un-mixed before the token head, which equals
  mixing the labels (eq. 6) and is cheaper; the class label is mixed by area (eq. 7).
- CutMix: a box of pixels. MixUp: all pixels blended with λ.
- RandomPatches, BlockPatches (TL-Align, Table 7: random and block-wise mixing instead of one box): λ ~ Beta(alpha,
  alpha) of the patches stays, the others come from the partner. Patches are the cells of the network's token grid, so
  no token is mixed inside; pixels are swapped, so every backbone can be trained so.
Differently from the released code, which blends all token targets with one λ under CutMix: token targets are mixed
where the pixels are, and a token that the box's edge crosses gets the true ratio of its two images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Device, Guide, Level, MaskMixer, Mix, Mixer, Rng, Size, box_masks, draw_boxes


@dataclass
class MixToken(MaskMixer):
    """A box of tokens from the partner; `mode="batch"` is the paper's method. Settings: `MaskMixer`.

    Example:
        images, mix = MixToken()(images, grid=(14, 14))       # images stay as they are
        view = model(images, mix)                             # a TokenModel, which mixes after its patch embedding
    """

    level: ClassVar[Level] = "tokens"

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, h, w] on the token grid."""
        boxes = draw_boxes(len(active), grid, self.alpha, rng) * active[:, None]  # a box of zeros is empty
        return box_masks(boxes, grid, device)


@dataclass
class CutMix(MaskMixer):
    """A box of pixels from the partner.

    Args:
        patches: the box is drawn on the network's token grid, so that it cuts no patch (TL-Align's released code).
        others: of `MaskMixer`.

    Example:
        images, mix = CutMix(alpha=1.0)(images)
        view = model(images, mix)
        loss = HardLabels()(view, Batch(images, labels, mix=mix))["loss"]
    """

    patches: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_grid = self.patches

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, H, W] on the pixel grid."""
        size = grid if self.patches else image_size
        mask = box_masks(draw_boxes(len(active), size, self.alpha, rng) * active[:, None], size, device)
        return patches_to_pixels(mask, image_size) if self.patches else mask


@dataclass
class MixUp(MaskMixer):
    """All pixels blended: λ of the own image, 1-λ of the partner. Settings: `MaskMixer`.

    Example: `images, mix = MixUp(alpha=0.8)(images)`
    """

    soft: ClassVar[bool] = True
    needs_grid = False

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, 1, 1]: the same everywhere."""
        lam = np.where(active, rng.beta(self.alpha, self.alpha, size=len(active)), 1.0)
        return torch.from_numpy(lam).float().to(device, non_blocking=True).view(-1, 1, 1)


def patches_to_pixels(mask: Tensor, image_size: Size) -> Tensor:
    """Masks on a patch grid, [n, h, w] (1 = own image) -> float32 [n, H, W] on the pixels."""
    h, w = mask.shape[1:]
    height, width = image_size
    rows = torch.arange(height, device=mask.device) * h // height
    columns = torch.arange(width, device=mask.device) * w // width
    return mask[:, rows][:, :, columns].float()


@dataclass
class RandomPatches(MaskMixer):
    """Scattered patches from the partner: each set of that many patches is equally likely.

    Args:
        scale: patches of the mask are squares of scale x scale tokens (fewer at the border where it does not divide).
    """

    scale: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.scale >= 1, "scale must be at least 1")

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, H, W] on the pixel grid."""
        h, w = grid
        cells = (-(-h // self.scale), -(-w // self.scale))
        count = cells[0] * cells[1]
        own = np.ones((len(active), count), dtype=bool)
        for i, mixes in enumerate(active):
            taken = round((1 - rng.beta(self.alpha, self.alpha)) * count)
            if mixes:
                own[i, rng.permutation(count)[:taken]] = False
        own = own.reshape(-1, *cells).repeat(self.scale, 1).repeat(self.scale, 2)[:, :h, :w]
        return patches_to_pixels(torch.from_numpy(own).to(device, non_blocking=True), image_size)


@dataclass
class BlockPatches(MaskMixer):
    """Rectangles of patches from the partner, placed until they cover enough.

    Args:
        smallest: patches in the smallest rectangle.
        aspect: narrowest proportions of a rectangle, width to height or the reverse.
    """

    smallest: int = 4
    aspect: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.smallest >= 1 and 0 < self.aspect <= 1, "smallest must be at least 1 and aspect in (0, 1]")

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, H, W] on the pixel grid."""
        own = np.ones((len(active), *grid), dtype=bool)
        for i, mixes in enumerate(active):
            taken = round((1 - rng.beta(self.alpha, self.alpha)) * grid[0] * grid[1])
            if mixes:
                self._cover(own[i], taken, rng)
        return patches_to_pixels(torch.from_numpy(own).to(device, non_blocking=True), image_size)

    def _cover(self, own: np.ndarray, wanted: int, rng: Rng) -> None:
        """Clear rectangles until exactly `wanted` patches are cleared; the last one is cut to fit, row by row."""
        h, w = own.shape
        left = wanted
        while left > 0:
            area = rng.uniform(min(self.smallest, left), left)
            ratio = math.exp(rng.uniform(math.log(self.aspect), -math.log(self.aspect)))
            rows = min(h, max(1, round(math.sqrt(area * ratio))))
            columns = min(w, max(1, round(math.sqrt(area / ratio))))
            top, side = int(rng.integers(0, h - rows + 1)), int(rng.integers(0, w - columns + 1))
            block = own[top : top + rows, side : side + columns]
            free = np.argwhere(block)[:left]
            block[free[:, 0], free[:, 1]] = False
            left -= len(free)


@dataclass
class Compose(Mixer):
    """Pixels are mixed, then the tokens of the mixed images, in the same batch: All Tokens Matter, Table 3, MixToken
    and MixUp at the same time. Both take the same partner, as the released code does, so that two images are in it:
    where tokens stay, λ of the own one; where they are swapped, 1-λ.

    Args:
        pixels, tokens: a mixer of each level, neither of which looks at the images.

    Example: `images, mix = Compose(MixUp(alpha=0.8), MixToken())(images, grid=(14, 14))`, then `model(images, mix)`.
    """

    pixels: MaskMixer
    tokens: MaskMixer

    def __post_init__(self) -> None:
        levels = (self.pixels.level, self.tokens.level)
        if levels != ("pixels", "tokens") or hasattr(self.pixels, "guide"):
            names = f"{type(self.pixels).__name__} and {type(self.tokens).__name__}"
            raise EverytokenError(f"Compose takes CutMix, MixUp or patches, and then MixToken; got {names}.")

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """As `Mixer.draw`."""
        first = self.pixels.draw(batch_size, image_size, grid, rng, device, guide)
        second = self.tokens.draw(batch_size, image_size, grid, rng, device, guide)
        if first is None or second is None:
            return first or second
        both = replace(first, tokens=second)
        return replace(both, ratio=both.at(grid).mean((1, 2)))


@dataclass
class OneOf(Mixer):
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
        self.needs_grid = any(mixer.needs_grid for mixer in self.mixers)

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """As `Mixer.draw`."""
        odds = np.ones(len(self.mixers)) if self.odds is None else np.asarray(self.odds, dtype=np.float64)
        chosen = self.mixers[int(rng.choice(len(odds), p=odds / odds.sum()))]
        return chosen.draw(batch_size, image_size, grid, rng, device, guide)
