"""Scales for plain transformers, whose maps are all at one stride.

`SideLayers` is the released LV-ViT set-up (All Tokens Matter, section 4.4): each of four taps becomes one level by
transposed convolutions; the last one is widened. Note that its coarsest level stays at the stride of the tokens.
`SimplePyramid` is that of plain-backbone detectors (Li et al. 2022, section 3): all levels from the last tap, at 1/4,
1/2, 1 and 2 times the stride of the tokens.

Both take the maps of `Features` and have `dims` and `strides` like it, so heads do not know which came before them.
Cost: SideLayers of LV-ViT-S 4.2 M parameters, SimplePyramid of a ViT-B 5.6 M.
"""

from __future__ import annotations

from collections.abc import Sequence

from timm.layers import LayerNorm2d
from torch import Tensor, nn


def _norm_relu(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _side(dim: int, out: int, finer: int) -> nn.Sequential:
    """A map at `finer` times the resolution. One convolution, or two if it is made finer."""
    if finer == 1:
        return nn.Sequential(nn.Conv2d(dim, out, 1, bias=False), *_norm_relu(out))
    up = nn.ConvTranspose2d(dim, dim, finer, stride=finer, bias=False)
    return nn.Sequential(up, *_norm_relu(dim), nn.Conv2d(dim, out, 1, bias=False), *_norm_relu(out))


class SideLayers(nn.Module):
    """One level per tap: [B, D, h, w] each -> [B, D, 4h, 4w], [B, D, 2h, 2w], [B, D, h, w], [B, last, h, w].

    Args:
        dims, strides: of the taps.
        last: channels of the last level.
        finer: how much finer than the tokens each level is, one number per tap; the released FCN uses the last two taps
            with (1, 2), the released UperNet four with (4, 2, 1, 1).
    """

    def __init__(
        self, dims: Sequence[int], strides: Sequence[int], last: int = 2048, finer: Sequence[int] = (4, 2, 1, 1)
    ) -> None:
        super().__init__()
        self.first = len(dims) - len(finer)  # taps before it are not used
        used = list(dims[self.first :])
        self.dims = [*used[:-1], last]
        self.strides = [s // f for s, f in zip(strides[self.first :], finer, strict=True)]
        self.layers = nn.ModuleList([_side(d, out, f) for d, out, f in zip(used, self.dims, finer, strict=True)])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps of the taps -> levels, finest first (or last, as `finer` says)."""
        return [layer(grid) for layer, grid in zip(self.layers, maps[self.first :], strict=True)]


class SimplePyramid(nn.Module):
    """Four levels from the last map: strides 1/4, 1/2, 1 and 2 times its own.

    Args:
        dims, strides: of the maps; only the last is used.
        out: channels of every level.
    """

    def __init__(self, dims: Sequence[int], strides: Sequence[int], out: int = 256) -> None:
        super().__init__()
        dim, stride = dims[-1], strides[-1]
        self.dims = [out] * 4
        self.strides = [stride // 4, stride // 2, stride, stride * 2]
        half, quarter = dim // 2, dim // 4
        scales: list[tuple[list[nn.Module], int]] = [
            ([nn.ConvTranspose2d(dim, half, 2, 2), LayerNorm2d(half), nn.GELU(),
              nn.ConvTranspose2d(half, quarter, 2, 2)], quarter),
            ([nn.ConvTranspose2d(dim, half, 2, 2)], half),
            ([], dim),
            ([nn.MaxPool2d(2, 2)], dim),
        ]  # fmt: skip
        self.levels = nn.ModuleList(
            [
                nn.Sequential(
                    *scale, nn.Conv2d(width, out, 1, bias=False), LayerNorm2d(out),
                    nn.Conv2d(out, out, 3, padding=1, bias=False), LayerNorm2d(out),
                )
                for scale, width in scales
            ]
        )  # fmt: skip

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """[..., [B, D, h, w]] -> [B, out, 4h, 4w], [B, out, 2h, 2w], [B, out, h, w], [B, out, h/2, w/2]"""
        return [level(maps[-1]) for level in self.levels]
