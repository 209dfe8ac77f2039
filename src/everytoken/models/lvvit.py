"""LV-ViT: a vision transformer whose patch tokens are trained as well as its class token.

Paper: "All Tokens Matter" (section 3 and Table 1) and its supplement (Tables 2 to 4); "Token Labeling:
Training a 85.4% ..." (Tables 4, 5 and 9). The model is timm's VisionTransformer with three changes: a
convolutional patch embedding, residual branches divided by a constant, and a second classifier for the patch
tokens (`aux_head`, the released name, so that released weights load as they are).

What we do differently from the released code: attention is fused, position embeddings follow the image size,
`reset_classifier` renews both heads, and evaluation gives the class token's logits alone, as the papers
describe; the released `class + 0.5 * max over tokens` is `token_vote=0.5`.

Cost at 224 (multiply-adds): T 2.9 G, S 6.6 G, M 12.7 G (one paper prints 16.0), L 34.8 G; the token head is
about 1 % of it and runs only in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from timm.layers import LayerNorm, Mlp, nchw_to
from timm.models import generate_default_cfgs
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, init_weights_vit_timm
from torch import Tensor, nn

from everytoken.models.common import StridedEmbed, TokenViT, checkpoint_filter_fn, default_cfg, register_variants


class ConvStem(StridedEmbed):
    """Patch embedding by a few convolutions; the last one makes the tokens (section 3 and Table 1).

    Args:
        kernels, strides: one entry per convolution. All but the last are followed by batch norm and ReLU. One
            entry is the plain patch embedding of ViT. The token size is the product of the strides.
        width: channels of all convolutions but the last.
        others: as in timm's PatchEmbed.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = 224,
        in_chans: int = 3,
        embed_dim: int = 384,
        kernels: Sequence[int] = (7, 3, 3, 8),
        strides: Sequence[int] = (2, 1, 1, 8),
        width: int = 64,
        strict_img_size: bool = True,
        dynamic_img_pad: bool = False,
        output_fmt: str | None = None,
        patch_size: int | tuple[int, int] | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if not kernels or len(kernels) != len(strides):
            raise ValueError(f"the stem needs one stride per kernel: {tuple(kernels)}, {tuple(strides)}")
        super().__init__(math.prod(strides), strict_img_size, output_fmt)
        self.dynamic_img_pad = dynamic_img_pad
        self.num_hidden = len(kernels) - 1
        dd = {"device": device, "dtype": dtype}
        channels = in_chans
        for i, (kernel, stride) in enumerate(zip(kernels[:-1], strides[:-1], strict=True), start=1):
            conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False, **dd)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(width, **dd))
            channels = width
        # a kernel wider than its stride overlaps; padding keeps the number of tokens at size / stride
        padding = max(0, kernels[-1] - strides[-1]) // 2
        self.proj = nn.Conv2d(channels, embed_dim, kernels[-1], stride=strides[-1], padding=padding, bias=bias, **dd)
        self.set_input_size(img_size)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Token grid (h, w) for an image of (height, width)."""
        if self.dynamic_img_pad:
            return -(-img_size[0] // self.patch_size[0]), -(-img_size[1] // self.patch_size[1])
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> tokens [B, h*w, D] (or [B, h, w, D] with output_fmt NHWC), row by row."""
        self.check_size(x)
        if self.dynamic_img_pad:
            height, width = x.shape[-2:]
            x = nn.functional.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        for i in range(1, self.num_hidden + 1):
            x = nn.functional.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)), inplace=True)
        x = self.proj(x)
        if self.output_fmt is None:
            return x.flatten(2).transpose(1, 2)
        return nchw_to(x, self.output_fmt)


