"""What attacks climb: cross entropy and the difference of logits ratio (Croce and Hein 2020, equations 5 and 6).

The ratio does not change when logits are shifted or multiplied, so a model cannot hide by scaling its logits. It needs
three classes (four when targeted); with fewer, the nearest there is serves: the spread of all logits, and for two
classes the plain margin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor], Tensor]  # logits [B, K] -> [B]


def cross_entropy(labels: Tensor) -> Loss:
    """-log p(label)"""
    return lambda logits: F.cross_entropy(logits, labels, reduction="none")


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Logit of the label minus the largest other one."""
    own = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return own - others.amax(1)


def margin(labels: Tensor) -> Loss:
    """Negative margin: above 0 when the model is wrong."""
    return lambda logits: -_margin(logits, labels)


def dlr(labels: Tensor) -> Loss:
    """-(z_y - max_{i != y} z_i) / (z_(1) - z_(3))"""

    def loss(logits: Tensor) -> Tensor:
        ordered = logits.sort(dim=1, descending=True).values
        spread = ordered[:, 0] - ordered[:, 2] if logits.shape[1] > 2 else torch.ones_like(ordered[:, 0])
        return -_margin(logits, labels) / (spread + 1e-12)

    return loss


def targeted_dlr(labels: Tensor, targets: Tensor) -> Loss:
    """-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2)"""

    def loss(logits: Tensor) -> Tensor:
        ordered = logits.sort(dim=1, descending=True).values
        if logits.shape[1] > 3:
            spread = ordered[:, 0] - (ordered[:, 2] + ordered[:, 3]) / 2
        else:
            spread = ordered[:, 0] - ordered[:, 2] if logits.shape[1] == 3 else torch.ones_like(ordered[:, 0])
        own, other = (logits.gather(1, c[:, None])[:, 0] for c in (labels, targets))
        return -(own - other) / (spread + 1e-12)

    return loss


def value_and_gradient(model: Model, images: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [B, K], loss [B], its gradient by the images)"""
    with torch.enable_grad():
        leaf = images.detach().requires_grad_()
        logits = model(leaf)
        values = loss(logits)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return logits.detach(), values.detach(), gradient.detach()


@torch.no_grad()
def rivals(model: Model, images: Tensor, labels: Tensor, count: int) -> Tensor:
    """[B, count]: the classes other than the label with the largest logits, the best first."""
    logits = model(images).scatter(1, labels[:, None], -torch.inf)
    return logits.topk(min(count, logits.shape[1] - 1), dim=1).indices
