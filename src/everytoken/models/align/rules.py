"""Which layer mixes tokens, and how: the one place that knows. Anything not listed here is an error that names it.

To support another layer, add its class to RULES (it mixes tokens: give the rule), CONTAINERS (it only runs its
children one after the other) or TOKENWISE (it treats every token alike). A class counts for its subclasses. How to do
that outside of this package, and what a rule is: docs/alignment.md.
A patch embedding that is not listed cuts patches that touch, or is taken as if it did: a token starts with the mean
of its patch. One that is listed is followed from the pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from everytoken.models.align.attention import (
    attention_of,
    channel_attention,
    conv_attention,
    huggingface_window,
    local_interaction,
    outlook_attention,
    patch_merging,
    pooling_block,
    self_attention,
    stage_embedding,
    talking_heads,
    tokens_to_token,
    torchvision_window,
    window_block,
)
from everytoken.models.align.convolution import convolution, convolution_same, mixer_block, residual
from everytoken.models.align.state import ShareHook, ShareState, Update
from everytoken.models.families import UnsupportedModelError


class HookBuilder:
    """Walks through a backbone and attaches the hooks that the rules ask for.

    Args:
        state: shared by all hooks.
        embed: name of the patch embedding, where the shares of tokens start; None where the model has none.
        layers: the numbers (from 1) of the mixing layers that count; None: all.

    Attributes:
        handles: of all hooks, to remove them.
        count: mixing layers so far.
        doublings: residual connections so far that count; the total of an unnormalised label doubles at each.
    """

    def __init__(self, state: ShareState, embed: str | None = None, layers: frozenset[int] | None = None) -> None:
        self.state = state
        self.embed = embed
        self.layers = layers
        self.handles: list[RemovableHandle] = []
        self.count = 0
        self.doublings = 0

    def before(self, module: nn.Module, update: Update, **options: Any) -> None:
        """Update the shares before every run of the module, see `ShareHook`."""
        self.handles.append(module.register_forward_pre_hook(ShareHook(self.state, update, **options)))

    def after(self, module: nn.Module, update: Update, **options: Any) -> None:
        """Update the shares after every run of the module, see `ShareHook`."""
        self.handles.append(module.register_forward_hook(ShareHook(self.state, update, **options)))

    def next_layer(self) -> bool:
        """Number the next mixing layer, which has two residual connections with its MLP; whether it counts."""
        self.count += 1
        counts = self.layers is None or self.count in self.layers
        self.doublings += 2 if counts else 0
        return counts

    def attach(self, module: nn.Module, name: str, skip: frozenset[str] = frozenset()) -> None:
        """Attach the rules of a module and its children, or say which layer is unknown.

        Args:
            name: of the module in the backbone, for messages.
            skip: children to leave out (heads).
        """
        if name != self.embed and not self._attach_known(module, name, skip):
            cls = type(module)
            raise UnsupportedModelError(
                f"token-label alignment does not know how {cls.__name__} ({cls.__module__}, at {name or 'the top'!r}) "
                "mixes tokens. Train this backbone without alignment, or add the class to "
                "everytoken.models.align.RULES, CONTAINERS or TOKENWISE."
            )

    def attach_embedding(self, module: nn.Module, name: str) -> bool:
        """Attach the rules of the patch embedding; False if it has none: tokens start with the mean of their patch."""
        return rule_of(module) != "tokenwise" and self._attach_known(module, name)

    def attach_children(self, module: nn.Module, name: str, skip: frozenset[str] = frozenset()) -> None:
        """Attach to the children, in their order."""
        for child_name, child in module.named_children():
            if child_name not in skip:
                self.attach(child, f"{name}.{child_name}" if name else child_name)

    def _attach_known(self, module: nn.Module, name: str, skip: frozenset[str] = frozenset()) -> bool:
        rule = rule_of(module)
        if rule == "container":
            self.attach_children(module, name, skip)
        elif callable(rule):
            rule(module, self, name)
        return rule is not None

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


Rule = Callable[[nn.Module, HookBuilder, str], None]


def without_pooler(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for a network of Hugging Face, whose head may read `pooler` or not."""
    builder.attach_children(module, name, skip=frozenset(["pooler"]))


