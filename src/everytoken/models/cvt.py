"""CvT: a vision transformer in three stages, with convolutions where ViT has linear maps and positions.

Paper: "CvT: Introducing Convolutions to Vision Transformers" (ICCV 2021), section 3 and Table 2. Each stage embeds
its input by an overlapping convolution; inside a block, queries, keys and values come from a depth-wise 3x3
convolution with batch norm (stride 2 for keys and values) before the usual linear maps. There are no positions. Only
the last stage has a class token, which the convolutions leave alone.

What we do differently from the released code: attention is fused, any image size and shape works, a batch of one works,
and `forward_features` gives all tokens. Kept, because the released weights were trained with it: attention is divided
by the root of the stage's width, not of a head's; the activation is x * sigmoid(1.702 x). The state-dict keys are the
released ones.

`cvt_13_pooled` is the form that "Efficient Training of Visual Transformers with Small Datasets" trained, another
project's port: no class token and no last norm, the head reads the mean of the tokens; keys and values share one
convolution; no biases in the projections; attention is divided by the root of a head's width; GELU.

Cost at 224 (multiply-adds, as published): CvT-13 4.5 G, CvT-21 7.1 G.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerNorm, Mlp, calculate_drop_path_rates, get_act_layer, global_pool_nlc
from timm.models import checkpoint, generate_default_cfgs
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.models.common import default_cfg, register_variants
from everytoken.models.weights import unwrap_state_dict

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
        qkv_bias: of the linear maps.
        shared_kv: keys and values share one convolution (`conv_proj_k`).
        scale_by_head: divide attention by the root of a head's width, not of all heads' together.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        prefix: int,
        stride_kv: int,
        attn_drop: float,
        proj_drop: float,
        qkv_bias: bool = True,
        shared_kv: bool = False,
        scale_by_head: bool = False,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.prefix = prefix
        self.scale = (dim // num_heads if scale_by_head else dim) ** -0.5
        self.conv_proj_q = _projection(dim, 1, **dd)
        self.conv_proj_k = _projection(dim, stride_kv, **dd)
        self.conv_proj_v = None if shared_kv else _projection(dim, stride_kv, **dd)
        self.proj_q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.proj_k = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.proj_v = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """Tokens [B, prefix + h*w, D] of a grid of `size` (h, w) -> the same shape."""
        prefix, tokens = x[:, : self.prefix], x[:, self.prefix :]
        grid = tokens.transpose(1, 2).unflatten(2, size)
        q = self._heads(self.proj_q, self.conv_proj_q, grid, prefix)
        k = self._heads(self.proj_k, self.conv_proj_k, grid, prefix)
        v = self._heads(self.proj_v, self.value_conv, grid, prefix)
        drop = self.attn_drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, scale=self.scale)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))

    @property
    def value_conv(self) -> nn.Sequential:
        """The convolution that values are made by."""
        return self.conv_proj_k if self.conv_proj_v is None else self.conv_proj_v

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
        projections: Mapping[str, bool],
        **dd: Any,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-5, **dd)
        self.attn = ConvAttention(dim, num_heads, prefix, stride_kv, attn_drop, proj_drop, **projections, **dd)
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


class CvT(nn.Module):
    """Convolutional vision transformer with timm's protocol.

    Args:
        img_size: only sets `grid_size`, the token grid that tools may ask for; every size and shape runs.
        num_classes, in_chans, drop_rate, proj_drop_rate, attn_drop_rate: as in timm.
        global_pool: "token" (class token), "avg" (mean of the patch tokens) or "" (no pooling).
        class_token: whether the last stage has one; without, global_pool is "avg".
        embed_dims, depths, num_heads, embeds, strides_kv: one entry per stage; `embeds` is (kernel, stride, padding).
        qkv_bias, shared_kv, scale_by_head: of the attention layers, see `ConvAttention`.
        final_norm: a norm after the last block.
        drop_path_rate: largest rate, reached linearly in the last stage, the other stages having none (as published);
            or one such rate per stage.
    """

    def __init__(
        self,
        img_size: int | Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["token", "avg", ""] | None = None,
        class_token: bool = True,
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        embeds: Sequence[Embed] = ((7, 4, 2), (3, 2, 1), (3, 2, 1)),
        strides_kv: Sequence[int] = (2, 2, 2),
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float | Sequence[float] = 0.0,
        act_layer: str | type[nn.Module] = "quick_gelu",
        qkv_bias: bool = True,
        shared_kv: bool = False,
        scale_by_head: bool = False,
        final_norm: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        count = len(embed_dims)
        if any(len(per_stage) != count for per_stage in (depths, num_heads, embeds, strides_kv)):
            raise ValueError(f"embed_dims names {count} stages; depths, num_heads, embeds, strides_kv need as many")
        rates = [0.0] * (count - 1) + [drop_path_rate] if isinstance(drop_path_rate, int | float) else drop_path_rate
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.num_prefix_tokens = int(class_token)
        self.num_stages = count
        self.embeds = tuple(embeds)
        self.global_pool: str = self._checked_pool(global_pool)
        self.set_input_size(img_size)
        self.feature_info: list[dict[str, Any]] = []
        reduction = 1
        for i, (dim, embed) in enumerate(zip(embed_dims, embeds, strict=True)):
            stage = CvTStage(
                in_chans,
                dim,
                embed,
                calculate_drop_path_rates(rates[i], depths[i]),
                class_token and i == count - 1,
                num_heads=num_heads[i],
                mlp_ratio=mlp_ratio,
                stride_kv=strides_kv[i],
                proj_drop=proj_drop_rate,
                attn_drop=attn_drop_rate,
                act_layer=get_act_layer(act_layer),
                projections={"qkv_bias": qkv_bias, "shared_kv": shared_kv, "scale_by_head": scale_by_head},
                **dd,
            )
            self.add_module(f"stage{i}", stage)
            in_chans = dim
            reduction *= embed[1]
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"stage{i}"})
        self.norm = LayerNorm(in_chans, eps=1e-5, **dd) if final_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(in_chans, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal (0.02) for linear layers and the class token; torch's own for convolutions."""
        self.apply(_init_linear)
        if self.stages[-1].cls_token is not None:
            nn.init.trunc_normal_(self.stages[-1].cls_token, std=0.02)

    @property
    def stages(self) -> list[CvTStage]:
        """The stages in order."""
        return [getattr(self, f"stage{i}") for i in range(self.num_stages)]

    def _checked_pool(self, pool: str | None) -> str:
        pool = ("token" if self.num_prefix_tokens else "avg") if pool is None else pool
        if pool not in ("token", "avg", "") or (pool == "token" and not self.num_prefix_tokens):
            raise ValueError(f"global_pool is 'token' (with a class token), 'avg' or '', not {pool!r}")
        return pool

    def set_input_size(self, img_size: int | Size) -> None:
        """Tell the expected image size; sets `grid_size`. Weights do not depend on it."""
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        self.grid_size = self.dynamic_feat_size(self.img_size)

    def dynamic_feat_size(self, img_size: Size) -> Size:
        """Token grid (h, w) of the last stage for an image of (height, width)."""
        h, w = img_size
        for kernel, stride, padding in self.embeds:
            h, w = (h + 2 * padding - kernel) // stride + 1, (w + 2 * padding - kernel) // stride + 1
        return h, w

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay."""
        return {f"stage{self.num_stages - 1}.cls_token"} if self.num_prefix_tokens else set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise learning rates: by stage if coarse, else by block."""
        blocks = [(r"^stage(\d+)", None)] if coarse else [(r"^stage(\d+)\.blocks\.(\d+)", None), (r"^stage(\d+)", (0,))]
        return {"stem": r"^stage0\.patch_embed", "blocks": [*blocks, (r"^norm", (99999,))]}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass to save memory."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for other classes."""
        self.num_classes = num_classes
        self.global_pool = self._checked_pool(self.global_pool if global_pool is None else global_pool)
        like = next(self.parameters())
        self.head = nn.Linear(self.num_features, num_classes).to(like) if num_classes > 0 else nn.Identity()
        _init_linear(self.head)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Grids [B, D, h, w] after the stages `indices` (last n if an int), and the final features.

        Args:
            norm: apply the final norm to the last stage's grid (the others have other widths).
            stop_early: do not run stages after the last one asked for.
            intermediates_only: return only the list.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"CvT gives intermediates as NCHW, not {output_fmt}")
        take, last = feature_take_indices(self.num_stages, indices)
        grids: list[Tensor] = []
        tokens = x
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            tokens, size = stage(x)
            x = tokens[:, int(stage.cls_token is not None) :].transpose(1, 2).unflatten(2, size)
            if i in take:
                final = norm and i == self.num_stages - 1
                grids.append(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if final else x)
        if intermediates_only:
            return grids
        return (self.norm(tokens) if tokens.shape[-1] == self.num_features else tokens), grids

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the stages `indices` do not need."""
        take, last = feature_take_indices(self.num_stages, indices)
        for i in range(last + 1, self.num_stages):
            delattr(self, f"stage{i}")
        self.num_stages = last + 1
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] -> normed tokens [B, prefix + h*w, D], row by row."""
        tokens = x
        for i, stage in enumerate(self.stages):
            tokens, size = stage(x)
            if i < self.num_stages - 1:
                x = tokens.transpose(1, 2).unflatten(2, size)
        return self.norm(tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, prefix + h*w, D] -> logits [B, K], or the pooled features."""
        x = global_pool_nlc(x, self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Fit released weights to `model`: unwrap and drop the `module.` prefix. There are no positions to resize."""
    return unwrap_state_dict(state_dict)


_CFG = default_cfg(
    first_conv="stage0.patch_embed.proj", classifier="head", license="mit", crop_pct=0.875, fixed_input_size=False
)
default_cfgs = generate_default_cfgs({"cvt_13": _CFG, "cvt_13_pooled": _CFG, "cvt_21": _CFG})


_POOLED: dict[str, Any] = {"class_token": False, "final_norm": False, "act_layer": "gelu", "qkv_bias": False}
_POOLED |= {"shared_kv": True, "scale_by_head": True, "embeds": ((7, 4, 3), (3, 2, 1), (3, 2, 1))}
register_variants(
    __name__,
    {  # parameters: 20.0 M, 19.9 M, 31.6 M
        "cvt_13": (CvT, {"depths": (1, 2, 10)}),
        "cvt_13_pooled": (CvT, _POOLED),
        "cvt_21": (CvT, {"depths": (1, 4, 16)}),
    },
    checkpoint_filter_fn,
    out_indices=(0, 1, 2),
)
