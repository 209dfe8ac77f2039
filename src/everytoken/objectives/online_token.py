"""`online_token`: token labeling with a teacher that answers during training.

Paper: All Tokens Matter, online token labeling (Table 4): the teacher sees the student's input and labels its tokens.
Equation 3: L = H(cls, y^cls) + β · mean over tokens of H(softmax(teacher token), token).
Differently: teacher grids of any size are resampled, and no K-wide target is kept. Cost: the teacher's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.functional import dense_soft_cross_entropy
from everytoken.mixing.guided import resize
from everytoken.objectives.base import Objective, check_choice, need, need_token_logits
from everytoken.objectives.hard import HardLabels

if TYPE_CHECKING:
    from everytoken.models import TokenView


class OnlineTokenLabeling(Objective):
    """H(cls) + β · mean H(teacher token, token).

    Args:
        beta: β.
        temperature: of teacher and student.
        class_target: what the class token learns: the "truth" (paper), the "teacher"'s class logits, or "none".
        smoothing: of the truth.
        weight: of all terms in the loss.

    Example:
        with torch.no_grad():
            answer = TeacherView(*teacher.class_and_cell_logits(images))   # [B, K] and [B, h, w, K]
        OnlineTokenLabeling()(model(images), Batch(images, labels, teacher=answer))["loss"].backward()
    """

    name = "online_token"

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        class_target: Literal["truth", "teacher", "none"] = "truth",
        smoothing: float = 0.1,
        weight: float = 1.0,
    ) -> None:
        super().__init__(weight)
        check_choice(self.name, "class_target", class_target, ("truth", "teacher", "none"))
        self.beta, self.temperature, self.class_target = beta, temperature, class_target
        self.hard = HardLabels(smoothing)
        self.teaches_class = class_target != "none"
        self.requires = frozenset({"teacher", "token_logits"} | ({"labels"} if class_target == "truth" else set()))

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"token": β · mean H(token), "class": H(cls)}"""
        logits = need_token_logits(view, self.name)
        teacher = need(batch.teacher, self.name, "a teacher's answer in the batch")
        label = need(teacher.token_logits, self.name, "a teacher with token logits, not one that labels whole images")
        label = resize_logits(label, (logits.shape[1], logits.shape[2]))
        mix = None if batch.mix is None else batch.mix.of_tokens
        if mix is None or mix.unmixes:  # the teacher saw what the student's tokens show
            token = dense_soft_cross_entropy(logits, label, self.temperature)
        else:
            own = mix.at((logits.shape[1], logits.shape[2])).expand(logits.shape[:3])
            rows = [dense_soft_cross_entropy(logits, z, self.temperature, "none") for z in (label, label[mix.partner])]
            token = (own * rows[0] + (1 - own) * rows[1]).mean()
        terms = {"token": token * self.beta}
        if self.class_target == "truth":
            terms |= self.hard.terms(view, batch)
        elif self.class_target == "teacher":
            terms["class"] = mean_over_partners(
                batch, lambda z: dense_soft_cross_entropy(view.logits, z, self.temperature, "none"), teacher.logits
            )
        return terms


def mean_over_partners(batch: Batch, rows: Callable[[Tensor], Tensor], teacher_logits: Tensor) -> Tensor:
    """Mean over the batch of `rows(teacher logits) -> [B]`. When tokens were mixed, the teacher saw clean images: its
    answers to both partners count, by area."""
    mix = None if batch.mix is None else batch.mix.of_tokens
    if mix is None:
        return rows(teacher_logits).mean()
    return (mix.ratio * rows(teacher_logits) + (1 - mix.ratio) * rows(teacher_logits[mix.partner])).mean()


def resize_logits(logits: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, h, w, C] on another grid: averaged when it is coarser, bilinear when it is finer."""
    if logits.shape[1:3] == torch.Size(grid):
        return logits
    planes = logits.movedim(-1, 1).float()
    return resize(planes.flatten(0, 1), grid).unflatten(0, planes.shape[:2]).movedim(1, -1)
