"""The shares of the forward pass under way, and the hook that keeps them up to date.

Hooks never change what a layer returns. They belong to the layers (so that compiled, wrapped and checkpointed models
call them too) and hold nothing but the state, so a deep copy of a model gets hooks with an idle state of its own, and
state dicts do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.functional.shares import mean_shares, patch_shares

Pair = tuple[int, int]


class ShareState:
    """What is known during one forward pass; everything is None or empty between passes.

    Attributes:
        mask, ratio: of the mix; [B, H, W] and [B].
        checkpointing: blocks may run again in the backward pass, then without shares.
        wants_mixing: the tokens are to be mixed behind the patch embedding.
        on_pixels: shares start on the pixels, before the first layer, not behind the patch embedding.
        shares: [B, N] of a sequence or [B, h, w] of a map, float32; None until they start.
        grid: (h, w) of the patches of a sequence.
        in_attention: a layer that is known to attend is running.
        keys: [B', N, C], the shares that this layer mixes; None if it does not count. C is 2 where some keys belong to
            no image: shares, 0 for those, and which keys count (`normalised`).
        mixed: [B', M, C], what its fused attention made of them.
        matrix: [B', heads, M, N], its attention matrix, if it makes one.
        projected: keys, queries and values of the performer that is running.
        window: (window, shift, whether it pads before it shifts) of the window block that is running.
        residuals: inputs of the residual blocks that are running, the innermost last.
        pooled: [B], what attention pooling made of the shares.
        history: shares after every mixing layer, if they are kept.
        first: the hook that was called first; when it is called again, another pass has begun.
    """

    def __init__(self, residual: bool = True, keep_history: bool = False, patches_only: bool = False) -> None:
        self.residual = residual
        self.keep_history = keep_history
        self.patches_only = patches_only
        self.checkpointing = False
        self.wants_mixing = False
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self.mask: Tensor | None = None
        self.ratio: Tensor | None = None
        self.on_pixels = False
        self.shares: Tensor | None = None
        self.grid: Pair | None = None
        self.in_attention = False
        self.keys: Tensor | None = None
        self.mixed: Tensor | None = None
        self.matrix: Tensor | None = None
        self.projected: Tensor | None = None
        self.window: tuple[Pair, Pair, bool] | None = None
        self.residuals: list[Tensor] = []
        self.pooled: Tensor | None = None
        self.history: list[Tensor] = []
        self.first: ShareHook | None = None

    def start(self, images: Tensor, grid: Pair, cell: tuple[float, float] | None = None) -> Tensor:
        """Set the shares [B, h, w] on a grid over the images: the mean of the mask over each cell (equation 5).

        Args:
            images: [B, C, H, W], what the first layer is given.
            grid: (h, w).
            cell: (height, width) of a cell as fractions of the image; None: (1/h, 1/w).
        """
        assert self.mask is not None
        assert self.ratio is not None
        if images.shape[:1] != self.ratio.shape:
            raise EverytokenError(f"the mix is for {len(self.ratio)} images, the model was given {len(images)}")
        self.shares = patch_shares(self.mask, grid, cell)
        return self.shares

    def combine(self, mixed: Tensor, before: Tensor) -> Tensor:
        """The residual connection around a mixing layer (equation 11)."""
        return mean_shares(mixed, before) if self.residual else mixed

    def keep(self, shares: Tensor) -> None:
        """Set the shares after a mixing layer."""
        self.shares = shares
        if self.keep_history:
            self.history.append(shares)


Update = Callable[..., None]  # update(state, shares, module, args, output, **options)


class ShareHook:
    """A forward hook or pre-hook that updates the shares while a pass is under way, and is idle otherwise.

    Args:
        state: shared by all hooks of an aligner.
        update: called as update(state, shares, module, args, output, **options) with the shares [B, N] or [B, h, w];
            `output` is None before the module has run. A function of a module, not a closure, so that copies of the
            model share nothing.
    """

    def __init__(self, state: ShareState, update: Update, **options: Any) -> None:
        self.state = state
        self.update = update
        self.options = options

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        state = self.state
        if state.mask is None:
            return
        if state.first is None:
            state.first = self
        elif state.first is self:
            raise EverytokenError("the model ran twice in one `with` block, which follows one pass; use two blocks.")
        if state.shares is None and not state.on_pixels:
            return
        with torch.no_grad(), torch.autocast(state.mask.device.type, enabled=False):
            shares = state.shares
            if shares is None:  # the first layer that is followed
                shares = state.start(args[0], (args[0].shape[-2], args[0].shape[-1]))
            self.update(state, shares, module, args, output, **self.options)


def normalised(mixed: Tensor) -> Tensor:
    """What attention made of `ShareState.keys`, [B', M, C] -> shares [B', M]; keys of no image do not count."""
    if mixed.shape[-1] == 1:
        return mixed[..., 0]
    return (mixed[..., 0] / mixed[..., 1].clamp(min=torch.finfo(mixed.dtype).tiny)).clamp(0, 1)
