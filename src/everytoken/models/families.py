"""How each family of backbones lays out its features.

Every timm classifier is `forward_head(forward_features(image))`. What differs is the shape in between: a sequence
with prefix tokens, a channels-first map or a channels-last map. FAMILIES says which, per timm module, and names the
patch embedding where tokens can be mixed before they meet a position. To add a family, add a line and a name to the
sweep test. FOREIGN has the same for classes of torchvision and Hugging Face's transformers, with what timm's models
say themselves: how to get features, logits and the width of a token. Neither is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError

Layout = Literal["tokens", "nchw", "nhwc"]
Pool = Literal["token", "avg", "token+avg", "two tokens", "map"]


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
        pool: what the head reads: the class token, the mean of the tokens, both side by side, class and distillation
            token, or (map) what attention pooling makes of the tokens; None: ask the model.
        width: where the model says how many channels a token has.
        features, head: (model, images) -> features, (model, features) -> logits; None: timm's methods.
    """

    title: str
    layout: Layout
    prefix: int | None = 0
    embed: str | None = None
    embed_layout: Layout = "nhwc"
    pool: Pool | None = None
    width: str = "num_features"
    features: Callable[[Any, Tensor], Tensor] | None = None
    head: Callable[[Any, Tensor], Tensor] | None = None


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
    **dict.fromkeys(["vision_transformer", "vision_transformer_hybrid", "vitamin"], _vit("ViT, DeiT, DINOv2, SigLIP")),
    "deit": _vit("DeiT, DeiT-III"),
    "naflexvit": Family("NaFlex ViT", "tokens", prefix=None),
    "vision_transformer_relpos": _vit("ViT with relative positions"),
    "beit": _vit("BEiT"),
    "eva": _vit("EVA"),
    "cait": _vit("CaiT", prefix=1),
    "convit": _vit("ConViT", prefix=1),
    "volo": _vit("VOLO", prefix=1, embed_layout="nchw"),
    "xcit": _vit("XCiT", prefix=1),
    "mlp_mixer": _vit("MLP-Mixer, ResMLP, gMLP", prefix=0, embed="stem"),
    "twins": Family("Twins", "tokens"),
    "mvitv2": _vit("MViTv2"),
    "tnt": Family("TNT", "tokens", prefix=1),
    "hiera": Family("Hiera", "tokens"),
    "efficientformer": Family("EfficientFormer", "tokens"),
    # channels-last maps
    "swin_transformer": Family("Swin", "nhwc", embed="patch_embed"),
    "swin_transformer_v2": Family("Swin V2", "nhwc", embed="patch_embed"),
    "mambaout": Family("MambaOut", "nhwc"),
    "sequencer": Family("Sequencer", "nhwc"),
    "hieradet_sam2": Family("Hiera of SAM 2", "nhwc"),
    # channels-first maps
    "convnext": Family("ConvNeXt, ConvNeXt V2", "nchw", embed="stem", embed_layout="nchw"),
    **dict.fromkeys(["resnet", "res2net", "sknet"], _cnn("ResNet, ResNeXt, SE-ResNet")),
    **dict.fromkeys(["mobilenetv3", "hardcorenas"], _cnn("MobileNet V3")),
    **dict.fromkeys(["byobnet", "byoanet", "mobilevit"], _cnn("ByobNet, MobileViT")),
    "swin_transformer_v2_cr": _cnn("Swin V2 CR"),
    "maxxvit": _cnn("MaxViT, CoAtNet"),
    "cspnet": _cnn("CspNet, DarkNet"),
    "resnetv2": _cnn("ResNet V2, BiT"),
    "efficientnet": _cnn("EfficientNet, MobileNet V2"),
    "metaformer": _cnn("PoolFormer, CAFormer"),
    **{  # by the names of their modules
        name: _cnn(name)
        for name in (
            *("convmixer", "cpubone", "csatv2", "cspnext", "davit", "densenet", "dla", "dpn", "edgenext"),
            *("efficientvit_msra", "fasternet", "fastvit", "focalnet", "gcvit", "ghostnet", "hgnet", "hrnet"),
            *("efficientformer_v2", "efficientvit_mit", "iformer", "inception_resnet_v2", "inception_v3"),
            *("inception_v4", "lcnetv2"),
            *("lowformer", "nasnet", "nest", "nextvit", "nfnet", "pnasnet", "pvt_v2", "rdnet", "regnet", "repghost"),
            *("repvit", "resnest", "rexnet", "selecsls", "shvit", "starnet", "swiftformer", "tiny_vit", "tresnet"),
            *("senet", "vgg", "vision_transformer_sam", "visformer", "vovnet", "xception", "xception_aligned"),
        )
    },
}


