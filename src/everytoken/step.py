"""One training step as a module: mix the batch, run the model, add up the objectives.

It is a module so that DistributedDataParallel, optimizers and weight averaging see everything that is trained: the
backbone, the token head, and the parameters of objectives (drloc's MLP).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timm.models import group_parameters
from torch import Tensor, nn

from everytoken.data.batch import Batch, TeacherView
from everytoken.errors import EverytokenError
from everytoken.mixing.guided import guide_for
from everytoken.mixing.mix import Guide, GuideKind, Mixer, apply_to_pixels
from everytoken.models import TokenModel, probe
from everytoken.objectives.registry import required_by

_BACKBONE = "model.backbone."


class FrozenTeacher:
    """A classifier that answers while the student trains. Its weights are not trained, saved or averaged.

    Args:
        model: its token view; or, for its tokens alone, a module that answers [B, h, w, D].
        student_norm, own_norm: (mean, std) that the images were normalised with, and that the teacher wants.
        columns: for each of the student's classes, which of the teacher's it is; None: they are the same.
    """

    def __init__(
        self,
        model: nn.Module,
        student_norm: tuple[Sequence[float], Sequence[float]],
        own_norm: tuple[Sequence[float], Sequence[float]],
        columns: Sequence[int] | None = None,
    ) -> None:
        self.columns = None if columns is None else torch.tensor(columns)
        self.model: Any = model.eval().requires_grad_(False)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in student_norm)
        own_mean, own_std = (torch.tensor(v).view(1, -1, 1, 1) for v in own_norm)
        self.scale, self.shift = std / own_std, (mean - own_mean) / own_std

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenTeacher:
        return self  # copies of a step, such as averaged weights, share it

    @torch.no_grad()
    def __call__(self, images: Tensor, cells: bool) -> TeacherView:
        """Images as the student gets them -> class logits and, if asked for, logits at every cell."""
        images = self.normalised(images)
        answers = list(self.model.class_and_cell_logits(images) if cells else (self.model(images).logits,))
        return TeacherView(*(answers if self.columns is None else [logits[..., self.columns] for logits in answers]))

    @torch.no_grad()
    def tokens(self, images: Tensor) -> Tensor:
        """Images as the student gets them -> the teacher's tokens [B, h, w, D]."""
        answer = self.model(self.normalised(images))
        return answer if isinstance(answer, Tensor) else answer.grid

    def normalised(self, images: Tensor) -> Tensor:
        """The student's images, normalised as the teacher wants them. The teacher follows them to their device."""
        if self.scale.device != images.device:
            self.model.to(images.device)
            self.scale, self.shift = self.scale.to(images.device), self.shift.to(images.device)
            self.columns = None if self.columns is None else self.columns.to(images.device)
        return images * self.scale + self.shift


