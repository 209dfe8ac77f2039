"""Square Attack: random search with squares; it uses no gradient, so hiding the gradient does not help against it.

Paper: Andriushchenko et al. 2020, algorithms 1 and 2, for L-infinity. The change is eps everywhere: vertical stripes at
the start, then one sign per channel in smaller and smaller squares, kept if the margin falls.

Every image has its own windows, keyed by image (the released program has one for the whole batch); with other numbers
of queries than 5,000 the schedule of square sizes is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from everytoken import keyed
from everytoken_lab.robust.gradient_attacks import AttackBatch, margin, wide

FIRST = 0.8  # fraction of the image that the first squares cover
QUERIES = 5000
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after these queries the area is halved


def area(query: int, queries: int) -> float:
    """Fraction of the image that a square covers."""
    scaled = query if queries == QUERIES else int(query / queries * QUERIES)
    return FIRST / 2 ** sum(scaled > limit for limit in _HALVINGS)


@torch.no_grad()
def square(batch: AttackBatch, queries: int = QUERIES) -> Tensor:
    """Adversarial images where they were found, else the given ones."""
    model, images, labels, eps = batch.model, batch.images, batch.labels, batch.eps
    dice = [keyed.generator(0, key, "attack", "square") for key in batch.keys]
    adversarial = images.clone()
    rows = torch.arange(len(images), device=images.device)
    best = _stripes(images, eps, dice)
    loss = margin(model(best), labels)

    for query in range(queries):
        done = loss > 0
        if done.any() or not query:
            adversarial[rows[done]] = best[done]
            rows, best, loss = rows[~done], best[~done], loss[~done]
        if not len(rows):
            return adversarial
        base, row_dice = images[rows], [dice[i] for i in rows.tolist()]
        trial = _new_squares(best, base, eps, area(query, queries), row_dice)
        tried = margin(model(trial), labels[rows])
        better = tried > loss
        best, loss = torch.where(wide(better), trial, best), torch.where(better, tried, loss)
    done = loss > 0
    adversarial[rows[done]] = best[done]
    return adversarial


def _signs(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.integers(0, 2, shape).astype(np.float32) * 2 - 1)


def _stripes(images: Tensor, eps: float, dice: Sequence[np.random.Generator]) -> Tensor:
    _, channels, _, width = images.shape
    signs = torch.stack([_signs(d, channels, 1, width) for d in dice]).to(images)
    return (images + eps * signs).clamp(0, 1)


def _new_squares(
    best: Tensor, images: Tensor, eps: float, fraction: float, dice: Sequence[np.random.Generator]
) -> Tensor:
    _, channels, height, width = images.shape
    side = max(1, round(math.sqrt(fraction * height * width)))
    trial = best.clone()
    for i, generator in enumerate(dice):
        y, x = (int(generator.integers(0, max(1, length - side + 1))) for length in (height, width))
        window = (i, slice(None), slice(y, y + side), slice(x, x + side))
        trial[window] = (images[window] + eps * _signs(generator, channels, 1, 1).to(images)).clamp(0, 1)
    return trial