def grid_shape(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """The grid (h, w) of `count` tokens whose proportions are nearest to an image of (height, width)."""
    height, width = size
    best, least = 1, abs(width - count * height) / 1
    for divisor in range(1, int(count**0.5) + 1):  # a loop: older compilers cannot trace min with a key
        for h in (divisor, count // divisor):
            error = abs(h * h * width - count * height) / h
            if count % divisor == 0 and (error, h) < (least, best):
                best, least = h, error
    return best, count // best


def _torchvision_tokens(model: Any, images: Tensor) -> Tensor:
    tokens = model._process_input(images)
    return model.encoder(torch.cat((model.class_token.expand(len(tokens), -1, -1), tokens), dim=1))


def _huggingface_tokens(model: Any, images: Tensor) -> Tensor:
    return model.base_model(images).last_hidden_state


def _huggingface_map(model: Any, images: Tensor) -> Tensor:
    tokens = _huggingface_tokens(model, images)
    return tokens.unflatten(1, grid_shape(tokens.shape[1], (images.shape[-2], images.shape[-1])))


def _pooled(model: Any, features: Tensor) -> Tensor:
    return features[:, 0] if features.ndim == 3 else features.mean((1, 2))


def _huggingface(name: str, prefix: int = 1, pool: Pool = "token", head: Any = None) -> dict[str, Family]:
    """The rows of a classifier and of the same network without a head, whose logits are what a linear head reads."""
    folder, embed = name.lower(), "embeddings.patch_embeddings"
    path = f"transformers.models.{folder}.modeling_{folder}.{name}"
    family = Family(f"{name} of Hugging Face", "tokens", prefix, embed, pool=pool, width="config.hidden_size")
    family = replace(family, features=_huggingface_tokens, head=_pooled)
    if pool == "avg":
        family = replace(family, layout="nhwc", features=_huggingface_map)
    classifier = replace(family, embed=f"{folder}.{embed}", head=head or _classifier)
    bare = replace(family, pool="avg" if pool == "avg" else "token")
    return {f"{path}ForImageClassification": classifier, f"{path}Model": bare}


def _classifier(model: Any, features: Tensor) -> Tensor:
    return model.classifier(_pooled(model, features))


def _two_classifiers(model: Any, features: Tensor) -> Tensor:
    return (model.cls_classifier(features[:, 0]) + model.distillation_classifier(features[:, 1])) / 2


def _class_token_and_mean(model: Any, features: Tensor) -> Tensor:
    return model.classifier(torch.cat((features[:, 0], features[:, 1:].mean(1)), dim=1))


_DEIT = _huggingface("DeiT", prefix=2)
_TORCHVISION_SWIN = Family(
    "Swin of torchvision",
    "nhwc",
    embed="features.0",
    pool="avg",
    width="head.in_features",
    features=lambda model, images: model.norm(model.features(images)),
    head=lambda model, features: model.head(features.mean((1, 2))),
)

# Keyed by class.
FOREIGN: dict[str, Family] = {
    "torchvision.models.vision_transformer.VisionTransformer": Family(
        "ViT of torchvision",
        "tokens",
        prefix=1,
        embed="conv_proj",
        embed_layout="nchw",
        pool="token",
        width="hidden_dim",
        features=_torchvision_tokens,
        head=lambda model, features: model.heads(features[:, 0]),
    ),
    "torchvision.models.swin_transformer.SwinTransformer": _TORCHVISION_SWIN,
    **_huggingface("ViT"),
    **_DEIT,
    "transformers.models.deit.modeling_deit.DeiTForImageClassificationWithTeacher": replace(
        _DEIT["transformers.models.deit.modeling_deit.DeiTForImageClassification"],
        pool="two tokens",
        head=_two_classifiers,
    ),
    **_huggingface("Dinov2", pool="token+avg", head=_class_token_and_mean),
    **_huggingface("Swin", prefix=0, pool="avg"),
}

# Why a timm module has no token view.
NO_GRID: dict[str, str] = {
    "coat": "parallel branches have grids of several sizes",
    "efficientvim": "its head reads features of several stages",
    "inception_next": "its head has its norm behind a hidden layer",
    "levit": "some of its models show tokens, others (levit_conv_...) maps",
    **dict.fromkeys(["deepseek_vit", "gemma4_vit", "mobilenetv5", "qwen3_vit"], "some of its models have no head"),
    "crossvit": "two branches have a grid each",
    "pit": "its features are the class tokens alone",
}

# Networks of others that timm has, too, by a part of the name of their module.
TWINS = {
    "beit": "beit_base_patch16_224",
    "clip": "vit_base_patch16_clip_224",
    "convnext": "convnext_tiny",
    "convnextv2": "convnextv2_tiny",
    "densenet": "densenet121",
    "dinov2_with_registers": "vit_small_patch14_reg4_dinov2",
    "dinov3_convnext": "convnext_tiny.dinov3_lvd1689m",
    "dinov3_vit": "vit_small_patch16_dinov3",
    "efficientnet": "efficientnet_b0",
    "maxvit": "maxvit_tiny_tf_224",
    "mobilenetv2": "mobilenetv2_100",
    "mobilenetv3": "mobilenetv3_large_100",
    "regnet": "regnety_032",
    "resnet": "resnet50",
    "siglip": "vit_base_patch16_siglip_224",
    "swinv2": "swinv2_tiny_window8_256",
    "vit": "vit_base_patch16_224",
}


def family_of(model: nn.Module) -> Family:
    """The family of a model, by its class, the module of its class, or those of a base class."""
    for cls in type(model).__mro__:
        if (family := FOREIGN.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return family
        name = cls.__module__.rsplit(".", 1)[-1]
        if name in FAMILIES and cls.__module__.startswith(("timm.models.", "everytoken.models.")):
            return FAMILIES[name]
    package, *parts = type(model).__module__.split(".")
    name = f"{type(model).__name__} ({type(model).__module__})"
    if package in ("torchvision", "transformers"):
        twin = next((TWINS[part] for part in parts if part in TWINS), None)
        way = f"timm.create_model({twin!r}) is the same kind of network" if twin else "timm may have the same network"
        raise UnsupportedModelError(f"{name} has no token view; {way}, which has one.")
    if package == "timm":
        reason = NO_GRID.get(parts[-1], "the layout of its features is not in everytoken.models.FAMILIES")
        raise UnsupportedModelError(f"{name} has no token view: {reason}.")
    raise UnsupportedModelError(
        f"{name} has no token view: it neither is a network of timm, torchvision or transformers that has one, nor "
        "holds one. Supported are everytoken.models.FAMILIES and FOREIGN."
    )


def family_of_name(name: str) -> Family | None:
    """The family of a registered model name, without building it; None if it is not supported."""
    from timm.models import model_entrypoint

    from everytoken.models.small import SMALL

    if name in SMALL:  # variants of several families in one module
        return FAMILIES[SMALL[name].family]
    return FAMILIES.get(model_entrypoint(name).__module__.rsplit(".", 1)[-1])


def backbone_of(model: nn.Module) -> nn.Module:
    """The one supported backbone that a model is or holds, however deep; an error if there is none, or several."""
    found = _backbones(model)
    if len(found) > 1:
        names = ", ".join(f"{type(module).__name__} at {name!r}" for name, module in found.items())
        raise EverytokenError(f"{type(model).__name__} holds {len(found)} backbones: {names}. Give the one you mean.")
    if not found:
        family_of(model)  # says why not
    return next(iter(found.values()))


def _backbones(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """The outermost supported backbones, by name."""
    try:
        family = family_of(model)
        if family.features is not None or hasattr(model, "forward_features"):  # not a layer from the same module
            return {name: model}
    except UnsupportedModelError:
        pass
    found: dict[str, nn.Module] = {}
    for child_name, child in model.named_children():
        found |= _backbones(child, f"{name}.{child_name}" if name else child_name)
    return found
