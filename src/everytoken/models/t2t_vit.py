"""T2T-ViT: a deep and narrow vision transformer whose tokens are built in overlapping steps.

Paper: "Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet" (ICCV 2021), section 3 and
Table 1. The model is timm's VisionTransformer with another patch embedding (`tokens_to_token`, the released name, so
that released weights load as they are) and fixed sinusoid positions. The embedding (section 3.1) cuts the image into
overlapping windows three times (7x7 stride 4, then 3x3 stride 2 twice); between the cuts a narrow attention layer of 64
channels mixes all positions: a performer, which is linear in the number of positions, or a transformer.

What we do differently from the released code: attention is fused, grids may be rectangular and of any size,
`reset_classifier` initialises the new head, and the performer is computed in float32 with its exponents shifted, so
that it does not overflow or underflow in float16 or for large inputs (the released one loses whole rows there, and
losses become NaN). The result is the same elsewhere.

Two habits of the released code are kept because its weights were trained with them: the token transformer divides by
the root of its input width (147 and 576), not of its 64 channels; and 1e-8 is added to the performer's denominator,
which fades attention where keys and queries are very large (`eps=0` in `performer` is the kernel as defined).

Cost at 224 (multiply-adds, as published): T2T-ViT-7 1.1 G, -14 4.8 G, -24 13.8 G, t-14 6.1 G, t-24 15.0 G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import LayerNorm, Mlp, nhwc_to, register_notrace_function
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.models.common import StridedEmbed, TokenViT, checkpoint_filter_fn, default_cfg, register_variants

Split = tuple[int, int, int]  # kernel, stride, padding
SPLITS: tuple[Split, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


@register_notrace_function  # torch.fx cannot trace the choice of autocast
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
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
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


class TokensToToken(StridedEmbed):
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
        if tokens not in ("performer", "transformer"):
            raise ValueError(f"tokens is 'performer' or 'transformer', not {tokens!r}")
        if dynamic_img_pad:
            raise ValueError("T2T-ViT takes every image size; leave dynamic_img_pad out")
        super().__init__(math.prod(stride for _, stride, _ in splits), strict_img_size, output_fmt)
        self.splits = tuple(splits)
        dd = {"device": device, "dtype": dtype}
        layer: Any = TokenPerformer if tokens == "performer" else TokenTransformer
        options = {} if token_drop is None else {"drop": token_drop}
        channels = in_chans
        for i, (kernel, _, _) in enumerate(self.splits[:-1], start=1):
            self.add_module(f"attention{i}", layer(channels * kernel**2, token_dim, **options, **dd))
            channels = token_dim
        self.project = nn.Linear(channels * self.splits[-1][0] ** 2, embed_dim, bias=bias, **dd)
        self.set_input_size(img_size)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Token grid (h, w) for an image of (height, width)."""
        h, w = img_size
        for split in self.splits:
            h, w = _windows(h, split), _windows(w, split)
        return h, w

    def forward(self, x: Tensor) -> Tensor:
        self.check_size(x)
        h, w = x.shape[-2:]
        for i, split in enumerate(self.splits, start=1):
            kernel, stride, padding = split
            x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
            h, w = _windows(h, split), _windows(w, split)
            if i < len(self.splits):
                x = getattr(self, f"attention{i}")(x)
                x = x.transpose(1, 2).reshape(x.shape[0], -1, h, w)
        x = self.project(x)
        return x if self.output_fmt is None else nhwc_to(x.unflatten(1, (h, w)), self.output_fmt)


def _windows(length: int, split: Split) -> int:
    """How many windows fit on an axis of so many pixels or cells."""
    kernel, stride, padding = split
    return (length + 2 * padding - kernel) // stride + 1


