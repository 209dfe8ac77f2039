"""Tokens-to-token: the patch embedding of T2T-ViT, in overlapping steps.

Paper: "Tokens-to-Token ViT" (ICCV 2021), section 3.1. The image is cut into overlapping windows three times (7x7
stride 4, then 3x3 stride 2 twice); between the cuts a narrow attention layer of 64 channels mixes all positions: a
performer, which is linear in the number of positions, or a transformer.

What we do differently from the released code: grids may be rectangular and of any size, attention is fused, and the
performer is computed in float32 with its exponents shifted, so that it does not overflow or underflow in float16 or
for large inputs (the released one loses whole rows there, and losses become NaN). The result is the same elsewhere.

Two habits of the released code are kept because its weights were trained with them: the token transformer divides by
the root of its input width (147 and 576), not of its 64 channels; and 1e-8 is added to the performer's denominator,
which fades attention where keys and queries are very large (`eps=0` in `performer` is the kernel as defined).

Cost: with N positions after the first cut, 3 * 147 * 64 N multiply-adds for k, q, v and about 2 * 32 * 64 N for the
performer; the transformer needs 2 * 64 N² instead (N = 3136 at 224).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from timm.layers import Format, Mlp
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SPLITS", "Split", "TokenPerformer", "TokenTransformer", "TokensToToken", "performer"]

Split = tuple[int, int, int]  # kernel, stride, padding
SPLITS: tuple[Split, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


def performer(q: Tensor, k: Tensor, v: Tensor, features: Tensor, eps: float = 1e-8) -> Tensor:
    """Linear attention with positive random features: softmax-like weights exp(w.q - |q|²/2) exp(w.k - |k|²/2).

    Args:
        q, k: [B, N, C]; v: [B, N, D]; features: w [m, C].
        eps: added to the denominator, in units of the unshifted sum / m; 0 is the plain kernel.

    Returns:
        [B, N, D] in float32. Exponents are shifted per feature (keys) and per query, which cancels in the quotient, so
        that the largest term of every sum is 1 and the denominator is at least 1, whatever the size of q and k.
    """
    # the meta device, on which costs are counted, knows no autocast
    with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):
        q, k, v, features = q.float(), k.float(), v.float(), features.float()
        of_key = k @ features.t() - k.square().sum(-1, keepdim=True) / 2  # [B, N, m]
        of_query = q @ features.t() - q.square().sum(-1, keepdim=True) / 2
        key_shift = of_key.amax(dim=1, keepdim=True)
        of_query = of_query + key_shift
        query_shift = of_query.amax(dim=2, keepdim=True)
        keys = torch.exp(of_key - key_shift)
        queries = torch.exp(of_query - query_shift)
        total = queries @ keys.sum(dim=1).unsqueeze(2)  # [B, N, 1], at least 1
        if eps:  # 60: far beyond where the quotient has become 0, and finite
            total = total + eps * features.shape[0] * torch.exp((-query_shift).clamp(max=60.0))
        return queries @ (keys.transpose(1, 2) @ v) / total


class TokenPerformer(nn.Module):
    """Attention layer [B, N, dim] -> [B, N, width] with a performer; the value takes the place of the residual."""

    def __init__(self, dim: int, width: int = 64, kernel_ratio: float = 0.5, drop: float = 0.1, **dd: Any) -> None:
        super().__init__()
        self.width = width
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.kqv = nn.Linear(dim, 3 * width, **dd)
        self.proj = nn.Linear(width, width, **dd)
        self.dp = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(width, **dd)
        self.mlp = nn.Sequential(
            nn.Linear(width, width, **dd), nn.GELU(), nn.Linear(width, width, **dd), nn.Dropout(drop)
        )
        self.w = nn.Parameter(torch.empty(int(width * kernel_ratio), width, **dd), requires_grad=False)
        self.reset_features()

    @torch.no_grad()
    def reset_features(self) -> None:
        """Draw the random features again: orthogonal rows of length sqrt(m)."""
        if not self.w.is_meta:
            nn.init.orthogonal_(self.w)
            self.w.mul_(math.sqrt(self.w.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x)).split(self.width, dim=-1)
        x = v + self.dp(self.proj(performer(q, k, v, self.w).to(v.dtype)))
        return x + self.mlp(self.norm2(x))


class TokenAttention(nn.Module):
    """One head of attention from `dim` to `width` channels, with the value as residual."""

    def __init__(self, dim: int, width: int, **dd: Any) -> None:
        super().__init__()
        self.scale = dim**-0.5  # of the input, as released
        self.qkv = nn.Linear(dim, 3 * width, bias=False, **dd)
        self.proj = nn.Linear(width, width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return v.squeeze(1) + self.proj(mixed.squeeze(1))


class TokenTransformer(nn.Module):
    """Attention layer [B, N, dim] -> [B, N, width] with softmax attention; quadratic in N."""

    def __init__(self, dim: int, width: int = 64, drop: float = 0.0, **dd: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.attn = TokenAttention(dim, width, **dd)
        self.norm2 = nn.LayerNorm(width, **dd)
        self.mlp = Mlp(width, width, drop=drop, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokensToToken(nn.Module):
    """Image [B, C, H, W] -> tokens [B, h*w, D] (or [B, h, w, D] with output_fmt NHWC), row by row.

    Args:
        splits: (kernel, stride, padding) of the overlapping windows; an attention layer follows all but the last.
        tokens: "performer" or "transformer".
        token_dim: channels of the attention layers.
        token_drop: dropout inside them; None is the released 0.1 for the performer and 0 for the transformer.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = 224,
        in_chans: int = 3,
        embed_dim: int = 384,
        splits: Sequence[Split] = SPLITS,
        tokens: Literal["performer", "transformer"] = "performer",
        token_dim: int = 64,
        token_drop: float | None = None,
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        patch_size: int | tuple[int, int] | None = None,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if tokens not in ("performer", "transformer"):
            raise ValueError(f"tokens is 'performer' or 'transformer', not {tokens!r}")
        if dynamic_img_pad:
            raise ValueError(
                "the windows of T2T-ViT pad by themselves: every image size works, leave dynamic_img_pad out"
            )
        dd = {"device": device, "dtype": dtype}
        self.splits = tuple(splits)
        size = math.prod(stride for _, stride, _ in self.splits)
        self.patch_size = (size, size)
        self.strict_img_size = strict_img_size
        self.output_fmt = Format(output_fmt) if output_fmt else None
        layer: Any = TokenPerformer if tokens == "performer" else TokenTransformer
        options = {} if token_drop is None else {"drop": token_drop}
        channels = in_chans
        for i, (kernel, _, _) in enumerate(self.splits[:-1], start=1):
            self.add_module(f"attention{i}", layer(channels * kernel**2, token_dim, **options, **dd))
            channels = token_dim
        self.project = nn.Linear(channels * self.splits[-1][0] ** 2, embed_dim, bias=bias, **dd)
        self.set_input_size(img_size)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set the expected image size (None: keep); the token size is fixed by the strides."""
        wanted = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if wanted is not None and tuple(wanted) != self.patch_size:
            raise ValueError(
                f"T2T-ViT's token size follows from its splits, whose strides make {self.patch_size[0]}; "
                f"patch_size={patch_size} was asked; pass splits instead"
            )
        if img_size is not None:
            self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
            self.grid_size = self.dynamic_feat_size(self.img_size)
            self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels per token, along each axis."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Token grid (h, w) for an image of (height, width)."""
        h, w = img_size
        for split in self.splits:
            h, w = _cut(h, split), _cut(w, split)
        return h, w

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        if self.strict_img_size:
            torch._assert(
                (h, w) == self.img_size,
                f"the input is {h}x{w}, the model was made for {self.img_size}; "
                "call set_input_size, or create it with img_size or dynamic_img_size=True",
            )
        for i, split in enumerate(self.splits, start=1):
            kernel, stride, padding = split
            x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
            h, w = _cut(h, split), _cut(w, split)
            if i < len(self.splits):
                x = getattr(self, f"attention{i}")(x)
                x = x.transpose(1, 2).unflatten(2, (h, w))
        x = self.project(x)
        if self.output_fmt is None or self.output_fmt == Format.NLC:
            return x
        x = x.unflatten(1, (h, w))
        return x if self.output_fmt == Format.NHWC else x.permute(0, 3, 1, 2)


def _cut(length: int, split: Split) -> int:
    """How many windows fit on an axis."""
    kernel, stride, padding = split
    return (length + 2 * padding - kernel) // stride + 1
