"""Which places of an image speak for a class: three methods behind one function, `relevance`.

"attention": Chefer, Gur and Wolf, "Generic Attention-model Explainability" (2021), self-attention rules. With A of a
    block and its gradient for the class's logit,  Ā = mean over heads of (∇A ⊙ A)⁺,  R ← R + Ā·R,  R = 1 at the start.
"rollout":   Abnar and Zuidema, "Quantifying Attention Flow" (2020):  R ← (½·mean over heads of A + ½·1)·R. It does not
    know of classes: all get the same map.
"cam":       Selvaraju et al., "Grad-CAM" (2017):  (Σ_k α_k·F_k)⁺ with α_k the mean over places of ∂logit/∂F_k.

What the answer is read from: the row of the class token; the mean of the rows of class and distillation token where
both answer; the mean over all patch rows, without the start's 1, where the head reads the mean of the tokens. Blocks
that update the class token only (CaiT) change that row only, and tokens that join late join with R = 1.
What we do differently: talking heads (CaiT) mix heads after the softmax; what mixes tokens then has any sign, counts by
size in rollout and as it is in "attention". Grad-CAM of a model with a class token looks at the patches before the last
block, because after it they do not reach the head.
Cost: one forward pass, one backward pass per class; see `attention` for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.explanation.attention import NoAttentionError, attention_layers, evaluating, read_tokens, see_attention
from everytoken.functional.shares import row_normalised
from everytoken.models.families import UnsupportedModelError, family_of
from everytoken.models.token_model import TokenModel, grid_shape, last_block

Method = Literal["auto", "attention", "rollout", "cam"]
Classes = Tensor | Sequence[int]


def relevance(model: nn.Module, images: Tensor, classes: Classes, method: Method = "auto") -> Tensor:
    """Maps of how much each place speaks for each class, [B, n, h, w] float32, 0 or more, on the token grid.

    Args:
        model: a `TokenModel` or a timm model; unchanged afterwards, its gradients too.
        images: [B, C, H, W], normalised.
        classes: n classes for all images, or [B, n] for each.
        method: "auto" takes "attention" where the model has it over all tokens and answers with a class token, else
            "cam": where the head reads the mean of the tokens, most of what speaks for a class stays in its own place
            and goes through no attention matrix at all.
    """
    backbone = backbone_of(model)
    chosen = choose_method(backbone, method)
    with torch.inference_mode(False), torch.enable_grad(), evaluating(backbone):
        indices = _indices(backbone, classes, len(images))
        inputs = images.detach().clone().requires_grad_()
        if chosen == "cam":
            return _grad_cam(backbone, inputs, indices)
        with see_attention(backbone) as seen:
            logits = class_logits(backbone, inputs)
        size = (images.shape[-2], images.shape[-1])
        if chosen == "rollout":
            with torch.no_grad():
                steps = [_rollout_step(a, s) for a, s in zip(seen.matrices, seen.softmax, strict=True)]
                rows = _read(backbone, accumulate(steps, residual=False), size)
            return rows[:, None].expand(-1, indices.shape[1], -1, -1).clone()
        maps = []
        for i in range(indices.shape[1]):
            score = logits.gather(1, indices[:, i : i + 1]).sum()  # images do not see each other
            grads = torch.autograd.grad(score, seen.matrices, retain_graph=True, allow_unused=True)
            with torch.no_grad():
                steps = [_relevance_step(a.detach(), g) for a, g in zip(seen.matrices, grads, strict=True)]
                start = _identity(1, steps[-1].shape[2], steps[-1])
                maps.append(_read(backbone, accumulate(steps) - start, size))
        return torch.stack(maps, dim=1)


def choose_method(model: nn.Module, method: Method = "auto") -> Literal["attention", "rollout", "cam"]:
    """What "auto" means for a model; other methods are checked. A layer that is not known is an error that names it."""
    if method not in get_args(Method):
        raise EverytokenError(f"there is no method {method!r}; there are {', '.join(get_args(Method))}.")
    if method == "cam":
        return "cam"
    backbone = backbone_of(model)
    try:
        attention_layers(backbone)
        pooled = read_tokens(backbone) == "avg"
    except NoAttentionError:
        if method == "auto":
            return "cam"
        raise
    if method == "auto":
        return "cam" if pooled else "attention"
    return method


def accumulate(steps: Sequence[Tensor], residual: bool = True) -> Tensor:
    """R of all blocks, [B, T, T], from R = 1: R ← R + step·R, or without `residual` R ← step·R.

    A step [B, M, N] updates the first M tokens. One with more tokens than R means that tokens joined in front, with
    R = 1. Without `residual`, tokens that a step does not update stay as they are.
    """
    first = steps[0]
    result = _identity(first.shape[0], first.shape[2], first)
    for step in steps:
        more = step.shape[2] - result.shape[1]
        if more > 0:
            result = torch.nn.functional.pad(result, (more, 0, more, 0))
            result[:, :more, :more] = _identity(len(result), more, result)
        updated = step.shape[1]
        new = torch.bmm(step, result)
        result = torch.cat((result[:, :updated] + new if residual else new, result[:, updated:]), dim=1)
    return result


def _relevance_step(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """Ā: mean over heads of (∇A ⊙ A)⁺, [B, M, N]. No gradient (nothing of it reaches the class): zeros."""
    if gradient is None:
        return attention.new_zeros(attention.shape[0], *attention.shape[2:])
    return (gradient * attention).clamp(min=0).mean(1)


def _rollout_step(attention: Tensor, softmax: bool) -> Tensor:
    """½·mean over heads of A + ½·1 for the tokens that the block updates, [B, M, N]."""
    mixing = (attention if softmax else row_normalised(attention)).mean(1)
    return 0.5 * mixing + 0.5 * torch.eye(*mixing.shape[1:], device=mixing.device)


def _read(backbone: nn.Module, result: Tensor, size: tuple[int, int]) -> Tensor:
    """The patches' part of what the head reads, [B, h, w]."""
    kind = read_tokens(backbone)
    family = family_of(backbone)
    prefix = int(backbone.num_prefix_tokens) if family.prefix is None else family.prefix  # type: ignore[arg-type]
    if kind == "avg":
        row = result[:, prefix:].mean(1)
    else:
        row = result[:, : 2 if kind == "both" else 1].mean(1)
    patches = row[:, prefix:].clamp(min=0)
    return patches.unflatten(1, grid_shape(patches.shape[1], size))


