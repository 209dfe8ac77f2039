"""Mixing that looks at the images: what is taken from the partner depends on where something is to be seen.

- SaliencyMix: a box around the most salient pixel of the partner; λ as in CutMix.
- Attentive-CutMix: the six most attended cells of the partner's 7x7 map, at their own places.
- TokenMix: blocks of patches; the label counts what each image shows of its own importance, not area.
- Puzzle-Mix: a mask and moved patches that keep what matters of both images.
What is important comes from a guide: "saliency" (`contrast_saliency`); "attention": a network's answer for its own
first choice at every cell, or, for networks with a class token, how like the class token each token is (the class head
is not trained to read the others); "gradient": the size of the gradient of the student's loss at the pixels. Training
asks the teacher if there is one, otherwise the student; networks run in evaluation mode and keep no trace of it.
Every image has its own mask here, so token outputs are not put back: token targets are mixed instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.keyed import StepKey
from everytoken.mixing.methods import BlockPatches, patches_to_pixels
from everytoken.mixing.mix import Device, Guide, GuideKind, MaskMixer, Mix, Mode, Rng, Size, box_masks

if TYPE_CHECKING:
    from everytoken.models import TokenModel

# Half sides of the windows of `contrast_saliency`, as published, at 224 pixels.
_WINDOWS = (12, 24, 48, 28, 56, 112)


def contrast_saliency(images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H, W], not negative, largest where the image stands out from its surroundings.

    Fine-grained static saliency (Montabone and Soto), which SaliencyMix uses: the grey value of a pixel minus the mean
    of a window around it, both signs counted, summed over windows of six sizes. They shrink with the image.
    """
    grey = images.float().mean(1, keepdim=True)
    height, width = grey.shape[-2:]
    out = torch.zeros_like(grey)
    for half in _WINDOWS:
        rows, columns = max(1, round(half * height / 224)), max(1, round(half * width / 224))
        around = grey  # mean of columns, then of rows: 450 additions per pixel for the largest, not 50,625
        for kernel, padding in (((2 * rows + 1, 1), (rows, 0)), ((1, 2 * columns + 1), (0, columns))):
            around = F.avg_pool2d(around, kernel, stride=1, padding=padding, count_include_pad=False)
        out += (grey - around).abs()
    return out[:, 0]


def guide_for(model: TokenModel, images: Tensor, labels: Tensor | None) -> Guide:
    """A guide to a batch.

    Args:
        model: the network that looks.
        images: [B, C, H, W] as that network wants them.
        labels: [B] classes for the gradient, -1 = not known; or [B, K], several of each image.
    """

    def guide(kind: GuideKind) -> Tensor:
        if kind == "saliency":
            return contrast_saliency(images)
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            return importance_by_gradient(model, images, labels) if kind == "gradient" else importance(model, images)
        finally:
            for part, was in modes:
                part.training = was

    return guide


@torch.no_grad()
def importance(model: TokenModel, images: Tensor) -> Tensor:
    """[B, h, w], smallest 0: how strongly each cell supports what the network sees in the image."""
    view = model(images)
    if view.prefix is not None:
        cells = F.cosine_similarity(view.grid.float(), view.prefix[:, 0, None, None].float(), dim=-1)
    else:
        logits = model.cell_logits(images).float()
        first = logits.mean((1, 2)).argmax(-1)
        cells = logits.gather(-1, first[:, None, None, None].expand(-1, *logits.shape[1:3], 1))[..., 0]
    return cells - cells.amin((1, 2), keepdim=True)


def importance_by_gradient(model: TokenModel, images: Tensor, labels: Tensor | None) -> Tensor:
    """[B, H, W]: size over channels of the gradient of the cross entropy at each pixel; weights get no gradient."""
    if labels is None:
        raise EverytokenError("Puzzle-Mix looks at the gradient of the loss, and these images have no labels.")
    with torch.enable_grad():
        pixels = images.detach().float().requires_grad_()
        logits = model(pixels).logits.float()
        if labels.dim() == 2:
            loss = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="sum")
        else:
            loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-1)
        (gradient,) = torch.autograd.grad(loss, pixels)
    return gradient.square().sum(1).sqrt()


