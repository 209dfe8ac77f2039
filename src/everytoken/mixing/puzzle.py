"""Puzzle-Mix: keep what matters of both images, by a mask and by moving patches.

Paper: "Puzzle Mix: Exploiting Saliency and Local Statistics for Optimal Mixup". On a grid of n x n blocks, with
importance s of each image (the size of the loss gradient at its pixels, mean 1), find a mask z in {0, 1/m, ..., 1} of
the own image that makes
    E(z) = Σ_i -z_i s_own,i - (1-z_i) s_partner,i + smooth · Σ_(i~j) (z_i - z_j)²
           - prior · Σ_i log Binomial(m z_i; m, λ)
small; then move the blocks of each image so that important ones come where the mask shows them: block j goes to place i
at a price of move · distance(i, j)².
Differently: the paper cuts graphs, which gives a mask within a factor of the best; here every block takes its best
value given its neighbours, black and white squares of a chess board in turn, which never raises E and runs for a
whole batch on the device. The term that looks at pixel differences of neighbours is left out. Blocks find places in
order of their gain (the paper's approximation does nearly the same).
Cost: the gradient of the loss at the images (a forward and a backward pass), and a few small operations per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.mixing.guided import GuidedMixer, resize, to_pixels
from everytoken.mixing.mix import GuideKind, Mix, Scene


@dataclass(frozen=True)
class PuzzleMix(GuidedMixer):
    """A mask and moves that keep what matters of both images.

    Args:
        blocks: how many blocks a side has; one of these is drawn for each batch.
        levels: m; 1 is a hard mask, 2 also blends half and half.
        smooth, prior, move: weights of smoothness, of λ and of distance (0 to 1 across the image); a negative `move`
            leaves all blocks where they are.
    """

    blocks: tuple[int, ...] = (2, 4, 8, 16)
    levels: int = 2
    smooth: float = 0.6
    prior: float = 0.2
    move: float = 0.8

    guide: ClassVar[GuideKind] = "gradient"
    soft: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks or min(self.blocks) < 2 or self.levels < 1:
            raise EverytokenError(
                f"PuzzleMix: blocks are 2 or more and levels 1 or more, got {self.blocks} and {self.levels}."
            )

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """Masks on the pixel grid, moves on the grid of blocks."""
        fitting = [n for n in self.blocks if scene.image_size[0] % n == 0 and scene.image_size[1] % n == 0]
        if not fitting:
            raise EverytokenError(f"PuzzleMix: none of {self.blocks} blocks divides {scene.image_size} pixels.")
        n = int(scene.rng.choice(fitting))
        lam = self._lam(len(partner), scene.rng, importance.device)
        own = resize(importance, (n, n)) + 1e-8
        own = own / own.mean((1, 2), keepdim=True)
        mask = best_mask(own, own[partner], lam, self.levels, self.smooth, self.prior)
        moves = None
        if self.move >= 0:
            pairs = ((mask, own), (1 - mask, own[partner]))
            moves = torch.stack([places(shown, s, self.move) for shown, s in pairs], dim=1)
        return self._mix(partner, to_pixels(mask, scene.image_size), moves=moves)


def energy(mask: Tensor, own: Tensor, other: Tensor, lam: Tensor, levels: int, smooth: float, prior: float) -> Tensor:
    """E(z) [B] of masks [B, n, n], as in the head of this file."""
    shown = -(mask * own + (1 - mask) * other).sum((1, 2))
    rough = mask.diff(dim=1).square().sum((1, 2)) + mask.diff(dim=2).square().sum((1, 2))
    steps = (mask * levels).round().long()
    likely = _log_binomial(lam, levels).gather(1, steps.flatten(1)).sum(1)
    return shown + smooth * rough - prior * likely


def best_mask(
    own: Tensor, other: Tensor, lam: Tensor, levels: int, smooth: float, prior: float, rounds: int = 8
) -> Tensor:
    """Masks [B, n, n] of small energy, from the best of the constant masks and of the mask without smoothness."""
    values = torch.linspace(0, 1, levels + 1, device=own.device)
    alone = -(values * own[..., None] + (1 - values) * other[..., None])
    alone = alone - prior * _log_binomial(lam, levels)[:, None, None]  # [B, n, n, m + 1]
    h, w = own.shape[1:]
    chess = torch.arange(h, device=own.device)[:, None] + torch.arange(w, device=own.device)
    inside = F.pad(torch.ones(1, 1, h, w, device=own.device), (1, 1, 1, 1))
    neighbours = _around(inside)[0, 0]

    starts = [values[alone.argmin(-1)], *(torch.full_like(own, float(v)) for v in values)]
    best, lowest = starts[0], torch.full_like(lam, math.inf)
    for mask in starts:
        for step in range(2 * rounds):
            total = _around(F.pad(mask[:, None], (1, 1, 1, 1)))[:, 0]
            # Σ_j (v - z_j)² without the part that does not depend on v
            cost = alone + smooth * (neighbours[..., None] * values**2 - 2 * values * total[..., None])
            mask = torch.where(chess % 2 == step % 2, values[cost.argmin(-1)], mask)
        reached = energy(mask, own, other, lam, levels, smooth, prior)
        better = reached < lowest
        best, lowest = torch.where(better[:, None, None], mask, best), torch.where(better, reached, lowest)
    return best


def places(shown: Tensor, importance: Tensor, price: float) -> Tensor:
    """Which block [B, n, n] (row-major number) comes to each place, each block exactly once.

    Pairs of place and block are taken by gain, shown_i · s_j - price · distance², best first, as long as both are
    free; a block that is worth nothing anywhere else stays.
    """
    b, h, w = shown.shape
    n = h * w
    row, column = torch.arange(n, device=shown.device) // w / h, torch.arange(n, device=shown.device) % w / w
    distance = (row[:, None] - row).square() + (column[:, None] - column).square()
    gain = shown.reshape(b, n, 1) * importance.reshape(b, 1, n) - price * distance
    out = torch.empty(b, n, dtype=torch.long, device=shown.device)
    images = torch.arange(b, device=shown.device)
    for _ in range(n):
        at = gain.flatten(1).argmax(1)
        place, block = at // n, at % n
        out[images, place] = block
        gain[images, place] = -math.inf
        gain[images, :, block] = -math.inf
    return out.view(b, h, w)


def _around(padded: Tensor) -> Tensor:
    """Sum of the four neighbours, [B, 1, h + 2, w + 2] -> [B, 1, h, w]."""
    middle = slice(1, -1)
    return padded[..., :-2, middle] + padded[..., 2:, middle] + padded[..., middle, :-2] + padded[..., middle, 2:]


def _log_binomial(lam: Tensor, levels: int) -> Tensor:
    """log P(k) [B, m + 1] of k successes in m trials with probability λ [B]."""
    k = torch.arange(levels + 1, device=lam.device, dtype=torch.float32)
    ways = torch.tensor([math.log(math.comb(levels, i)) for i in range(levels + 1)], device=lam.device)
    lam = lam[:, None].clamp(1e-4, 1 - 1e-4)
    return ways + k * lam.log() + (levels - k) * (1 - lam).log()
