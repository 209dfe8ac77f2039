"""Distances, projections and random starts in L-infinity and L2 balls around images in 0..1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from everytoken import keyed

Norm = Literal["linf", "l2"]


def wide(values: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1]"""
    return values.view(-1, 1, 1, 1)


def distance(change: Tensor, norm: Norm) -> Tensor:
    """[B, C, H, W] -> [B]"""
    flat = change.flatten(1)
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def project(moved: Tensor, images: Tensor, eps: float, norm: Norm) -> Tensor:
    """The point of the ball around `images` nearest to `moved`, cut to 0..1 (which never leads out of the ball)."""
    if norm == "linf":
        return torch.minimum(torch.maximum(moved, images - eps), images + eps).clamp(0, 1)
    change = moved - images
    size = wide(distance(change, norm))
    return (images + change * (eps / size.clamp(min=1e-12)).clamp(max=1)).clamp(0, 1)


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """The step of length 1 in which a linear function rises most."""
    if norm == "linf":
        return gradient.sign()
    return gradient / wide(distance(gradient, norm)).clamp(min=1e-12)


def random_start(images: Tensor, eps: float, norm: Norm, keys: Sequence[str], *purpose: str | int) -> Tensor:
    """A random point at distance eps, keyed by image."""
    draw = torch.rand if norm == "linf" else torch.randn
    dice = [keyed.torch_generator(0, key, "attack", *purpose) for key in keys]
    change = torch.stack([draw(images.shape[1:], generator=d) for d in dice]).to(images)
    change = change * 2 - 1 if norm == "linf" else change
    change = change / wide(distance(change, norm)).clamp(min=1e-12)
    return (images + eps * change).clamp(0, 1)
