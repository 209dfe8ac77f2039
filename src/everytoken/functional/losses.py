"""Cross entropy with soft targets, compact or dense.

Papers: All Tokens Matter, eq. 2-4: L = H(cls) + β · mean over tokens of H(token), and its ablations (participation
rate, online token labeling); DeiT: soft and hard distillation.
Compact targets: with t = Σ_u mass_u · onehot(c_u) + b · 1 and m = Σ_u mass_u + K·b,
    H = -Σ_c t_c log p_c = m·lse(x) - Σ_u mass_u x_(c_u) - b·Σ_c x_c = -Σ_u mass_u log p_(c_u) - b·Σ_c log p_c,
    dH/dx = m·softmax(x) - b - scatter(mass).
Differently: tokens without a label do not count; every mean is Σ w·H / Σ w over the batch at hand (on each rank for
itself), 0 when nothing has a label. There is no K-wide target, and no K-wide tensor is kept from forward to backward
except the logits themselves: the compact loss is one operator with its own gradient, computed in chunks that fit the
cache, in float32 for half-precision logits. So the memory beyond the logits and their gradient does not grow with K or
with the number of tokens, and for `torch.compile` it is one node. Targets get no gradient; no second derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.functional.targets import CompactTarget, from_labels

Reduction = Literal["mean", "sum", "none"]

# Logits worked on at a time: 2 MB in float32 are near a CPU core; a GPU wants fewer, larger steps (64 MB).
CPU_CHUNK, DEVICE_CHUNK = 2**19, 2**24


def compact_cross_entropy(
    logits: Tensor, target: CompactTarget, reduction: Reduction = "mean", weight: Tensor | None = None
) -> Tensor:
    """Soft cross entropy with a compact target; equals the dense one with `target.dense()`.

    Args:
        logits: [B, ..., K], any float type; reduced in float32 (float64 stays). The middle dimensions are the target's.
        target: shape [B, ...]; gets no gradient.
        reduction: "mean" is Σ w·H / Σ w, "sum" is Σ w·H, "none" is the unweighted rows [B, ...].
        weight: [B, ...], or [B] for whole images, instead of the target's own.
    """
    if logits.shape[:-1] != target.shape or logits.shape[-1] != target.num_classes:
        raise ValueError(f"logits {list(logits.shape)} do not fit a target {[*target.shape, target.num_classes]}")
    B, K, U = len(target), logits.shape[-1], target.classes.shape[1]
    rows = compact_rows(
        logits.reshape(B, -1, K), target.classes, target.mass.reshape(B, -1, U), target.background.reshape(B, -1)
    )
    return _reduce(rows.view(target.shape), target.weight if weight is None else weight, reduction)


def compact_binary_cross_entropy(logits: Tensor, target: CompactTarget) -> Tensor:
    """Binary cross entropy, added up over the classes and averaged over images: each class is there or not, for itself.

    Σ_c softplus(x_c) - t_c x_c is linear in the target, as the cross entropy is, so mixed and smoothed targets need no
    K-wide tensor here either.

    Args:
        logits: [B, K], any float type.
        target: shape [B], of labels [B, K] (`from_labels`), mixed or not.
    """
    x = logits.float()
    named = (target.mass * x.gather(1, target.classes)).sum(1)
    return _reduce(F.softplus(x).sum(1) - named - target.background * x.sum(1), target.weight, "mean")


def label_cross_entropy(logits: Tensor, target: CompactTarget, labels: Tensor) -> Tensor:
    """Binary cross entropy where an image may have several labels [B, K], else the usual one, of targets from them."""
    return compact_binary_cross_entropy(logits, target) if labels.dim() == 2 else compact_cross_entropy(logits, target)


def dense_soft_cross_entropy(
    logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """H(softmax(teacher / t), softmax(logits / t)), for targets that come as dense logits (online token labeling).

    Args:
        logits, teacher_logits: [B, ..., K], any float types; the teacher gets no gradient.
        temperature: t, for both.
        reduction: as in `compact_cross_entropy`.
        weight: [B, ...] or [B]; None = 1.
    """
    log_p, log_q = _log_softmax_pair(logits, teacher_logits, temperature)
    return _reduce(-(log_q.exp() * log_p).sum(-1), weight, reduction)


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    kind: Literal["soft", "hard"] = "soft",
    temperature: float = 1.0,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Knowledge distillation of a class or distillation token.

    Args:
        logits, teacher_logits: [B, ..., K].
        kind: "soft" is t² · KL(teacher ‖ student) at temperature t; "hard" is the cross entropy with the teacher's
            best class (DeiT).
        temperature: t of "soft"; DeiT's soft distillation has 3.0.
        weight: [B, ...] or [B]; None = 1.
        reduction: as in `compact_cross_entropy`.
    """
    if kind not in ("soft", "hard"):
        raise ValueError(f"distillation is 'soft' or 'hard', not {kind!r}")
    if kind == "soft":
        log_p, log_q = _log_softmax_pair(logits, teacher_logits, temperature)
        rows = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1) * temperature**2
        return _reduce(rows, weight, reduction)
    _check_same_shape(logits, teacher_logits)
    flat = logits.reshape(-1, logits.shape[-1])
    best = teacher_logits.reshape(-1, teacher_logits.shape[-1]).argmax(-1)
    rows = compact_cross_entropy(flat, from_labels(best, flat.shape[-1]), "none").view(logits.shape[:-1])
    return _reduce(rows, weight, reduction)


