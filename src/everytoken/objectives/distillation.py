"""`distill`: a teacher's class logits, soft or hard, through the class token or a distillation token.

Papers: Hinton et al. (soft: t² · KL at temperature t); DeiT (hard: cross entropy with the teacher's best class, and a
distillation token with its own head). The baseline that All Tokens Matter compares online token labeling with.
Use it beside `hard`: DeiT's hard distillation is weight 0.5 each, its soft one 0.9 for `hard` and 0.1 for `distill`.
Cost: the teacher's forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import distillation_loss
from everytoken.objectives.base import Objective, View, need_teacher
from everytoken.objectives.online import mixed_rows


@dataclass(frozen=True)
class Distillation(Objective):
    """Learn a teacher's answers about whole images.

    Args:
        kind: "soft" or "hard".
        temperature: t of "soft".
        through: "class" or "distillation", the token that learns.
    """

    kind: Literal["soft", "hard"] = "hard"
    temperature: float = 3.0
    through: Literal["class", "distillation"] = "class"

    name: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        if self.kind not in ("soft", "hard"):
            raise EverytokenError(f"distillation is 'soft' or 'hard', not '{self.kind}'.")
        if self.through not in ("class", "distillation"):
            raise EverytokenError(
                f"distillation goes through the 'class' or 'distillation' token, not '{self.through}'."
            )

    @property
    def needs(self) -> frozenset[str]:
        """A teacher, and perhaps a distillation token."""
        return frozenset({"teacher"} | ({"distill_logits"} if self.through == "distillation" else set()))

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"class": loss}"""
        logits = view.logits if self.through == "class" else view.distill_logits
        if logits is None:
            raise EverytokenError(
                "this model has no distillation token in training; take a distilled model (such as "
                "deit_small_distilled_patch16_224) or distill through the class token."
            )
        teacher = need_teacher(batch)
        loss = mixed_rows(
            batch,
            lambda z: distillation_loss(logits, z, self.kind, self.temperature, reduction="none"),
            teacher.logits,
        )
        return {"class": loss}
