"""Attention whose values come from a convolution: CvT.

Paper: TL-Align, equation (9) with appendix A. What attention mixes are not tokens but values, and CvT makes them by a
depth-wise convolution, often with a stride: the shares are convolved first, then mixed by the attention. (The
convolutions of queries and keys only change the attention.) Each stage begins with an overlapping convolution of the
whole grid, the first one of the pixels; prefix tokens pass by convolutions.
Cost: that of fused attention, and a one-channel convolution per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everytoken.models.align.attention import Enter, Leave, patches_marked
from everytoken.models.align.convolution import convolved_by
from everytoken.models.align.tape import Hook, Site


class EnterConvolved(Enter):
    """Convolutional attention over [B, prefix + h·w, D] begins: convolve what it is to mix."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        super().act(shares, module, args, output)
        tape = self.tape
        if not self.on:
            return
        assert tape.shares is not None
        assert tape.grid is not None
        layer: Any = module
        prefix, patches = tape.shares[:, : layer.prefix], tape.shares[:, layer.prefix :]
        conv = layer.conv_proj_v.conv
        values = convolved_by(conv, patches.unflatten(1, tape.grid)).flatten(1)
        keys = torch.cat((prefix, values), dim=1)
        tape.keys = patches_marked(keys, layer.prefix) if tape.patches_only and layer.prefix else keys[..., None]


class Embed(Hook):
    """A stage has embedded the map of pixels [B, h, w], or the grid [B, h·w] of the stage before."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        layer: Any = module
        if shares.dim() == 3:
            tape.shares = convolved_by(layer.proj, shares)
            return
        assert tape.grid is not None
        shares = convolved_by(layer.proj, shares.unflatten(1, tape.grid))
        tape.grid = (shares.shape[1], shares.shape[2])
        tape.shares = shares.flatten(1)


def conv_attention(module: nn.Module, site: Site, name: str) -> None:
    """Rule for attention with convolutional projections and `prefix` tokens that pass by them."""
    on = site.layer()
    site.before(module, EnterConvolved(site.tape, on))
    site.after(module, Leave(site.tape, on))


def stage_embedding(module: nn.Module, site: Site, name: str) -> None:
    """Rule for the convolution `proj` that a stage of tokens begins with."""
    site.after(module, Embed(site.tape))
