"""A stage of CvT: convolutional embedding and blocks with convolutional attention.

Paper: "CvT: Introducing Convolutions to Vision Transformers" (ICCV 2021), sections 3.1 and 3.2. Queries, keys and
values come from a depth-wise 3x3 convolution with batch norm before the usual linear maps; keys and values with
stride 2, which makes a quarter of them. Prefix tokens pass by the convolutions.

Kept from the released code, because its weights were trained with it: attention is divided by the root of the stage's
width, not of a head's. The state-dict keys are the released ones. Attention is fused.

Cost per block of N tokens and width D: (4 * 2.5/4 + 8) N D² + N² D / 2 multiply-adds; the convolutions are below 1 %.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, Mlp
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ConvAttention", "ConvEmbed", "CvTBlock", "CvTStage", "Embed", "Size"]

Size = tuple[int, int]
Embed = tuple[int, int, int]  # kernel, stride, padding


class ConvEmbed(nn.Module):
    """Overlapping convolution and a layer norm over the channels: [B, C, H, W] -> [B, D, h, w]."""

    def __init__(self, in_chans: int, dim: int, embed: Embed, **dd: Any) -> None:
        super().__init__()
        kernel, stride, padding = embed
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride=stride, padding=padding, **dd)
        self.norm = LayerNorm(dim, eps=1e-5, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _projection(dim: int, stride: int, **dd: Any) -> nn.Sequential:
    conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False, **dd)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(dim, **dd)))


class ConvAttention(nn.Module):
    """Attention with convolutional projections; prefix tokens pass by the convolutions.

    Args:
        dim, num_heads: channels and heads.
        prefix: number of tokens in front of the grid.
        stride_kv: stride of the convolution for keys and values: 2 makes a quarter of them.
    """

    def __init__(
        self, dim: int, num_heads: int, prefix: int, stride_kv: int, attn_drop: float, proj_drop: float, **dd: Any
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.prefix = prefix
        self.scale = dim**-0.5  # of all heads together, as released
        self.conv_proj_q = _projection(dim, 1, **dd)
        self.conv_proj_k = _projection(dim, stride_kv, **dd)
        self.conv_proj_v = _projection(dim, stride_kv, **dd)
        self.proj_q = nn.Linear(dim, dim, **dd)
        self.proj_k = nn.Linear(dim, dim, **dd)
        self.proj_v = nn.Linear(dim, dim, **dd)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """Tokens [B, prefix + h*w, D] of a grid of `size` (h, w) -> the same shape."""
        prefix, tokens = x[:, : self.prefix], x[:, self.prefix :]
        grid = tokens.transpose(1, 2).unflatten(2, size)
        q = self._heads(self.proj_q, self.conv_proj_q, grid, prefix)
        k = self._heads(self.proj_k, self.conv_proj_k, grid, prefix)
        v = self._heads(self.proj_v, self.conv_proj_v, grid, prefix)
        drop = self.attn_drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, scale=self.scale)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, linear: nn.Linear, conv: nn.Sequential, grid: Tensor, prefix: Tensor) -> Tensor:
        tokens = conv(grid).flatten(2).transpose(1, 2)
        if self.prefix:
            tokens = torch.cat([prefix, tokens], dim=1)
        return linear(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class CvTBlock(nn.Module):
    """Pre-norm transformer block with convolutional attention."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        prefix: int,
        stride_kv: int,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        act_layer: type[nn.Module],
        **dd: Any,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-5, **dd)
        self.attn = ConvAttention(dim, num_heads, prefix, stride_kv, attn_drop, proj_drop, **dd)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = LayerNorm(dim, eps=1e-5, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop, **dd)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), size))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class CvTStage(nn.Module):
    """Convolutional embedding, then blocks: [B, C, H, W] -> tokens [B, prefix + h*w, D] and (h, w)."""

    def __init__(
        self, in_chans: int, dim: int, embed: Embed, drop_paths: Sequence[float], class_token: bool, **block: Any
    ) -> None:
        super().__init__()
        dd = {"device": block.get("device"), "dtype": block.get("dtype")}
        self.patch_embed = ConvEmbed(in_chans, dim, embed, **dd)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim, **dd)) if class_token else None
        prefix = int(class_token)
        self.blocks = nn.ModuleList([CvTBlock(dim, prefix=prefix, drop_path=rate, **block) for rate in drop_paths])
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> tuple[Tensor, Size]:
        x = self.patch_embed(x)
        size = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = checkpoint(block, x, size) if self.grad_checkpointing and self.training else block(x, size)
        return x, size