RULES: dict[str, Rule] = {
    # attention over all tokens
    "timm.layers.attention.Attention": self_attention,
    "timm.layers.attention.AttentionRope": self_attention,
    "timm.models.vision_transformer_relpos.RelPosAttention": self_attention,
    "timm.models.beit.Attention": self_attention,
    "timm.models.eva.EvaAttention": self_attention,
    "timm.models.cait.TalkingHeadAttn": talking_heads,
    "timm.models.cait.ClassAttn": self_attention,
    "timm.models.volo.Attention": self_attention,
    "timm.models.volo.ClassAttention": self_attention,
    "timm.models.convit.GPSA": self_attention,
    "timm.models.convit.MHSA": self_attention,
    "timm.models.xcit.XCA": channel_attention,
    "timm.models.xcit.LPI": local_interaction,
    # embeddings that attend, attention over convolved tokens
    "everytoken.models.t2t_vit.TokensToToken": tokens_to_token,
    "everytoken.models.cvt.ConvAttention": conv_attention,
    "everytoken.models.cvt.ConvEmbed": stage_embedding,
    "timm.models.volo.Downsample": stage_embedding,
    "timm.models.mvitv2.MultiScaleBlock": pooling_block,
    # attention in windows
    "timm.models.volo.OutlookAttention": outlook_attention,
    "timm.models.swin_transformer.SwinTransformerBlock": window_block(),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": window_block(),
    "timm.models.swin_transformer.PatchMerging": patch_merging,
    "timm.models.swin_transformer_v2.PatchMerging": patch_merging,
    # networks of torchvision and Hugging Face
    "torch.nn.modules.activation.MultiheadAttention": self_attention,
    "torchvision.models.swin_transformer.SwinTransformerBlock": window_block(sizes=torchvision_window),
    "torchvision.models.swin_transformer.PatchMerging": patch_merging,
    "torchvision.models.swin_transformer.PatchMergingV2": patch_merging,
    **{
        f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}Model": without_pooler
        for name in ("ViT", "DeiT", "Dinov2", "Swin")
    },
    "transformers.models.vit.modeling_vit.ViTLayer": attention_of("attention"),
    "transformers.models.deit.modeling_deit.DeiTLayer": attention_of("attention"),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": attention_of("attention"),
    "transformers.models.swin.modeling_swin.SwinLayer": window_block("attention", huggingface_window),
    "transformers.models.swin.modeling_swin.SwinPatchMerging": patch_merging,
    # learned matrices over tokens
    "timm.models.mlp_mixer.MixerBlock": mixer_block,
    "timm.models.mlp_mixer.ResBlock": mixer_block,
    # convolution and pooling
    "timm.layers.conv2d_same.Conv2dSame": convolution_same,
    "timm.layers.pool2d_same.AvgPool2dSame": convolution_same,
    "timm.layers.pool2d_same.MaxPool2dSame": convolution_same,
    "torch.nn.modules.conv.Conv2d": convolution,
    "torch.nn.modules.pooling.MaxPool2d": convolution,
    "torch.nn.modules.pooling.AvgPool2d": convolution,
    # blocks with a shortcut around convolutions
    "timm.models.convnext.ConvNeXtBlock": residual("shortcut"),
    "timm.models.resnet.BasicBlock": residual("downsample"),
    "timm.models.resnet.Bottleneck": residual("downsample"),
    "timm.models.regnet.Bottleneck": residual("downsample", only_if="downsample"),
    "timm.models.convmixer.Residual": residual(),
    **{
        f"timm.models._efficientnet_blocks.{name}": residual(only_if="has_skip")
        for name in (
            "ConvBnAct",
            "DepthwiseSeparableConv",
            "InvertedResidual",
            "UniversalInvertedResidual",
            "EdgeResidual",
        )
    },
}

