"""Shares: the part of a token that belongs to its own image, when two images are mixed (TL-Align).

Paper: "Token-Label Alignment for Vision Transformers", equations (1) to (12) and Table 9 of its appendix.
The paper carries a K-wide label per token. Every such label is r·y_own + (1-r)·y_partner, and every operation on labels
is an average of labels, so the scalar r in [0, 1] says the same:
    start       (5)   r of a patch = part of it that shows its own image; of class and other free tokens = mix ratio
    attention   (9)   r̂ = mean over heads of A·r
    residual   (11)   r  = (r̂ + r) / 2
    aggregation       r  = mean over what is merged
    loss       (12)   r·H(y_own) + (1-r)·H(y_partner), no gradient through r
What we do differently: one number instead of K; weights that are not a softmax (convolution, token MLP, talking heads)
count by their size, as in equation (2), so that r stays in [0, 1]. Cost: N² instead of K·N² per attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.functional.losses import compact_cross_entropy
from everytoken.functional.targets import CompactTarget, blend, from_labels, smoothing_factors


def patch_shares(mask: Tensor, grid: tuple[int, int], cell: tuple[float, float] | None = None) -> Tensor:
    """The start of every patch (equation 5): the mean of the mix mask over it, [B or 1, h, w].

    Args:
        mask: [B or 1, H, W], 1 = own image, 0 = partner, on any grid that covers the whole image.
        grid: (h, w) of the tokens.
        cell: (height, width) of one token as fractions of the image, where the tokens do not tile it exactly: what
            lies outside the image does not count. None: (1/h, 1/w).
    """
    h, w = grid
    n, H, W = mask.shape
    mask = mask.float()
    if cell is None or (abs(cell[0] * h - 1) < 1e-9 and abs(cell[1] * w - 1) < 1e-9):
        if (h, w) == (H, W):
            return mask
        if H % h == 0 and W % w == 0:
            return mask.reshape(n, h, H // h, w, W // w).mean((2, 4))
        cell = (1 / h, 1 / w)
    rows = _overlap(H, h, cell[0], mask.device)
    columns = _overlap(W, w, cell[1], mask.device)
    return torch.einsum("ih,nhw,jw->nij", rows, mask, columns)


def _overlap(fine: int, coarse: int, size: float, device: torch.device) -> Tensor:
    """[coarse, fine]: how much of each coarse cell each fine cell covers; rows sum to 1."""
    at = torch.arange(fine, device=device) / fine
    to = (torch.arange(coarse, device=device) * size)[:, None]
    common = torch.minimum((to + size).clamp(max=1), at + 1 / fine) - torch.maximum(to, at)
    common = common.clamp(min=0)
    return common / common.sum(1, keepdim=True).clamp(min=1e-12)


def mean_shares(mixed: Tensor, before: Tensor) -> Tensor:
    """Residual connection (equation 11): Norm(Ŷ + Y), the paper's simple average."""
    return (mixed + before) / 2


def mixed_by_matrix(matrix: Tensor, values: Tensor, stochastic: bool = True) -> Tensor:
    """Equation (9) with the matrix at hand: the mean over heads of Norm(`|W|`)·values, [B, M, C].

    Args:
        matrix: [B, heads, M, N] spatial weights; output m is made from inputs n.
        values: [B, N, C].
        stochastic: rows are non-negative and sum to 1 already (softmax), so nothing is normalised.
    """
    b, heads, m, n = matrix.shape
    values = values.to(matrix.dtype)
    if not stochastic:
        matrix = matrix.abs()
        values = torch.cat((values, torch.ones_like(values[..., :1])), dim=-1)
    # one product per image, not one per head
    mixed = torch.bmm(matrix.reshape(b, heads * m, n), values).view(b, heads, m, -1)
    if not stochastic:
        mixed = mixed[..., :-1] / mixed[..., -1:].clamp(min=torch.finfo(mixed.dtype).tiny)
    return mixed.mean(1)


def row_normalised(weight: Tensor) -> Tensor:
    """Norm(`|W|`) of Table 9: every row of [..., M, N] sums to 1. A row of zeros becomes uniform."""
    size = weight.abs().float()
    total = size.sum(-1, keepdim=True)
    return torch.where(total > 0, size / total.clamp(min=torch.finfo(total.dtype).tiny), 1 / weight.shape[-1])