class TokenGroupNorm(nn.GroupNorm):
    """Group norm of tokens [B, N, D]: statistics over all tokens and the channels of a group (Table 9)."""

    def __init__(self, dim: int, groups: int, **kwargs: Any) -> None:
        super().__init__(groups, dim, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ScaledBlock(Block):
    """Transformer block with x + F(norm(x)) / divisor (equation 5), or norm(x + F(x) / divisor) for post-norm."""

    def __init__(self, *args: Any, divisor: float = 1.0, post_norm: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divisor = divisor
        self.post_norm = post_norm

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if self.post_norm:
            attended = self.attn(x, attn_mask=attn_mask, is_causal=is_causal)
            x = self.norm1(x + self.drop_path1(self.ls1(attended)) / self.divisor)
            return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))) / self.divisor)
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended)) / self.divisor
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x)))) / self.divisor


class LVViT(TokenViT):
    """LV-ViT with a head for the class token (`head`) and one for every patch token (`aux_head`).

    Arguments beyond timm's VisionTransformer:
        stem_kernels, stem_strides, stem_width: the convolutional patch embedding.
        residual_divisor: what each residual branch is divided by (the released `skip_lam`).
        token_classes: outputs of the token head; 0: no token head. None: as many as num_classes, for released weights;
            nothing trains that head in plain training, so it gets no gradient until `TokenModel` uses it.
        token_vote: at evaluation, add this much of the strongest token logit of each class to the class logits.
            The papers' accuracies were measured with 0.5; the method as described is 0.
        block_norm, norm_groups: "layer", or "group" with that many groups, inside the blocks.
        norm_position: "pre" or "post".
        pos_embed: "learn", "none", or "sinusoid" for fixed ones (Token Labeling: Training a 85.4% ..., 3.1).
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = False,
        fc_norm: bool | None = False,
        stem_kernels: Sequence[int] = (7, 3, 3, 8),
        stem_strides: Sequence[int] = (2, 1, 1, 8),
        stem_width: int = 64,
        residual_divisor: float = 2.0,
        token_classes: int | None = None,
        token_vote: float = 0.0,
        block_norm: Literal["layer", "group"] = "layer",
        norm_groups: int = 1,
        norm_position: Literal["pre", "post"] = "pre",
        pos_embed: str = "learn",
        norm_layer: Callable[..., nn.Module] | None = None,
        patch_size: int | None = None,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        if norm_position not in ("pre", "post") or block_norm not in ("layer", "group"):
            raise ValueError(f"norm_position={norm_position!r} or block_norm={block_norm!r} is not known")
        strides_size = math.prod(stem_strides)
        if patch_size not in (None, strides_size):
            raise ValueError(f"patch_size={patch_size} does not fit stem_strides, which make {strides_size}")
        layer = norm_layer or partial(LayerNorm, eps=1e-5)
        inner = partial(TokenGroupNorm, groups=norm_groups) if block_norm == "group" else layer
        super().__init__(
            img_size=img_size,
            patch_size=strides_size,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            fc_norm=fc_norm,
            embed_layer=partial(ConvStem, kernels=stem_kernels, strides=stem_strides, width=stem_width),
            block_fn=partial(_block, inner_norm=inner, divisor=residual_divisor, post_norm=norm_position == "post"),
            norm_layer=layer,
            mlp_layer=Mlp,
            pos_embed="learn" if pos_embed == "sinusoid" else pos_embed,
            weight_init="skip",
            **kwargs,
        )
        self.fixed_positions = pos_embed == "sinusoid"
        self.token_vote = token_vote
        outputs = num_classes if token_classes is None else token_classes
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        self.aux_head: nn.Linear | None = nn.Linear(embed_dim, outputs, device=device, dtype=dtype) if outputs else None
        if self.aux_head is not None:
            self.aux_head.requires_grad_(token_classes is not None)
        self.begin(weight_init)

    def reset_classifier(
        self, num_classes: int, global_pool: str | None = None, token_classes: int | None = None
    ) -> None:
        """New heads for other classes: the class head and, unless there is none, the token head."""
        super().reset_classifier(num_classes, global_pool)
        trained = self.aux_head is not None and self.aux_head.weight.requires_grad
        outputs = (num_classes if self.aux_head is not None else 0) if token_classes is None else token_classes
        like = self.patch_embed.proj.weight
        self.aux_head = nn.Linear(self.embed_dim, outputs, device=like.device, dtype=like.dtype) if outputs else None
        if self.aux_head is not None:
            init_weights_vit_timm(self.aux_head)
            self.aux_head.requires_grad_(trained or token_classes is not None)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images [B, C, H, W] -> class logits [B, K], at evaluation with the vote of the tokens, if any."""
        features = self.forward_features(x, attn_mask=attn_mask, is_causal=is_causal)
        logits = self.forward_head(features)
        if self.token_vote and self.aux_head is not None and not self.training:
            votes = self.aux_head(features[:, self.num_prefix_tokens :]).amax(dim=1)
            logits = logits + self.token_vote * votes
        return logits


