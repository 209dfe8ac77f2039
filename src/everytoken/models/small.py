"""Small-image variants: ViT, Swin, LV-ViT, T2T-ViT and CvT for images of 32, 64 and 96 pixels, sizes for a laptop.

The published models cut 224 pixels into tokens of 16; at 32 pixels that leaves 4 tokens. These keep the number of
tokens instead: 8x8 at 32 and 64 pixels, 12x12 at 96 (Swin ends with 4x4, 4x4 and 6x6). The parts of a model are those
of its family; only patch sizes, strides, widths and depths differ. None of them is published: there are no weights and
no accuracies to compare with.

Names: `{family}_{size}_patch{pixels per token}_{image}`; Swin has `patch{of its embedding}_window{w}_{image}`, as in
timm. Sizes: nano about 1.2 M parameters, micro 2.6 M, mini 5.3 M. Images of other sizes: `img_size=`, as in timm.

Cost (multiply-adds, forward): nano 0.1 G, micro 0.2 G and mini 0.4 G at 32 and 64 pixels, Swin half of that; 2.4 times
as much at 96.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import checkpoint_filter_fn as swin_filter
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from torch import nn

from everytoken.models import cvt, lvvit, t2t

__all__ = ["SMALL"]

Arguments = dict[str, Any]

_IMAGES = (32, 64, 96)
_TOKEN = {32: 4, 64: 8, 96: 8}  # pixels per token

_VIT: dict[str, Arguments] = {
    "nano": {"embed_dim": 128, "depth": 6, "num_heads": 4},
    "micro": {"embed_dim": 192, "depth": 6, "num_heads": 3},
    "mini": {"embed_dim": 192, "depth": 12, "num_heads": 3},
}
_SWIN: dict[str, Arguments] = {
    "nano": {"embed_dim": 48, "depths": (2, 2, 2), "num_heads": (3, 6, 12)},
    "micro": {"embed_dim": 64, "depths": (2, 4, 2), "num_heads": (2, 4, 8)},
    "mini": {"embed_dim": 96, "depths": (2, 2, 2), "num_heads": (3, 6, 12)},
}
_SWIN_CUTS = {32: (2, 4), 64: (4, 4), 96: (4, 6)}  # patch and window: 16x16 tokens (24x24 at 96), halved twice
_LVVIT: dict[str, Arguments] = {
    "nano": {"embed_dim": 128, "depth": 7, "num_heads": 4, "stem_width": 24},
    "micro": {"embed_dim": 192, "depth": 7, "num_heads": 3, "stem_width": 32},
    "mini": {"embed_dim": 240, "depth": 9, "num_heads": 4, "stem_width": 32},
}
# LV-ViT-T, the smallest published one, does not divide its residual branches either
_LVVIT_STEM: dict[int, Arguments] = {
    image: {"stem_kernels": (3, 3, 3, 4), "stem_strides": (first, 1, 1, 4), "residual_divisor": 1.0}
    for image, first in {32: 1, 64: 2, 96: 2}.items()
}
_T2T: dict[str, Arguments] = {
    "nano": {"embed_dim": 128, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0, "token_dim": 32},
    "micro": {"embed_dim": 192, "depth": 8, "num_heads": 3, "mlp_ratio": 2.0, "token_dim": 32},
    "mini": {"embed_dim": 256, "depth": 10, "num_heads": 4, "mlp_ratio": 2.0, "token_dim": 32},
}
_T2T_SPLITS: dict[int, Arguments] = {
    image: {"splits": (first, (3, 2, 1), (3, 2, 1))}
    for image, first in {32: (3, 1, 1), 64: (5, 2, 2), 96: (5, 2, 2)}.items()
}
_CVT: dict[str, Arguments] = {
    "nano": {"embed_dims": (32, 64, 128), "depths": (1, 2, 5), "num_heads": (1, 2, 4)},
    "micro": {"embed_dims": (48, 96, 192), "depths": (1, 2, 5), "num_heads": (1, 2, 4)},
    "mini": {"embed_dims": (64, 128, 256), "depths": (1, 2, 6), "num_heads": (1, 2, 4)},
}
_CVT_EMBEDS: dict[int, Arguments] = {
    image: {"embeds": (first, (3, 2, 1), (3, 1, 1))}
    for image, first in {32: (3, 2, 1), 64: (7, 4, 2), 96: (7, 4, 2)}.items()
}


def _variants() -> dict[str, tuple[str, int, Arguments]]:
    """name -> (family module, image size, arguments)."""
    table: dict[str, tuple[str, int, Arguments]] = {}
    for image in _IMAGES:
        token = _TOKEN[image]
        patch, window = _SWIN_CUTS[image]
        for size in ("nano", "micro", "mini"):
            vit = {**_VIT[size], "patch_size": token}
            swin = {**_SWIN[size], "patch_size": patch, "window_size": window}
            table[f"vit_{size}_patch{token}_{image}"] = ("vision_transformer", image, vit)
            table[f"swin_{size}_patch{patch}_window{window}_{image}"] = ("swin_transformer", image, swin)
            table[f"lvvit_{size}_patch{token}_{image}"] = ("lvvit", image, {**_LVVIT[size], **_LVVIT_STEM[image]})
            table[f"t2t_vit_{size}_patch{token}_{image}"] = ("t2t", image, {**_T2T[size], **_T2T_SPLITS[image]})
            table[f"cvt_{size}_patch{token}_{image}"] = ("cvt", image, {**_CVT[size], **_CVT_EMBEDS[image]})
    return table


SMALL = _variants()

# family module -> class, rule for loading weights, first convolution, classifiers
_FAMILY: dict[str, tuple[type[nn.Module], Callable[..., Any], str | None, str | tuple[str, ...]]] = {
    "vision_transformer": (VisionTransformer, vit_filter, "patch_embed.proj", "head"),
    "swin_transformer": (SwinTransformer, swin_filter, "patch_embed.proj", "head.fc"),
    "lvvit": (lvvit.LVViT, lvvit.checkpoint_filter_fn, "patch_embed.conv1", ("head", "aux_head")),
    "t2t": (t2t.T2TViT, t2t.checkpoint_filter_fn, None, "head"),
    "cvt": (cvt.CvT, cvt.checkpoint_filter_fn, "stage0.patch_embed.proj", "head"),
}


def _cfg(family: str, image: int) -> Arguments:
    _, _, first, classifier = _FAMILY[family]
    return {
        "url": "",
        "num_classes": 10,
        "input_size": (3, image, image),
        "pool_size": (_SWIN_CUTS[image][1],) * 2 if family == "swin_transformer" else None,  # one window is left
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": first,
        "classifier": classifier,
        "license": "apache-2.0",
    }


default_cfgs = generate_default_cfgs({name: _cfg(family, image) for name, (family, image, _) in SMALL.items()})


def _entrypoint(name: str, family: str, image: int, arguments: Arguments) -> Callable[..., nn.Module]:
    cls, rule, _, _ = _FAMILY[family]

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        swin = family == "swin_transformer"
        hierarchical = swin or family == "cvt"
        out_indices = kwargs.pop("out_indices", (0, 1, 2) if hierarchical else 3)
        features = {"flatten_sequential": True} if swin else {"feature_cls": "getter"}
        model: nn.Module = build_model_with_cfg(
            cls,
            name,
            pretrained,
            pretrained_filter_fn=rule,
            feature_cfg={"out_indices": out_indices, **features},
            **{"img_size": image, **arguments, **kwargs},
        )
        return model

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{name}: {cls.__name__} for images of {image} pixels."
    build.family = family  # type: ignore[attr-defined]  # read by families.family_of_name
    return build


for _name, _variant in SMALL.items():
    globals()[_name] = register_model(_entrypoint(_name, *_variant))