def kernel_of(weight: Tensor) -> Tensor:
    """How a convolution [out, in / groups, kh, kw] mixes places: [kh, kw], sums to 1.

    Each output channel is to a convolution what a head is to attention: its weights, by size and summed over the
    input channels, are normalised first, then channels are averaged.
    """
    places = weight.abs().float().sum(1)
    return row_normalised(places.flatten(1)).mean(0).view(places.shape[1:])


def convolved_shares(
    shares: Tensor,
    kernel: Tensor,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """Norm(T(K))·r for a convolution or pooling, [B, h, w] -> [B, h', w'].

    Args:
        kernel: [kh, kw] non-negative. Places outside of the image belong to nobody: the kernel is normalised over
            those inside.
        padding: (left, right, top, bottom).
    """
    weight = kernel[None, None].to(shares.dtype)
    inside = torch.ones_like(shares[:1])
    maps = F.pad(torch.cat((shares, inside))[:, None], padding)
    out = F.conv2d(maps, weight, stride=stride, dilation=dilation)[:, 0]
    # a window whose only weights lie outside of the image falls back to 0 / tiny = 0; real kernels have none
    return out[:-1] / out[-1:].clamp(min=torch.finfo(out.dtype).tiny)


def merged_shares(shares: Tensor, size: int = 2) -> Tensor:
    """Patch merging: the mean of size x size neighbours, [B, h, w] -> [B, ceil(h/size), ceil(w/size)].

    Cells that only fill up an odd border do not count.
    """
    b, h, w = shares.shape
    if h % size == 0 and w % size == 0:
        return shares.view(b, h // size, size, w // size, size).mean((2, 4))
    kernel = shares.new_full((size, size), 1 / size**2)
    return convolved_shares(shares, kernel, (size, size), (0, -w % size, 0, -h % size))


def aligned_target(own: CompactTarget, partner: CompactTarget, shares: Tensor) -> CompactTarget:
    """r·own + (1-r)·partner: image targets with shares [B], or token targets [B, h, w] with shares [B, h, w].

    The second is token labeling with alignment: a token's label follows what the token holds, not where it stands.
    """
    if shares.shape != own.shape:
        raise ValueError(f"shares {list(shares.shape)} do not fit targets {list(own.shape)}")
    shares = shares.detach()
    return blend(own, shares, partner, 1 - shares)


def aligned_cross_entropy(
    logits: Tensor,
    own: Tensor | CompactTarget,
    partner: Tensor | CompactTarget,
    shares: Tensor,
    smoothing: float = 0.0,
) -> Tensor:
    """Equation (12), a scalar: mean of r·H(own) + (1-r)·H(partner), which is H(r·own + (1-r)·partner) exactly.

    Args:
        logits: [B, K].
        own, partner: labels of each image and of the one mixed into it: classes [B] int64, distributions [B, K], or
            compact targets of shape [B].
        shares: [B], r of what the head reads; gets no gradient.
        smoothing: label smoothing, of distributions too, as in `torch.nn.functional.cross_entropy`.
    """
    if isinstance(own, Tensor) and isinstance(partner, Tensor):
        if own.is_floating_point():
            on, off = smoothing_factors(smoothing, logits.shape[-1])
            mixed = torch.lerp(partner.float(), own.float(), shares.detach()[:, None]) * on + off
            return -(logits.float().log_softmax(-1) * mixed).sum(-1).mean()
        own, partner = (from_labels(labels, logits.shape[-1], smoothing) for labels in (own, partner))
    elif isinstance(own, CompactTarget) and isinstance(partner, CompactTarget) and smoothing:
        own, partner = own.smooth(smoothing), partner.smooth(smoothing)
    if isinstance(own, CompactTarget) and isinstance(partner, CompactTarget):
        return compact_cross_entropy(logits, aligned_target(own, partner, shares))
    raise TypeError(f"both labels must be of one kind, got {type(own).__name__} and {type(partner).__name__}")


def similarity_shares(mixed: Tensor, own: Tensor, partner: Tensor) -> Tensor:
    """Reference shares by likeness (Figure 4), [..., N], of tokens [..., N, D] of the mixed image and its two sources.

    The share is s_own / (s_own + s_partner) with s the cosine, negative ones counting as 0; 1/2 where neither is like.
    """
    like_own = F.cosine_similarity(mixed.float(), own.float(), dim=-1).clamp(min=0)
    like_partner = F.cosine_similarity(mixed.float(), partner.float(), dim=-1).clamp(min=0)
    total = like_own + like_partner
    return torch.where(total > 0, like_own / total.clamp(min=1e-12), 0.5)