class LVViTDistilled(LVViT, VisionTransformerDistilled):
    """LV-ViT with a distillation token and its head, as DeiT has them (All Tokens Matter, Table 4: online distillation
    with two tokens)."""


def _block(*args: Any, norm_layer: Any, inner_norm: Any, **kwargs: Any) -> ScaledBlock:
    return ScaledBlock(*args, norm_layer=inner_norm, **kwargs)


_RELEASES = "https://github.com/zihangJiang/TokenLabeling/releases/download"


def _cfg(file: str = "", size: int = 224, **fields: Any) -> dict[str, Any]:
    return default_cfg(
        f"{_RELEASES}/{file}" if file else "",
        size,
        **{
            "first_conv": "patch_embed.conv1",
            "classifier": ("head", "aux_head"),
            "license": "apache-2.0",
            "origin_url": "https://github.com/zihangJiang/TokenLabeling",
            "paper_name": "All Tokens Matter: Token Labeling for Training Better Vision Transformers",
            "paper_ids": "arXiv:2104.10858",
            **fields,
        },
    )


# The addresses were not tried: the files cannot be fetched where this was written.
default_cfgs = generate_default_cfgs(
    {
        "lvvit_t.tl_in1k": _cfg("v0.2.0/lvvit_t.pth"),
        "lvvit_s.tl_in1k": _cfg("1.0/lvvit_s-26M-224-83.3.pth.tar"),
        "lvvit_s.tl_in1k_384": _cfg("1.0/lvvit_s-26M-384-84.4.pth.tar", 384),
        "lvvit_s_distilled": _cfg(classifier=("head", "head_dist", "aux_head")),
        "lvvit_m.tl_in1k": _cfg("1.0/lvvit_m-56M-224-84.0.pth.tar", crop_pct=1.0),
        "lvvit_m.tl_in1k_384": _cfg("1.0/lvvit_m-56M-384-85.4.pth.tar", 384, crop_pct=1.0),
        "lvvit_m.tl_in1k_448": _cfg("1.0/lvvit_m-56M-448-85.5.pth.tar", 448, crop_pct=1.0),
        "lvvit_l.tl_in1k_448": _cfg("1.0/lvvit_l-150M-448-86.2.pth.tar", 448, crop_pct=1.0),
        "lvvit_l.tl_in1k_512": _cfg("1.0/lvvit_l-150M-512-86.4.pth.tar", 512, crop_pct=1.0),
    }
)


register_variants(
    __name__,
    {  # parameters: 8.5 M, 26 M, 26.5 M, 56 M, 150 M
        "lvvit_t": (LVViT, {"embed_dim": 240, "depth": 12, "num_heads": 4, "residual_divisor": 1.0}),
        "lvvit_s": (LVViT, {"embed_dim": 384, "depth": 16, "num_heads": 6}),
        "lvvit_s_distilled": (LVViTDistilled, {"embed_dim": 384, "depth": 16, "num_heads": 6}),
        "lvvit_m": (LVViT, {"embed_dim": 512, "depth": 20, "num_heads": 8}),
        "lvvit_l": (
            LVViT,
            {"embed_dim": 768, "depth": 24, "num_heads": 12, "residual_divisor": 3.0, "stem_width": 128},
        ),
    },
    checkpoint_filter_fn,
)
