"""`hard`: ordinary training, cross entropy of the class token with the true class.

Equation: H(cls, (1-s)·onehot(y) + s/K), mixed by area when images are mixed (All Tokens Matter, eq. 1 and 7).
For multi-label images, [B, K]: the same target, with 1 for each label, and binary cross entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.functional import from_labels, label_cross_entropy
from everytoken.mixing.mix import mix_image_target
from everytoken.objectives.base import Objective, need

if TYPE_CHECKING:
    from everytoken.models import TokenView


class HardLabels(Objective):
    """Cross entropy of class logits [B, K] with the true classes [B], or binary cross entropy with several [B, K].

    Args:
        smoothing: label smoothing s.
        weight: of the term in the loss.

    Example: `HardLabels()(model(images), Batch(images, labels))["loss"].backward()`
    """

    name = "hard"
    requires = frozenset({"labels"})
    teaches_class = True
    multi_label = True

    def __init__(self, smoothing: float = 0.1, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.smoothing = smoothing

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"class": H}"""
        labels = need(batch.labels, self.name, "class labels in the batch")
        target = from_labels(labels, view.logits.shape[-1], self.smoothing)
        if batch.mix is not None:
            target = mix_image_target(target, batch.mix)
        return {"class": label_cross_entropy(view.logits, target, labels)}
