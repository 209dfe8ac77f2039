"""The aligner: follows mixed images through a timm model and says which part of the result belongs to which image.

Paper: "Token-Label Alignment for Vision Transformers", equations (4) to (12); ablations of Table 8 as options.
Evaluation and passes outside of `watch` are the plain model's; `remove()` removes the hooks.
What we do differently: one share per token instead of a K-wide label (exact, see `everytoken.functional.shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.functional.shares import aligned_cross_entropy
from everytoken.mixing.mix import Mix
from everytoken.models.align.attention import InterceptAttention, attention_pool
from everytoken.models.align.rules import HookBuilder
from everytoken.models.align.state import ShareState
from everytoken.models.families import Family, UnsupportedModelError, family_of, grid_shape

if TYPE_CHECKING:
    from everytoken.models.token_model import TokenView

# Classifier, pooling and what belongs to them: how they read tokens is in `Aligner.read`.
HEADS = frozenset(
    {"head", "head_dist", "head_drop", "heads", "aux_head", "fc", "fc_norm", "flatten", "avgpool"}
    | {"classifier", "cls_classifier", "distillation_classifier", "global_pool", "pooling", "attn_pool"}
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


class AlignedPass:
    """What `watch` and `everytoken.aligned` yield: the shares of the pass, once the `with` block has ended."""

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self._shares: Shares | None = None

    @property
    def shares(self) -> Shares:
        """Shares of what the head reads (`.image` [B]) and of the tokens (`.grid` [B, h, w])."""
        if self._shares is None:
            raise EverytokenError("no shares yet: run the model inside the `with` block, and ask after it.")
        return self._shares

    def cross_entropy(self, logits: Tensor | TokenView, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Equation (12), a scalar. Call it after the `with` block.

        Args:
            logits: [B, K], or the view that a TokenModel returned.
            labels: of the images before they were mixed: classes [B], or distributions [B, K].
            smoothing: label smoothing, of distributions too.
        """
        logits = logits if isinstance(logits, Tensor) else logits.logits
        if labels.shape not in ((len(logits),), logits.shape):
            raise ValueError(f"labels {list(labels.shape)} do not fit logits {list(logits.shape)}: [B] or [B, K]")
        shares = self.shares
        loss = aligned_cross_entropy(logits, labels, labels[self.mix.partner], shares.image, smoothing)
        return loss * shares.total


class Aligner:
    """Attaches to a timm model and carries shares through its layers.

    Args:
        backbone: a timm model whose layers are known (`everytoken.models.align.RULES`). It gets hooks, which are idle
            outside of `watch` and `run`, and is not changed.
        options: see `Alignment`.
    """

    def __init__(self, backbone: nn.Module, options: Alignment | None = None) -> None:
        self.backbone = backbone
        self.options = options or Alignment()
        self.family = family_of(backbone)
        self.is_map = self.family.layout == "nchw"
        self._pool = pooling(backbone)
        layers = self.options.layers
        counting = self._attach(ShareState(), None)  # a first walk counts the layers
        counting.remove()
        if layers is not None and not counting.count:
            raise EverytokenError(f"layers={layers}: {type(backbone).__name__} has no token-mixing layers.")
        numbers = None if layers is None else _layer_numbers(layers, counting.count)
        self.state = ShareState(self.options.residual, self.options.history, self.options.patches_only)
        self._hooks = self._attach(self.state, numbers)
        self._intercept = InterceptAttention(self.state)
        self._may_checkpoint = [
            (module, name)  # as timm and transformers call it
            for module in backbone.modules()
            for name in ("grad_checkpointing", "gradient_checkpointing")
            if hasattr(module, name)
        ]

    def _attach(self, state: ShareState, layers: frozenset[int] | None) -> HookBuilder:
        embed = None if self.is_map else self.family.embed
        if not self.is_map and embed is None:
            name = type(self.backbone).__name__
            raise UnsupportedModelError(f"token-label alignment does not know where {name} embeds its patches")
        builder = HookBuilder(state, embed, layers)
        self._from_pixels = self.is_map
        try:
            if embed is not None:
                module = self.backbone.get_submodule(embed)
                builder.before(module, _start_on_pixels)
                self._from_pixels = builder.attach_embedding(module, embed)
                builder.handles.append(module.register_forward_hook(_TokensStart(state, self.family, self.backbone)))
            builder.attach(self.backbone, "", HEADS)
            if self._pool == "map":
                attention_pool(self.backbone.get_submodule("attn_pool"), builder)
        except Exception:
            builder.remove()
            raise
        return builder

    def remove(self) -> None:
        """Remove all hooks; the model is then exactly what it was."""
        self._hooks.remove()

    @contextmanager
    def watch(self, mix: Mix) -> Iterator[AlignedPass]:
        """Follow one pass of the model, or of a wrapper of it, over mixed images.

        Args:
            mix: an `everytoken.Mix`, or anything with `mask` [B or 1, h, w] on any grid over the image (1 = own
                image, 0 = partner) and `ratio` [B]. Its `level`, if it has one, says whether tokens are mixed instead
                of pixels, behind the patch embedding.
        """
        aligned = AlignedPass(mix)
        self._begin(mix)
        try:
            with self._intercept:
                yield aligned
            aligned._shares = self._end()
        finally:
            self.state.clear()

    def run(self, forward: Callable[[Tensor], Any], images: Tensor, mix: Mix) -> tuple[Any, Shares]:
        """The same as one call, which can be compiled as a whole: (forward(images), shares)."""
        self._begin(mix)
        try:
            with self._intercept:
                out = forward(images)
            return out, self._end()
        finally:
            self.state.clear()

    def _begin(self, mix: Mix) -> None:
        state = self.state
        state.clear()
        # blocks that run again in the backward pass run without shares then, so they should make the plain call now
        state.checkpointing = any(getattr(module, name) for module, name in self._may_checkpoint)
        tokens: Any = getattr(mix, "tokens", None)
        mask, ratio = mix.mask.detach(), mix.ratio.detach().float()
        if tokens is not None:  # pixels and then tokens: what a token shows is known behind the patch embedding
            finer = max(mask.shape[1:], tokens.mask.shape[1:])
            mask = mix.at((finer[0], finer[1]))
        if mask.dim() != 3 or ratio.dim() != 1 or mask.shape[0] not in (1, ratio.shape[0]):
            raise ValueError(f"mask {list(mask.shape)} and ratio {list(ratio.shape)} are not [B or 1, h, w] and [B]")
        state.mask, state.ratio = mask.expand(ratio.shape[0], -1, -1), ratio
        tokens_mixed = tokens is not None or getattr(mix, "level", "pixels") == "tokens"
        state.on_pixels = self.is_map or (self._from_pixels and not tokens_mixed)
        state.wants_mixing = tokens_mixed and isinstance(mix, Mix)

    def _end(self) -> Shares:
        shares, grid, history = self.state.shares, self.state.grid, tuple(self.state.history)
        pooled = self.state.pooled
        self.state.clear()
        if shares is None:
            raise EverytokenError("the watched model has not run; was the aligner made for another one?")
        prefix = None
        if grid is not None:
            count = grid[0] * grid[1]
            if shares.shape[1] > count:
                prefix = shares[:, :-count]
            shares = shares[:, -count:].reshape(-1, *grid)
        total = 1.0 if self.options.normalise else 2.0**self._hooks.doublings
        return Shares(self.read(shares, prefix) if pooled is None else pooled, shares, prefix, total, history)

    def read(self, grid: Tensor, prefix: Tensor | None) -> Tensor:
        """[B], of what the class head reads, from shares [B, h, w] of patches and [B, P] of prefix tokens."""
        model: Any = self.backbone
        if self._pool == "avg":
            with_prefix = getattr(model, "pool_include_prefix", self.family.title == "VOLO")
            if prefix is not None and with_prefix:
                return torch.cat((prefix, grid.flatten(1)), dim=1).mean(1)
            return grid.mean((1, 2))
        if self._pool == "map":
            raise EverytokenError("the head attends to the tokens, so it has to run in the same pass.")
        assert prefix is not None
        if self._pool == "token+avg":
            return (prefix[:, 0] + grid.mean((1, 2))) / 2
        two_heads = hasattr(model, "head_dist") and not (model.training and model.distilled_training)
        if two_heads or self._pool == "two tokens":
            return prefix[:, :2].mean(1)  # the mean of two heads: each of the two tokens is half of the answer
        return prefix[:, 0]


