"""AutoAttack: an ensemble without parameters to tune. An image counts as robust if it withstands every attack.

Paper: Croce and Hein 2020, the standard version: APGD on cross entropy, targeted APGD (9 targets), targeted FAB (9
targets), Square (5,000 queries). Each attack sees the images that withstood the ones before it.

Square (Andriushchenko et al. 2020, algorithms 1 and 2) is a random search without gradients, so hiding them does not
help: the change is eps everywhere, vertical stripes at first, then one sign per channel in smaller and smaller squares,
kept if the margin falls. Every image has its own windows, keyed by image (the released program has one for the whole
batch); with other numbers of queries than 5,000 the schedule of sizes is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everytoken import keyed
from everytoken.errors import EverytokenError
from everytoken_lab.robust.gradient_attacks import (
    AttackBatch,
    apgd,
    apgd_targeted,
    distance,
    fab_targeted,
    margin,
    wide,
)

Attack = Callable[[AttackBatch], Tensor]
QUERIES = 5000
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after these queries a square's area is halved


def area(query: int, queries: int) -> float:
    """Fraction of the image that a square covers."""
    return 0.8 / 2 ** sum(query * QUERIES // queries > limit for limit in _HALVINGS)


@torch.no_grad()
def square(batch: AttackBatch, queries: int = QUERIES) -> Tensor:
    """Adversarial images where they were found, else the given ones."""
    model, images, labels, eps = batch.model, batch.images, batch.labels, batch.eps
    _, channels, height, width = images.shape
    dice = [keyed.generator(0, key, "attack", "square") for key in batch.keys]
    adversarial, rows = images.clone(), torch.arange(len(images), device=images.device)
    stripes = torch.stack([_signs(generator, channels, 1, width) for generator in dice])
    best = (images + eps * stripes.to(images)).clamp(0, 1)
    loss = margin(model(best), labels)
    for query in range(queries + 1):
        done = loss > 0
        if done.any():
            adversarial[rows[done]] = best[done]
            rows, best, loss = rows[~done], best[~done], loss[~done]
        if not len(rows) or query == queries:
            break
        side = max(1, round(math.sqrt(area(query, queries) * height * width)))
        trial = best.clone()
        for i, row in enumerate(rows.tolist()):
            y, x = (int(dice[row].integers(0, max(1, length - side + 1))) for length in (height, width))
            window = (slice(None), slice(y, y + side), slice(x, x + side))
            signs = _signs(dice[row], channels, 1, 1).to(images)
            trial[(i, *window)] = (images[(row, *window)] + eps * signs).clamp(0, 1)
        tried = margin(model(trial), labels[rows])
        better = tried > loss
        best, loss = torch.where(wide(better), trial, best), torch.where(better, tried, loss)
    return adversarial


def _signs(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.integers(0, 2, shape).astype(np.float32) * 2 - 1)


def attacks(name: str, steps: int = 100, queries: int = QUERIES, targets: int = 9) -> dict[str, Attack]:
    """The attacks that a name (autoattack: all) stands for, in their order; the defaults are the papers'."""
    available: dict[str, Attack] = {
        "apgd-ce": partial(apgd, steps=steps),
        "apgd-t": partial(apgd_targeted, steps=steps, targets=targets),
        "fab-t": partial(fab_targeted, steps=steps, targets=targets),
        "square": partial(square, queries=queries),
    }
    return available if name == "autoattack" else {name: available[name]}


@dataclass(frozen=True)
class Outcome:
    """What became of a batch."""

    clean: Tensor  # [B] predicted class without attack
    images: Tensor  # [B, C, H, W] adversarial where found, else as given
    attacked: Tensor  # [B] predicted class of `images`
    by: list[str]  # the attack that succeeded; "" if the image withstood; "clean" if it was wrong before
    distance: Tensor  # [B] size of the change


@torch.no_grad()
def run(batch: AttackBatch, parts: dict[str, Attack], progress: Callable[[str], None] = lambda attack: None) -> Outcome:
    """Attack one batch with what `attacks` gave; `progress` hears which attack begins."""
    model, images, labels = batch.model, batch.images, batch.labels
    logits = model(images)
    if not torch.isfinite(logits).all():
        raise EverytokenError(f"the model's logits are not finite for some of {', '.join(batch.keys[:3])} ...")
    clean = logits.argmax(1)
    adversarial, by = images.clone(), ["clean" if wrong else "" for wrong in (clean != labels).tolist()]
    remaining = torch.nonzero(clean == labels)[:, 0]
    attacked = clean.clone()
    for name, attack in parts.items():
        if not len(remaining):
            break
        progress(name)
        some = batch.take(remaining)
        candidates = attack(some)
        predicted = model(candidates).argmax(1)
        wrong = predicted != some.labels
        for i in remaining[wrong].tolist():
            by[i] = name
        adversarial[remaining[wrong]], attacked[remaining[wrong]] = candidates[wrong], predicted[wrong]
        remaining = remaining[~wrong]
    return Outcome(clean, adversarial, attacked, by, distance(adversarial - images))
