"""AutoAttack: an ensemble of attacks inside an L-infinity ball. An image counts as robust if it withstands all of them.

All attacks take images in 0..1 and a model from such images to logits (normalisation inside), and look for an image
within distance eps, again in 0..1, that the model gets wrong. Randomness is keyed by image, attack and restart, so what
happens to an image does not depend on its batch; an image leaves as soon as it is adversarial.

Paper: Croce and Hein 2020, the standard version: APGD on cross entropy, targeted APGD (9 targets), targeted FAB (9
targets), Square (5,000 queries). Each attack sees the images that withstood the ones before it.

Auto-PGD (algorithm 1): projected gradient ascent with momentum from a random point of the ball's surface, with a step
of 2 eps that is halved, from the best point, at checkpoints where it stopped paying. It climbs cross entropy or the
targeted difference of logits ratio (equation 6), which needs four classes; with three, the spread of all logits serves,
and with two the plain difference.

Fast Adaptive Boundary (Croce and Hein 2020, Minimally distorted adversarial examples, algorithm 1): the boundary
between the label and a target class is replaced by a plane, the current point and the image are projected to it within
the box 0..1, and the next point is a mixture of the two. The projection is solved by one sort (`reach_plane`).

Square (Andriushchenko et al. 2020, algorithms 1 and 2) is a random search without gradients, so hiding them does not
help: the change is eps everywhere, vertical stripes at first, then one sign per channel in smaller and smaller squares,
kept if the margin falls. Every image has its own windows, keyed by image (the released program has one for the whole
batch); with other numbers of queries than 5,000 the schedule of sizes is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken import keyed
from everytoken.errors import EverytokenError

Model = Callable[[Tensor], Tensor]


def wide(values: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, 1]"""
    return values.view(-1, 1, 1, 1)


def distance(change: Tensor) -> Tensor:
    """L-infinity norm: [B, C, H, W] -> [B]"""
    return change.flatten(1).abs().amax(1)


@dataclass(frozen=True)
class AttackBatch:
    """Images to attack, float [B, C, H, W] in 0..1, and the ball that limits the change.

    The model takes such images to logits and has nothing random in it; the images' keys decide what is random.
    """

    model: Model
    images: Tensor
    labels: Tensor
    keys: Sequence[str]
    eps: float

    def take(self, rows: Tensor) -> AttackBatch:
        """Some of the images."""
        keys = [self.keys[i] for i in rows.tolist()]
        return replace(self, images=self.images[rows], labels=self.labels[rows], keys=keys)

    def random_start(self, *purpose: str | int) -> Tensor:
        """A random point at distance eps, keyed by image."""
        generators = [keyed.torch_generator(0, key, "attack", *purpose) for key in self.keys]
        change = torch.stack([torch.rand(self.images.shape[1:], generator=g) for g in generators]).to(self.images)
        change = change * 2 - 1
        change = change / wide(distance(change)).clamp(min=1e-12)
        return (self.images + self.eps * change).clamp(0, 1)

    def project(self, moved: Tensor, rows: Tensor) -> Tensor:
        """The points of the balls around the images `rows` nearest to `moved`, cut to 0..1."""
        images = self.images[rows]
        return torch.minimum(torch.maximum(moved, images - self.eps), images + self.eps).clamp(0, 1)


# Losses: logits [B, K], labels [B] -> [B]


