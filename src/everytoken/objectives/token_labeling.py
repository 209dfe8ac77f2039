"""`token`: token labeling, the method of All Tokens Matter.

Equations 3, 4: L = H(cls) + β · mean over tokens of H(token), β = 0.5, with labels from score maps through RoIAlign.
Differently from the released code: β is the paper's (it has 1.0), crops are read in the right order, tokens without a
label do not count, and the token head may speak other classes than the class head (`class_target="truth"`).
Cost: the token head, about 1 % of a ViT's multiply-adds at 1000 classes, and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import compact_cross_entropy, participating
from everytoken.mixing import mix_token_target
from everytoken.objectives.base import View, draws, need_token_logits
from everytoken.objectives.relabel import FromMaps


@dataclass(frozen=True)
class TokenLabeling(FromMaps):
    """H(cls) + β · mean H(token).

    Args:
        beta: β.
        participation: part of each image's tokens that count (the paper's ablation); 1 = all.
        class_term: False leaves H(cls) to another objective.
    """

    beta: float = 0.5
    participation: float = 1.0
    class_term: bool = True

    name: ClassVar[str] = "token"

    @property
    def needs(self) -> frozenset[str]:
        """Maps and a token head, and labels when the truth is asked for."""
        asked = super().needs if self.class_term else frozenset({"maps"})
        return asked | {"token_logits"}

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"class": H(cls), "token": β · mean H(token)}"""
        logits = need_token_logits(view)
        target, made = batch.token_target, None
        if target is None:
            made = self.labels(batch, (logits.shape[1], logits.shape[2]))
            target = made.tokens
        if logits.shape[-1] != target.num_classes:
            raise EverytokenError(
                f"the token head has {logits.shape[-1]} outputs, but the score maps speak {target.num_classes} "
                f"classes: build TokenModel(backbone, token_classes={target.num_classes})."
            )
        if batch.mix is not None and not batch.mix.unmixes:
            target = mix_token_target(target, batch.mix)
        weight = target.weight
        if self.participation < 1:
            generator = draws(batch, "participation", weight.device)
            weight = weight * participating(weight.shape, self.participation, generator, weight.device)
        terms = {"token": compact_cross_entropy(logits, target, weight=weight) * self.beta}
        if self.class_term:
            terms["class"] = compact_cross_entropy(view.logits, self.image_target(view, batch, made))
        return terms