@dataclass
class GuidedMixer(MaskMixer):
    """A mixer that needs to see the images. Subclasses provide `guided`."""

    mode: Mode = "elem"

    guide: ClassVar[GuideKind] = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.mode == "elem", "every image gets a mask of its own, so mode must be 'elem'")

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """As `Mixer.draw`; `guide` is asked for the importance of each place."""
        active = rng.random(batch_size) < self.prob if self.prob < 1 else np.ones(batch_size, dtype=bool)
        if not active.any():
            return None
        if guide is None:
            raise ValueError(f"{type(self).__name__} looks at the images: guide=guide_for(model, images, labels)")
        partner = torch.arange(batch_size - 1, -1, -1, device=device)
        mix = self.guided(guide(self.guide).detach().float(), partner, image_size, grid, rng)
        if active.all():
            return mix
        on = torch.from_numpy(active).to(mix.mask.device, non_blocking=True)
        mask, ratio, moves = torch.where(on[:, None, None], mix.mask, 1.0), torch.where(on, mix.ratio, 1.0), mix.moves
        if moves is not None:
            stay = torch.arange(moves[0, 0].numel(), device=on.device).view(moves.shape[2:])
            moves = torch.where(on[:, None, None, None], moves, stay)
        return replace(mix, mask=mask, ratio=ratio, moves=moves)

    def guided(self, importance: Tensor, partner: Tensor, image_size: Size, grid: Size, rng: Rng) -> Mix:
        """The mix of a whole batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to mix")

    def _mix(self, partner: Tensor, mask: Tensor, ratio: Tensor | None = None, moves: Tensor | None = None) -> Mix:
        ratio = mask.mean((1, 2)) if ratio is None else ratio
        return Mix(partner, mask, ratio, "pixels", symmetric=False, soft=self.soft, moves=moves)

    def _lam(self, count: int, rng: Rng, device: torch.device) -> Tensor:
        return torch.from_numpy(rng.beta(self.alpha, self.alpha, size=count)).float().to(device, non_blocking=True)


@dataclass
class SaliencyMix(GuidedMixer):
    """A box around the most salient pixel of the partner."""

    guide: ClassVar[GuideKind] = "saliency"
    needs_grid = False

    def __call__(
        self, images: Tensor, key: StepKey | None = None, grid: Size | None = None, guide: Guide | None = None
    ) -> tuple[Tensor, Mix]:
        """As `Mixer.__call__`; the guide is `contrast_saliency` unless another one is given."""
        return super().__call__(images, key, grid, guide or (lambda kind: contrast_saliency(images)))

    def guided(self, importance: Tensor, partner: Tensor, image_size: Size, grid: Size, rng: Rng) -> Mix:
        """[B, H, W] masks on the pixel grid; boxes as `boxes_at` makes them, on the device."""
        lam = self._lam(len(partner), rng, importance.device)
        peak = patches_to_pixels(importance, image_size)[partner].flatten(1).argmax(1)
        centre = torch.stack((peak // image_size[1], peak % image_size[1]), dim=1)
        half = (torch.tensor(image_size).to(lam, non_blocking=True) * (1 - lam).sqrt()[:, None]).long() // 2
        return self._mix(partner, box_masks(torch.cat((centre - half, centre + half), dim=1), image_size, lam.device))


@dataclass
class AttentiveCutMix(GuidedMixer):
    """The most attended cells of the partner, at their own places.

    Args:
        cells: how many.
        side: cells in a row and in a column of the map.
    """

    cells: int = 6
    side: int = 7

    needs_grid = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(0 < self.cells < self.side**2, "cells must be above 0 and below side²")

    def guided(self, importance: Tensor, partner: Tensor, image_size: Size, grid: Size, rng: Rng) -> Mix:
        """[B, H, W] masks on the pixel grid."""
        coarse = resize(importance, (self.side, self.side))[partner].flatten(1)
        own = torch.ones_like(coarse).scatter_(1, coarse.topk(self.cells).indices, 0.0)
        return self._mix(partner, patches_to_pixels(own.view(-1, self.side, self.side), image_size))


@dataclass
class TokenMix(GuidedMixer):
    """Blocks of patches; the label follows importance.

    Args:
        smallest: patches in the smallest block.
        aspect: narrowest proportions of a block.
    """

    smallest: int = 14
    aspect: float = 0.3

    def guided(self, importance: Tensor, partner: Tensor, image_size: Size, grid: Size, rng: Rng) -> Mix:
        """[B, H, W] masks on the pixel grid; the ratio weighs them by importance."""
        blocks = BlockPatches(self.alpha, mode="elem", smallest=self.smallest, aspect=self.aspect)
        mask = blocks.masks(np.ones(len(partner), dtype=bool), image_size, grid, rng, partner.device)
        weight = resize(importance, grid).flatten(1)
        weight = (weight + 1e-12) / (weight + 1e-12).sum(1, keepdim=True)
        shown = resize(mask, grid).flatten(1)
        own, other = (shown * weight).sum(1), ((1 - shown) * weight[partner]).sum(1)
        return self._mix(partner, mask, own / (own + other).clamp(min=1e-12))


def resize(cells: Tensor, grid: Size) -> Tensor:
    """Importance [B, H, W] on another grid [B, h, w]: averaged where it becomes coarser, interpolated where finer."""
    if tuple(cells.shape[1:]) == grid:
        return cells
    if cells.shape[1] >= grid[0] and cells.shape[2] >= grid[1]:
        return F.adaptive_avg_pool2d(cells[:, None], grid)[:, 0]
    return F.interpolate(cells[:, None], grid, mode="bilinear", align_corners=False)[:, 0]


@dataclass
class PuzzleMix(GuidedMixer):
    """A mask and moves that keep what matters of both images.

    Paper: "Puzzle Mix: Exploiting Saliency and Local Statistics for Optimal Mixup". On a grid of n x n blocks, with
    importance s of each image (the size of the loss gradient at its pixels, mean 1), find a mask z in {0, 1/m, ..., 1}
    of the own image that makes
        E(z) = Σ_i -z_i s_own,i - (1-z_i) s_partner,i + smooth · Σ_(i~j) (z_i - z_j)²
               - prior · Σ_i log Binomial(m z_i; m, λ)
    small; then move the blocks of each image so that important ones come where the mask shows them: block j goes to
    place i at a price of move · distance(i, j)².
    Differently: the paper cuts graphs, which gives a mask within a factor of the best; here every block takes its best
    value given its neighbours, black and white squares of a chess board in turn, which never raises E and runs for a
    whole batch on the device. The term that looks at pixel differences of neighbours is left out. Blocks find places in
    order of their gain (the paper's approximation does nearly the same).

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
    needs_grid = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = tuple(self.blocks)
        self.check(min(self.blocks, default=0) >= 2 and self.levels >= 1, "blocks must be 2 or more, levels 1 or more")

    def guided(self, importance: Tensor, partner: Tensor, image_size: Size, grid: Size, rng: Rng) -> Mix:
        """Masks on the pixel grid, moves on the grid of blocks."""
        fitting = [n for n in self.blocks if image_size[0] % n == 0 and image_size[1] % n == 0]
        if not fitting:
            raise EverytokenError(f"PuzzleMix: none of {self.blocks} blocks divides {image_size} pixels.")
        n = int(rng.choice(fitting))
        lam = self._lam(len(partner), rng, importance.device)
        own = resize(importance, (n, n)) + 1e-8
        own = own / own.mean((1, 2), keepdim=True)
        mask = best_mask(own, own[partner], lam, self.levels, self.smooth, self.prior)
        moves = None
        if self.move >= 0:
            pairs = ((mask, own), (1 - mask, own[partner]))
            moves = torch.stack([places(shown, s, self.move) for shown, s in pairs], dim=1)
        return self._mix(partner, patches_to_pixels(mask, image_size), moves=moves)


def energy(mask: Tensor, own: Tensor, other: Tensor, lam: Tensor, levels: int, smooth: float, prior: float) -> Tensor:
    """E(z) [B] of masks [B, n, n], as in `PuzzleMix`."""
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

    starts = [values[alone.argmin(-1)], *(value.expand_as(own) for value in values.unbind())]
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
    ways = torch.tensor([math.log(math.comb(levels, i)) for i in range(levels + 1)])
    ways = ways.to(lam.device, non_blocking=True)
    lam = lam[:, None].clamp(1e-4, 1 - 1e-4)
    return ways + k * lam.log() + (levels - k) * (1 - lam).log()
