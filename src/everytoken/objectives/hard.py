"""`hard`: ordinary training, cross entropy of the class token with the true class.

Equation: H(cls, (1-s)·onehot(y) + s/K), mixed by area when images are mixed (All Tokens Matter, eq. 1 and 7).
Cost: that of any cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.functional import compact_cross_entropy, from_labels
from everytoken.mixing import mix_image_target
from everytoken.objectives.base import Objective, View, need_labels


@dataclass(frozen=True)
class HardLabels(Objective):
    """Cross entropy with the true class.

    Args:
        smoothing: label smoothing s.
    """

    smoothing: float = 0.1

    name: ClassVar[str] = "hard"

    @property
    def needs(self) -> frozenset[str]:
        """Labels."""
        return frozenset({"labels"})

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"class": H}"""
        target = from_labels(need_labels(batch), view.logits.shape[-1], self.smoothing)
        if batch.mix is not None:
            target = mix_image_target(target, batch.mix)
        return {"class": compact_cross_entropy(view.logits, target)}
