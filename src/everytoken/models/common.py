"""What LV-ViT, T2T-ViT, CvT and small variants share: configuration, construction, weights, positions, patch grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Format
from timm.layers.trace_utils import _assert
from timm.models import build_model_with_cfg, load_pretrained, register_model
from timm.models.vision_transformer import VisionTransformer, init_weights_vit_timm
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from torch import Tensor, nn

from everytoken.models.weights import fit_state, read_weights, unwrap_state_dict


def default_cfg(url: str = "", size: int = 224, **fields: Any) -> dict[str, Any]:
    """timm's configuration of a model, for ImageNet unless `fields` say else; released weights at `url`, if any."""
    return {
        "url": url,
        "custom_load": bool(url),
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **fields,
    }


def register_variants(
    module: str,
    variants: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]],
    filter_fn: Callable[..., Any],
    out_indices: int | tuple[int, ...] = 3,
    **feature_cfg: Any,
) -> None:
    """Register models with timm, as functions of `module`, whose `default_cfgs` configure them.

    Args:
        variants: name -> (class, default arguments), which the caller of `timm.create_model` may override.
        filter_fn: fits a checkpoint to the model (timm's `checkpoint_filter_fn`).
        out_indices: what `features_only=True` returns unless the caller says else.
        feature_cfg: further settings of feature extraction; without any, by `forward_intermediates`.
    """

    def entry_point(name: str, model_class: type[nn.Module], defaults: Mapping[str, Any]) -> Callable[..., nn.Module]:
        def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
            features = {"out_indices": kwargs.pop("out_indices", out_indices)}
            features |= feature_cfg or {"feature_cls": "getter"}
            how = {"pretrained_filter_fn": filter_fn, "feature_cfg": features}
            model: nn.Module = build_model_with_cfg(model_class, name, pretrained, **how, **{**defaults, **kwargs})
            return model

        build.__module__, build.__name__, build.__qualname__ = module, name, name
        return build

    for name, (model_class, defaults) in variants.items():
        register_model(entry_point(name, model_class, defaults))


class TokenViT(VisionTransformer):
    """What LV-ViT and T2T-ViT have beside timm's VisionTransformer: released weights, fixed positions, initial weights.

    Subclasses call `begin` at the end of their constructor.
    """

    drawn: tuple[str, ...] = ("cls_token", "pos_embed", "reg_token", "dist_token")  # from the truncated normal
    fixed_positions = False  # sinusoids, which are not trained

    def begin(self, weight_init: str) -> None:
        """Freeze positions that are fixed and, unless `weight_init` is "skip", draw the weights."""
        self.weight_init_mode = ""
        self._freeze_positions()
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Truncated normal (0.02) for linear layers, tokens, positions (or sinusoids); each other layer as its own."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                init_weights_vit_timm(module, name)
            elif needs_reset and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name in self.drawn:
            if (parameter := getattr(self, name, None)) is not None:
                nn.init.trunc_normal_(parameter, std=0.02)
        if self.fixed_positions and self.pos_embed is not None:
            self.pos_embed.copy_(sinusoid_positions(*self.pos_embed.shape[1:]))

    def _freeze_positions(self) -> None:
        if self.fixed_positions and self.pos_embed is not None:
            self.pos_embed.requires_grad_(False)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """As timm's; positions are resampled, as the released fine-tunings do, and fixed ones stay fixed."""
        super().set_input_size(*args, **kwargs)
        self._freeze_positions()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for other classes."""
        super().reset_classifier(num_classes, global_pool)
        for head in (self.head, getattr(self, "head_dist", None)):
            if isinstance(head, nn.Linear):
                init_weights_vit_timm(head)

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Called by timm (`custom_load`) with a file that the model's authors released, which it would refuse where an
        `argparse.Namespace` lies beside the weights. timm then does the rest: classes, channels, a strict check of
        names.

        A file without a token head leaves the model without one, because nothing has trained it.
        """
        model: Any = self
        state = read_weights(checkpoint_path)
        if getattr(model, "aux_head", None) is not None and "aux_head.weight" not in state:
            model.aux_head = None
        config = {**model.pretrained_cfg, "custom_load": False, "state_dict": fit_state(model, state)}
        load_pretrained(model, config, model.num_classes, model.in_chans)


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Fit released weights to `model`: unwrap, drop the `module.` prefix, resize the position embedding.

    Resizing is bicubic without anti-aliasing, as the released fine-tunings do it.
    """
    return vit_filter(unwrap_state_dict(state_dict), model, antialias=False)


def sinusoid_positions(count: int, dim: int) -> Tensor:
    """[1, count, dim]: sine in even and cosine in odd channels, wavelengths from 2π to 10000·2π."""
    position = torch.arange(count, dtype=torch.float64, device="cpu").unsqueeze(1)
    even = torch.arange(dim, device="cpu") // 2 * 2
    angle = position / torch.pow(torch.tensor(10000.0, dtype=torch.float64, device="cpu"), even / dim)
    return torch.where(torch.arange(dim, device="cpu") % 2 == 0, angle.sin(), angle.cos()).float().unsqueeze(0)


class StridedEmbed(nn.Module):
    """Base of patch embeddings whose token size follows from the strides of their layers (timm's PatchEmbed protocol).

    Subclasses implement `dynamic_feat_size` and call `set_input_size` at the end of their constructor.

    Args:
        stride: pixels per token, along both axes.
        strict_img_size: refuse images of another size than `set_input_size` was given.
        output_fmt: timm's Format of what `forward` returns; None: [B, N, D].
    """

    def __init__(self, stride: int, strict_img_size: bool = True, output_fmt: str | None = None) -> None:
        super().__init__()
        self.patch_size = (stride, stride)
        self.img_size: tuple[int, int] | None = None
        self.strict_img_size = strict_img_size
        self.output_fmt = Format(output_fmt) if output_fmt else None

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set the expected image size (None: keep); the token size is fixed by the strides."""
        asked = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if asked is not None and tuple(asked) != self.patch_size:
            raise ValueError(f"patch_size={patch_size} does not fit strides that make {self.patch_size[0]}")
        if img_size is not None:
            self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
            self.grid_size = self.dynamic_feat_size(self.img_size)
            self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels per token, along each axis."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Token grid (h, w) for an image of (height, width)."""
        raise NotImplementedError

    def check_size(self, x: Tensor) -> None:
        """Refuse images [B, C, H, W] of another size than the model was made for, if that matters.

        One number at a time, so that torch.fx can trace it.
        """
        if self.strict_img_size and self.img_size is not None:
            height, width = x.shape[-2:]
            message = (
                f"the input is {height}x{width}, the model was made for {self.img_size}; "
                "call set_input_size, or create it with img_size or dynamic_img_size=True"
            )
            _assert(height == self.img_size[0], message)
            _assert(width == self.img_size[1], message)


def make_attention_explicit(module: nn.Module, grid: tuple[int, int]) -> bool:
    """For mixed precision on the CPU, where fused attention is slow to differentiate: let attention on a small grid
    (up to 16x16) be matrix products; whether the grid is small."""
    small = grid[0] * grid[1] <= 256
    layers: list[Any] = [layer for layer in module.modules() if small and hasattr(layer, "fused_attn")]
    for layer in layers:
        layer.fused_attn = False
    return small
