"""Fast Adaptive Boundary attack: walk along the decision boundary towards the image, for the smallest change.

Paper: Croce and Hein 2020 (Minimally distorted adversarial examples), algorithm 1. In each step the boundary between
the label and another class is replaced by a plane; the current point and the image are projected to it within the box
0..1, and the next point is a mixture of the two projections, with a small overshoot. When it is adversarial, the search
goes a tenth of the way back to the image.

What we do differently: the projection to plane and box is solved by one sort (see `reach_plane`), the same for both
norms; an image leaves when its change is within eps, unless the smallest change is asked for; the untargeted attack
looks at the `classes` most likely wrong classes, not at all (with ten classes or fewer that is all of them).

Cost: steps forward and backward passes per target, and as many forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everytoken.robust.attacks.apgd import unchanged
from everytoken.robust.attacks.balls import Norm, distance, random_start, wide
from everytoken.robust.attacks.losses import Model, rivals, value_and_gradient

ALPHA_MAX, OVERSHOOT, BACK = 0.1, 1.05, 0.9


def reach_plane(points: Tensor, normal: Tensor, excess: Tensor, norm: Norm) -> Tensor:
    """The smallest change of points in the box [0, 1]^n that lowers a linear function by `excess`.

    Args:
        points: [B, n] in 0..1.
        normal: [B, n] gradient w of the function.
        excess: [B] how much w.x has to fall (rise, if negative).

    Returns:
        [B, n] the change d: w.d = -excess if the box allows it, else the nearest that it allows.

    Every coordinate moves against w until it meets the box: by min(u, room) in L-infinity, by |w| min(u, room / |w|) in
    L2. What is gained, sum_i a_i min(u, c_i) with a = |w| and c = room, or a = w^2 and c = room / |w|, rises with u and
    is linear between the sorted c_i, so the right u is found by sorting and summing.
    """
    wanted = excess.double().abs()
    sign = torch.where(excess >= 0, 1.0, -1.0).to(points)[:, None]
    slope = normal * sign  # the coordinates move along -slope
    room = torch.where(slope > 0, points, 1 - points)
    room = torch.where(slope == 0, torch.zeros_like(room), room)
    steep = slope.abs()
    weight = (steep if norm == "linf" else steep**2).double()
    cap = room.double() if norm == "linf" else room.double() / steep.double().clamp(min=1e-30)
    order = cap.argsort(dim=1)
    c, a = cap.gather(1, order), weight.gather(1, order)
    done, used = (a * c).cumsum(1), a.cumsum(1)
    left = used[:, -1:] - used  # weight of the coordinates that are still free after the i-th cap
    gained = done + c * left
    i = torch.searchsorted(gained, wanted[:, None]).clamp(max=c.shape[1] - 1)
    earlier = (i - 1).clamp(min=0)
    first = i == 0
    base = torch.where(first, torch.zeros_like(wanted[:, None]), done.gather(1, earlier))
    free = torch.where(first, used[:, -1:], left.gather(1, earlier))
    level = ((wanted[:, None] - base) / free.clamp(min=1e-30)).clamp(min=0)
    level = torch.minimum(level, c[:, -1:])
    move = torch.minimum(level, cap)
    if norm == "l2":
        move = move * steep
    return (-move.to(points) * slope.sign()).to(points)


def boundary(
    model: Model, images: Tensor, labels: Tensor, others: Tensor, start: Tensor, eps: float, norm: Norm, steps: int,
    stop: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One run.

    Args:
        others: [B, m] classes whose boundary is sought; of several, the nearest by linear estimate in each step.
        start: [B, C, H, W].
        stop: an image is done when its change is within eps; else the smallest change is sought to the end.

    Returns:
        (adversarial images, their distances); inf where none was found.
    """
    found = images.clone()
    best = torch.full((len(images),), torch.inf, device=images.device, dtype=images.dtype)
    rows = torch.arange(len(images), device=images.device)
    at = start
    for _ in range(steps):
        if not len(rows):
            break
        base, shape = images[rows], at.shape
        gap, normal = _nearest_plane(model, at, labels[rows], others[rows], norm)
        w, flat = normal.flatten(1), at.flatten(1)
        # the plane: gap + w.(x - at) = 0
        here = reach_plane(flat, w, gap, norm).view(shape)
        from_image = gap + (w.double() * (base.flatten(1) - flat).double()).sum(1).to(gap)
        there = reach_plane(base.flatten(1), w, from_image, norm).view(shape)
        near, far = (wide(distance(d, norm).clamp(min=1e-8)) for d in (here, there))
        mix = (near / (near + far)).clamp(0, ALPHA_MAX)
        at = ((at + OVERSHOOT * here) * (1 - mix) + (base + OVERSHOOT * there) * mix).clamp(0, 1)
        with torch.no_grad():
            wrong = model(at).argmax(1) != labels[rows]
        far_away = distance(at - base, norm)
        better = wrong & (far_away < best[rows])
        found[rows[better]], best[rows[better]] = at[better], far_away[better]
        at = torch.where(wide(wrong), base + BACK * (at - base), at)
        if stop:
            open_ = best[rows] > eps
            rows, at = rows[open_], at[open_]
    return found, best


def _nearest_plane(model: Model, at: Tensor, labels: Tensor, others: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """(z_label - z_other [B], its gradient [B, C, H, W]) of the other class that seems nearest."""
    gap = normal = near = None
    for column in others.unbind(1):
        difference = lambda z, c=column: (z.gather(1, labels[:, None]) - z.gather(1, c[:, None]))[:, 0]  # noqa: E731
        _, value, gradient = value_and_gradient(model, at, difference)
        dual = gradient.flatten(1).abs().sum(1) if norm == "linf" else gradient.flatten(1).norm(dim=1)
        far = value.abs() / dual.clamp(min=1e-12)
        if gap is None or normal is None or near is None:
            gap, normal, near = value, gradient, far
            continue
        closer = far < near
        gap, near = torch.where(closer, value, gap), torch.where(closer, far, near)
        normal = torch.where(wide(closer), gradient, normal)
    assert gap is not None
    assert normal is not None
    return gap, normal


def fab_targeted(
    model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], eps: float, norm: Norm,
    steps: int = 100, targets: int = 9,
) -> Tensor:  # fmt: skip
    """One run from the image for each of the `targets` most likely wrong classes; images within eps are returned."""
    others = rivals(model, images, labels, targets)
    found = images.clone()
    todo = torch.arange(len(images), device=images.device)
    for number in range(others.shape[1]):
        todo = unchanged(found, images, todo)
        if not len(todo):
            break
        x = images[todo]
        made, far = boundary(model, x, labels[todo], others[todo, number : number + 1], x, eps, norm, steps)
        found[todo] = torch.where(wide(far <= eps), made, x)
    return found


def fab(
    model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], eps: float, norm: Norm,
    steps: int = 100, restarts: int = 5, classes: int = 9,
) -> Tensor:  # fmt: skip
    """Untargeted: from the image, then from random points at half of eps."""
    others = rivals(model, images, labels, classes)
    found = images.clone()
    todo = torch.arange(len(images), device=images.device)
    for restart in range(restarts):
        todo = unchanged(found, images, todo)
        if not len(todo):
            break
        x, names = images[todo], [keys[i] for i in todo.tolist()]
        start = random_start(x, eps / 2, norm, names, "fab", restart) if restart else x
        made, far = boundary(model, x, labels[todo], others[todo], start, eps, norm, steps)
        found[todo] = torch.where(wide(far <= eps), made, x)
    return found
