"""AutoAttack: an ensemble without parameters to tune. An image counts as robust if it withstands every attack.

Paper: Croce and Hein 2020. `standard`: APGD on cross entropy, targeted APGD (9 targets), targeted FAB (9 targets),
Square (5,000 queries). `plus`: 5 restarts of APGD on cross entropy and on the ratio and of untargeted FAB, then the
others. Each attack sees the images that withstood the ones before it. Every adversarial image is checked again: within
its ball, within 0..1, and wrong for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.robust.attacks.apgd import apgd, apgd_targeted
from everytoken.robust.attacks.balls import Norm, distance
from everytoken.robust.attacks.fab import fab, fab_targeted
from everytoken.robust.attacks.losses import Model, cross_entropy, value_and_gradient
from everytoken.robust.attacks.pgd import fgsm, pgd
from everytoken.robust.attacks.square import QUERIES, square

Attack = Callable[[Model, Tensor, Tensor, Sequence[str], float, Norm], Tensor]


@dataclass(frozen=True)
class Budget:
    """How hard attacks try; the defaults are the paper's.

    Attributes:
        steps: gradient steps of APGD and FAB. pgd_steps: of PGD. queries: of Square. targets: classes that targeted
            attacks aim at.
    """

    steps: int = 100
    pgd_steps: int = 20
    queries: int = QUERIES
    targets: int = 9

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value < 1:
                raise EverytokenError(f"an attack's {name} must be 1 or more, not {value}")


ENSEMBLES: dict[str, tuple[str, ...]] = {
    "autoattack": ("apgd-ce", "apgd-t", "fab-t", "square"),
    "autoattack-plus": ("apgd-ce-5", "apgd-dlr-5", "fab-5", "square", "apgd-t", "fab-t"),
}
SINGLE = ("fgsm", "pgd", "apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
NAMES = (*ENSEMBLES, *SINGLE)


def attacks(name: str, budget: Budget | None = None) -> dict[str, Attack]:
    """The attacks that a name stands for, in their order."""
    if name not in NAMES:
        raise EverytokenError(f"there is no attack {name!r}.{did_you_mean(name, NAMES)} There are {', '.join(NAMES)}.")
    b = budget or Budget()
    known: dict[str, Attack] = {
        "fgsm": fgsm,
        "pgd": partial(pgd, steps=b.pgd_steps),
        "apgd-ce": partial(apgd, steps=b.steps, loss="ce"),
        "apgd-ce-5": partial(apgd, steps=b.steps, loss="ce", restarts=5),
        "apgd-dlr": partial(apgd, steps=b.steps, loss="dlr"),
        "apgd-dlr-5": partial(apgd, steps=b.steps, loss="dlr", restarts=5),
        "apgd-t": partial(apgd_targeted, steps=b.steps, targets=b.targets),
        "fab": partial(fab, steps=b.steps, restarts=1, classes=b.targets),
        "fab-5": partial(fab, steps=b.steps, restarts=5, classes=b.targets),
        "fab-t": partial(fab_targeted, steps=b.steps, targets=b.targets),
        "square": partial(square, queries=b.queries),
    }
    return {part: known[part] for part in ENSEMBLES.get(name, (name,))}


@dataclass(frozen=True)
class Outcome:
    """What became of a batch.

    Attributes:
        clean: [B] predicted class without attack.
        images: [B, C, H, W] adversarial where found, else as given.
        attacked: [B] predicted class of these.
        by: for each image the attack that succeeded; "" if it withstood; "clean" if it was wrong before.
        distance: [B] size of the change.
        no_gradient: number of images whose gradient was exactly zero: attacks by gradient learn nothing there.
    """

    clean: Tensor
    images: Tensor
    attacked: Tensor
    by: list[str]
    distance: Tensor
    no_gradient: int


def run(
    model: Model, images: Tensor, labels: Tensor, keys: Sequence[str], parts: dict[str, Attack], eps: float, norm: Norm,
    tell: Callable[[str, int], None] = lambda attack, left: None,
) -> Outcome:  # fmt: skip
    """Attack one batch.

    Args:
        model: images in 0..1 -> logits, without anything random in it.
        images: float [B, C, H, W] in 0..1.
        labels: [B]. keys: names of the images, which decide everything random.
        parts: from `attacks`.
        eps: radius of the ball in units of 0..1. norm: of the ball.
        tell: hears which attack begins, and how many images are left.
    """
    if not eps > 0:
        raise EverytokenError(f"eps must be above 0, not {eps}")
    with torch.no_grad():
        logits = model(images)
        if not torch.equal(logits, model(images)):
            raise EverytokenError(
                "the model answers the same images differently each time; attacks would measure that. "
                "Use it in evaluation mode and without dropout."
            )
        if not torch.isfinite(logits).all():
            raise EverytokenError(f"the model's logits are not finite for some of {', '.join(keys[:3])} ...")
    clean = logits.argmax(1)
    found, by = images.clone(), ["clean" if wrong else "" for wrong in (clean != labels).tolist()]
    _, _, gradient = value_and_gradient(model, images, cross_entropy(labels))
    no_gradient = int(((gradient == 0).flatten(1).all(1) & (clean == labels)).sum())
    todo = torch.nonzero(clean == labels)[:, 0]
    attacked = clean.clone()
    for name, attack in parts.items():
        if not len(todo):
            break
        tell(name, len(todo))
        x, y = images[todo], labels[todo]
        made = attack(model, x, y, [keys[i] for i in todo.tolist()], eps, norm)
        made = made.detach()
        with torch.no_grad():
            said = model(made).argmax(1)
        _check(made, x, eps, norm, name)
        wrong = said != y
        for i in todo[wrong].tolist():
            by[i] = name
        found[todo[wrong]], attacked[todo[wrong]] = made[wrong], said[wrong]
        todo = todo[~wrong]
    return Outcome(clean, found, attacked, by, distance(found - images, norm), no_gradient)


def _check(made: Tensor, images: Tensor, eps: float, norm: Norm, name: str) -> None:
    """An attack that leaves its ball would prove nothing: that is a bug, not a weak model."""
    far = distance(made - images, norm)
    slack = 1e-6 + 1e-5 * eps
    if not torch.isfinite(made).all() or bool((far > eps + slack).any()):
        raise AssertionError(f"{name} left its ball: {float(far.max())} > {eps}")
    if bool((made < 0).any()) or bool((made > 1).any()):
        raise AssertionError(f"{name} left the range of pixels")
