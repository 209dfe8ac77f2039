"""The shares of the forward pass under way, and the hooks that keep them up to date.

Hooks only watch: they never change what a layer returns. They belong to the layers (so that compiled, wrapped and
checkpointed models call them too) and hold nothing but the tape, so a deep copy of a model copies an idle tape with it,
and state dicts know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everytoken.functional.shares import mean_shares


class Tape:
    """What one pass knows; everything is None or empty between passes.

    Attributes:
        mask, ratio: of the mix; [B or 1, H, W] and [B].
        shares: [B, N] of a sequence or [B, h, w] of a map, float32; None until the patches are embedded.
        first: the shares on the pixel grid, before a convolutional model has run.
        late: tokens are mixed after the patch embedding, so shares start behind it.
        grid: (h, w) of the patches of a sequence.
        inside: a known attention layer is running.
        keys: [B', N, C] what that layer is to mix; None if it is left out. C is 2 where some keys belong to nobody:
            shares, 0 for those, and which keys count (`normalised`).
        mixed: [B', M, C] what its attention made of them.
        projected: keys, queries and values of the performer under way.
        window: (window, shift) of the window block under way.
        stack: inputs of the residual blocks under way.
        history: shares after every mixing layer, if wanted.
    """

    def __init__(
        self, residual: bool = True, keep_history: bool = False, ask_again: bool = False, patches_only: bool = False
    ) -> None:
        self.residual = residual
        self.patches_only = patches_only
        self.keep_history = keep_history
        self.ask_again = ask_again
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self.mask: Tensor | None = None
        self.ratio: Tensor | None = None
        self.shares: Tensor | None = None
        self.first: Tensor | None = None
        self.late = False
        self.grid: tuple[int, int] | None = None
        self.inside = False
        self.keys: Tensor | None = None
        self.mixed: Tensor | None = None
        self.projected: Tensor | None = None
        self.window: tuple[tuple[int, int], tuple[int, int]] | None = None
        self.stack: list[Tensor] = []
        self.history: list[Tensor] = []

    def combine(self, mixed: Tensor, before: Tensor) -> Tensor:
        """The residual connection around a mixing layer."""
        return mean_shares(mixed, before) if self.residual else mixed

    def keep(self, shares: Tensor) -> None:
        """Set the shares after a mixing layer."""
        self.shares = shares
        if self.keep_history:
            self.history.append(shares)


def normalised(mixed: Tensor) -> Tensor:
    """[B', M, C] as attention has made it of `Tape.keys` -> shares [B', M]; keys that belong to nobody do not count."""
    if mixed.shape[-1] == 1:
        return mixed[..., 0]
    return (mixed[..., 0] / mixed[..., 1].clamp(min=torch.finfo(mixed.dtype).tiny)).clamp(0, 1)


class Hook:
    """A forward hook or pre-hook that does something only while a pass is under way."""

    def __init__(self, tape: Tape, on: bool = True) -> None:
        self.tape = tape
        self.on = on

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        shares = self.tape.shares
        if shares is None:
            return
        with torch.no_grad(), torch.autocast(shares.device.type, enabled=False):
            self.act(shares, module, args, output)

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What to do with the shares [B, N] or [B, h, w]; `output` is None before the module has run."""
        raise NotImplementedError


@dataclass
class Site:
    """Where rules attach themselves: one per aligner.

    Attributes:
        tape: shared by all hooks.
        descend: attaches to a child: descend(module, name).
        embed: name of the patch embedding, where the shares of tokens start; None where the model has none.
        layers: the numbers (from 1) of the mixing layers that count; None: all.
        handles: of all hooks, to remove them.
        count: mixing layers so far.
        doublings: residual connections so far that count; the total of an unnormalised label doubles at each.
    """

    tape: Tape
    descend: Callable[[nn.Module, str], None]
    embed: str | None = None
    layers: frozenset[int] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    count: int = 0
    doublings: int = 0

    def layer(self, residuals: int = 2) -> bool:
        """Number the next mixing layer, which has so many residual connections; whether it counts."""
        self.count += 1
        on = self.layers is None or self.count in self.layers
        self.doublings += residuals if on else 0
        return on

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, args)` before every run of the module."""
        self.handles.append(module.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call `hook(module, args, output)` after every run of the module."""
        self.handles.append(module.register_forward_hook(hook))

    def children(self, module: nn.Module, name: str, skip: frozenset[str] = frozenset()) -> None:
        """Attach to the children, in their order."""
        for child_name, child in module.named_children():
            if child_name not in skip:
                self.descend(child, f"{name}.{child_name}" if name else child_name)
