"""One training step as a module: mix the batch, look at it through the token view, add up the objectives.

It is a module so that DistributedDataParallel and weight averaging see everything that is trained: the backbone, the
token head, and what objectives bring along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.engine.guide import guide_for
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.keyed import StepKey
from everytoken.mixing import MIXERS, Guide, GuideKind, Mix, Mixer, OneOf, apply_to_pixels
from everytoken.models import TokenModel
from everytoken.objectives import OBJECTIVES, Objective, total_loss

CLASS_TERMS = {"hard", "relabel", "token", "online-token", "alignment", "transmix"}
ALIASES = {"token_labeling": "token", "online_token": "online-token", "distillation": "distill"}


@dataclass(frozen=True)
class TeacherAnswer:
    """A teacher's answer: class logits [B, K] and cell logits [B, h, w, K]."""

    logits: Tensor
    token_logits: Tensor | None


class FrozenTeacher(nn.Module):
    """A classifier that answers while the student trains. Its weights are not trained, saved or averaged.

    Args:
        model: its token view.
        student_norm, own_norm: (mean, std) that the images were normalised with, and that the teacher wants.
    """

    def __init__(
        self,
        model: TokenModel,
        student_norm: tuple[Sequence[float], Sequence[float]],
        own_norm: tuple[Sequence[float], Sequence[float]],
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in student_norm)
        own_mean, own_std = (torch.tensor(v).view(1, -1, 1, 1) for v in own_norm)
        self.register_buffer("scale", std / own_std, persistent=False)
        self.register_buffer("shift", (mean - own_mean) / own_std, persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, cells: bool) -> TeacherAnswer:
        """Images as the student gets them -> class logits and, if asked for, logits at every cell."""
        self.model.eval()
        images = self.as_wanted(images)
        if cells:
            return TeacherAnswer(*self.model.class_and_cell_logits(images))
        return TeacherAnswer(self.model(images).logits, None)

    def as_wanted(self, images: Tensor) -> Tensor:
        """The student's images, normalised as the teacher wants them."""
        return images * self.get_buffer("scale") + self.get_buffer("shift")


