"""Attention in shifted windows, and patch merging: Swin and Swin V2.

Paper: TL-Align, section 3.3 (hierarchical transformers); its released code has none of this. The map of shares is
shifted, filled up and cut into windows exactly as the block does it with tokens, mixed by the window's own attention
(which already holds relative bias or cosine scale, and the shift mask), put together again and averaged with the
residual. Merging 2x2 patches averages their shares.
Cells that fill up a map to whole windows can be attended to but belong to nobody: what remains is normalised to sum
to 1, as Norm does to the K-wide labels.
Cost: one product [heads·n, n]·[n] per window on the matrix that the layer makes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.functional.shares import merged_shares
from everytoken.models.align.attention import seen, watch_matrix
from everytoken.models.align.tape import Hook, Site, normalised

Pair = tuple[int, int]


def to_windows(shares: Tensor, window: Pair, shift: Pair) -> Tensor:
    """[B, h, w] -> [B·windows, window area]; places that fill up hold 0."""
    b, h, w = shares.shape
    if any(shift):
        shares = torch.roll(shares, (-shift[0], -shift[1]), (1, 2))
    fill = (-h % window[0], -w % window[1])
    if any(fill):
        shares = F.pad(shares, (0, fill[1], 0, fill[0]))
    rows, columns = (h + fill[0]) // window[0], (w + fill[1]) // window[1]
    cut = shares.view(b, rows, window[0], columns, window[1]).transpose(2, 3)
    return cut.reshape(b * rows * columns, window[0] * window[1])


def from_windows(windows: Tensor, window: Pair, shift: Pair, size: Pair) -> Tensor:
    """The way back: [B·windows, window area] -> [B, h, w]."""
    rows, columns = -(-size[0] // window[0]), -(-size[1] // window[1])
    cut = windows.view(-1, rows, columns, window[0], window[1]).transpose(2, 3)
    shares = cut.reshape(-1, rows * window[0], columns * window[1])[:, : size[0], : size[1]]
    return torch.roll(shares, shift, (1, 2)) if any(shift) else shares


class Place(Hook):
    """A window block begins: remember its geometry."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        block: Any = module
        self.tape.window = (tuple(block.window_size), tuple(block.shift_size))


class Enter(Hook):
    """The window attention begins: cut the map as the block has cut the tokens."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        tape.inside, tape.mixed, tape.keys = True, None, None
        if not self.on:
            return
        assert tape.window is not None
        window, shift = tape.window
        cut = to_windows(shares, window, shift)[..., None]
        if shares.shape[1] % window[0] or shares.shape[2] % window[1]:
            real = to_windows(torch.ones_like(shares), window, shift)[..., None]
            cut = torch.cat((cut, real), dim=-1)
        tape.keys = cut


class Leave(Hook):
    """The window attention has ended: put the map together, residual average."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        if self.on:
            assert tape.window is not None
            mixed = normalised(seen(tape, module))
            size = (shares.shape[1], shares.shape[2])
            tape.keep(tape.combine(from_windows(mixed, *tape.window, size), shares))
        tape.inside, tape.keys = False, None


class Merge(Hook):
    """Patch merging has run."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tape.shares = merged_shares(shares)


def window_block(module: nn.Module, site: Site, name: str) -> None:
    """Rule for a block with `window_size`, `shift_size` and window attention `attn` over [B·windows, n, D]."""
    attention: Any = module.attn
    on = site.layer()
    site.before(module, Place(site.tape))
    site.before(attention, Enter(site.tape, on))
    watch_matrix(attention, site)
    site.after(attention, Leave(site.tape, on))


def patch_merging(module: nn.Module, site: Site, name: str) -> None:
    """Rule for the concatenation of 2x2 neighbours."""
    site.after(module, Merge(site.tape))
