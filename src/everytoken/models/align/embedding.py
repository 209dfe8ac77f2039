"""Embeddings that mix places themselves: T2T-ViT's tokens-to-token.

Paper: TL-Align, section 3.2 and appendix A. Where patches only touch, a token starts with the mean of its patch
(equation 5). Where the embedding overlaps its neighbours or attends, shares start on the pixels and go through it: the
stems of LV-ViT and CvT by `convolution`, tokens-to-token by this file. The paper says nothing about such embeddings.
Our reading: a soft split lays overlapping windows side by side, which is aggregation, so a token is the mean of its
window, and what pads the border belongs to nobody; the narrow attention between splits is attention like any other,
with its value as the residual. A performer's weights are those of its kernel, normalised to 1.
It is a part of the embedding: it has no layer number, and counts when all layers do (`Alignment.layers`).
Cost: a one-channel convolution per split, a performer or attention with one channel per attention layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everytoken.functional.shares import convolved_shares
from everytoken.models.align.attention import seen
from everytoken.models.align.tape import Hook, Site, Tape
from everytoken.models.t2t_vit import Split, TokenPerformer, performer


class SoftSplit(Hook):
    """The map was cut into overlapping windows (kernel, stride, padding)."""

    def __init__(self, tape: Tape, split: Split) -> None:
        super().__init__(tape)
        self.split = split

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kernel, stride, padding = self.split
        even = torch.full((kernel, kernel), 1 / kernel**2, device=shares.device)
        self.tape.shares = convolved_shares(shares, even, (stride, stride), (padding,) * 4)


class Enter(Hook):
    """Attention over a whole map begins."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        tape.inside, tape.mixed = True, None
        tape.keys = shares.flatten(1)[..., None] if self.on else None


class Leave(Hook):
    """Attention over a whole map has ended."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        if self.on:
            tape.shares = tape.combine(seen(tape, module)[..., 0].view_as(shares), shares)
        tape.inside, tape.keys = False, None


class Projected(Hook):
    """A performer has made its keys, queries and values."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tape.projected = output


class Perform(Hook):
    """A performer over a whole map has ended: mix the shares by the same kernel."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape, layer = self.tape, module
        assert isinstance(layer, TokenPerformer)
        assert tape.projected is not None
        k, q, _ = tape.projected.split(layer.width, dim=-1)
        mixed = performer(q, k, shares.flatten(1)[..., None], layer.w, eps=0.0)
        tape.shares = tape.combine(mixed.view_as(shares), shares)
        tape.projected = None


def tokens_to_token(module: nn.Module, site: Site, name: str) -> None:
    """Rule for `TokensToToken`, from a map of shares on pixels to one on tokens."""
    embedding: Any = module
    on = site.layers is None
    for i, split in enumerate(embedding.splits[:-1], start=1):
        layer = getattr(embedding, f"attention{i}")
        site.before(layer, SoftSplit(site.tape, split))
        if not isinstance(layer, TokenPerformer):
            site.before(layer.attn, Enter(site.tape, on))
            site.after(layer.attn, Leave(site.tape, on))
        elif on:
            site.after(layer.kqv, Projected(site.tape))
            site.after(layer, Perform(site.tape))
        site.doublings += 2 if on else 0
    site.after(embedding, SoftSplit(site.tape, embedding.splits[-1]))
