"""The aligner: watches a timm model run on mixed images and says whose they are in the end.

Paper: "Token-Label Alignment for Vision Transformers", equations (4) to (12); ablations of Table 8 as options.
    aligner = Aligner(model)
    with aligner.watch(images, mix) as seen:
        logits = model(images)                    # or a compiled or DDP wrapper of it
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
Evaluation and passes outside of `watch` are the plain model's; `remove()` takes the last trace of it away.
What we do differently: one share per token instead of a K-wide label (exact, see `everytoken.functional.shares`).
Cost: see `fused`, `windows`, `convolution`, `token_mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everytoken.errors import EverytokenError
from everytoken.functional.shares import patch_shares
from everytoken.models.align.attention import Watch
from everytoken.models.align.rules import attach, attach_embedding
from everytoken.models.align.tape import Site, Tape
from everytoken.models.families import Family, UnsupportedModelError, family_of

# Classifier, pooling and what belongs to them: how they read tokens is in `Aligner.read`.
HEADS = frozenset(
    {"head", "head_dist", "head_drop", "aux_head", "fc", "fc_norm", "classifier", "flatten"}
    | {"global_pool", "pooling", "attn_pool"}
)


@dataclass(frozen=True)
class Alignment:
    """How labels follow tokens.

    Args:
        layers: numbers of the mixing layers (attention, token MLP) that count, from 1; -1 is the last. None: all,
            and attention inside the patch embedding (T2T-ViT), which has no number. Aggregation and convolution
            between them always count. The paper's Table 8 has (12,) and (2, 4, 6, 8) of DeiT-S.
        residual: average with the residual (equation 11). False: attention alone.
        patches_only: attention counts over patches alone, normalised again; what it sees of class, distillation and
            register tokens does not count. With `layers=(-1,)` that is TransMix: the class token's attention ratio,
            averaged with its share before, the mix ratio; with `residual=False` the attention ratio alone.
        normalise: the paper's Norm. False: labels add up at every residual, so that the target's total, and with it
            the loss, is Shares.total = 2 to the number of residuals; the shares are the same.
        history: keep the shares after every mixing layer (pictures).
    """

    layers: tuple[int, ...] | None = None
    residual: bool = True
    normalise: bool = True
    history: bool = False
    patches_only: bool = False


@dataclass(frozen=True)
class Shares:
    """Which part belongs to the own image, after the last layer; float32, no gradient.

    Attributes:
        image: [B], of what the class head reads: class token, mean of tokens (with prefix tokens, if the head averages
            them too), or mean of class and distillation token.
        grid: [B, h, w], of the patch tokens, or of the cells of the last map.
        prefix: [B, P], of class, distillation and register tokens; None without any.
        total: what the target sums to; 1 unless `normalise=False`.
        history: after every mixing layer, [B, P + N] or [B, h, w], if wanted.
    """

    image: Tensor
    grid: Tensor
    prefix: Tensor | None = None
    total: float = 1.0
    history: tuple[Tensor, ...] = ()

    def unmixed(self, mask: Tensor, partner: Tensor) -> Shares:
        """For a grid whose tokens were put back to their own images: the part that belongs to the image they joined.

        Args:
            mask: [B or 1, h, w], 1 where a token was its own image's all along.
            partner: [B].
        """
        return replace(self, grid=torch.where(mask >= 0.5, self.grid, 1 - self.grid[partner]))


class Seen:
    """Filled when a watched pass ends."""

    def __init__(self) -> None:
        self._shares: Shares | None = None

    @property
    def shares(self) -> Shares:
        """The result of the pass."""
        if self._shares is None:
            raise EverytokenError("no shares yet: run the model inside `with aligner.watch(images, mix):`, once.")
        return self._shares


class Aligner:
    """Attaches to a timm model and carries shares through its layers.

    Args:
        backbone: a timm model whose layers are known (`everytoken.models.align.RULES`). It is watched, not changed.
        options: see `Alignment`.
    """

    def __init__(self, backbone: nn.Module, options: Alignment | None = None) -> None:
        self.backbone = backbone
        self.options = options or Alignment()
        self.family = family_of(backbone)
        self.is_map = self.family.layout == "nchw"
        self._pool = pooling(backbone)
        layers = self.options.layers
        site = self._attach(Tape(), None)  # a first walk counts the layers
        _remove(site.handles)
        if layers is not None and not site.count:
            raise EverytokenError(
                f"layers={layers}: {type(backbone).__name__} has no attention or token-mixing layers to choose from; "
                "leave `layers` out for convolutional backbones."
            )
        chosen = None if layers is None else _numbers(layers, site.count)
        self.tape = Tape(self.options.residual, self.options.history, patches_only=self.options.patches_only)
        site = self._attach(self.tape, chosen)
        self._handles, self._doublings = site.handles, site.doublings
        self._watch = Watch(self.tape)
        self._may_checkpoint = [m for m in backbone.modules() if hasattr(m, "grad_checkpointing")]

    def _attach(self, tape: Tape, layers: frozenset[int] | None) -> Site:
        embed = None if self.is_map else self.family.embed
        site = Site(tape, lambda module, name: attach(module, site, name), embed, layers)
        if not self.is_map and embed is None:
            raise UnsupportedModelError(
                f"token-label alignment does not know where {type(self.backbone).__name__} embeds its patches"
            )
        try:
            if embed is not None:
                module = self.backbone.get_submodule(embed)
                if attach_embedding(module, site, embed):
                    site.before(module, _Pixels(tape))
                site.after(module, _Begin(tape, self.family))
            attach(self.backbone, site, "", HEADS)
        except Exception:
            _remove(site.handles)
            raise
        return site

    def remove(self) -> None:
        """Take all hooks off; the model is then exactly what it was."""
        _remove(self._handles)

    @contextmanager
    def watch(self, images: Tensor, mix: Any) -> Iterator[Seen]:
        """Watch one pass of the model, or of a wrapper of it, over mixed images.

        Args:
            images: [B, C, H, W], what the model is given.
            mix: an `everytoken.mixing.Mix`, or anything with `mask` [B or 1, h, w] on any grid over the image (1 = own
                image, 0 = partner) and `ratio` [B]. Its `level`, if it has one, says whether tokens are mixed instead
                of pixels, behind the patch embedding.
        """
        seen = Seen()
        self._begin(images, mix)
        try:
            with self._watch:
                yield seen
            seen._shares = self._end()
        finally:
            self.tape.clear()

    def run(self, forward: Callable[[Tensor], Tensor], images: Tensor, mix: Any) -> tuple[Tensor, Shares]:
        """The same as one call, which can be compiled as a whole: (forward(images), shares)."""
        self._begin(images, mix)
        try:
            with self._watch:
                out = forward(images)
            return out, self._end()
        finally:
            self.tape.clear()

    def _begin(self, images: Tensor, mix: Any) -> None:
        tape = self.tape
        tape.clear()
        # blocks that are run again in the backward pass are run without shares, so they should see the plain call
        tape.ask_again = any(m.grad_checkpointing for m in self._may_checkpoint)
        mask, ratio = mix.mask.detach(), mix.ratio.detach().float()
        if mask.dim() != 3 or mask.shape[0] not in (1, images.shape[0]) or ratio.shape != images.shape[:1]:
            raise EverytokenError(
                f"a mix for {images.shape[0]} images needs a mask [B or 1, h, w] and a ratio [B]; got mask "
                f"{list(mask.shape)} and ratio {list(ratio.shape)}."
            )
        tape.mask, tape.ratio = mask.expand(images.shape[0], -1, -1), ratio
        tape.late = getattr(mix, "level", "pixels") == "tokens"
        if self.is_map:
            tape.shares = tape.first = patch_shares(tape.mask, (images.shape[-2], images.shape[-1]))

    def _end(self) -> Shares:
        tape = self.tape
        shares, grid, history = tape.shares, tape.grid, tuple(tape.history)
        ran = shares is not tape.first
        tape.clear()
        if shares is None or not ran:
            raise EverytokenError("the watched model has not run; was it another one than the aligner was made for?")
        prefix = None
        if grid is not None:
            count = grid[0] * grid[1]
            if shares.shape[1] > count:
                prefix = shares[:, :-count]
            shares = shares[:, -count:].reshape(-1, *grid)
        total = 1.0 if self.options.normalise else 2.0**self._doublings
        return Shares(self.read(shares, prefix), shares, prefix, total, history)

    def read(self, grid: Tensor, prefix: Tensor | None) -> Tensor:
        """[B], of what the class head reads, from shares [B, h, w] of patches and [B, P] of prefix tokens."""
        model: Any = self.backbone
        if self._pool == "avg":
            if prefix is not None and getattr(model, "pool_include_prefix", False):
                return torch.cat((prefix, grid.flatten(1)), dim=1).mean(1)
            return grid.mean((1, 2))
        assert prefix is not None
        if hasattr(model, "head_dist") and not (model.training and model.distilled_training):
            return prefix[:, :2].mean(1)  # the mean of two heads: each of the two tokens is half of the answer
        return prefix[:, 0]


class _Pixels:
    """An embedding that is followed begins: give every pixel its share."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        tape = self.tape
        if tape.mask is not None and not tape.late:
            with torch.no_grad(), torch.autocast(tape.mask.device.type, enabled=False):
                tape.shares = patch_shares(tape.mask, (args[0].shape[-2], args[0].shape[-1]))


