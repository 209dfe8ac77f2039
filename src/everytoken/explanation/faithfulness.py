"""Does a relevance map point at what the model uses? Take the places away, or give them, and watch the class.

Paper: Petsiuk, Das and Saenko, "RISE" (2018). Deletion: cells are replaced from the most relevant to the least, and the
probability of the class should fall early; insertion: cells are given in that order to an image that shows nothing, and
it should rise early. The area under the curve is the measure; a map that means nothing scores as a random order does.
What we do differently: whole cells of the map, not pixels; what a missing cell shows is the image's mean colour, or a
picture of your own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.explanation.saliency import backbone_of, class_logits, evaluating


def deletion_curve(
    model: nn.Module, images: Tensor, classes: Tensor, maps: Tensor, steps: int = 16, blank: Tensor | None = None
) -> Tensor:
    """Probability of the class while the most relevant cells are taken away, [B, steps + 1]; lower is better.

    Args:
        model: a `TokenModel` or a timm model.
        images: [B, C, H, W], normalised.
        classes: [B].
        maps: [B, h, w] relevance.
        steps: equal parts in which the cells go.
        blank: [B or 1, C, H or 1, W or 1], what missing cells show. None: the mean colour of each image.
    """
    return _curve(model, images, classes, maps, steps, blank, insert=False)


def insertion_curve(
    model: nn.Module, images: Tensor, classes: Tensor, maps: Tensor, steps: int = 16, blank: Tensor | None = None
) -> Tensor:
    """Probability of the class while the most relevant cells are given, [B, steps + 1]; higher is better.

    Arguments as in `deletion_curve`.
    """
    return _curve(model, images, classes, maps, steps, blank, insert=True)


def area_under(curve: Tensor) -> Tensor:
    """Mean height of curves [..., steps + 1] over equal steps (trapezoids), [...]."""
    return (curve[..., 1:] + curve[..., :-1]).mean(-1) / 2


def mass_inside(maps: Tensor, mask: Tensor) -> Tensor:
    """The part of a map's relevance that lies in a mask, [B]: compare it with the mask's part of the area.

    Args:
        maps: [B, h, w], 0 or more.
        mask: [B, h, w] bool or 0..1, on the same grid.
    """
    total = maps.sum((1, 2)).clamp(min=torch.finfo(maps.dtype).tiny)
    return (maps * mask).sum((1, 2)) / total


def points_inside(maps: Tensor, mask: Tensor) -> Tensor:
    """The pointing game, [B] bool: whether the highest cell lies in the mask [B, h, w]."""
    best = maps.flatten(1).argmax(1, keepdim=True)
    return mask.flatten(1).gather(1, best)[:, 0] > 0


@torch.no_grad()
def _curve(
    model: nn.Module, images: Tensor, classes: Tensor, maps: Tensor, steps: int, blank: Tensor | None, insert: bool
) -> Tensor:
    if maps.dim() != 3 or len(maps) != len(images) or classes.shape != images.shape[:1] or steps < 1:
        raise EverytokenError(
            f"a curve of {len(images)} images needs maps [B, h, w], classes [B] and at least one step; got "
            f"{list(maps.shape)}, {list(classes.shape)} and {steps}."
        )
    b, h, w = maps.shape
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).view(b, 1, h, w).float()
    rank = F.interpolate(rank, images.shape[-2:], mode="nearest")
    blank = images.mean((2, 3), keepdim=True) if blank is None else blank
    backbone, heights = backbone_of(model), []
    with evaluating(backbone):
        for step in range(steps + 1):
            chosen = rank < round(step * h * w / steps)
            shown = torch.where(chosen == insert, images, blank)
            chance = class_logits(backbone, shown).float().softmax(-1)
            heights.append(chance.gather(1, classes[:, None])[:, 0])
    return torch.stack(heights, dim=1)
