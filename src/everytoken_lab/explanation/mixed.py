"""Two images mixed, and what a model makes of whose is what (TL-Align's Figures 4 to 6).

Paper: "Token-Label Alignment for Vision Transformers", section 4.4. For one mixture: the labels of the patches at the
start and after the last layer, and the share of the first image in what the head reads after every layer. (Figures 3
and 4 over a dataset, the latter with likeness to the unmixed images: benchmarks/papers/tl_align_figures.py.)
What we do differently: shares instead of K-wide labels (exact, see `everytoken.functional.shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everytoken.functional.shares import patch_shares
from everytoken.mixing.mix import Mix, apply_to_pixels, box_masks
from everytoken.models.align import Aligner, Alignment, Shares
from everytoken.models.token_model import TokenModel
from everytoken_lab.explanation.saliency import evaluating


@dataclass(frozen=True)
class MixStory:
    """What became of one mixture; shares are those of the first image.

    `layers` are the shares of what the head reads, at the start and after every mixing layer (before a class token
    joins: of all tokens); only start and end where the model has no such layers.
    """

    ratio: float  # by area
    share: float  # of what the class head reads, after the last layer
    start: Tensor  # [h, w] of the patches
    aligned: Tensor  # [h, w] after the last layer
    layers: tuple[float, ...]


def draw_box(part: float, size: tuple[int, int], seed: int = 0) -> Tensor:
    """A mask [1, H, W], 0 in a box of this fraction of the area, wholly inside, at a random place."""
    rng = np.random.default_rng(seed)
    sides = [max(1, round(side * part**0.5)) for side in size]
    top, left = (int(rng.integers(0, full - side + 1)) for full, side in zip(size, sides, strict=True))
    return box_masks(np.array([[top, left, top + sides[0], left + sides[1]]]), size, None)


@torch.no_grad()
def follow_mix(model: TokenModel, own: Tensor, partner: Tensor, mask: Tensor) -> MixStory:
    """Mix two images and follow the shares through the model.

    Args:
        own, partner: [1, 3, H, W], normalised.
        mask: [1, H, W], 1 where the first image is kept.
    """
    backbone, mask = model.backbone, mask.to(own.device)
    both = torch.cat((own, partner))
    mix = Mix(torch.tensor([1, 0], device=own.device), mask, mask.mean((1, 2)).expand(2), "pixels")
    mixed = apply_to_pixels(both, mix)
    aligner = Aligner(backbone, Alignment(history=True))
    try:
        with evaluating(backbone):
            with aligner.watch(mix) as seen:
                backbone(mixed)
            shares = seen.shares
            read = [_read(aligner, shares, h)[0].item() for h in shares.history]
    finally:
        aligner.remove()
    ratio, share, grid = float(mix.ratio[0]), float(shares.image[0]), shares.grid[0]
    start = patch_shares(mask, (grid.shape[0], grid.shape[1]))[0]
    return MixStory(ratio, share, start.cpu(), grid.cpu(), (ratio, *(read or [share])))


def _read(aligner: Aligner, shares: Shares, values: Tensor) -> Tensor:
    """Those of a layer's shares that the head would read, [B]."""
    prefix = 0 if shares.prefix is None else shares.prefix.shape[1]
    if values.dim() == 3 or not prefix or values.shape[1] != prefix + shares.grid[0].numel():
        return values.flatten(1).mean(1)
    return aligner.read(values[:, prefix:].unflatten(1, shares.grid.shape[1:]), values[:, :prefix])