class TokenStep(nn.Module):
    """Batch -> loss terms. One module for model and objectives: what to hand to DistributedDataParallel.

        step = TokenStep(model, {"hard": HardLabels(), "drloc": Drloc(model)})
        optimizer = torch.optim.AdamW(step.parameters())
        step = DistributedDataParallel(step)                    # with several processes
        step(Batch(images, labels))["loss"].backward()

    Args:
        model: the student.
        objectives: what it learns, by name.
        mixer: draws how each batch is mixed.
        teacher: for objectives and mixers that need one.
        compile: compile the model, in place: state dict and copies stay plain. Mixing, teacher and objectives stay
            outside, as targets have another shape in every batch.
        token_vote: in evaluation, add this much of the strongest token logit of each class.
        norm_eval: batch norms of the backbone keep their statistics in training.
        class_offsets: [K] to add to the class logits in training only (logit adjustment, Menon et al. 2021).
    """

    def __init__(
        self,
        model: TokenModel,
        objectives: Mapping[str, nn.Module],
        mixer: Mixer | None = None,
        teacher: FrozenTeacher | None = None,
        compile: bool = False,
        token_vote: float = 0.0,
        norm_eval: bool = False,
        class_offsets: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_offsets", class_offsets, persistent=False)
        self.norm_eval = norm_eval
        self.model = model
        self.token_vote = token_vote
        self.objectives = nn.ModuleDict(objectives)
        self.mixer = mixer
        self.teacher = teacher
        self.grid: tuple[int, int] | None = None
        requires = [required_by(objective) for objective in objectives.values()]
        # objectives of others may not say what they need; the mixer asks for itself, see `_guide`
        unknown = any(not hasattr(objective, "requires") for objective in objectives.values())
        self.asks_teacher = unknown or any("teacher" in required for required in requires)
        self.asks_teacher_for_tokens = any({"teacher", "token_logits"} <= required for required in requires)
        if any("distill_logits" in required for required in requires):
            model.train_distilled()
        unused_head = getattr(model.backbone, "aux_head", None)
        if unused_head is not None and not model.uses_own_head:
            unused_head.requires_grad_(False)  # DDP wants every trained weight to have a gradient
        if compile:
            model.compile()

    class_offsets: Tensor | None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name, each a scalar; "loss" is their weighted sum; "output" holds the class logits [B, K].

        In evaluation mode the output only.
        """
        if not self.training:
            if self.model._compiled_call_impl is not None:  # the last batch is smaller: one graph for both
                torch._dynamo.maybe_mark_dynamic(batch.images, 0)
            return {"output": self.model(batch.images).voted(self.token_vote)}
        for objective in self.objectives.values():
            before_mixing: Callable[[Batch], Batch] | None = getattr(objective, "before_mixing", None)
            batch = batch if before_mixing is None else before_mixing(batch)
        batch = self.mixed(batch)
        view = self.model(batch.images, batch.mix)
        if self.class_offsets is not None:
            view = replace(view, logits=view.logits + self.class_offsets)
        if self.teacher is not None and self.asks_teacher:
            batch = replace(batch, teacher=self.teacher(batch.images, self.asks_teacher_for_tokens))
        losses: list[Tensor] = []
        terms: dict[str, Tensor] = {}
        for name, objective in self.objectives.items():
            result = objective(view, batch)
            if not isinstance(result, dict) or "loss" not in result:
                raise EverytokenError(f'objective {name!r} must return a dict with "loss".')
            losses.append(result["loss"])
            terms |= {f"{name}/{term}": value.detach() for term, value in result.items() if term != "loss"}
        if not losses:
            raise EverytokenError("there is nothing to train on: no objectives.")
        return {"loss": sum(losses[1:], start=losses[0]), **terms, "output": view.logits.detach()}

    def train(self, mode: bool = True) -> TokenStep:
        """Training mode; batch norms that are frozen, or whose statistics are kept, stay in evaluation mode."""
        super().train(mode)
        for module in self.model.backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                frozen = self.norm_eval or not any(p.requires_grad for p in module.parameters())
                module.train(mode and not frozen)
        return self

    def mixed(self, batch: Batch) -> Batch:
        """The batch with its mix drawn and, for pixels, carried out."""
        if self.mixer is None:
            return batch
        images = batch.images
        size = (images.shape[-2], images.shape[-1])
        if self.grid is None:
            self.grid = probe(self.model, size, images.shape[1])
        rng = np.random.default_rng(int(torch.randint(2**62, ()))) if batch.key is None else batch.key.generator("mix")
        mix = self.mixer.draw(len(batch), size, self.grid, rng, images.device, self._guide(batch))
        if mix is None:
            return batch
        return replace(batch, images=apply_to_pixels(images, mix) if mix.level == "pixels" else images, mix=mix)

    def _guide(self, batch: Batch) -> Guide:
        """What mixers that look at images may ask; the teacher answers if there is one and no gradient is wanted."""

        def guide(kind: GuideKind) -> Tensor:
            if self.teacher is not None and kind == "attention":
                return guide_for(self.teacher.model, self.teacher.normalised(batch.images), batch.labels)(kind)
            return guide_for(self.model, batch.images, batch.labels)(kind)

        return guide

    def no_weight_decay(self) -> set[str]:
        """Parameters that the backbone exempts from weight decay; timm's optimizer factory asks."""
        exempt: set[str] = getattr(self.model.backbone, "no_weight_decay", set)()
        return {_BACKBONE + name for name in exempt}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Parameter name -> number of its layer, for layer-wise learning rates; timm's optimizer factory asks.

        What does not belong to the backbone is grouped with its last layer, the classifier.
        """
        backbone: Any = self.model.backbone
        layers = group_parameters(backbone, backbone.group_matcher(coarse=coarse), reverse=True)
        last = max(layers.values())
        return lambda name: layers.get(name.removeprefix(_BACKBONE), last) if name.startswith(_BACKBONE) else last
