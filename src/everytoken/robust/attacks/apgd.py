"""Auto-PGD: projected gradient ascent with momentum and a step that halves itself when it stops paying.

Paper: Croce and Hein 2020, algorithm 1. Start at a random point of the ball's surface with step 2 eps. At checkpoints
(after 22 % of the steps, then at distances that shrink by 3 % down to 6 %) the step is halved, and the search goes back
to its best point, if the loss rose in less than 75 % of the steps since the last checkpoint, or if neither step nor
best loss changed since then. What we do differently: an image leaves as soon as it is adversarial.

Cost: steps + 1 forward and backward passes for images that withstand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from everytoken.robust.attacks.balls import Norm, direction, project, random_start, wide
from everytoken.robust.attacks.losses import Loss, Model, cross_entropy, dlr, rivals, targeted_dlr, value_and_gradient

RHO, MOMENTUM = 0.75, 0.75


def checkpoints(steps: int) -> set[int]:
    """Numbers of steps after which the step length is reconsidered."""
    gap, least, shrink = (max(int(part * steps), 1) for part in (0.22, 0.06, 0.03))
    at, found = 0, set()
    while at + gap <= steps:
        at += gap
        found.add(at)
        gap = max(gap - shrink, least)
    return found


@dataclass
class _State:
    """Of the images that still withstand; every field has one row per image."""

    row: Tensor  # in the batch
    at: Tensor
    before: Tensor
    gradient: Tensor
    loss: Tensor
    step: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    rises: Tensor  # since the last checkpoint
    last_best: Tensor  # at the last checkpoint
    was_halved: Tensor  # at the last checkpoint

    def keep(self, rows: Tensor) -> None:
        """Drop the others."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name)[rows])


def ascend(
    model: Model, images: Tensor, labels: Tensor, start: Tensor, eps: float, norm: Norm, steps: int,
    loss_for: Callable[[Tensor], Loss],
) -> Tensor:  # fmt: skip
    """One run; returns adversarial images where it found them and the given images elsewhere.

    Args:
        start: [B, C, H, W] in the ball.
        loss_for: rows of the batch [b] -> the loss of these rows' logits.
    """
    found = images.clone()
    every = torch.arange(len(images), device=images.device)
    logits, loss, gradient = value_and_gradient(model, start, loss_for(every))
    size = torch.full_like(loss, 2 * eps)
    none = torch.zeros_like(loss)
    s = _State(every, start, start, gradient, loss, size, start, gradient, loss, none, loss.clone(), none + 1)

    def drop_adversarial(logits: Tensor) -> None:
        wrong = logits.argmax(1) != labels[s.row]
        found[s.row[wrong]] = s.at[wrong]
        if wrong.any():
            s.keep(~wrong)

    drop_adversarial(logits)
    checks, since = checkpoints(steps), 0
    for number in range(1, steps + 1):
        if not len(s.row):
            break
        base = images[s.row]
        pushed = project(s.at + wide(s.step) * direction(s.gradient, norm), base, eps, norm)
        share = MOMENTUM if number > 1 else 1.0
        moved = project(s.at + share * (pushed - s.at) + (1 - share) * (s.at - s.before), base, eps, norm)
        s.before, s.at = s.at, moved
        logits, loss, s.gradient = value_and_gradient(model, moved, loss_for(s.row))
        s.rises = s.rises + (loss > s.loss)
        s.loss = loss
        better = loss > s.best_loss
        s.best = torch.where(wide(better), s.at, s.best)
        s.best_gradient = torch.where(wide(better), s.gradient, s.best_gradient)
        s.best_loss = torch.where(better, loss, s.best_loss)
        drop_adversarial(logits)
        since += 1
        if number in checks and len(s.row):
            _reconsider(s, since)
            since = 0
    return found


def _reconsider(s: _State, since: int) -> None:
    """Halve the steps that do not pay, and go back to the best point there."""
    stuck = (s.was_halved == 0) & (s.last_best >= s.best_loss)
    halve = (s.rises <= RHO * since) | stuck
    s.step = torch.where(halve, s.step / 2, s.step)
    s.at = torch.where(wide(halve), s.best, s.at)
    s.gradient = torch.where(wide(halve), s.best_gradient, s.gradient)
    s.was_halved, s.last_best, s.rises = halve.to(s.loss), s.best_loss.clone(), torch.zeros_like(s.rises)


def apgd(
    model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], eps: float, norm: Norm,
    steps: int = 100, restarts: int = 1, loss: str = "ce",
) -> Tensor:  # fmt: skip
    """Untargeted, on cross entropy ("ce") or on the difference of logits ratio ("dlr")."""
    make = {"ce": cross_entropy, "dlr": dlr}[loss]
    found = images.clone()
    todo = torch.arange(len(images), device=images.device)
    for restart in range(restarts):
        todo = unchanged(found, images, todo)
        if not len(todo):
            break
        own, names = labels[todo], [keys[i] for i in todo.tolist()]
        start = random_start(images[todo], eps, norm, names, "apgd", loss, restart)
        run = lambda rows, own=own: make(own[rows])  # noqa: E731
        found[todo] = ascend(model, images[todo], own, start, eps, norm, steps, run)
    return found


def apgd_targeted(
    model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], eps: float, norm: Norm,
    steps: int = 100, targets: int = 9,
) -> Tensor:  # fmt: skip
    """Targeted ratio, one run for each of the `targets` most likely wrong classes."""
    found = images.clone()
    others = rivals(model, images, labels, targets)
    todo = torch.arange(len(images), device=images.device)
    for number in range(others.shape[1]):
        todo = unchanged(found, images, todo)
        if not len(todo):
            break
        own, wanted, names = labels[todo], others[todo, number], [keys[i] for i in todo.tolist()]
        start = random_start(images[todo], eps, norm, names, "apgd-t", number)
        run = lambda rows, own=own, wanted=wanted: targeted_dlr(own[rows], wanted[rows])  # noqa: E731
        found[todo] = ascend(model, images[todo], own, start, eps, norm, steps, run)
    return found


def unchanged(found: Tensor, images: Tensor, rows: Tensor) -> Tensor:
    """Those of the rows for which nothing has been found yet."""
    return rows[(found[rows] == images[rows]).flatten(1).all(1)]
