"""Cross entropy with soft targets, row by row, in chunks, as single operators with their own gradient.

Compact targets. With t = Σ_u mass_u · onehot(c_u) + b · 1 and m = Σ_u mass_u + K·b,
    H = -Σ_c t_c log p_c = m·lse(x) - Σ_u mass_u x_(c_u) - b·Σ_c x_c = -Σ_u mass_u log p_(c_u) - b·Σ_c log p_c,
    dH/dx = m·softmax(x) - b - scatter(mass).
Dense targets (a teacher's logits z): H = -Σ_c softmax(z)_c log p_c, dH/dx = softmax(x) - softmax(z).

Differently from plain autograd: no K-wide target, and no K-wide tensor is kept from forward to backward except the
logits themselves. Work is done in chunks that fit the cache, in float32 for bfloat16 and float16 logits, so the memory
beyond the logits and their gradient does not grow with K or with the number of tokens. As custom operators they are
one node for `torch.compile`. Targets get no gradient, and there is no second derivative.
Cost: one exponential per logit forward and one backward. The same loss by plain autograd is slower than the dense one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Logits worked on at a time: 2 MB in float32 are near a CPU core; a GPU wants fewer, larger steps (64 MB).
CPU_CHUNK, DEVICE_CHUNK = 2**19, 2**24


def _chunks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Pieces (images, tokens) of x [B, T, K]: several whole images, or part of one."""
    B, T, K = x.shape
    budget = max(1, (CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK) // K)  # rows
    images, tokens = max(1, budget // max(T, 1)), min(T, budget)
    for i in range(0, B, images):
        for j in range(0, T, max(tokens, 1)):
            yield slice(i, i + images), slice(j, j + tokens)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("everytoken::compact_rows", mutates_args=())
def compact_rows(logits: Tensor, classes: Tensor, mass: Tensor, background: Tensor) -> Tensor:
    """Cross entropy of every row: logits [B, T, K], classes [B, U], mass [B, T, U], background [B, T] -> [B, T]."""
    kind = _exact(logits)
    rows = torch.empty(logits.shape[:2], dtype=kind, device=logits.device)
    for at in _chunks(logits):
        logp = torch.log_softmax(logits[at], -1, dtype=kind)
        part = mass[at].to(kind)
        named = logp.gather(-1, classes[at[0], None].expand(part.shape))
        named.masked_fill_(part == 0, 0)  # a masked logit (-inf) costs nothing where the target is 0
        floor = background[at].to(kind)
        rest = torch.where(floor == 0, 0, floor * logp.sum(-1))
        rows[at] = (named.mul_(part).sum(-1) + rest).neg_()
    return rows


@torch.library.custom_op("everytoken::compact_rows_backward", mutates_args=())
def compact_rows_backward(scale: Tensor, logits: Tensor, classes: Tensor, mass: Tensor, background: Tensor) -> Tensor:
    """Gradient [B, T, K] of Σ scale · rows, with scale [B, T]."""
    kind = _exact(logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    K = logits.shape[-1]
    for at in _chunks(logits):
        part, floor, by = mass[at].to(kind), background[at].to(kind), scale[at].to(kind)
        total = part.sum(-1) + K * floor
        # float32: straight into the result; half precision: in float32 beside it
        piece = grad[at] if grad.dtype == kind else torch.empty(logits[at].shape, dtype=kind, device=grad.device)
        torch.softmax(logits[at].to(kind), -1, out=piece)
        piece.mul_((total * by)[..., None]).sub_((floor * by)[..., None])  # addcmul broadcasts four times slower
        piece.scatter_add_(-1, classes[at[0], None].expand(part.shape), part.mul(-by[..., None]))
        if grad.dtype != kind:
            grad[at] = piece
    return grad


@torch.library.custom_op("everytoken::dense_rows", mutates_args=())
def dense_rows(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """H(softmax(teacher / t), softmax(logits / t)) of every row: two [B, T, K] -> [B, T]."""
    kind = _exact(logits)
    rows = torch.empty(logits.shape[:2], dtype=kind, device=logits.device)
    for at in _chunks(logits):
        logp = torch.log_softmax(_cooled(logits[at], temperature, kind), -1)
        rows[at] = logp.mul_(torch.softmax(_cooled(teacher[at], temperature, kind), -1)).sum(-1).neg_()
    return rows


@torch.library.custom_op("everytoken::dense_rows_backward", mutates_args=())
def dense_rows_backward(scale: Tensor, logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Gradient [B, T, K] of Σ scale · rows with respect to the logits."""
    kind = _exact(logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for at in _chunks(logits):
        piece = torch.softmax(_cooled(logits[at], temperature, kind), -1)
        piece.sub_(torch.softmax(_cooled(teacher[at], temperature, kind), -1))
        grad[at] = piece.mul_((scale[at].to(kind) / temperature)[..., None])
    return grad


def _cooled(x: Tensor, temperature: float, kind: torch.dtype) -> Tensor:
    return x.to(kind) if temperature == 1 else x.to(kind) / temperature


@compact_rows.register_fake
@dense_rows.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=_exact(logits))


@compact_rows_backward.register_fake
@dense_rows_backward.register_fake
def _(scale: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.rest = tuple(x for x in inputs if not isinstance(x, Tensor))


def _compact_grad(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
    return compact_rows_backward(scale, *ctx.saved_tensors), None, None, None


def _dense_grad(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
    return dense_rows_backward(scale, *ctx.saved_tensors, *ctx.rest), None, None


compact_rows.register_autograd(_compact_grad, setup_context=_keep)
dense_rows.register_autograd(_dense_grad, setup_context=_keep)
