"""Patch embedding by convolutions, as in LV-ViT (All Tokens Matter, section 3 and Table 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Format, nchw_to
from torch import Tensor, nn


class ConvStem(nn.Module):
    """Patch embedding by a few convolutions; the last one makes the tokens.

    Args:
        kernels, strides: one entry per convolution. All but the last are followed by batch norm and ReLU. One
            entry is the plain patch embedding of ViT. The token size is the product of the strides.
        width: channels of all convolutions but the last.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] | None = 224,
        in_chans: int = 3,
        embed_dim: int = 384,
        kernels: Sequence[int] = (7, 3, 3, 8),
        strides: Sequence[int] = (2, 1, 1, 8),
        width: int = 64,
        strict_img_size: bool = True,
        dynamic_img_pad: bool = False,
        output_fmt: str | None = None,
        patch_size: int | tuple[int, int] | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not kernels or len(kernels) != len(strides):
            raise ValueError(
                f"the stem needs one stride per kernel: {len(kernels)} kernels {tuple(kernels)}, "
                f"{len(strides)} strides {tuple(strides)}"
            )
        size = math.prod(strides)
        self.patch_size = (size, size)
        self.strict_img_size = strict_img_size
        self.dynamic_img_pad = dynamic_img_pad
        self.output_fmt = Format(output_fmt) if output_fmt else None
        self.num_hidden = len(kernels) - 1
        self.set_input_size(img_size)
        dd = {"device": device, "dtype": dtype}
        channels = in_chans
        for i, (kernel, stride) in enumerate(zip(kernels[:-1], strides[:-1], strict=True), start=1):
            conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False, **dd)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(width, **dd))
            channels = width
        # a kernel wider than its stride overlaps; padding keeps the number of tokens at size / stride
        padding = max(0, kernels[-1] - strides[-1]) // 2
        self.proj = nn.Conv2d(channels, embed_dim, kernels[-1], stride=strides[-1], padding=padding, bias=bias, **dd)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set the expected image size (None: any); the token size is fixed by the strides."""
        wanted = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if wanted is not None and tuple(wanted) != self.patch_size:
            raise ValueError(
                f"LV-ViT's token size follows from its stem: the strides make {self.patch_size[0]}, "
                f"patch_size={patch_size} was asked; pass stem_kernels and stem_strides instead"
            )
        if img_size is None:
            self.img_size: tuple[int, int] | None = None
            return
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels per token, along each axis."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Token grid (h, w) for an image of (height, width)."""
        if self.dynamic_img_pad:
            return -(-img_size[0] // self.patch_size[0]), -(-img_size[1] // self.patch_size[1])
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> tokens [B, h*w, D] (or [B, h, w, D] with output_fmt NHWC), row by row."""
        height, width = x.shape[-2:]
        if self.strict_img_size and self.img_size is not None:
            torch._assert(
                (height, width) == self.img_size,
                f"the input is {height}x{width}, the model was made for {self.img_size}; "
                "call set_input_size, or create it with img_size or dynamic_img_size=True",
            )
        if self.dynamic_img_pad:
            x = nn.functional.pad(x, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))
        for i in range(1, self.num_hidden + 1):
            x = nn.functional.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)), inplace=True)
        x = self.proj(x)
        if self.output_fmt is None:
            return x.flatten(2).transpose(1, 2)
        return nchw_to(x, self.output_fmt)