class _Begin:
    """The patches are embedded: give every one its share (equation 5), unless it was followed from the pixels."""

    def __init__(self, tape: Tape, family: Family) -> None:
        self.tape = tape
        self.family = family

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        tape = self.tape
        if tape.mask is None:
            return
        with torch.no_grad(), torch.autocast(tape.mask.device.type, enabled=False):
            shares = tape.shares
            if shares is None:
                shares = self._patches(tape.mask, module, args[0], output)
            if self.family.layout == "tokens":
                tape.grid = (shares.shape[1], shares.shape[2])
                shares = shares.flatten(1)
            tape.shares = shares

    def _patches(self, mask: Tensor, module: nn.Module, images: Tensor, output: Tensor) -> Tensor:
        """[B, h, w]: the mean of the mask over each patch."""
        from everytoken.models.token_model import grid_shape

        size = (images.shape[-2], images.shape[-1])
        if output.dim() == 4:
            rows = 2 if self.family.embed_layout == "nchw" else 1
            grid = (output.shape[rows], output.shape[rows + 1])
        else:
            grid = grid_shape(output.shape[1], size)
        patch: Any = getattr(module, "patch_size", None)
        cell = (patch[0] / size[0], patch[1] / size[1]) if isinstance(patch, tuple) else None
        return patch_shares(mask, grid, cell)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _numbers(layers: tuple[int, ...], count: int) -> frozenset[int]:
    numbers = frozenset(n + count + 1 if n < 0 else n for n in layers)
    wrong = [n for n in numbers if not 1 <= n <= count]
    if wrong or not layers:
        raise EverytokenError(f"layers={layers}: this backbone has mixing layers 1 to {count} (or -{count} to -1).")
    return numbers


def pooling(model: nn.Module) -> str:
    """How the class head reads the tokens: "token" or "avg"."""
    for owner in (model, getattr(model, "head", None)):
        for name in ("global_pool", "pooling"):
            pool = getattr(owner, name, None)
            kind = getattr(pool, "pool_type", pool)
            if kind == "fast":
                kind = "avg"
            if kind in ("token", "avg"):
                return str(kind)
            if isinstance(kind, str):
                raise UnsupportedModelError(
                    f"token-label alignment knows heads that read the class token or the mean of tokens; "
                    f"{type(model).__name__} has global_pool={kind!r}"
                )
    raise UnsupportedModelError(f"it is not known how the head of {type(model).__name__} reads its tokens")
