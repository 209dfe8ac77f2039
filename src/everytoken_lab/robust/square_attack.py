"""Square Attack: random search with squares; it uses no gradient, so hiding the gradient does not help against it.

Paper: Andriushchenko et al. 2020, algorithms 1 to 3. The change has length eps throughout; a square of it is replaced
by another, smaller and smaller squares as the queries go on, and kept if the margin falls. L-infinity: vertical stripes
at the start, one sign per channel and square. L2: bumps, whose budget is moved from one window to another.

What we do differently: every image has its own windows (one for the whole batch in the released program), because the
randomness is keyed by image; with other numbers of queries than 5,000 the schedule of square sizes is stretched.

Cost: `queries` forward passes for images that withstand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from everytoken import keyed
from everytoken_lab.robust.gradient_attacks import AttackBatch, distance, margin, wide

FIRST = 0.8  # part of the image that the first squares cover
QUERIES = 5000
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after these queries the area is halved


def area(query: int, queries: int) -> float:
    """Part of the image that a square covers."""
    scaled = query if queries == QUERIES else int(query / queries * QUERIES)
    return FIRST / 2 ** sum(scaled > limit for limit in _HALVINGS)


@torch.no_grad()
def square(batch: AttackBatch, queries: int = QUERIES) -> Tensor:
    """Adversarial images where they were found, else the given ones."""
    model, images, labels, eps, norm = batch.model, batch.images, batch.labels, batch.eps, batch.norm
    dice = [keyed.generator(0, key, "attack", "square") for key in batch.keys]
    adversarial = images.clone()
    rows = torch.arange(len(images), device=images.device)
    best = _stripes(images, eps, dice) if norm == "linf" else _bumps(images, eps, dice)
    loss = margin(model(best), labels)

    for query in range(queries):
        done = loss > 0
        if done.any() or not query:
            adversarial[rows[done]] = best[done]
            rows, best, loss = rows[~done], best[~done], loss[~done]
        if not len(rows):
            return adversarial
        base, row_dice = images[rows], [dice[i] for i in rows.tolist()]
        part = area(query, queries)
        trial = (
            _new_squares(best, base, eps, part, row_dice) if norm == "linf" else _moved(best, base, eps, part, row_dice)
        )
        tried = margin(model(trial), labels[rows])
        better = tried > loss
        best, loss = torch.where(wide(better), trial, best), torch.where(better, tried, loss)
    done = loss > 0
    adversarial[rows[done]] = best[done]
    return adversarial


def _signs(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.integers(0, 2, shape).astype(np.float32) * 2 - 1)


def _corner(generator: np.random.Generator, height: int, width: int, side: int) -> tuple[int, int]:
    return int(generator.integers(0, max(1, height - side + 1))), int(generator.integers(0, max(1, width - side + 1)))


def _stripes(images: Tensor, eps: float, dice: Sequence[np.random.Generator]) -> Tensor:
    _, channels, _, width = images.shape
    signs = torch.stack([_signs(d, channels, 1, width) for d in dice]).to(images)
    return (images + eps * signs).clamp(0, 1)


def _new_squares(best: Tensor, images: Tensor, eps: float, part: float, dice: Sequence[np.random.Generator]) -> Tensor:
    _, channels, height, width = images.shape
    side = max(1, round(math.sqrt(part * height * width)))
    trial = best.clone()
    for i, generator in enumerate(dice):
        y, x = _corner(generator, height, width, side)
        window = (i, slice(None), slice(y, y + side), slice(x, x + side))
        trial[window] = (images[window] + eps * _signs(generator, channels, 1, 1).to(images)).clamp(0, 1)
    return trial


@lru_cache(maxsize=256)
def bump(height: int, width: int) -> Tensor:
    """[height, width] a hill of nested rectangles around the middle, of length 1."""
    hill = torch.zeros(height, width)
    top, left = height // 2, width // 2
    for ring in range(max(height, width) // 2 + 1):
        hill[max(top - ring, 0) : top + ring + 1, max(left - ring, 0) : left + ring + 1] += 1 / (ring + 1) ** 2
    return hill / hill.norm()


def _eta(side: int, generator: np.random.Generator) -> Tensor:
    """[side, side] a hill and a valley side by side, of length 1, upright or lying."""
    pattern = torch.cat([bump(side // 2, side), -bump(side - side // 2, side)]) if side > 1 else torch.ones(1, 1)
    pattern = pattern / pattern.norm()
    return pattern.T if generator.random() > 0.5 else pattern


def _bumps(images: Tensor, eps: float, dice: Sequence[np.random.Generator]) -> Tensor:
    """5 x 5 tiles of hills and valleys, scaled to length eps."""
    _, channels, height, width = images.shape
    change = torch.zeros_like(images)
    side = max(1, min(height, width) // 5)
    for i, generator in enumerate(dice):
        for y in range((height % side) // 2, height - side + 1, side):
            for x in range((width % side) // 2, width - side + 1, side):
                tile = _eta(side, generator) * _signs(generator, channels, 1, 1)
                change[i, :, y : y + side, x : x + side] = tile.to(images)
    return _at_length(images, change, eps)


def _at_length(images: Tensor, change: Tensor, eps: float) -> Tensor:
    return (images + change * (eps / wide(distance(change, "l2")).clamp(min=1e-12))).clamp(0, 1)


def _moved(best: Tensor, images: Tensor, eps: float, part: float, dice: Sequence[np.random.Generator]) -> Tensor:
    """One window's budget and what is unused go to another window, whose change is bent towards a new bump."""
    _, channels, height, width = images.shape
    side = max(3, round(math.sqrt(part * height * width)))
    side = min(side + (side % 2 == 0), height, width)
    change = best - images
    unused = (eps**2 - change.flatten(1).pow(2).sum(1)).clamp(min=0) / channels
    for i, generator in enumerate(dice):
        y, x = _corner(generator, height, width, side)
        other_y, other_x = _corner(generator, height, width, side)
        to = (slice(None), slice(y, y + side), slice(x, x + side))
        source = (slice(None), slice(other_y, other_y + side), slice(other_x, other_x + side))
        mine = change[i]
        both = torch.zeros((height, width), dtype=torch.bool)
        both[to[1:]] = both[source[1:]] = True
        budget = (mine * both.to(mine)).pow(2).sum((1, 2), keepdim=True)
        old = mine[to] / mine[to].flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None]
        bent = old + (_eta(side, generator) * _signs(generator, channels, 1, 1)).to(mine)
        bent = bent / bent.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None]
        new = bent * (budget + unused[i]).sqrt()
        mine[source] = 0
        mine[to] = new
    return _at_length(images, change, eps)
