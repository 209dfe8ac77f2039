"""`online-token`: token labeling with a teacher that answers during training.

Paper: All Tokens Matter, online token labeling (Table 4): the teacher sees the student's input and labels its tokens.
Equation: L = H(cls) + β · mean over tokens of H(softmax(teacher token), token).
Differently: teacher grids of any size are resampled, and no K-wide target is kept. Cost: the teacher's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import dense_soft_cross_entropy
from everytoken.objectives.base import Objective, View, need_teacher, need_token_logits
from everytoken.objectives.hard import HardLabels


@dataclass(frozen=True)
class OnlineTokens(Objective):
    """H(cls) + β · mean H(teacher token, token).

    Args:
        beta: β.
        temperature: of teacher and student.
        class_target: what the class token learns: the "teacher"'s class logits, the "truth", or "none" (no term).
        smoothing: of the truth.
    """

    beta: float = 0.5
    temperature: float = 1.0
    class_target: Literal["teacher", "truth", "none"] = "teacher"
    smoothing: float = 0.1

    name: ClassVar[str] = "online-token"

    @property
    def needs(self) -> frozenset[str]:
        """A teacher and a token head, and labels when the truth is asked for."""
        return frozenset({"teacher", "token_logits"} | ({"labels"} if self.class_target == "truth" else set()))

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"token": β · mean H(token), "class": H(cls)}"""
        teacher, logits = need_teacher(batch), need_token_logits(view)
        if teacher.token_logits is None:
            raise EverytokenError(
                "'online-token' needs a teacher with token logits; this one labels whole images only."
            )
        label = resize_logits(teacher.token_logits, (logits.shape[1], logits.shape[2]))
        mix = batch.mix
        if mix is None or mix.level == "pixels" or mix.unmixes:  # the teacher saw what the student's tokens show
            token = dense_soft_cross_entropy(logits, label, self.temperature)
        else:
            own = mix.at((logits.shape[1], logits.shape[2])).expand(logits.shape[:3])
            rows = [dense_soft_cross_entropy(logits, z, self.temperature, "none") for z in (label, label[mix.partner])]
            token = (own * rows[0] + (1 - own) * rows[1]).mean()
        terms = {"token": token * self.beta}
        if self.class_target == "truth":
            terms |= HardLabels(smoothing=self.smoothing)(view, batch)
        elif self.class_target == "teacher":
            terms["class"] = mixed_rows(
                batch, lambda z: dense_soft_cross_entropy(view.logits, z, self.temperature, "none"), teacher.logits
            )
        return terms


def mixed_rows(batch: Batch, rows: Callable[[Tensor], Tensor], teacher_logits: Tensor) -> Tensor:
    """Mean over the batch of `rows(teacher logits) -> [B]`. When tokens were mixed, the teacher saw clean images: its
    answers to both partners count, by area."""
    mix = batch.mix
    if mix is None or mix.level == "pixels":
        return rows(teacher_logits).mean()
    return (mix.ratio * rows(teacher_logits) + (1 - mix.ratio) * rows(teacher_logits[mix.partner])).mean()


def resize_logits(logits: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, h, w, C] on another grid: averaged when it is coarser, bilinear when it is finer."""
    if logits.shape[1:3] == torch.Size(grid):
        return logits
    planes = logits.permute(0, 3, 1, 2).float()
    if grid[0] <= logits.shape[1] and grid[1] <= logits.shape[2]:
        planes = F.adaptive_avg_pool2d(planes, grid)
    else:
        planes = F.interpolate(planes, grid, mode="bilinear", align_corners=False)
    return planes.permute(0, 2, 3, 1)