def participating(shape: torch.Size, rate: float, generator: torch.Generator, device: torch.device | str) -> Tensor:
    """[B, ...] of 0 and 1: round(rate · tokens) tokens of each image, at least one, drawn without replacement."""
    if not 0 < rate <= 1:
        raise EverytokenError(f"the token participation rate must be in (0, 1], got {rate}.")
    tokens = shape[1:].numel()
    order = torch.rand((shape[0], tokens), generator=generator, device=generator.device).argsort(dim=1)
    return (order < max(1, round(rate * tokens))).to(torch.float32).to(device).view(shape)


def _log_softmax_pair(logits: Tensor, teacher_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax of student and teacher at a temperature; the teacher's without gradient."""
    _check_same_shape(logits, teacher_logits)
    if temperature <= 0:
        raise EverytokenError(f"the temperature must be above 0, got {temperature}.")
    pair = [x if temperature == 1 else x / temperature for x in (logits, teacher_logits.detach())]
    return pair[0].log_softmax(-1, dtype=_precise(logits)), pair[1].log_softmax(-1, dtype=_precise(logits))


def _check_same_shape(logits: Tensor, teacher_logits: Tensor) -> None:
    if logits.shape != teacher_logits.shape:
        raise ValueError(f"logits {list(logits.shape)} and the teacher's {list(teacher_logits.shape)} differ in shape")


def _reduce(rows: Tensor, weight: Tensor | None, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return rows
    if weight is None:
        weight = torch.ones_like(rows)
    if weight.shape != rows.shape:
        if weight.dim() == 1:  # per image, whatever the number of tokens
            weight = weight.view(-1, *(1,) * (rows.dim() - 1))
        weight = weight.expand(rows.shape)
    # The loss of a row without a label must not count even when it is not finite.
    total = torch.where(weight > 0, rows * weight, 0).sum()
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    weights = weight.sum()
    return total / torch.where(weights > 0, weights, 1)


def _chunks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Pieces (images, tokens) of x [B, T, K]: several whole images, or part of one."""
    B, T, K = x.shape
    budget = max(1, (CPU_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK) // K)  # rows
    images, tokens = max(1, budget // max(T, 1)), min(T, budget)
    for i in range(0, B, images):
        for j in range(0, T, max(tokens, 1)):
            yield slice(i, i + images), slice(j, j + tokens)


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("everytoken::compact_rows", mutates_args=())
def compact_rows(logits: Tensor, classes: Tensor, mass: Tensor, background: Tensor) -> Tensor:
    """Cross entropy of every row: logits [B, T, K], classes [B, U], mass [B, T, U], background [B, T] -> [B, T]."""
    dtype = _precise(logits)
    rows = torch.empty(logits.shape[:2], dtype=dtype, device=logits.device)
    for piece in _chunks(logits):
        log_p = torch.log_softmax(logits[piece], -1, dtype=dtype)
        part = mass[piece].to(dtype)
        named = log_p.gather(-1, classes[piece[0], None].expand(part.shape)).mul_(part)
        floor, total = background[piece].to(dtype), log_p.sum(-1)
        rest = torch.where((floor == 0) & ~total.isnan(), 0, floor * total)  # NaN if any logit is
        # 0 · -inf is NaN: a masked logit costs nothing where the target is 0
        rows[piece] = (named.nansum(-1) + rest).neg_()
    return rows


@torch.library.custom_op("everytoken::compact_rows_backward", mutates_args=())
def compact_rows_backward(scale: Tensor, logits: Tensor, classes: Tensor, mass: Tensor, background: Tensor) -> Tensor:
    """Gradient [B, T, K] of Σ scale · rows, with scale [B, T]."""
    dtype = _precise(logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    K = logits.shape[-1]
    for piece in _chunks(logits):
        part, floor, factor = mass[piece].to(dtype), background[piece].to(dtype), scale[piece].to(dtype)
        total = part.sum(-1) + K * floor
        # float32: straight into the result; half precision: in float32 beside it
        out = grad[piece] if grad.dtype == dtype else torch.empty(logits[piece].shape, dtype=dtype, device=grad.device)
        torch.softmax(logits[piece].to(dtype), -1, out=out)
        out.mul_((total * factor)[..., None]).sub_((floor * factor)[..., None])  # addcmul broadcasts four times slower
        out.scatter_add_(-1, classes[piece[0], None].expand(part.shape), part.mul(-factor[..., None]))
        if grad.dtype != dtype:
            grad[piece] = out
    return grad


@compact_rows.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=_precise(logits))


@compact_rows_backward.register_fake
def _(scale: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
    return compact_rows_backward(scale, *ctx.saved_tensors), None, None, None


compact_rows.register_autograd(_gradient, setup_context=_save_inputs)