class T2TViT(TokenViT):
    """T2T-ViT: `tokens_to_token`, a class token, fixed sinusoid positions, deep and narrow transformer blocks.

    Arguments beyond timm's VisionTransformer: splits, tokens, token_dim and token_drop of `TokensToToken`.
    """

    drawn = ("cls_token", "reg_token")
    fixed_positions = True

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        fc_norm: bool | None = False,
        splits: Sequence[Split] = SPLITS,
        tokens: Literal["performer", "transformer"] = "performer",
        token_dim: int = 64,
        token_drop: float | None = None,
        norm_layer: Any = None,
        patch_size: int | None = None,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        size = math.prod(stride for _, stride, _ in splits)
        if patch_size not in (None, size):
            raise ValueError(f"patch_size={patch_size} does not fit splits={tuple(splits)}, whose strides make {size}")
        super().__init__(
            img_size=img_size,
            patch_size=size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            fc_norm=fc_norm,
            embed_layer=partial(
                TokensToToken, splits=splits, tokens=tokens, token_dim=token_dim, token_drop=token_drop
            ),
            norm_layer=norm_layer or partial(LayerNorm, eps=1e-5),
            weight_init="skip",
            **kwargs,
        )
        # the released name; dicts keep their order, so the embedding goes first again
        modules = dict(self._modules)
        self._modules.clear()
        self._modules["tokens_to_token"] = modules.pop("patch_embed")
        self._modules.update(modules)
        self.begin(weight_init)

    @property
    def patch_embed(self) -> TokensToToken:
        """timm's name for `tokens_to_token`."""
        modules = self._modules
        return modules["tokens_to_token"] if "tokens_to_token" in modules else modules["patch_embed"]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|tokens_to_token",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def _cfg(file: str, size: int = 224) -> dict[str, Any]:
    """The first layer is linear, over windows of pixels: timm can name it, but not adapt it to other channels."""
    first_layer = "attn.qkv" if "ViTt" in file else "kqv"
    return default_cfg(
        f"https://github.com/yitu-opensource/T2T-ViT/releases/download/main/{file}.pth.tar",
        size,
        first_conv=f"tokens_to_token.attention1.{first_layer}",
        classifier="head",
        license="bsd-3-clause-clear",
        origin_url="https://github.com/yitu-opensource/T2T-ViT",
        paper_name="Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet",
        paper_ids="arXiv:2101.11986",
    )


# The addresses were not tried: the files cannot be fetched where this was written.
default_cfgs = generate_default_cfgs(
    {
        "t2t_vit_7.yitu_in1k": _cfg("71.7_T2T_ViT_7"),
        "t2t_vit_10.yitu_in1k": _cfg("75.2_T2T_ViT_10"),
        "t2t_vit_12.yitu_in1k": _cfg("76.5_T2T_ViT_12"),
        "t2t_vit_14.yitu_in1k": _cfg("81.5_T2T_ViT_14"),
        "t2t_vit_14.yitu_in1k_384": _cfg("83.3_T2T_ViT_14", 384),
        "t2t_vit_19.yitu_in1k": _cfg("81.9_T2T_ViT_19"),
        "t2t_vit_24.yitu_in1k": _cfg("82.3_T2T_ViT_24"),
        "t2t_vit_t_14.yitu_in1k": _cfg("81.7_T2T_ViTt_14"),
        "t2t_vit_t_19.yitu_in1k": _cfg("82.4_T2T_ViTt_19"),
        "t2t_vit_t_24.yitu_in1k": _cfg("82.6_T2T_ViTt_24"),
    }
)


_SIZES: dict[str, dict[str, Any]] = {  # parameters: 4.3 M, 5.8 M, 6.9 M, 21.5 M, 39.2 M, 64.1 M
    "7": {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
    "10": {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0},
    "12": {"embed_dim": 256, "depth": 12, "num_heads": 4, "mlp_ratio": 2.0},
    "14": {"embed_dim": 384, "depth": 14, "num_heads": 6},
    "19": {"embed_dim": 448, "depth": 19, "num_heads": 7},
    "24": {"embed_dim": 512, "depth": 24, "num_heads": 8},
}
register_variants(
    __name__,
    {f"t2t_vit_{size}": (T2TViT, arguments) for size, arguments in _SIZES.items()}
    | {f"t2t_vit_t_{size}": (T2TViT, {**_SIZES[size], "tokens": "transformer"}) for size in ("14", "19", "24")},
    checkpoint_filter_fn,
)
