"""Attention over a sequence of tokens: ViT, DeiT, DeiT-III, LV-ViT, T2T-ViT, BEiT, EVA, CaiT.

Paper: TL-Align, equations (6) to (11). While a known attention layer runs, its attention is seen in one of two ways:
fused, the call of `scaled_dot_product_attention` is answered by `fused.attend` (`Watch`); explicit, the matrix passes
through `attn_drop`, before dropout. Position biases, rotary positions, query norms and gates are thus the layer's own
business. A layer in which neither is seen is an error.
Talking heads (CaiT) mix heads after the softmax: what really mixes tokens has any sign, so it counts by size.
Class attention (CaiT) updates the class token only.
Cost: see `fused`; explicit, one product [heads·N, N]·[N] per layer on a matrix that is there anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from everytoken.functional.shares import mixed_by_matrix
from everytoken.models.align.fused import attend
from everytoken.models.align.tape import Hook, Site, Tape, normalised
from everytoken.models.families import UnsupportedModelError


class Watch(TorchFunctionMode):
    """Answers `scaled_dot_product_attention` inside known attention layers; everything else passes."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tape = self.tape
        if func is F.scaled_dot_product_attention and tape.shares is not None:
            if not tape.inside:
                raise UnsupportedModelError(
                    "token-label alignment met attention outside of the layers it knows; add a rule for the layer to "
                    "everytoken.models.align.RULES"
                )
            if tape.keys is not None:
                out, tape.mixed = attend(tape.keys, tape.ask_again, *args, **(kwargs or {}))
                return out
        return func(*args, **(kwargs or {}))


class Enter(Hook):
    """An attention layer over [B, N, D] begins. Tokens in front of the known ones carry the mix ratio (equation 5)."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        more = args[0].shape[1] - shares.shape[1]
        if more < 0:
            raise UnsupportedModelError(
                f"{type(module).__name__} sees {args[0].shape[1]} tokens where {shares.shape[1]} were embedded: "
                "token-label alignment does not know which were dropped (switch patch dropping off)"
            )
        if more > 0:
            assert tape.ratio is not None
            shares = torch.cat((tape.ratio[:, None].expand(-1, more), shares), dim=1)
            tape.shares = shares
        tape.inside = True
        tape.mixed = None
        tape.keys = self._keys(shares) if self.on else None

    def _keys(self, shares: Tensor) -> Tensor:
        """[B, N, 1], or with the mark of patches [B, N, 2] where only those count."""
        grid = self.tape.grid
        prefix = 0 if grid is None else shares.shape[1] - grid[0] * grid[1]
        return patches_marked(shares, prefix) if self.tape.patches_only and prefix else shares[..., None]


class Matrix(Hook):
    """The attention matrix [B, heads, M, N] on its way into `attn_drop`."""

    def __init__(self, tape: Tape, stochastic: bool = True) -> None:
        super().__init__(tape)
        self.stochastic = stochastic

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.tape.keys is not None:
            self.tape.mixed = mixed_by_matrix(args[0].detach(), self.tape.keys, self.stochastic).float()


class Leave(Hook):
    """An attention layer has ended: residual average for the tokens it has updated."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self.tape
        if self.on:
            mixed = normalised(seen(tape, module))
            new = tape.combine(mixed, shares[:, : mixed.shape[1]])
            tape.keep(torch.cat((new, shares[:, mixed.shape[1] :]), dim=1) if new.shape != shares.shape else new)
        tape.inside = False
        tape.keys = None


def patches_marked(shares: Tensor, prefix: int) -> Tensor:
    """Keys [B, N, 2] of which the first `prefix` belong to nobody."""
    patch = torch.ones_like(shares)
    patch[:, :prefix] = 0
    return torch.stack((shares * patch, patch), dim=-1)


def seen(tape: Tape, module: nn.Module) -> Tensor:
    """What the attention layer made of the keys."""
    if tape.mixed is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} ({type(module).__module__}) ran, but its attention was not seen: it neither "
            "calls scaled_dot_product_attention nor hands its matrix to attn_drop; give it a rule of its own in "
            "everytoken.models.align.RULES"
        )
    return tape.mixed


def self_attention(module: nn.Module, site: Site, name: str, stochastic: bool = True) -> None:
    """Rule for a layer whose input is [B, N, D] and whose attention updates the first tokens of it, usually all."""
    on = site.layer()
    site.before(module, Enter(site.tape, on))
    watch_matrix(module, site, stochastic)
    site.after(module, Leave(site.tape, on))


def talking_heads(module: nn.Module, site: Site, name: str) -> None:
    """Rule for attention whose heads are mixed after the softmax."""
    self_attention(module, site, name, stochastic=False)


def watch_matrix(module: nn.Module, site: Site, stochastic: bool = True) -> None:
    """See the matrix of an attention layer that makes one."""
    drop = getattr(module, "attn_drop", None)
    if isinstance(drop, nn.Module):
        site.before(drop, Matrix(site.tape, stochastic))
