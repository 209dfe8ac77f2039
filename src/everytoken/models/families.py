"""How each timm family lays out its features: the one place that knows.

Every timm classifier is `forward_head(forward_features(image))`. What differs is the shape in between: a sequence
with prefix tokens, a channels-first map or a channels-last map. FAMILIES says which, per timm module, and names the
patch embedding where tokens can be mixed before they meet a position. To add a family, add a line and a name to the
sweep test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from everytoken.errors import EverytokenError, did_you_mean

Layout = Literal["tokens", "nchw", "nhwc"]


class UnsupportedModelError(EverytokenError):
    """The backbone does not show a token grid; the message says what is missing."""


@dataclass(frozen=True)
class Family:
    """What we need to know of a family.

    Attributes:
        title: name for people.
        layout: "tokens" [B, P + h*w, D], "nchw" or "nhwc".
        prefix: number of prefix tokens, or None to ask the model (`num_prefix_tokens`).
        embed: the patch-embedding module, for mixing tokens; None where patches overlap or cannot be reached.
        embed_layout: layout of what it returns when that has four dimensions.
    """

    title: str
    layout: Layout
    prefix: int | None = 0
    embed: str | None = None
    embed_layout: Layout = "nhwc"


_TOKENS = {"layout": "tokens", "prefix": None, "embed": "patch_embed"}
_CNN = {"layout": "nchw"}

# Keyed by the last part of the module that defines the model class.
FAMILIES: dict[str, Family] = {
    name: Family(title, **fields)  # type: ignore[arg-type]
    for name, title, fields in [
        # ours
        ("lvvit", "LV-ViT", _TOKENS),
        ("t2t_vit", "T2T-ViT", {**_TOKENS, "embed": "tokens_to_token"}),
        ("cvt", "CvT", {**_TOKENS, "embed": "stage0.patch_embed", "embed_layout": "nchw"}),
        # sequences of tokens
        ("vision_transformer", "ViT, DeiT, DINOv2, SigLIP", _TOKENS),
        ("deit", "DeiT, DeiT-III", _TOKENS),
        ("vision_transformer_relpos", "ViT with relative positions", _TOKENS),
        ("beit", "BEiT", _TOKENS),
        ("eva", "EVA", _TOKENS),
        ("cait", "CaiT", {**_TOKENS, "prefix": 1}),
        ("convit", "ConViT", {**_TOKENS, "prefix": 1}),
        ("volo", "VOLO", {**_TOKENS, "prefix": 1, "embed_layout": "nchw"}),
        ("xcit", "XCiT", {"layout": "tokens", "prefix": 1}),
        ("mlp_mixer", "MLP-Mixer, ResMLP, gMLP", {"layout": "tokens", "embed": "stem"}),
        ("twins", "Twins", {"layout": "tokens"}),
        ("mvitv2", "MViTv2", {"layout": "tokens", "prefix": None}),
        # channels-last maps
        ("swin_transformer", "Swin", {"layout": "nhwc", "embed": "patch_embed"}),
        ("swin_transformer_v2", "Swin V2", {"layout": "nhwc", "embed": "patch_embed"}),
        # channels-first maps
        ("convnext", "ConvNeXt, ConvNeXt V2", {"layout": "nchw", "embed": "stem", "embed_layout": "nchw"}),
        ("resnet", "ResNet, ResNeXt, SE-ResNet", _CNN),
        ("resnest", "ResNeSt", _CNN),
        ("resnetv2", "ResNet V2, BiT", _CNN),
        ("nfnet", "NFNet", _CNN),
        ("efficientnet", "EfficientNet, MobileNet V2", _CNN),
        ("mobilenetv3", "MobileNet V3", _CNN),
        ("regnet", "RegNet", _CNN),
        ("densenet", "DenseNet", _CNN),
        ("metaformer", "PoolFormer, CAFormer", _CNN),
        ("byobnet", "ByobNet, MobileViT", _CNN),
        ("mobilevit", "ByobNet, MobileViT", _CNN),  # the module of its names; the models are ByobNets
        ("pvt_v2", "PVT v2", _CNN),
        ("davit", "DaViT", _CNN),
        ("focalnet", "FocalNet", _CNN),
        ("edgenext", "EdgeNeXt", _CNN),
    ]
}


def family_of(model: nn.Module) -> Family:
    """The family of a timm model, by the module of its class or of a base class."""
    for cls in type(model).__mro__:
        name = cls.__module__.rsplit(".", 1)[-1]
        if name in FAMILIES and cls.__module__.startswith(("timm.models.", "everytoken.models.")):
            return FAMILIES[name]
    module = type(model).__module__.rsplit(".", 1)[-1]
    raise UnsupportedModelError(
        f"{type(model).__name__} (module {module!r}) has no token view: it is not known how its features lie in the "
        f"image.{did_you_mean(module, FAMILIES)} Supported families: `everytoken models`. To add one, add a line to "
        "everytoken/models/families.py."
    )


def family_of_name(name: str) -> Family | None:
    """The family of a registered model name, without building it; None if there is no token view."""
    from timm.models import model_entrypoint

    from everytoken.models.small import SMALL

    if name in SMALL:  # variants of several families in one module
        return FAMILIES[SMALL[name].family]
    return FAMILIES.get(model_entrypoint(name).__module__.rsplit(".", 1)[-1])
