"""How each timm family lays out its features.

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


def _vit(title: str, prefix: int | None = None, embed: str = "patch_embed", embed_layout: Layout = "nhwc") -> Family:
    return Family(title, "tokens", prefix, embed, embed_layout)


def _cnn(title: str) -> Family:
    return Family(title, "nchw")


# Keyed by the last part of the module that defines the model class.
FAMILIES: dict[str, Family] = {
    # ours
    "lvvit": _vit("LV-ViT"),
    "t2t_vit": _vit("T2T-ViT", embed="tokens_to_token"),
    "cvt": _vit("CvT", embed="stage0.patch_embed", embed_layout="nchw"),
    # sequences of tokens
    "vision_transformer": _vit("ViT, DeiT, DINOv2, SigLIP"),
    "deit": _vit("DeiT, DeiT-III"),
    "vision_transformer_relpos": _vit("ViT with relative positions"),
    "beit": _vit("BEiT"),
    "eva": _vit("EVA"),
    "cait": _vit("CaiT", prefix=1),
    "convit": _vit("ConViT", prefix=1),
    "volo": _vit("VOLO", prefix=1, embed_layout="nchw"),
    "xcit": Family("XCiT", "tokens", prefix=1),
    "mlp_mixer": _vit("MLP-Mixer, ResMLP, gMLP", prefix=0, embed="stem"),
    "twins": Family("Twins", "tokens"),
    "mvitv2": Family("MViTv2", "tokens", prefix=None),
    # channels-last maps
    "swin_transformer": Family("Swin", "nhwc", embed="patch_embed"),
    "swin_transformer_v2": Family("Swin V2", "nhwc", embed="patch_embed"),
    # channels-first maps
    "convnext": Family("ConvNeXt, ConvNeXt V2", "nchw", embed="stem", embed_layout="nchw"),
    "resnet": _cnn("ResNet, ResNeXt, SE-ResNet"),
    "resnest": _cnn("ResNeSt"),
    "resnetv2": _cnn("ResNet V2, BiT"),
    "nfnet": _cnn("NFNet"),
    "efficientnet": _cnn("EfficientNet, MobileNet V2"),
    "mobilenetv3": _cnn("MobileNet V3"),
    "regnet": _cnn("RegNet"),
    "densenet": _cnn("DenseNet"),
    "metaformer": _cnn("PoolFormer, CAFormer"),
    "byobnet": _cnn("ByobNet, MobileViT"),
    "mobilevit": _cnn("ByobNet, MobileViT"),  # the module of its names; the models are ByobNets
    "pvt_v2": _cnn("PVT v2"),
    "davit": _cnn("DaViT"),
    "focalnet": _cnn("FocalNet"),
    "edgenext": _cnn("EdgeNeXt"),
}


def family_of(model: nn.Module) -> Family:
    """The family of a timm model, by the module of its class or of a base class."""
    for cls in type(model).__mro__:
        name = cls.__module__.rsplit(".", 1)[-1]
        if name in FAMILIES and cls.__module__.startswith(("timm.models.", "everytoken.models.")):
            return FAMILIES[name]
    module = type(model).__module__.rsplit(".", 1)[-1]
    raise UnsupportedModelError(
        f"{type(model).__name__} (module {module!r}) has no token view: the layout of its features is not known."
        f"{did_you_mean(module, FAMILIES)} Supported families are in everytoken.models.FAMILIES."
    )


def family_of_name(name: str) -> Family | None:
    """The family of a registered model name, without building it; None if it is not supported."""
    from timm.models import model_entrypoint

    from everytoken.models.small import SMALL

    if name in SMALL:  # variants of several families in one module
        return FAMILIES[SMALL[name].family]
    return FAMILIES.get(model_entrypoint(name).__module__.rsplit(".", 1)[-1])
