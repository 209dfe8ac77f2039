"""Heads that turn feature maps into class logits for every cell: FCN and UperNet.

FCN: Long et al. 2015 (here: 3x3 convolutions and a classifier on one map). UperNet: Xiao et al. 2018, section 3:
pyramid pooling (Zhao et al. 2017) on the coarsest map, a feature pyramid down to the finest, all levels fused. Sizes
and layers are those of the set-ups that the papers used, so the parameter counts of their tables come out.

Logits are at the resolution of the finest map; whoever wants pixels interpolates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLS = (1, 2, 3, 6)  # cells along each axis, of pyramid pooling


class ConvNormRelu(nn.Sequential):
    """Convolution without bias, batch norm, ReLU; the size stays."""

    def __init__(self, dim: int, out: int, kernel: int) -> None:
        super().__init__(
            nn.Conv2d(dim, out, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class Classifier(nn.Sequential):
    """Dropout of whole channels, then a class for every cell."""

    def __init__(self, dim: int, classes: int, dropout: float) -> None:
        conv = nn.Conv2d(dim, classes, 1)
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        super().__init__(nn.Dropout2d(dropout), conv)


class FcnHead(nn.Module):
    """Convolutions on one map.

    Args:
        dims: channels of all maps. index: the map to look at.
        classes: outputs. channels: inside. convs: how many 3x3 convolutions. dropout: before the classifier.
    """

    def __init__(
        self, dims: Sequence[int], classes: int, channels: int = 256, convs: int = 1, index: int = -1,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
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
    """Pyramid pooling on the last map, a feature pyramid over all, fused at the first map's resolution.

    Args:
        dims: channels of the maps, finest first; any number of them.
        classes: outputs. channels: inside. dropout: before the classifier.
    """

    def __init__(self, dims: Sequence[int], classes: int, channels: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.pooled = nn.ModuleList([ConvNormRelu(dims[-1], channels, 1) for _ in POOLS])
        self.bottleneck = ConvNormRelu(dims[-1] + len(POOLS) * channels, channels, 3)
        self.lateral = nn.ModuleList([ConvNormRelu(d, channels, 1) for d in dims[:-1]])
        self.smooth = nn.ModuleList([ConvNormRelu(channels, channels, 3) for _ in dims[:-1]])
        self.fuse = ConvNormRelu(len(dims) * channels, channels, 3)
        self.classifier = Classifier(channels, classes, dropout)

    def pool(self, grid: Tensor) -> Tensor:
        """[B, D, h, w] -> [B, channels, h, w] with a view of the whole image in it."""
        views = [grid]
        for cells, conv in zip(POOLS, self.pooled, strict=True):
            views.append(resize(conv(F.adaptive_avg_pool2d(grid, cells)), grid))
        out: Tensor = self.bottleneck(torch.cat(views, 1))
        return out

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """[[B, D_i, h_i, w_i], ...] -> [B, K, h_0, w_0]."""
        levels = [conv(grid) for conv, grid in zip(self.lateral, maps[:-1], strict=True)]
        levels.append(self.pool(maps[-1]))
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + resize(levels[i], levels[i - 1])
        out = [conv(grid) for conv, grid in zip(self.smooth, levels[:-1], strict=True)]
        out.append(levels[-1])
        logits: Tensor = self.classifier(self.fuse(torch.cat([resize(grid, out[0]) for grid in out], 1)))
        return logits


def resize(grid: Tensor, like: Tensor | tuple[int, int]) -> Tensor:
    """Bilinear, to the height and width of `like`."""
    size = (like.shape[-2], like.shape[-1]) if isinstance(like, Tensor) else like
    if (grid.shape[-2], grid.shape[-1]) == size:
        return grid
    return F.interpolate(grid, size, mode="bilinear", align_corners=False)
