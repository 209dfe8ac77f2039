"""The attention of a ViT, made explicit while somebody looks: every block's matrix, with its place in the gradient.

    with see_attention(backbone) as seen:
        logits = backbone(images)
    seen.matrices                                   # one [B, heads, M, N] per attention layer, part of the graph

The model is not rewritten. Which layers are attention over all tokens is what token-label alignment knows
(`everytoken.models.align.RULES`). Inside of these layers a call of `scaled_dot_product_attention` is answered by the
same formula with its matrix; a layer that makes its matrix itself hands it to `attn_drop`, where a hook sees it.
Outside of the `with` nothing is left: hooks, evaluation mode and gradient checkpointing are as they were.
Cost: the attention matrices, B·heads·N² numbers for each layer, which fused attention does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from everytoken.models.align.aligner import HEADS, pooling
from everytoken.models.align.attention import self_attention, talking_heads
from everytoken.models.align.rules import rule_of
from everytoken.models.families import UnsupportedModelError, family_of

WAY_OUT = "Use method='cam' (--method cam), which needs no attention."


class NoAttentionError(UnsupportedModelError):
    """The backbone is known, but it has no attention over all tokens: windows, convolutions or MLPs mix its places."""


def attention_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers with attention over all tokens, in the order in which they run.

    Raises `NoAttentionError` for hierarchical, convolutional and MLP backbones, and `UnsupportedModelError` that names
    the layer where it is not known how a layer mixes tokens.
    """
    family = family_of(backbone)
    name = type(backbone).__name__
    if family.layout != "tokens":
        raise NoAttentionError(f"{name} ({family.title}) has no attention over all tokens of one grid. {WAY_OUT}")
    found: list[nn.Module] = []

    def walk(module: nn.Module, path: str) -> None:
        if path == family.embed:
            return
        rule = rule_of(module)
        if rule in (self_attention, talking_heads):
            found.append(module)
        elif rule == "plain":
            for child_name, child in module.named_children():
                if path or child_name not in HEADS:
                    walk(child, f"{path}.{child_name}" if path else child_name)
        elif rule is None:
            raise UnsupportedModelError(
                f"it is not known how {type(module).__name__} ({type(module).__module__}, at {path or 'the top'!r} of "
                f"{name}) mixes tokens, so its attention cannot be followed. {WAY_OUT} Or add the class to "
                "everytoken.models.align.RULES."
            )
        elif rule != "tokenwise":
            raise NoAttentionError(
                f"{type(module).__name__} (at {path!r} of {name}) does not mix tokens by attention over one grid. "
                f"{WAY_OUT}"
            )

    walk(backbone, "")
    if not found:
        raise NoAttentionError(f"{name} has no attention layers. {WAY_OUT}")
    return found


def read_tokens(backbone: nn.Module) -> str:
    """Which tokens the class head reads: "token" (class token), "both" (class and distillation token) or "avg"."""
    try:
        kind = pooling(backbone)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}. {WAY_OUT}") from error
    return "both" if kind == "token" and hasattr(backbone, "head_dist") else kind


class Seen:
    """What was seen of the attention layers.

    Attributes:
        matrices: [B, heads, M, N] of each layer that has run; outputs m are made from inputs n.
        softmax: for each, whether its rows are a softmax (talking heads mix heads afterwards: any sign).
    """

    def __init__(self) -> None:
        self.matrices: list[Tensor] = []
        self.softmax: list[bool] = []
        self._inside: bool | None = None  # softmax of the layer under way
        self._count = 0

    def _enter(self, softmax: bool) -> None:
        self._inside, self._count = softmax, len(self.matrices)

    def _see(self, matrix: Tensor) -> None:
        if self._inside is not None:
            self.matrices.append(matrix)
            self.softmax.append(self._inside)

    def _leave(self, module: nn.Module) -> None:
        self._inside = None
        if len(self.matrices) != self._count + 1:
            raise UnsupportedModelError(
                f"{type(module).__name__} ({type(module).__module__}) ran, but its attention matrix was not seen. "
                f"{WAY_OUT}"
            )


class _Explicit(TorchFunctionMode):
    """Answers `scaled_dot_product_attention` with its matrix, inside of attention layers."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.seen._inside is not None:
            out, matrix = explicit_attention(*args, **(kwargs or {}))
            self.seen._see(matrix)
            return out
        return func(*args, **(kwargs or {}))


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """(softmax(scale·QKᵀ + mask)·V, the softmax [..., M, N]), as `scaled_dot_product_attention`, without dropout."""
    if enable_gqa:
        raise UnsupportedModelError(f"attention whose heads share keys (enable_gqa) cannot be followed. {WAY_OUT}")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    matrix = scores.softmax(-1)
    return matrix @ value, matrix


@contextmanager
def see_attention(backbone: nn.Module) -> Iterator[Seen]:
    """Run the backbone inside, once; the matrices are then in what this yields."""
    seen, handles = Seen(), []
    try:
        for layer in attention_layers(backbone):
            softmax = rule_of(layer) is not talking_heads
            handles.append(layer.register_forward_pre_hook(lambda m, a, softmax=softmax: seen._enter(softmax)))
            drop = getattr(layer, "attn_drop", None)
            if isinstance(drop, nn.Module):
                handles.append(drop.register_forward_pre_hook(lambda m, a: seen._see(a[0])))
            handles.append(layer.register_forward_hook(lambda m, a, o: seen._leave(m)))
        with evaluating(backbone), _Explicit(seen):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, float32 and no gradient checkpointing inside; every module is put back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    checkpointed: list[Any] = [module for module in model.modules() if getattr(module, "grad_checkpointing", False)]
    like = next(model.parameters())
    model.eval()
    for owner in checkpointed:
        owner.grad_checkpointing = False
    try:
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for owner in checkpointed:
            owner.grad_checkpointing = True
