"""Dense relative localization: guess how far apart two tokens lie, from their embeddings alone.

Paper: "Efficient Training of Visual Transformers with Small Datasets" (NeurIPS 2021), equations 1 and 2, and its
supplement, Figure 2 and equations 3 to 7. Pairs of grid positions are drawn at random, a small MLP sees both embeddings
and learns the distance along each axis as a part of the grid's size.

What we do differently: grids may be rectangular (each axis by its own size); positions are drawn on the device from a
generator of one's own; the MLP's first layer is applied to each endpoint (`pair_hidden`), which is exact and cheaper
when there are fewer positions than pairs. Where the authors' released code departs from the paper, `released=True`.

Sums and means: equation 2 has an L1 norm over the two axes, the pseudocode and the released code take the mean over
them, which is half of it. The default is the mean, as the weights λ of the paper were found with it. Cross entropy and
regression add the two axes up, in the paper and in the code.

Shapes: B images, grid (h, w), N = h * w positions numbered row by row, m pairs. Axes: rows first, then columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int]
Pairs = tuple[Tensor, Tensor]

EPS = 1e-8  # of the released code; keeps the variance of a certain answer above 0


def random_pairs(batch: int, count: int, grid: Grid, generator: torch.Generator) -> Pairs:
    """Two times `count` positions [B, m] per image, uniform, with replacement (the two may be the same)."""
    drawn = torch.randint(
        grid[0] * grid[1], (2, batch, count), generator=generator, device=generator.device, dtype=torch.int64
    )
    return drawn[0], drawn[1]


def all_pairs(grid: Grid, device: torch.device | str | None = None) -> Pairs:
    """Every ordered pair once, [N²] each, in the order of `pair_hidden`: what random pairs are on average."""
    positions = torch.arange(grid[0] * grid[1], device=device)
    return positions.repeat_interleave(len(positions)), positions.repeat(len(positions))


def offsets(pairs: Pairs, grid: Grid) -> tuple[Tensor, Tensor]:
    """Rows and columns from the second position to the first, int64, shaped like the positions."""
    first, second = pairs
    width = grid[1]
    return first // width - second // width, first % width - second % width


def offset_targets(offset: tuple[Tensor, Tensor], grid: Grid, signed: bool = False, released: bool = False) -> Tensor:
    """What a regressing MLP learns, [..., 2] float32.

    Args:
        offset: of `offsets`.
        signed: keep the direction (equation 3); else the distance (equation 1).
        released: do not divide by the grid's size; signed offsets are shifted to start at 0.
    """
    parts = []
    for part, side in zip(offset, grid, strict=True):
        value = part if signed else part.abs()
        if released:
            parts.append((value + (side - 1) if signed else value).float())
        else:
            parts.append(value / side)
    return torch.stack(parts, dim=-1)


def class_count(side: int, signed: bool = True, released: bool = False) -> int:
    """Classes along an axis of `side` positions: 2k + 1 (equation 4); released: 2k - 1, or k without direction."""
    if not released:
        return 2 * side + 1 if signed else side + 1
    return 2 * side - 1 if signed else side


def offset_classes(
    offset: tuple[Tensor, Tensor], grid: Grid, sides: Grid | None = None, signed: bool = True, released: bool = False
) -> tuple[Tensor, Tensor]:
    """The class of each offset along rows and along columns, int64.

    Args:
        sides: the k that the classes were counted for, if that is not the grid; class k is then offset 0.
        signed: keep the direction (the paper); else the class is the distance.
        released: class 0 is the smallest offset of this grid, 1 - k, not -k.
    """
    if not signed:
        return offset[0].abs(), offset[1].abs()
    shift = [side - 1 for side in grid] if released else list(sides or grid)
    return offset[0] + shift[0], offset[1] + shift[1]


def pool_grid(grid: Tensor, size: Grid, how: Literal["mean", "released"] = "mean") -> Tensor:
    """Average tokens [B, h, w, D] to at most `size`; smaller grids stay.

    Args:
        how: "mean", each new token is the mean of its part of the grid (2x2 for 14 to 7); "released", a window of 3x3
            with stride 2 that overlaps its neighbours (14 to 7 as well; `size` only says whether to pool).
    """
    b, h, w, d = grid.shape
    H, W = min(h, size[0]), min(w, size[1])
    if (h, w) == (H, W):
        return grid
    if how == "released":
        pooled = F.avg_pool2d(grid.permute(0, 3, 1, 2), 3, stride=2, padding=1, count_include_pad=False)
        return pooled.permute(0, 2, 3, 1)
    if h % H == 0 and w % W == 0:
        rows = grid.reshape(b, H, h // H, w * d).mean(2)  # one axis after the other: several times faster on a CPU
        return rows.reshape(b, H, W, w // W, d).mean(3)
    return F.adaptive_avg_pool2d(grid.permute(0, 3, 1, 2), (H, W)).permute(0, 2, 3, 1)


def pair_hidden(tokens: Tensor, pairs: Pairs | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """First layer of the MLP on concatenated pairs: [first | second] W^T + b, [B, m, H].

    With W = [A | C] that is first A^T + second C^T + b. If there are fewer positions than pairs, the products are made
    once per position and then picked; else the endpoints are picked first.

    Args:
        tokens: [B, N, d].
        pairs: positions [B, m] twice; None: all N² ordered pairs, without picking at all.
        weight, bias: [H, 2d] and [H].
    """
    _, n, d = tokens.shape
    if pairs is not None and n >= pairs[0].shape[1]:
        return F.linear(torch.cat([_pick(tokens, pairs[0]), _pick(tokens, pairs[1])], dim=2), weight, bias)
    of_first, of_second = weight.split(d, dim=1)  # one copy in the backward pass, where slices would make three
    as_first, as_second = F.linear(tokens, of_first), F.linear(tokens, of_second, bias)
    if pairs is None:
        return (as_first.unsqueeze(2) + as_second.unsqueeze(1)).flatten(1, 2)
    return _pick(as_first, pairs[0]) + _pick(as_second, pairs[1])


def _pick(tokens: Tensor, positions: Tensor) -> Tensor:
    """[B, N, D], [B, m] -> [B, m, D]."""
    b, n, d = tokens.shape
    rows = positions + torch.arange(0, b * n, n, device=positions.device).unsqueeze(1)
    return tokens.reshape(b * n, d).index_select(0, rows.flatten()).view(b, -1, d)


def same_image(mask: Tensor, pairs: Pairs, purity: float = 0.5) -> Tensor:
    """Which pairs of a mixed image lie in one source image: [B, m] float, 1 or 0.

    Args:
        mask: [B, h, w], 1 = own image, 0 = partner, between = partly.
        pairs: positions [B, m], or [N²] for all.
        purity: a token belongs to an image that has at least this part of it; one that belongs to none never counts.
    """
    own = mask.flatten(1)
    ends = [own.gather(1, p) if p.ndim == 2 else own.index_select(1, p) for p in pairs]
    both_own = (ends[0] >= purity) & (ends[1] >= purity)
    both_partner = (1 - ends[0] >= purity) & (1 - ends[1] >= purity)
    return (both_own | both_partner).float()


def drloc_l1(predicted: Tensor, target: Tensor, weight: Tensor | None = None, norm: bool = False) -> Tensor:
    """Mean absolute error over pairs and axes (Figure 2), or with `norm` the L1 norm per pair (equation 2): twice that.

    Args:
        predicted: [B, m, 2]; target: [B, m, 2] or [m, 2]; weight: [B, m] or None.
    """
    error = (predicted.float() - target).abs()
    return _mean(error.sum(-1) if norm else error.mean(-1), weight)


def drloc_ce(logits: tuple[Tensor, Tensor], classes: tuple[Tensor, Tensor], weight: Tensor | None = None) -> Tensor:
    """Cross entropy of the offset's class, the two axes added up (equation 5).

    Args:
        logits: [B, m, C] for rows and for columns; classes: [B, m] or [m] each.
    """
    rows = [
        F.cross_entropy(z.float().transpose(1, 2), c.expand(z.shape[:2]), reduction="none")
        for z, c in zip(logits, classes, strict=True)
    ]
    return _mean(rows[0] + rows[1], weight)


def drloc_reg(
    logits: tuple[Tensor, Tensor],
    classes: tuple[Tensor, Tensor],
    weight: Tensor | None = None,
    alpha: float = 0.001,
    log: Literal["sigma", "variance"] = "sigma",
) -> Tensor:
    """Regression through a distribution: (c - μ)² / σ² + α log σ, the two axes added up (equation 6).

    μ and σ² are those of the class under softmax(logits). Offsets and class numbers differ by a constant, so class
    numbers do. `log="variance"`: α log σ², twice the paper's weight, as released.
    """
    total = torch.zeros((), device=logits[0].device)
    for z, c in zip(logits, classes, strict=True):
        p = z.float().softmax(-1)
        values = torch.arange(z.shape[-1], device=z.device, dtype=torch.float32)
        mean = (p * values).sum(-1, keepdim=True)
        variance = (p * (values - mean).square()).sum(-1) + EPS
        spread = variance.log() * (1.0 if log == "variance" else 0.5)
        total = total + (c - mean.squeeze(-1)).square() / variance + alpha * spread
    return _mean(total, weight)


def _mean(per_pair: Tensor, weight: Tensor | None) -> Tensor:
    """Mean over pairs [B, m]; with weights, over those that count (0 if none does)."""
    if weight is None:
        return per_pair.mean()
    return (per_pair * weight).sum() / weight.sum().clamp(min=1)


def ramp(progress: float, warmup: float) -> float:
    """The released schedule of λ: linear from 0 to 1 over `warmup`, then linear to 0 at the end; all in 0..1."""
    if progress < warmup:
        return progress / warmup
    return max(0.0, 1 - (progress - warmup) / (1 - warmup)) if warmup < 1 else 1.0
