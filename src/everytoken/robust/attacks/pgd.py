"""FGSM and PGD: quick attacks. They find less than AutoAttack does; a model that withstands them may still be weak.

Papers: Goodfellow et al. 2015 (one step of length eps along the sign of the gradient); Madry et al. 2018 (several steps
from a random start, projected to the ball; here of length 2.5 eps / steps).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everytoken.robust.attacks.balls import Norm, direction, project, random_start
from everytoken.robust.attacks.losses import Model, cross_entropy, value_and_gradient


def fgsm(model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], eps: float, norm: Norm) -> Tensor:
    """One step. Returns images; whether they are adversarial is for the caller to see."""
    _, _, gradient = value_and_gradient(model, images, cross_entropy(labels))
    return project(images + eps * direction(gradient, norm), images, eps, norm)


def pgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    keys: Sequence[str],
    eps: float,
    norm: Norm,
    steps: int = 20,
    restarts: int = 1,
) -> Tensor:
    """`steps` steps from a random start, `restarts` times; the first adversarial image of each is kept."""
    found = images.clone()
    todo = torch.arange(len(images), device=images.device)
    for restart in range(restarts):
        names = [keys[i] for i in todo.tolist()]
        at = random_start(images[todo], eps, norm, names, "pgd", restart)
        left = torch.arange(len(todo), device=images.device)  # positions in `todo`
        for step in range(steps + 1):
            rows = todo[left]
            logits, _, gradient = value_and_gradient(model, at, cross_entropy(labels[rows]))
            wrong = logits.argmax(1) != labels[rows]
            found[rows[wrong]] = at[wrong]
            left, at, gradient = left[~wrong], at[~wrong], gradient[~wrong]
            if not len(left) or step == steps:
                break
            base = images[todo[left]]
            at = project(at + 2.5 * eps / steps * direction(gradient, norm), base, eps, norm)
        todo = todo[left]
        if not len(todo):
            break
    return found