class TokenStep(nn.Module):
    """Batch -> loss terms.

    Args:
        model: the student.
        objectives: what it learns.
        mixer: draws how each batch is mixed, or None.
        teacher: for objectives that need one; kept out of the state dict.
    """

    def __init__(
        self,
        model: TokenModel,
        objectives: Sequence[Objective],
        mixer: Mixer | OneOf | None = None,
        teacher: FrozenTeacher | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.objectives = list(objectives)
        self.mixer = mixer
        self._teacher = [teacher]  # in a list, so that it is not a submodule
        brought = {o.name: o.modules() for o in objectives}
        self.brought = nn.ModuleDict({name: module for name, module in brought.items() if module is not None})
        if compile:
            model.compile()  # in place: the state dict and copies stay plain
        self.grid: tuple[int, int] | None = None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name, each a scalar; "loss" is their weighted sum; "output" holds the class logits [B, K].

        In evaluation mode the output only.
        """
        batch = self.mixed(batch)
        view = self.model(batch.images, batch.mix)
        if not self.training:
            return {"output": view.logits}
        loss, terms = total_loss(self.objectives, view, replace(batch, teacher=self._ask_teacher(batch)))
        return {"loss": loss, **terms, "output": view.logits.detach()}

    def mixed(self, batch: Batch) -> Batch:
        """The batch with its mix drawn and, for pixels, carried out."""
        if self.mixer is None or not self.training:
            return batch
        size = (batch.images.shape[-2], batch.images.shape[-1])
        rng = (batch.key or StepKey()).generator("mix")
        guide = self._guide(batch)
        mix: Mix | None = self.mixer.draw(len(batch), size, self._grid(batch.images), rng, batch.images.device, guide)
        if mix is None:
            return batch
        images = apply_to_pixels(batch.images, mix) if mix.level == "pixels" else batch.images
        return replace(batch, images=images, mix=mix)

    def _guide(self, batch: Batch) -> Guide:
        """What mixers that look at images may ask; the teacher answers if there is one and no gradient is wanted."""
        (teacher,) = self._teacher

        def guide(kind: GuideKind) -> Tensor:
            if teacher is not None and kind == "attention":
                return guide_for(teacher.model, teacher.as_wanted(batch.images), batch.labels)(kind)
            return guide_for(self.model, batch.images, batch.labels)(kind)

        return guide

    def _grid(self, images: Tensor) -> tuple[int, int]:
        if self.grid is None:
            from everytoken.models import probe

            self.grid = probe(self.model, (images.shape[-2], images.shape[-1]), images.shape[1])
        return self.grid

    def _ask_teacher(self, batch: Batch) -> TeacherAnswer | None:
        (teacher,) = self._teacher
        if teacher is None:
            return None
        return teacher(batch.images, any("token_logits" in o.needs and "teacher" in o.needs for o in self.objectives))

    def to(self, *args: Any, **kwargs: Any) -> TokenStep:
        """Move, and take the teacher along."""
        (teacher,) = self._teacher
        if teacher is not None:
            teacher.to(*args, **kwargs)
        return super().to(*args, **kwargs)


def build_objectives(
    settings: Mapping[str, Mapping[str, Any]], model: TokenModel, smoothing: float = 0.1
) -> list[Objective]:
    """Objectives by name; `hard` is added when nothing else teaches the class token.

    Args:
        settings: name -> its fields. `token_labeling: {weight: w}` is `token: {beta: w}`, as the papers write it.
        model: whose token width and family some objectives want to know.
        smoothing: label smoothing of those that have it and do not say their own.
    """
    known = {"dim": model.num_features, "family": model.family.title, "smoothing": smoothing}
    out: list[Objective] = []
    wanted = {ALIASES.get(name, name): dict(fields) for name, fields in settings.items()}
    if "token_labeling" in settings and "weight" in wanted["token"]:
        wanted["token"]["beta"] = wanted["token"].pop("weight")
    if not any(_teaches_class_token(name, fields) for name, fields in wanted.items()):
        wanted = {"hard": {}, **wanted}
    for name, fields in wanted.items():
        if name not in OBJECTIVES:
            raise EverytokenError(f"there is no objective {name!r}.{did_you_mean(name, [*OBJECTIVES, *ALIASES])}")
        allowed = OBJECTIVES[name].__dataclass_fields__
        for field in fields:
            if field not in allowed:
                raise EverytokenError(f"objective {name!r} has no setting {field!r}.{did_you_mean(field, allowed)}")
        extra = {k: v for k, v in known.items() if k in allowed and k not in fields}
        objective = OBJECTIVES[name](**{**extra, **fields})
        attach = getattr(objective, "attach", None)
        if attach is not None:  # it wants to see the backbone: for its width, its layers or its shares
            attach(model)
        out.append(objective)
    return out


def _teaches_class_token(name: str, fields: Mapping[str, Any]) -> bool:
    return name in CLASS_TERMS and bool(fields.get("class_term", True)) and fields.get("class_target") != "none"


def build_mixer(settings: Mapping[str, Mapping[str, Any]]) -> Mixer | OneOf | None:
    """No entry: no mixing. One: that one. Several: one of them for each batch, with `odds` (default: equal)."""
    mixers, odds = [], []
    for name, fields in settings.items():
        if name not in MIXERS:
            raise EverytokenError(f"there is no mixing method {name!r}.{did_you_mean(name, MIXERS)}")
        fields = dict(fields)
        odds.append(float(fields.pop("odds", 1.0)))
        allowed = MIXERS[name].__dataclass_fields__
        for field in fields:
            if field not in allowed:
                raise EverytokenError(f"mixing {name!r} has no setting {field!r}.{did_you_mean(field, allowed)}")
        mixers.append(MIXERS[name](**fields))
    if not mixers:
        return None
    return mixers[0] if len(mixers) == 1 else OneOf(mixers, odds)