cross_entropy = partial(F.cross_entropy, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest other logit minus that of the label: above 0 when the model is wrong."""
    return logits.scatter(1, labels[:, None], -torch.inf).amax(1) - logits.gather(1, labels[:, None])[:, 0]


def lead(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """z_y - z_t"""
    return (logits.gather(1, labels[:, None]) - logits.gather(1, targets[:, None]))[:, 0]


def dlr(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2), towards the targets t."""
    best = logits.topk(min(4, logits.shape[1])).values
    spread = best[:, 0] - best[:, 2:].mean(1) if logits.shape[1] > 2 else 1.0
    return -lead(logits, labels, targets) / (spread + 1e-12)


def value_and_gradient(
    model: Model, images: Tensor, loss: Callable[..., Tensor], *args: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [B, K], loss(logits, *args) [B], its gradient by the images)"""
    with torch.enable_grad():
        leaf = images.detach().requires_grad_()
        logits = model(leaf)
        values = loss(logits, *args)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return logits.detach(), values.detach(), gradient.detach()


@torch.no_grad()
def rivals(batch: AttackBatch, count: int) -> Tensor:
    """[B, count]: the classes other than the label with the largest logits, the best first."""
    logits = batch.model(batch.images).scatter(1, batch.labels[:, None], -torch.inf)
    return logits.topk(min(count, logits.shape[1] - 1), dim=1).indices


def against_rivals(batch: AttackBatch, count: int, run: Callable[[AttackBatch, Tensor, int], Tensor]) -> Tensor:
    """A run (images, targets, its number) -> images for each of the `count` likeliest wrong classes.

    Each run sees the images that withstood so far. Returns adversarial images where one was found, and the given images
    elsewhere.
    """
    others, adversarial = rivals(batch, count), batch.images.clone()
    rows = torch.arange(len(batch.images), device=batch.images.device)
    for number in range(others.shape[1]):
        rows = rows[(adversarial[rows] == batch.images[rows]).flatten(1).all(1)]
        if not len(rows):
            break
        adversarial[rows] = run(batch.take(rows), others[rows, number], number)
    return adversarial


# APGD

RHO, MOMENTUM = 0.75, 0.75


def checkpoints(steps: int) -> set[int]:
    """Numbers of steps after which the step length is reconsidered."""
    gap, least, shrink = (max(int(part * steps), 1) for part in (0.22, 0.06, 0.03))
    position, points = 0, set()
    while position + gap <= steps:
        position += gap
        points.add(position)
        gap = max(gap - shrink, least)
    return points


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
    batch: AttackBatch, start: Tensor, steps: int, loss_function: Callable[..., Tensor], *classes: Tensor
) -> Tensor:
    """One run; returns adversarial images where it found them and the given images elsewhere.

    Args:
        start: [B, C, H, W] in the ball.
        loss_function: (logits, *classes) -> [B]. classes: [B] labels, and perhaps targets.
    """
    adversarial = batch.images.clone()
    every = torch.arange(len(start), device=start.device)
    logits, loss, gradient = value_and_gradient(batch.model, start, loss_function, *classes)
    size = torch.full_like(loss, 2 * batch.eps)
    none = torch.zeros_like(loss)
    s = _State(every, start, start, gradient, loss, size, start, gradient, loss, none, loss.clone(), none + 1)

    def drop_adversarial(logits: Tensor) -> None:
        wrong = logits.argmax(1) != batch.labels[s.row]
        adversarial[s.row[wrong]] = s.at[wrong]
        if wrong.any():
            s.keep(~wrong)

    drop_adversarial(logits)
    checks, since = checkpoints(steps), 0
    for number in range(1, steps + 1):
        if not len(s.row):
            break
        pushed = batch.project(s.at + wide(s.step) * s.gradient.sign(), s.row)
        pull = MOMENTUM if number > 1 else 1.0
        moved = batch.project(s.at + pull * (pushed - s.at) + (1 - pull) * (s.at - s.before), s.row)
        s.before, s.at = s.at, moved
        logits, loss, s.gradient = value_and_gradient(batch.model, moved, loss_function, *(c[s.row] for c in classes))
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
    return adversarial


def _reconsider(s: _State, since: int) -> None:
    """Halve the steps that do not pay, and go back to the best point there."""
    stuck = (s.was_halved == 0) & (s.last_best >= s.best_loss)
    halve = (s.rises <= RHO * since) | stuck
    s.step = torch.where(halve, s.step / 2, s.step)
    s.at = torch.where(wide(halve), s.best, s.at)
    s.gradient = torch.where(wide(halve), s.best_gradient, s.gradient)
    s.was_halved, s.last_best, s.rises = halve.to(s.loss), s.best_loss.clone(), torch.zeros_like(s.rises)


def apgd(batch: AttackBatch, steps: int = 100) -> Tensor:
    """Untargeted, on cross entropy."""
    return ascend(batch, batch.random_start("apgd", "ce", 0), steps, cross_entropy, batch.labels)


def apgd_targeted(batch: AttackBatch, steps: int = 100, targets: int = 9) -> Tensor:
    """Targeted ratio, one run for each of the `targets` most likely wrong classes."""
    return against_rivals(
        batch, targets, lambda b, t, number: ascend(b, b.random_start("apgd-t", number), steps, dlr, b.labels, t)
    )


# FAB

ALPHA_MAX, OVERSHOOT, BACK = 0.1, 1.05, 0.9


def reach_plane(points: Tensor, normal: Tensor, excess: Tensor) -> Tensor:
    """The smallest change of points in the box [0, 1]^n that lowers a linear function by `excess`.

    Args:
        points: [B, n] in 0..1.
        normal: [B, n] gradient w of the function.
        excess: [B] how much w.x has to fall (rise, if negative).

    Returns:
        [B, n] the change d: w.d = -excess if the box allows it, else the nearest that it allows.

    Every coordinate moves against w until it meets the box, by min(u, room). What is gained, sum_i |w_i| min(u, room_i)
    rises with u and is linear between the sorted rooms, so the right u is found by sorting and summing.
    """
    wanted = excess.double().abs()[:, None]
    slope = normal * torch.where(excess >= 0, 1.0, -1.0).to(points)[:, None]  # the coordinates move along -slope
    room = torch.where(slope > 0, points, 1 - points).masked_fill(slope == 0, 0).double()
    room_sorted, order = room.sort(dim=1)
    weight = slope.abs().double().gather(1, order)
    done, used = (weight * room_sorted).cumsum(1), weight.cumsum(1)
    left = used[:, -1:] - used  # weight of the coordinates that are still free after the i-th room
    i = torch.searchsorted(done + room_sorted * left, wanted).clamp(max=room.shape[1] - 1)
    earlier, first = (i - 1).clamp(min=0), i == 0
    base = done.gather(1, earlier).masked_fill(first, 0)
    free = torch.where(first, used[:, -1:], left.gather(1, earlier))
    level = ((wanted - base) / free.clamp(min=1e-30)).clamp(min=0)
    level = torch.minimum(level, room_sorted[:, -1:])
    return -torch.minimum(level, room).to(points) * slope.sign()


def boundary(batch: AttackBatch, targets: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """One run from the images to the boundary with the targets [B]; an image is done when its change is within eps.

    Returns:
        (adversarial images, their distances); inf where none was found.
    """
    model, images, labels = batch.model, batch.images, batch.labels
    adversarial = images.clone()
    best = torch.full((len(images),), torch.inf, device=images.device, dtype=images.dtype)
    rows = torch.arange(len(images), device=images.device)
    at = images
    for _ in range(steps):
        if not len(rows):
            break
        base, shape = images[rows], at.shape
        _, gap, normal = value_and_gradient(model, at, lead, labels[rows], targets[rows])
        w, flat = normal.flatten(1), at.flatten(1)
        # the plane: gap + w.(x - at) = 0
        here = reach_plane(flat, w, gap).view(shape)
        from_image = gap + (w.double() * (base.flatten(1) - flat).double()).sum(1).to(gap)
        there = reach_plane(base.flatten(1), w, from_image).view(shape)
        near, far = (wide(distance(d).clamp(min=1e-8)) for d in (here, there))
        mix = (near / (near + far)).clamp(0, ALPHA_MAX)
        at = ((at + OVERSHOOT * here) * (1 - mix) + (base + OVERSHOOT * there) * mix).clamp(0, 1)
        with torch.no_grad():
            wrong = model(at).argmax(1) != labels[rows]
        far_away = distance(at - base)
        better = wrong & (far_away < best[rows])
        adversarial[rows[better]], best[rows[better]] = at[better], far_away[better]
        at = torch.where(wide(wrong), base + BACK * (at - base), at)
        missing = best[rows] > batch.eps
        rows, at = rows[missing], at[missing]
    return adversarial, best


def fab_targeted(batch: AttackBatch, steps: int = 100, targets: int = 9) -> Tensor:
    """One run from the image for each of the `targets` most likely wrong classes; images within eps are returned."""

    def run(some: AttackBatch, target: Tensor, number: int) -> Tensor:
        candidates, far = boundary(some, target, steps)
        return torch.where(wide(far <= some.eps), candidates, some.images)

    return against_rivals(batch, targets, run)


# Square

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


# The ensemble

Attack = Callable[[AttackBatch], Tensor]


def chosen(name: str, steps: int = 100, queries: int = QUERIES, targets: int = 9) -> dict[str, Attack]:
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
    """Attack one batch with what `chosen` gave; `progress` hears which attack begins."""
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
