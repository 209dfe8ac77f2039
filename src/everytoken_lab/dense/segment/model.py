"""The segmenter: backbone, side layers for plain transformers, head (FCN or UperNet) and auxiliary head.

FCN: Long et al. 2015 (here: 3x3 convolutions and a classifier on one map). UperNet: Xiao et al. 2018, section 3:
pyramid pooling (Zhao et al. 2017) on the coarsest map, a feature pyramid down to the finest, all levels fused.
Side layers are the released LV-ViT set-up (All Tokens Matter, section 4.4): each of four taps becomes one level by
transposed convolutions. The papers' models come out with the parameters of their tables; tests count them.

Loss: cross-entropy of every pixel at full resolution, plus 0.4 times that of the auxiliary head. Ignored pixels have no
loss; the mean is over all pixels of the batch, ignored ones included, as in the papers' set-ups.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.models import lvvit
from everytoken.models.weights import load_weights, read_weights
from everytoken_lab.dense.backbone import Features, build_features
from everytoken_lab.dense.common import DenseInfo, load_dense
from everytoken_lab.dense.segment import DecoderOptions, EvalOptions, SegmentOptions
from everytoken_lab.engine.options import BackboneOptions
from everytoken_lab.models.open import find_weights

logger = logging.getLogger(__name__)

POOLS = (1, 2, 3, 6)  # cells along each axis, of pyramid pooling


class ConvNormRelu(nn.Sequential):
    """Convolution without bias, batch norm, ReLU; the size stays. Initial weights as mmcv's (Kaiming, fan-out)."""

    def __init__(self, dim: int, out: int, kernel: int) -> None:
        conv = nn.Conv2d(dim, out, kernel, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Classifier(nn.Sequential):
    """Dropout of whole channels, then a class for every cell."""

    def __init__(self, dim: int, classes: int, dropout: float) -> None:
        conv = nn.Conv2d(dim, classes, 1)
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        super().__init__(nn.Dropout2d(dropout), conv)


class FcnHead(nn.Module):
    """`convs` 3x3 convolutions on the map `index` of maps with `dims` channels."""

    def __init__(
        self, dims: Sequence[int], classes: int, channels: int, convs: int, dropout: float, index: int = -1
    ) -> None:
        super().__init__()
        self.index = index
        widths = [dims[index], *[channels] * convs]
        self.convs = nn.Sequential(*[ConvNormRelu(a, b, 3) for a, b in pairwise(widths)])
        self.classifier = Classifier(widths[-1], classes, dropout)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[[B, D_i, h_i, w_i], ...] -> [B, K, h, w] of the map at `index`."""
        out: Tensor = self.classifier(self.convs(maps[self.index]))
        return out


class UperHead(nn.Module):
    """Pyramid pooling on the last map, a feature pyramid over all, fused at the resolution of the first, the finest."""

    def __init__(self, dims: Sequence[int], classes: int, channels: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.pooled = nn.ModuleList([ConvNormRelu(dims[-1], channels, 1) for _ in POOLS])
        self.bottleneck = ConvNormRelu(dims[-1] + len(POOLS) * channels, channels, 3)
        self.lateral = nn.ModuleList([ConvNormRelu(d, channels, 1) for d in dims[:-1]])
        self.smooth = nn.ModuleList([ConvNormRelu(channels, channels, 3) for _ in dims[:-1]])
        self.fuse = ConvNormRelu(len(dims) * channels, channels, 3)
        self.classifier = Classifier(channels, classes, dropout)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[[B, D_i, h_i, w_i], ...] -> [B, K, h_0, w_0]."""
        last = maps[-1]
        pools = [conv(F.adaptive_avg_pool2d(last, cells)) for cells, conv in zip(POOLS, self.pooled, strict=True)]
        whole = self.bottleneck(torch.cat([last, *(resize(pool, last) for pool in pools)], 1))
        levels = [*(conv(grid) for conv, grid in zip(self.lateral, maps[:-1], strict=True)), whole]
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + resize(levels[i], levels[i - 1])
        out = [*(conv(grid) for conv, grid in zip(self.smooth, levels[:-1], strict=True)), levels[-1]]
        logits: Tensor = self.classifier(self.fuse(torch.cat([resize(grid, out[0]) for grid in out], 1)))
        return logits


def resize(grid: Tensor, like: Tensor | tuple[int, int]) -> Tensor:
    """Bilinear, to the height and width of `like`."""
    size = (like.shape[-2], like.shape[-1]) if isinstance(like, Tensor) else like
    if (grid.shape[-2], grid.shape[-1]) == size:
        return grid
    return F.interpolate(grid, size, mode="bilinear", align_corners=False)


def _side(dim: int, out: int, finer: int) -> nn.Sequential:
    """A map at `finer` times the resolution. One convolution, or two if it is made finer."""
    layers: list[nn.Module] = []
    if finer > 1:
        layers += [nn.ConvTranspose2d(dim, dim, finer, finer, bias=False), nn.BatchNorm2d(dim), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(dim, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class SideLayers(nn.Module):
    """One level per tap: [B, D, h, w] each -> [B, D, 4h, 4w], [B, D, 2h, 2w], [B, D, h, w], [B, last, h, w].

    Args:
        dims: channels of the taps. last: channels of the last level.
        finer: how much finer than the tokens each level is, one number for each of the last taps.
    """

    def __init__(self, dims: Sequence[int], last: int = 2048, finer: Sequence[int] = (4, 2, 1, 1)) -> None:
        super().__init__()
        self.first = len(dims) - len(finer)  # taps before it are not used
        used = list(dims[self.first :])
        self.dims = [*used[:-1], last]
        self.layers = nn.ModuleList([_side(d, out, f) for d, out, f in zip(used, self.dims, finer, strict=True)])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps of the taps -> levels, finest first (or last, as `finer` says)."""
        return [layer(grid) for layer, grid in zip(self.layers, maps[self.first :], strict=True)]


class InterpolatedLevels(nn.Module):
    """One level per tap: 1x1 convolution, interpolation to 4, 2, 1 and 1/2 times the resolution, 3x3 convolution."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims, self.scales = list(dims), (4, 2, 1, 0.5)
        self.lateral = nn.ModuleList([nn.Conv2d(d, d, 1) for d in dims])
        self.convs = nn.ModuleList([nn.Conv2d(d, d, 3, padding=1) for d in dims])
        for conv in (*self.lateral, *self.convs):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps of the taps -> levels, finest first."""
        levels = []
        for grid, lateral, conv, scale in zip(maps, self.lateral, self.convs, self.scales, strict=True):
            size = (max(int(grid.shape[-2] * scale), 1), max(int(grid.shape[-1] * scale), 1))
            levels.append(conv(resize(lateral(grid), size)))
        return levels


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy: [B, K, H, W], int [B, H, W] -> scalar; pixels below 0 add nothing but count."""
    return F.cross_entropy(logits.float(), masks.long(), ignore_index=-1, reduction="sum") / masks.numel()


class Segmenter(nn.Module):
    """Images -> class logits for every pixel."""

    def __init__(self, features: Features, options: DecoderOptions, classes: int) -> None:
        super().__init__()
        self.features = features
        dims, fcn = features.dims, options.head == "fcn"
        self.pyramid: nn.Module = nn.Identity()
        if features.plain:
            last, finer = options.pyramid_channels or (768 if fcn else 2048), (1, 2) if fcn else (4, 2, 1, 1)
            interpolated = options.neck == "interpolated"
            self.pyramid = InterpolatedLevels(dims) if interpolated else SideLayers(dims, last, finer)
            dims = self.pyramid.dims
        channels, dropout = options.channels or (256 if fcn else 512), options.dropout
        fcn_head = FcnHead(dims, classes, channels, options.convs, dropout) if fcn else None
        self.head: nn.Module = fcn_head or UperHead(dims, classes, channels, dropout)
        self.aux: nn.Module | None = None
        self.aux_weight = options.aux_weight
        if options.aux_weight:
            self.aux = FcnHead(dims, classes, options.aux_channels or 256, 1, dropout, max(len(dims) - 2, 0))
        if fcn:
            for i in range(len(features.norms) - (2 if self.aux is not None else 1)):
                features.norms[i] = nn.Identity()  # of maps that nothing looks at

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> logits [B, K, H, W]."""
        return self._to_pixels(self.head(self.pyramid(self.features(images))), images)

    def losses(self, images: Tensor, masks: Tensor) -> dict[str, Tensor]:
        """Terms by name: "loss" is `pixels` plus the weighted `aux`; `accuracy` is of the pixels of this batch.

        Images [B, 3, H, W], masks int [B, H, W], -1 where a pixel is ignored.
        """
        maps = self.pyramid(self.features(images))
        logits = self._to_pixels(self.head(maps), images)
        pixels = pixel_loss(logits, masks)
        terms = {"loss": pixels, "pixels": pixels}
        if self.aux is not None:
            terms["aux"] = pixel_loss(self._to_pixels(self.aux(maps), images), masks)
            terms["loss"] = pixels + self.aux_weight * terms["aux"]
        with torch.no_grad():
            known = masks >= 0  # not as an index, whose size a GPU would have to tell
            terms["accuracy"] = ((logits.argmax(1) == masks) & known).sum() / known.sum().clamp(min=1)
        return terms

    def _to_pixels(self, logits: Tensor, images: Tensor) -> Tensor:
        """Interpolate to the padded image that the backbone saw, and cut off the padding."""
        m, (height, width) = self.features.multiple, images.shape[-2:]
        padded = (-(-height // m) * m, -(-width // m) * m)
        return resize(logits, padded)[..., :height, :width]


@dataclass(frozen=True)
class SegmenterInfo(DenseInfo):
    """What a segmenter's weights say about themselves: head, and how the run was validated."""

    METADATA: ClassVar[str] = "everytoken-segment"
    HINT: ClassVar[str] = (
        "is not a segmenter of `everytoken segment train`. To train one on these weights: segment train --weights."
    )

    decoder: DecoderOptions
    evaluation: EvalOptions
    resize: int = 0  # short side of an image at scale 1; 0: that of the crops

    def network(self, features: Features) -> Segmenter:
        return Segmenter(features, self.decoder, len(self.class_names))


def build_segmenter(
    options: SegmentOptions, class_names: tuple[str, ...], size: int | tuple[int, int] = 0
) -> tuple[Segmenter, SegmenterInfo]:
    """A segmenter to be trained, its backbone with the weights that the options name; `size`: of images, not crops."""
    features, backbone = build_features(options.model, size or options.augment.crop_size)
    info = SegmenterInfo(backbone, class_names, options.decoder, options.evaluation, options.augment.resize)
    return info.network(features), info


def load_segmenter(source: str | Path) -> tuple[Segmenter, SegmenterInfo]:
    """A trained segmenter and its description, of a run folder, its weights file, or a released file of mmseg."""
    path = find_weights(source)
    return load_dense(source, SegmenterInfo) if path.suffix == ".safetensors" else load_mmseg(path)


# -- released segmenters ----------------------------------------------------------------------------------------------

_MMSEG_NAMES = (  # in the files of mmseg -> here
    (r"backbone\.side_layer(\d)\.", lambda match: f"pyramid.layers.{int(match[1]) - 1}."),
    (r"backbone\.", "features.backbone."),
    (r"decode_head\.psp_modules\.(\d)\.1\.", r"head.pooled.\1."),
    (r"decode_head\.lateral_convs\.", "head.lateral."),
    (r"decode_head\.fpn_convs\.", "head.smooth."),
    (r"decode_head\.fpn_bottleneck\.", "head.fuse."),
    (r"(decode_head|auxiliary_head)\.conv_seg\.", r"\1.classifier.1."),
    (r"decode_head\.", "head."),
    (r"auxiliary_head\.", "aux."),
)
LVVIT = {16: ("lvvit_s", {}), 20: ("lvvit_m", {}), 24: ("lvvit_l", {"residual_divisor": 1.0})}  # by depth


def load_mmseg(path: Path) -> tuple[Segmenter, SegmenterInfo]:
    """A released UperNet on LV-ViT (`upernet_lvvit_s|m|l.pth`), whose names are those of mmseg 0.x.

    Its blocks have norms with epsilon 1e-6, and those of L do not divide their residuals, as in the released set-up.
    """
    state = read_weights(path)
    depth = len({name.split(".")[2] for name in state if name.startswith("backbone.blocks.")})
    if depth not in LVVIT or "decode_head.fpn_bottleneck.conv.weight" not in state:
        raise EverytokenError(f"{path} is not a released UperNet on LV-ViT, and {SegmenterInfo.HINT}")
    architecture, arguments = LVVIT[depth]
    decoder = DecoderOptions(
        channels=len(state["decode_head.fpn_bottleneck.conv.weight"]),
        aux_channels=len(state["auxiliary_head.convs.0.conv.weight"]),
        pyramid_channels=len(state["backbone.side_layer4.0.weight"]),
    )
    meta = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("meta") or {}
    count = len(state["decode_head.conv_seg.weight"])
    names = tuple(str(name).strip() for name in meta.get("CLASSES") or ())
    names = names if len(names) == count else tuple(f"class {number}" for number in range(count))
    evaluation = EvalOptions("slide", 341, (1.0,), False, (0.75, 1.0, 1.25, 1.5, 1.75))
    backbone = BackboneOptions(model=architecture, model_kwargs=arguments)
    model, info = build_segmenter(SegmentOptions(model=backbone, decoder=decoder, evaluation=evaluation), names)
    for module in model.features.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    renamed = {mmseg_name(name): value for name, value in state.items()}
    positions = lvvit.checkpoint_filter_fn(
        {"pos_embed": renamed["features.backbone.pos_embed"]}, model.features.backbone
    )
    renamed["features.backbone.pos_embed"] = positions["pos_embed"]
    report = load_weights(model, renamed)
    if report.missing or report.left_out:
        raise EverytokenError(f"{path} does not fit the network that it looks like:\n{report}")
    if report.unknown:
        logger.warning("%s: %s", path, report)
    return model.eval(), info


def mmseg_name(name: str) -> str:
    """Our name of a weight that mmseg calls `name`."""
    for pattern, ours in _MMSEG_NAMES:
        name = re.sub(f"^{pattern}", ours, name)
    return name.replace(".conv.", ".0.").replace(".bn.", ".1.") if name.startswith(("head.", "aux.")) else name
