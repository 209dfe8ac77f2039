"""What mixers that look at images are shown: which places matter, by contrast, by a network, or by gradient.

"attention": a network's answer for its own first choice at every cell; for networks with a class token, how like the
class token each token is (the class head is not trained to read the others). "gradient": the size of the gradient of
the student's loss at the pixels (Puzzle-Mix). Networks run in evaluation mode and keep no trace of it.
Cost: one forward pass more for "attention", a forward and a backward pass for "gradient".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.mixing import Guide, GuideKind, contrast_saliency
from everytoken.models import TokenModel


def guide_for(model: TokenModel, images: Tensor, labels: Tensor | None) -> Guide:
    """A guide to a batch.

    Args:
        model: the network that looks.
        images: [B, C, H, W] as that network wants them.
        labels: [B] classes for the gradient, -1 = not known.
    """

    def guide(kind: GuideKind) -> Tensor:
        if kind == "saliency":
            return contrast_saliency(images)
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            return importance_by_gradient(model, images, labels) if kind == "gradient" else importance(model, images)
        finally:
            for part, was in modes:
                part.training = was

    return guide


@torch.no_grad()
def importance(model: TokenModel, images: Tensor) -> Tensor:
    """[B, h, w], smallest 0: how strongly each cell speaks for what the network sees in the image."""
    view = model(images)
    if view.prefix is not None:
        cells = F.cosine_similarity(view.grid.float(), view.prefix[:, 0, None, None].float(), dim=-1)
    else:
        logits = model.cell_logits(images).float()
        first = logits.mean((1, 2)).argmax(-1)
        cells = logits.gather(-1, first[:, None, None, None].expand(-1, *logits.shape[1:3], 1))[..., 0]
    return cells - cells.amin((1, 2), keepdim=True)


def importance_by_gradient(model: TokenModel, images: Tensor, labels: Tensor | None) -> Tensor:
    """[B, H, W]: size over channels of the gradient of the cross entropy at each pixel; weights get no gradient."""
    if labels is None:
        raise EverytokenError("Puzzle-Mix looks at the gradient of the loss, and these images have no labels.")
    with torch.enable_grad():
        pixels = images.detach().float().requires_grad_()
        loss = F.cross_entropy(model(pixels).logits.float(), labels, reduction="sum", ignore_index=-1)
        (gradient,) = torch.autograd.grad(loss, pixels)
    return gradient.square().sum(1).sqrt()
