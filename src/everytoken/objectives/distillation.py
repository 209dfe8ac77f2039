"""`distillation`: a teacher's class logits, soft or hard, through the class token or a distillation token.

Papers: Hinton et al. (soft: t² · KL at temperature t); DeiT (hard: cross entropy with the teacher's best class, and a
distillation token with its own head). The baseline that All Tokens Matter compares online token labeling with.
Use it beside `hard`: DeiT's hard distillation is weight 0.5 each, its soft one 0.9 for `hard` and 0.1 for this.
Cost: the teacher's forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import distillation_loss
from everytoken.objectives.base import Objective, check_choice, need_batch, need_teacher
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

    def terms(self, view: TokenView, batch: Batch | None) -> dict[str, Tensor]:
        """{"class": loss}"""
        batch = need_batch(batch, self.name)
        logits = view.logits if self.through == "class" else view.distill_logits
        if logits is None:
            raise EverytokenError(
                "this view has no logits of a distillation token: take a distilled model, such as "
                "deit_small_distilled_patch16_224, call model.train_distilled(), and train it (model.train())."
            )
        teacher = need_teacher(batch, self.name)
        loss = mean_over_partners(
            batch,
            lambda z: distillation_loss(logits, z, self.kind, self.temperature, reduction="none"),
            teacher.logits,
        )
        return {"class": loss}
