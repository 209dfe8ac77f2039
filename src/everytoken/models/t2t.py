"""T2T-ViT: a deep and narrow vision transformer whose tokens are built in overlapping steps.

Paper: "Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet" (ICCV 2021), section 3 and
Table 1. The model is timm's VisionTransformer with another patch embedding (`tokens_to_token`, see the file of that
name, which also is the released name, so that released weights load as they are) and fixed sinusoid positions.

What we do differently from the released code: attention is fused, grids may be rectangular and of any size,
`reset_classifier` initialises the new head, and the performer is safe in half precision.

Cost at 224 (multiply-adds, as published): T2T-ViT-7 1.1 G, -14 4.8 G, -24 13.8 G, t-14 6.1 G, t-24 15.0 G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import LayerNorm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, init_weights_vit_timm
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from torch import Tensor, nn

from everytoken.models.tokens_to_token import SPLITS, Split, TokenPerformer, TokensToToken

__all__ = ["T2TViT", "sinusoid_positions"]


def sinusoid_positions(count: int, dim: int) -> Tensor:
    """[1, count, dim]: sine in even and cosine in odd channels, wavelengths from 2π to 10000·2π."""
    position = torch.arange(count, dtype=torch.float64, device="cpu").unsqueeze(1)
    even = torch.arange(dim, device="cpu") // 2 * 2
    angle = position / torch.pow(torch.tensor(10000.0, dtype=torch.float64, device="cpu"), even / dim)
    return torch.where(torch.arange(dim, device="cpu") % 2 == 0, angle.sin(), angle.cos()).float().unsqueeze(0)


class T2TViT(VisionTransformer):
    """T2T-ViT: `tokens_to_token`, a class token, fixed sinusoid positions, deep and narrow transformer blocks.

    Arguments beyond timm's VisionTransformer: splits, tokens, token_dim and token_drop of `TokensToToken`.
    """

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
        self.weight_init_mode = ""
        self._freeze_positions()
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @property
    def patch_embed(self) -> TokensToToken:
        """timm's name for `tokens_to_token`."""
        modules = self._modules
        return modules["tokens_to_token"] if "tokens_to_token" in modules else modules["patch_embed"]

    def _freeze_positions(self) -> None:
        if self.pos_embed is not None:
            self.pos_embed.requires_grad_(False)

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Truncated normal (0.02) for linear layers and class token, sinusoid positions, orthogonal features."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                init_weights_vit_timm(module, name)
            elif needs_reset and isinstance(module, TokenPerformer):
                module.reset_features()
            elif needs_reset and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for parameter in (self.cls_token, self.reg_token):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        if self.pos_embed is not None:
            self.pos_embed.copy_(sinusoid_positions(self.pos_embed.shape[1], self.pos_embed.shape[2]))

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the image size; positions are resampled, as the released fine-tuning does, and stay fixed."""
        super().set_input_size(img_size, patch_size)
        self._freeze_positions()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for other classes."""
        super().reset_classifier(num_classes, global_pool)
        if isinstance(self.head, nn.Linear):
            init_weights_vit_timm(self.head)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|tokens_to_token",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Fit released weights to `model`: unwrap, drop the `module.` prefix, resize the position table (bicubic)."""
    for name in ("state_dict_ema", "state_dict", "model"):
        if name in state_dict and isinstance(state_dict[name], dict):
            state_dict = state_dict[name]
            break
    state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}
    return vit_filter(state_dict, model, antialias=False)


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": None,
        "classifier": "head",
        "license": "bsd-3-clause-clear",
        **kwargs,
    }


_SIZES: dict[str, dict[str, Any]] = {
    "7": {"embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2.0},
    "10": {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0},
    "12": {"embed_dim": 256, "depth": 12, "num_heads": 4, "mlp_ratio": 2.0},
    "14": {"embed_dim": 384, "depth": 14, "num_heads": 6, "mlp_ratio": 3.0},
    "19": {"embed_dim": 448, "depth": 19, "num_heads": 7, "mlp_ratio": 3.0},
    "24": {"embed_dim": 512, "depth": 24, "num_heads": 8, "mlp_ratio": 3.0},
}

default_cfgs = generate_default_cfgs(
    {name: _cfg() for name in [f"t2t_vit_{s}" for s in _SIZES] + [f"t2t_vit_t_{s}" for s in ("14", "19", "24")]}
)


def create(variant: str, pretrained: bool, defaults: dict[str, Any], kwargs: dict[str, Any]) -> T2TViT:
    """Build a registered T2T-ViT: `defaults` of the variant, overridden by the caller's `kwargs`."""
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        T2TViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{**defaults, **kwargs},
    )


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-7: 4.3 M parameters."""
    return create("t2t_vit_7", pretrained, _SIZES["7"], kwargs)


@register_model
def t2t_vit_10(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-10: 5.8 M parameters."""
    return create("t2t_vit_10", pretrained, _SIZES["10"], kwargs)


@register_model
def t2t_vit_12(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-12: 6.9 M parameters."""
    return create("t2t_vit_12", pretrained, _SIZES["12"], kwargs)


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-14: 21.5 M parameters."""
    return create("t2t_vit_14", pretrained, _SIZES["14"], kwargs)


@register_model
def t2t_vit_19(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-19: 39.2 M parameters."""
    return create("t2t_vit_19", pretrained, _SIZES["19"], kwargs)


@register_model
def t2t_vit_24(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-24: 64.1 M parameters."""
    return create("t2t_vit_24", pretrained, _SIZES["24"], kwargs)


@register_model
def t2t_vit_t_14(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-14 with a token transformer: 21.5 M parameters."""
    return create("t2t_vit_t_14", pretrained, {**_SIZES["14"], "tokens": "transformer"}, kwargs)


@register_model
def t2t_vit_t_19(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-19 with a token transformer: 39.2 M parameters."""
    return create("t2t_vit_t_19", pretrained, {**_SIZES["19"], "tokens": "transformer"}, kwargs)


@register_model
def t2t_vit_t_24(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-24 with a token transformer: 64.1 M parameters."""
    return create("t2t_vit_t_24", pretrained, {**_SIZES["24"], "tokens": "transformer"}, kwargs)
