"""`distillation`: a teacher's class logits, soft or hard, through the class token or a distillation token.

Papers: Hinton et al. (soft: t² · KL at temperature t); DeiT (hard: cross entropy with the teacher's best class, and a
distillation token with its own head). The baseline that All Tokens Matter compares online token labeling with.
Use it beside `hard`: DeiT's hard distillation is weight 0.5 each, its soft one 0.9 for `hard` and 0.1 for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.functional import distillation_loss
from everytoken.objectives.base import Objective, check_choice, need
from everytoken.objectives.online_token import mean_over_partners

if TYPE_CHECKING:
    from everytoken.models import TokenView


class Distillation(Objective):
    """Learn a teacher's answers [B, K] about whole images.

    Args:
        kind: "soft" or "hard".
        temperature: t of "soft".
        through: "class" or "distillation", the token that learns.
        weight: of the term in the loss.

    Example:
        with torch.no_grad():
            answer = TeacherView(teacher(images))
        Distillation(kind="soft")(model(images), Batch(images, teacher=answer))["loss"].backward()
    """

    name = "distillation"

    def __init__(
        self,
        kind: Literal["soft", "hard"] = "hard",
        temperature: float = 3.0,
        through: Literal["class", "distillation"] = "class",
        weight: float = 1.0,
    ) -> None:
        super().__init__(weight)
        check_choice(self.name, "kind", kind, ("soft", "hard"))
        check_choice(self.name, "through", through, ("class", "distillation"))
        self.kind, self.temperature, self.through = kind, temperature, through
        self.requires = frozenset({"teacher"} | ({"distill_logits"} if through == "distillation" else set()))

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"class": loss}"""
        token = "a distillation token: a distilled model, model.train_distilled() and model.train()"
        logits = view.logits if self.through == "class" else need(view.distill_logits, self.name, token)
        teacher = need(batch.teacher, self.name, "a teacher's answer in the batch").logits

        def rows(answer: Tensor) -> Tensor:
            return distillation_loss(logits, answer, self.kind, self.temperature, reduction="none")

        return {"class": mean_over_partners(batch, rows, teacher)}
