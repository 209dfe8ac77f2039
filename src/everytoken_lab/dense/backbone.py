"""Any timm backbone as a source of feature maps for dense tasks: several scales, any input size, weights from anywhere.

Networks with stages (Swin, ConvNeXt, ResNet) give the last map of each scale; transformers get a layer norm behind each
of them, as in Swin's dense tasks. Plain transformers (ViT, DeiT, LV-ViT) are tapped after four of their blocks, the
last and every third before it, as in the released LV-ViT set-ups; the heads make scales of them.

Images are padded with zeros (the mean colour) to whole patches, right and below; position embeddings are resized to the
size when weights are read, and again for every batch of another size. A few families cannot do that and are rejected.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.models.families import UnsupportedModelError
from everytoken_lab.engine.options import BackboneOptions
from everytoken_lab.models.description import Description, check_architecture
from everytoken_lab.models.open import open_weights

logger = logging.getLogger(__name__)

_DYNAMIC: tuple[dict[str, Any], ...] = ({"strict_img_size": False}, {"dynamic_img_size": True}, {})  # ask for any size
_SIZE_ARGUMENTS = ("num_classes", "img_size", "token_classes", "strict_img_size", "dynamic_img_size")


class Features(nn.Module):
    """Images -> feature maps, finest first. The classifier and the final norm of the timm model are taken away.

    Attributes:
        dims: channels of each map. strides: pixels per cell of each. plain: all maps have the same scale.
        multiple: images are padded to multiples of this.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        infos: Any = getattr(backbone, "feature_info", None)
        if not infos or not hasattr(backbone, "forward_intermediates"):
            raise UnsupportedModelError(
                f"{type(backbone).__name__} gives no feature maps (timm's forward_intermediates); take another"
            )
        infos = list(infos)
        self.plain = len({info["reduction"] for info in infos}) == 1
        if self.plain:
            step = min(3, len(infos) // 4)
            if not step:
                raise UnsupportedModelError(
                    f"{type(backbone).__name__} has {len(infos)} blocks, and features are taken from four"
                )
            self.indices = [len(infos) - 1 - k * step for k in (3, 2, 1, 0)]
        else:  # the last map of each scale, from stride 4 on
            last = {int(info["reduction"]): i for i, info in enumerate(infos)}
            self.indices = [i for stride, i in sorted(last.items()) if stride >= 4]
        self.dims = [int(infos[i]["num_chs"]) for i in self.indices]
        self.strides = [int(infos[i]["reduction"]) for i in self.indices]
        self.multiple = max(self.strides)
        self.backbone: Any = backbone
        backbone.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)  # type: ignore[operator]
        head = getattr(backbone, "head", None)
        if isinstance(head, nn.Module) and any(True for _ in head.parameters()):
            backbone.head = nn.Identity()  # ConvNeXt's keeps a norm
        attends = not self.plain and any(isinstance(m, nn.LayerNorm) for m in backbone.modules())
        self.norms = nn.ModuleList([LayerNorm2d(d) if attends else nn.Identity() for d in self.dims])

    def forward(self, images: Tensor) -> list[Tensor]:
        """[B, 3, H, W] -> [B, D_i, ceil(H / m) m / s_i, ...] for each scale, m being `multiple`."""
        below, right = -images.shape[-2] % self.multiple, -images.shape[-1] % self.multiple
        if below or right:
            images = F.pad(images, (0, right, 0, below))
        maps = self.backbone.forward_intermediates(images, indices=self.indices, norm=False, intermediates_only=True)
        return [norm(grid) for norm, grid in zip(self.norms, maps, strict=True)]


def build_features(options: BackboneOptions, img_size: int | tuple[int, int]) -> tuple[Features, Description]:
    """A backbone as the options say, with its weights, made for `img_size`; and the description of how it was made."""
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    weights = open_weights(options.weights, options.model) if options.weights else None
    name, arguments = options.model, dict(options.model_kwargs)
    if weights is not None:
        name, arguments = weights.choose(name, arguments, asked=True)
    if not name:
        raise EverytokenError("which backbone? Name a model, or weights that know their own")
    check_architecture(name)
    backbone, arguments, any_size = _create(name, arguments, options.drop_path, size)
    config = resolve_data_config({}, model=backbone)
    features = Features(backbone)
    if not any_size and not _takes_any_size(features, size):
        raise EverytokenError(
            f"{name} takes images of one size only; take a backbone that takes any size, such as Swin, ConvNeXt, "
            "ResNet, ViT or LV-ViT"
        )
    mean, std = config["mean"], config["std"]
    if weights is not None:
        logger.info("weights from %s: %s", weights.source, weights.load(backbone))
        mean, std = weights.info.mean, weights.info.std
    if options.grad_checkpointing:
        features.backbone.set_grad_checkpointing(True)
    return features, Description(name, arguments, img_size=size, mean=tuple(mean), std=tuple(std))


def name_weights(options: BackboneOptions, asked: bool = True) -> BackboneOptions:
    """The options with the model of the weights, unless it was `asked` for, and the full name of published weights."""
    if not options.weights:
        return options
    weights = open_weights(options.weights, options.model)
    model, arguments = weights.choose(options.model, options.model_kwargs, asked)
    source = options.weights if Path(weights.source).exists() else weights.source
    return replace(options, weights=source, model=model, model_kwargs=arguments)


def rebuild_features(info: Description) -> Features:
    """The backbone of a dense task's weights file, as it was made; its weights are random."""
    arguments = {name: value for name, value in info.arguments.items() if name not in _SIZE_ARGUMENTS}
    options = BackboneOptions(model=info.architecture, drop_path=0.0, model_kwargs=arguments)
    return build_features(options, info.img_size)[0]


def _create(
    name: str, arguments: dict[str, Any], drop_path: float, size: tuple[int, int]
) -> tuple[nn.Module, dict[str, Any], bool]:
    """The timm model, the arguments it was made with, and whether it takes any size because it was asked to.

    Families know different arguments, so the ways to ask for a size and stochastic depth are tried one after the other.
    """
    ways: list[dict[str, Any]] = [{"img_size": size, **way} for way in _DYNAMIC] + [{}]
    problem = ""
    for way, depth in itertools.product(ways, ({"drop_path_rate": drop_path}, {})):
        used = {**arguments, "num_classes": 0, **way}
        try:
            backbone = timm.create_model(name, **used, **depth)
        except TypeError as error:
            problem = str(error)
        except (RuntimeError, OSError) as error:
            raise EverytokenError(f"{name} cannot be used at {size[0]}x{size[1]} pixels: {str(error)[:200]}") from error
        else:
            if drop_path and not depth:
                logger.info("note: %s has no stochastic depth; drop_path is left out", name)
            return backbone, used, len(way) == 2
    raise EverytokenError(f"{name} does not take these arguments: {problem}")


def _takes_any_size(features: Features, size: tuple[int, int]) -> bool:
    """Whether images of another size pass, found by trying."""
    like = next(features.parameters())
    try:
        with torch.no_grad():
            features.eval()(like.new_zeros(1, 3, size[0], size[1] + features.multiple))
    except (RuntimeError, AssertionError, ValueError, IndexError):
        return False
    finally:
        features.train()
    return True