def _start_on_pixels(state: ShareState, shares: Tensor, module: nn.Module, args: Any, output: Any) -> None:
    """A patch embedding that is followed begins. Nothing to do: `ShareHook` has just started the shares."""


class _TokensStart:
    """Forward hook: the patches are embedded, every one gets its share, unless it was followed from the pixels."""

    def __init__(self, state: ShareState, family: Family, backbone: nn.Module) -> None:
        self.state, self.family = state, family
        parent, _, self.name = (family.embed or "").rpartition(".")
        self.siblings = backbone.get_submodule(parent)._modules

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        state = self.state
        if state.mask is None:
            return
        output = output[0] if isinstance(output, tuple) else output
        if state.wants_mixing and self.siblings[self.name] is module:  # nothing stands in for it that mixes its tokens
            raise EverytokenError("a TokenModel mixes tokens if it is called with the mix: model(images, mix)")
        with torch.no_grad(), torch.autocast(state.mask.device.type, enabled=False):
            shares = state.shares
            if shares is None:
                shares = self._patches(module, args[0], output)
            if self.family.layout == "tokens":
                state.grid = (shares.shape[1], shares.shape[2])
                shares = shares.flatten(1)
            state.shares = shares

    def _patches(self, module: nn.Module, images: Tensor, output: Tensor) -> Tensor:
        """[B, h, w]: the mean of the mask over each patch."""
        height, width = images.shape[-2:]
        if output.dim() == 4:
            rows = 2 if self.family.embed_layout == "nchw" else 1
            grid = (output.shape[rows], output.shape[rows + 1])
        else:
            grid = grid_shape(output.shape[1], (height, width))
        patch: Any = getattr(module, "patch_size", None)
        cell = (patch[0] / height, patch[1] / width) if isinstance(patch, tuple) else None
        return self.state.start(images, grid, cell)


def _layer_numbers(layers: tuple[int, ...], count: int) -> frozenset[int]:
    numbers = frozenset(n + count + 1 if n < 0 else n for n in layers)
    if not layers or not all(1 <= n <= count for n in numbers):
        raise EverytokenError(f"layers={layers}: this backbone has mixing layers 1 to {count} (or -{count} to -1).")
    return numbers


def pooling(model: nn.Module) -> str:
    """How the class head reads the tokens, see `Family.pool`."""
    if (known := family_of(model).pool) is not None:
        return known
    for owner in (model, getattr(model, "head", None)):
        for name in ("global_pool", "pooling"):
            pool = getattr(owner, name, None)
            kind = getattr(pool, "pool_type", pool)
            if kind == "fast":
                kind = "avg"
            if kind in ("token", "avg") or (kind == "map" and hasattr(owner, "attn_pool")):
                return str(kind)
            if isinstance(kind, str):
                name = type(model).__name__
                raise UnsupportedModelError(
                    f"alignment knows class tokens, means and attention pooling; {name} has global_pool={kind!r}"
                )
    raise UnsupportedModelError(f"it is not known how the head of {type(model).__name__} reads its tokens")
