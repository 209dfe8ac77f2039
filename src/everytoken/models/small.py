"""Small-image variants: ViT, Swin, LV-ViT, T2T-ViT and CvT for images of 32, 64 and 96 pixels, sizes for a laptop.

The published models cut 224 pixels into tokens of 16; at 32 pixels that leaves 4 tokens. These keep the number of
tokens instead: 8x8 at 32 and 64 pixels, 12x12 at 96 (Swin ends with 4x4, 4x4 and 6x6). The parts of a model are those
of its family; only patch sizes, strides, widths and depths differ. None of them is published: there are no weights and
no accuracies to compare with.

Names: `{family}_{size}_patch{pixels per token}_{image}`; Swin has `patch{of its embedding}_window{w}_{image}`, as in
timm. Sizes: nano about 1.2 M parameters, micro 2.6 M, mini 5.3 M; ViT and LV-ViT also pico, 0.2 M, for a thousand
images and many epochs. `swin_nano4_patch4_window4_64` has four stages, strides 4 to 32, as the published Swins have:
it can be the backbone of a detector. Images of other sizes: `img_size=`, as in timm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import checkpoint_filter_fn as swin_filter
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from torch import nn

from everytoken.models import cvt, lvvit, t2t_vit
from everytoken.models.common import default_cfg, register_variants

Arguments = dict[str, Any]


@dataclass(frozen=True)
class SmallModel:
    """A small-image variant."""

    family: str  # key in `everytoken.models.families.FAMILIES`
    image: int  # side in pixels
    arguments: Arguments  # of the family's class


_IMAGES = (32, 64, 96)
_TOKEN = {32: 4, 64: 8, 96: 8}  # pixels per token

_VIT: dict[str, Arguments] = {
    "pico": {"embed_dim": 64, "depth": 4, "num_heads": 2},
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
    "pico": {"embed_dim": 64, "depth": 4, "num_heads": 2, "stem_width": 16},
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


def _variants() -> dict[str, SmallModel]:
    table: dict[str, SmallModel] = {}
    for image in _IMAGES:
        token = _TOKEN[image]
        patch, window = _SWIN_CUTS[image]
        swin_cut = {"patch_size": patch, "window_size": window}
        for prefix, suffix, family, sizes, more in (
            ("vit", f"patch{token}", "vision_transformer", _VIT, {"patch_size": token}),
            ("swin", f"patch{patch}_window{window}", "swin_transformer", _SWIN, swin_cut),
            ("lvvit", f"patch{token}", "lvvit", _LVVIT, _LVVIT_STEM[image]),
            ("t2t_vit", f"patch{token}", "t2t_vit", _T2T, _T2T_SPLITS[image]),
            ("cvt", f"patch{token}", "cvt", _CVT, _CVT_EMBEDS[image]),
        ):
            for size, arguments in sizes.items():
                table[f"{prefix}_{size}_{suffix}_{image}"] = SmallModel(family, image, {**arguments, **more})
    stages = {"embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8), "patch_size": 4, "window_size": 4}
    table["swin_nano4_patch4_window4_64"] = SmallModel("swin_transformer", 64, stages)
    return table


SMALL = _variants()

# class, checkpoint filter, first layer, classifier
_FAMILIES: dict[str, tuple[type[nn.Module], Callable[..., Any], str, str | tuple[str, ...]]] = {
    "vision_transformer": (VisionTransformer, vit_filter, "patch_embed.proj", "head"),
    "swin_transformer": (SwinTransformer, swin_filter, "patch_embed.proj", "head.fc"),
    "lvvit": (lvvit.LVViT, lvvit.checkpoint_filter_fn, "patch_embed.conv1", ("head", "aux_head")),
    "t2t_vit": (t2t_vit.T2TViT, t2t_vit.checkpoint_filter_fn, "tokens_to_token.attention1.kqv", "head"),
    "cvt": (cvt.CvT, cvt.checkpoint_filter_fn, "stage0.patch_embed.proj", "head"),
}


def _cfg(model: SmallModel) -> Arguments:
    pool_size = None
    if model.family == "swin_transformer":  # the grid of its last stage
        pool_size = (model.image // model.arguments["patch_size"] // 2 ** (len(model.arguments["depths"]) - 1),) * 2
    _, _, first, classifier = _FAMILIES[model.family]
    fixed = {"num_classes": 10, "crop_pct": 1.0, "license": "apache-2.0", "first_conv": first, "classifier": classifier}
    return default_cfg("", model.image, pool_size=pool_size, **fixed)


default_cfgs = generate_default_cfgs({name: _cfg(model) for name, model in SMALL.items()})


for _name, _small in SMALL.items():
    _class, _filter, *_ = _FAMILIES[_small.family]
    _stages = len(_small.arguments.get("depths", ()))
    register_variants(
        __name__,
        {_name: (_class, {"img_size": _small.image, **_small.arguments})},
        _filter,
        tuple(range(_stages)) if _stages else 3,
        **({"flatten_sequential": True} if _small.family == "swin_transformer" else {}),
    )
__all__ = ["SMALL", "SmallModel"]  # register_model adds names that only timm's registry holds
