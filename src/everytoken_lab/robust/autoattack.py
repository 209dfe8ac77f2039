"""AutoAttack: an ensemble without parameters to tune. An image counts as robust if it withstands every attack.

Paper: Croce and Hein 2020, the standard version: APGD on cross entropy, targeted APGD (9 targets), targeted FAB (9
targets), Square (5,000 queries). Each attack sees the images that withstood the ones before it. Every adversarial image
is checked again: within its ball, within 0..1, and wrong for the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken_lab.robust.gradient_attacks import AttackBatch, apgd, apgd_targeted, distance, fab_targeted
from everytoken_lab.robust.square_attack import QUERIES, square

Attack = Callable[[AttackBatch], Tensor]


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


def run(
    batch: AttackBatch, parts: dict[str, Attack], progress: Callable[[str, int], None] = lambda attack, left: None
) -> Outcome:
    """Attack one batch with what `attacks` gave; `progress` hears which attack begins, and how many images are left."""
    model, images, labels, eps = batch.model, batch.images, batch.labels, batch.eps
    with torch.no_grad():
        logits = model(images)
        if not torch.equal(logits, model(images)):
            raise EverytokenError(
                "the model answers the same images differently each time; attacks would measure that. "
                "Use it in evaluation mode and without dropout."
            )
        if not torch.isfinite(logits).all():
            raise EverytokenError(f"the model's logits are not finite for some of {', '.join(batch.keys[:3])} ...")
    clean = logits.argmax(1)
    adversarial, by = images.clone(), ["clean" if wrong else "" for wrong in (clean != labels).tolist()]
    remaining = torch.nonzero(clean == labels)[:, 0]
    attacked = clean.clone()
    for name, attack in parts.items():
        if not len(remaining):
            break
        progress(name, len(remaining))
        some = batch.take(remaining)
        candidates = attack(some).detach()
        with torch.no_grad():
            predicted = model(candidates).argmax(1)
        _check(candidates, some.images, eps, name)
        wrong = predicted != some.labels
        for i in remaining[wrong].tolist():
            by[i] = name
        adversarial[remaining[wrong]], attacked[remaining[wrong]] = candidates[wrong], predicted[wrong]
        remaining = remaining[~wrong]
    return Outcome(clean, adversarial, attacked, by, distance(adversarial - images))


def _check(candidates: Tensor, images: Tensor, eps: float, name: str) -> None:
    """An attack that leaves its ball would prove nothing: that is a bug, not a weak model."""
    far = distance(candidates - images)
    slack = 1e-6 + 1e-5 * eps
    if not torch.isfinite(candidates).all() or bool((far > eps + slack).any()):
        raise AssertionError(f"{name} left its ball: {float(far.max())} > {eps}")
    if bool((candidates < 0).any()) or bool((candidates > 1).any()):
        raise AssertionError(f"{name} left the range of pixels")
