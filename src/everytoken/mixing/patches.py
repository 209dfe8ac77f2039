"""Mixing by patches: scattered ones, and blocks of them.

Paper: TL-Align, Table 7 (random and block-wise mixing instead of one box); MixPro for larger squares.
λ ~ Beta(alpha, alpha) is the part that stays; the other patches come from the partner. Patches are the cells of the
network's token grid, so no token is mixed inside. Pixels are swapped, so every backbone can be trained this way.
Cost: a permutation of the patches per mix; the mask is made on the host and sent as one byte per patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Mixer, Scene


def patches_to_pixels(own: np.ndarray, image_size: tuple[int, int], device: torch.device | str | None) -> Tensor:
    """Masks on a patch grid, bool [n, h, w] (True = own image) -> float32 [n, H, W] on the pixels."""
    h, w = own.shape[1:]
    height, width = image_size
    rows = torch.arange(height, device=device) * h // height
    columns = torch.arange(width, device=device) * w // width
    mask = torch.from_numpy(own).to(device)
    return mask[:, rows][:, :, columns].float()


@dataclass(frozen=True)
class RandomPatches(Mixer):
    """Scattered patches from the partner: each set of that many patches is equally likely.

    Args:
        scale: patches of the mask are squares of scale x scale tokens (fewer at the border where it does not divide).
    """

    scale: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 1:
            raise EverytokenError(f"{type(self).__name__}: scale must be at least 1, got {self.scale}.")

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, H, W] on the pixel grid."""
        h, w = scene.grid
        cells = (-(-h // self.scale), -(-w // self.scale))
        count = cells[0] * cells[1]
        own = np.ones((len(active), count), dtype=bool)
        for i, mixes in enumerate(active):
            taken = round((1 - scene.rng.beta(self.alpha, self.alpha)) * count)
            if mixes:
                own[i, scene.rng.permutation(count)[:taken]] = False
        own = own.reshape(-1, *cells).repeat(self.scale, 1).repeat(self.scale, 2)[:, :h, :w]
        return patches_to_pixels(own, scene.image_size, scene.device)


@dataclass(frozen=True)
class MaskMix(RandomPatches):
    """Scattered squares of tokens from the partner: the mask of MixPro, whose squares are larger than a token.

    MixPro also lets the class label follow attention more and more; for that, add the objective `transmix`.
    """

    scale: int = 4


@dataclass(frozen=True)
class BlockPatches(Mixer):
    """Rectangles of patches from the partner, placed until they cover enough.

    Args:
        smallest: patches in the smallest rectangle.
        aspect: narrowest proportions of a rectangle, width to height or the reverse.
    """

    smallest: int = 4
    aspect: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smallest < 1 or not 0 < self.aspect <= 1:
            raise EverytokenError(
                f"BlockPatches: smallest must be at least 1 and aspect in 0..1, got {self.smallest} and {self.aspect}."
            )

    def masks(self, active: np.ndarray, scene: Scene) -> Tensor:
        """[n, H, W] on the pixel grid."""
        own = np.ones((len(active), *scene.grid), dtype=bool)
        for i, mixes in enumerate(active):
            taken = round((1 - scene.rng.beta(self.alpha, self.alpha)) * scene.grid[0] * scene.grid[1])
            if mixes:
                self._cover(own[i], taken, scene.rng)
        return patches_to_pixels(own, scene.image_size, scene.device)

    def _cover(self, own: np.ndarray, wanted: int, rng: np.random.Generator) -> None:
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