# Run their children one after the other; residual connections around attention are part of the attention's rule.
CONTAINERS: set[str] = {
    f"{module}.{name}"
    for module, names in {
        "torch.nn.modules.container": ["Sequential", "ModuleList"],
        "timm.layers.conv_bn_act": ["ConvNormAct"],
        "timm.models.vision_transformer": ["VisionTransformer", "Block", "ResPostBlock"],
        "timm.models.vision_transformer_relpos": ["VisionTransformerRelPos", "RelPosBlock", "ResPostRelPosBlock"],
        "timm.models.beit": ["Beit", "Block"],
        "timm.models.eva": ["Eva", "EvaBlock", "EvaBlockPostNorm"],
        "timm.models.cait": ["Cait", "LayerScaleBlock", "LayerScaleBlockClassAttn"],
        "timm.models.convit": ["ConVit", "Block"],
        "timm.models.xcit": ["Xcit", "XCABlock", "ClassAttentionBlock", "ConvPatchEmbed"],
        "timm.models.volo": ["VOLO", "PatchEmbed", "Outlooker", "Transformer", "ClassBlock"],
        "timm.models.mvitv2": ["MultiScaleVit", "PatchEmbed", "MultiScaleVitStage"],
        "everytoken.models.lvvit": ["ConvStem"],
        "everytoken.models.cvt": ["CvT", "CvTStage", "CvTBlock"],
        "timm.models.swin_transformer": ["SwinTransformer", "SwinTransformerStage"],
        "timm.models.swin_transformer_v2": ["SwinTransformerV2", "SwinTransformerV2Stage"],
        "timm.models.mlp_mixer": ["MlpMixer"],
        "timm.models.convnext": ["ConvNeXt", "ConvNeXtStage", "Downsample"],
        "timm.models.resnet": ["ResNet"],
        "timm.models.regnet": ["RegNet", "RegStage"],
        "timm.models.convmixer": ["ConvMixer"],
        "timm.models.efficientnet": ["EfficientNet"],
        "timm.models.mobilenetv3": ["MobileNetV3"],
        "torchvision.models.vision_transformer": ["VisionTransformer", "Encoder", "EncoderBlock"],
        "torchvision.models.swin_transformer": ["SwinTransformer"],
        **{
            f"transformers.models.{name.lower()}.modeling_{name.lower()}": [
                f"{name}{part}"
                for part in (
                    "ForImageClassification",
                    "ForImageClassificationWithTeacher",
                    "Embeddings",
                    "Encoder",
                    "Stage",
                )
            ]
            for name in ("ViT", "DeiT", "Dinov2", "Swin")
        },
    }.items()
    for name in names
}

# Treat every token (place) alike, or scale channels of a whole image: classes, or whole modules when they end in a dot.
TOKENWISE: tuple[str, ...] = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.normalization.",
    "torch.nn.modules.batchnorm.",
    "torch.nn.modules.dropout.",
    *(
        f"torch.nn.modules.activation.{name}"
        for name in ("ReLU", "ReLU6", "GELU", "SiLU", "Hardswish", "Hardsigmoid", "LeakyReLU", "Sigmoid", "PReLU")
    ),
    "timm.layers.activations.",
    "timm.layers.activations_me.",
    "timm.layers.drop.",
    "timm.layers.grn.",
    "timm.layers.layer_scale.",
    "timm.layers.mlp.",
    "timm.layers.norm.",
    "timm.layers.norm_act.",
    "timm.layers.pos_embed_rel.",
    "timm.layers.pos_embed_sincos.",
    "timm.layers.squeeze_excite.",
    "timm.models._efficientnet_blocks.SqueezeExcite",
    "timm.models.beit.RelativePositionBias",
    "timm.models.mlp_mixer.Affine",
    "timm.models.vitamin.GeGluMlp",
    "timm.models.xcit.PositionalEncodingFourier",
    "torchvision.ops.misc.Permute",
    "torchvision.ops.misc.MLP",
    "torchvision.ops.stochastic_depth.",
)


def rule_of(module: nn.Module) -> Rule | Literal["container", "tokenwise"] | None:
    """How a layer mixes tokens: its rule, "container" (ask its children), "tokenwise" (not at all), None: not known."""
    for cls in type(module).__mro__:
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path in RULES:
            return RULES[path]
        if path in CONTAINERS:
            return "container"
        if path in TOKENWISE or f"{cls.__module__}." in TOKENWISE:
            return "tokenwise"
    return None
