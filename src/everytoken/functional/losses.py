"""Losses over compact and dense targets.

Papers: All Tokens Matter, eq. 2-4: L = H(cls) + β · mean over tokens of H(token), β = 0.5 (the released code uses 1.0),
and its ablations: token participation rate, online token labeling; DeiT: soft and hard distillation.
Differently: tokens without a label do not count. Every mean is Σ w·H / Σ w over the batch at hand (on each rank for
itself), 0 when nothing has a label. See `cross_entropy` for how it is computed, and its cost.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.functional.cross_entropy import compact_rows, dense_rows
from everytoken.functional.targets import CompactTarget, from_labels

Reduction = Literal["mean", "sum", "none"]


class TokenLabelLoss(NamedTuple):
    """Terms of the token-label loss, scalars. `total` = `image` + β · `tokens` is the one to differentiate."""

    total: Tensor
    image: Tensor
    tokens: Tensor


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
        raise EverytokenError(
            f"logits of shape {list(logits.shape)} do not fit a target of shape {list(target.shape)} over "
            f"{target.num_classes} classes."
        )
    B, K, U = len(target), logits.shape[-1], target.classes.shape[1]
    rows = compact_rows(
        logits.reshape(B, -1, K), target.classes, target.mass.reshape(B, -1, U), target.background.reshape(B, -1)
    )
    return _reduce(rows.view(target.shape), target.weight if weight is None else weight, reduction)


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
    _same_shape(logits, teacher_logits)
    if temperature <= 0:
        raise EverytokenError(f"the temperature must be above 0, got {temperature}.")
    B, K = logits.shape[0], logits.shape[-1]
    rows = dense_rows(logits.reshape(B, -1, K), teacher_logits.detach().reshape(B, -1, K), float(temperature))
    rows = rows.view(logits.shape[:-1])
    return _reduce(rows, torch.ones_like(rows) if weight is None else weight, reduction)


def token_label_loss(
    class_logits: Tensor | None,
    token_logits: Tensor,
    class_target: CompactTarget | None,
    token_target: CompactTarget,
    beta: float = 0.5,
    participation: float = 1.0,
    generator: torch.Generator | None = None,
) -> TokenLabelLoss:
    """L = H(cls) + β · mean over labelled tokens of H(token).

    Args:
        class_logits: [B, K]; None (with its target) leaves that term out.
        token_logits: [B, h, w, C] or [B, N, C]; C may be the annotator's classes while K are the data set's.
        class_target: shape [B] over K.
        token_target: shape [B, h, w] over C.
        beta: β; the paper has 0.5, the released code 1.0.
        participation: part of the tokens that count, chosen at random for every image; 1 = all.
        generator: where that choice comes from; needed below 1.
    """
    if token_logits.dim() == 3 and token_target.background.dim() == 3:
        token_logits = token_logits.view(*token_target.shape, -1)
    weight = token_target.weight
    if participation < 1:
        weight = weight * participating(weight.shape, participation, generator, weight.device)
    tokens = compact_cross_entropy(token_logits, token_target, weight=weight)
    if class_logits is None or class_target is None:
        image = torch.zeros_like(tokens)
    else:
        image = compact_cross_entropy(class_logits, class_target)
    return TokenLabelLoss(image + beta * tokens, image, tokens)


def participating(
    shape: torch.Size, rate: float, generator: torch.Generator | None, device: torch.device | str
) -> Tensor:
    """[B, ...] of 0 and 1: round(rate · tokens) tokens of each image, at least one, drawn without replacement."""
    if not 0 < rate <= 1:
        raise EverytokenError(f"the token participation rate must be in (0, 1], got {rate}.")
    if generator is None:
        raise EverytokenError("a token participation rate below 1 needs a generator to choose the tokens with.")
    tokens = shape[1:].numel()
    order = torch.rand((shape[0], tokens), generator=generator, device=generator.device).argsort(dim=1)
    return (order < max(1, round(rate * tokens))).to(torch.float32).to(device).view(shape)


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
    if kind == "soft":
        cross = dense_soft_cross_entropy(logits, teacher_logits, temperature, "none")
        own = dense_soft_cross_entropy(teacher_logits.detach(), teacher_logits, temperature, "none")
        rows = (cross - own) * temperature**2
        return _reduce(rows, torch.ones_like(rows) if weight is None else weight, reduction)
    if kind != "hard":
        raise EverytokenError(f"distillation is 'soft' or 'hard', not '{kind}'.")
    _same_shape(logits, teacher_logits)
    flat = logits.reshape(-1, logits.shape[-1])
    best = teacher_logits.reshape(-1, teacher_logits.shape[-1]).argmax(-1)
    rows = compact_cross_entropy(flat, from_labels(best, flat.shape[-1]), "none").view(logits.shape[:-1])
    return _reduce(rows, torch.ones_like(rows) if weight is None else weight, reduction)


def _same_shape(logits: Tensor, teacher_logits: Tensor) -> None:
    if logits.shape != teacher_logits.shape:
        raise EverytokenError(
            f"the student's logits {list(logits.shape)} and the teacher's {list(teacher_logits.shape)} differ in shape."
        )


def _reduce(rows: Tensor, weight: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return rows
    if weight.shape != rows.shape:
        if weight.dim() == 1:  # per image, whatever the number of tokens
            weight = weight.view(-1, *(1,) * (rows.dim() - 1))
        try:
            weight = weight.expand(rows.shape)
        except RuntimeError:
            raise EverytokenError(
                f"a weight of shape {list(weight.shape)} does not fit losses of shape {list(rows.shape)}."
            ) from None
    # The loss of a row without a label must not count even when it is not finite.
    total = torch.where(weight > 0, rows * weight, 0).sum()
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise EverytokenError(f"reduction is 'mean', 'sum' or 'none', not '{reduction}'.")
    weights = weight.sum()
    return total / torch.where(weights > 0, weights, 1)