def _grad_cam(backbone: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    model: Any = backbone
    family = family_of(backbone)
    kept: list[Tensor] = []
    if family.layout == "tokens" and _has_class_token(backbone):
        handle = last_block(backbone).register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        try:
            logits = class_logits(backbone, inputs)
        finally:
            handle.remove()
    else:
        kept = [model.forward_features(inputs)]
        logits = _head(model, kept[0])
    features, maps = kept[0], []
    for i in range(classes.shape[1]):
        score = logits.gather(1, classes[:, i : i + 1]).sum()
        (gradient,) = torch.autograd.grad(score, features, retain_graph=True)
        places, slopes = (_as_grid(backbone, x, inputs) for x in (features.detach(), gradient))
        weight = slopes.mean((1, 2), keepdim=True)
        maps.append((weight * places).sum(-1).clamp(min=0))
    return torch.stack(maps, dim=1)


def _as_grid(backbone: nn.Module, features: Tensor, images: Tensor) -> Tensor:
    """[B, h, w, D]; prefix tokens are left out, of which a block may have fewer than the model (CaiT, CvT)."""
    family = family_of(backbone)
    if features.dim() == 4:
        channels_first = family.layout == "nchw"
        return features.permute(0, 2, 3, 1) if channels_first else features
    height, width = images.shape[-2], images.shape[-1]
    own = int(getattr(backbone, "num_prefix_tokens", 0)) if family.prefix is None else family.prefix
    prefix, grid = min(
        ((p, grid_shape(features.shape[1] - p, (height, width))) for p in dict.fromkeys((own, 0))),
        key=lambda found: abs(found[1][0] * width - found[1][1] * height),
    )
    return features[:, prefix:].unflatten(1, grid)


def _has_class_token(backbone: nn.Module) -> bool:
    try:
        return read_tokens(backbone) != "avg"
    except UnsupportedModelError:
        return True  # a head that pools in its own way: before the last block is safe for every one


def class_logits(backbone: Any, images: Tensor) -> Tensor:
    """[B, K] of a timm model, also while it is trained with a distillation token."""
    return _head(backbone, backbone.forward_features(images))


def _head(backbone: Any, features: Tensor) -> Tensor:
    out = backbone.forward_head(features)
    return out[0] if isinstance(out, tuple) else out


def backbone_of(model: nn.Module) -> nn.Module:
    """The timm model itself."""
    return model.backbone if isinstance(model, TokenModel) else model


def _indices(backbone: nn.Module, classes: Classes, count: int) -> Tensor:
    """[B, n] int64 on the model's device, checked."""
    device = next(backbone.parameters()).device
    indices = torch.as_tensor(classes, dtype=torch.int64, device=device)
    if indices.dim() == 1:
        indices = indices.expand(count, -1)
    total = int(backbone.num_classes)  # type: ignore[arg-type]
    if indices.dim() != 2 or indices.shape[0] != count or not indices.numel():
        raise EverytokenError(f"classes must be n numbers, or [{count}, n] for {count} images; got {classes}.")
    if int(indices.min()) < 0 or int(indices.max()) >= total:
        raise EverytokenError(f"the model has classes 0 to {total - 1}; got {indices.unique().tolist()}.")
    return indices.clone()  # never an inference tensor


def _identity(batch: int, count: int, like: Tensor) -> Tensor:
    return torch.eye(count, device=like.device, dtype=like.dtype).expand(batch, -1, -1)
