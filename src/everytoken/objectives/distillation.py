"""What a teacher knows: class logits (`distillation`), token logits (`online_token`), tokens (`feature_distillation`).

`distillation`: soft or hard, through the class token or a distillation token. Papers: Hinton et al. (soft: t² · KL at
temperature t); DeiT (hard: cross entropy with the teacher's best class, and a distillation token with its own head).
The baseline that All Tokens Matter compares online token labeling with. Use it beside `hard`: DeiT's hard distillation
is weight 0.5 each, its soft one 0.9 for `hard` and 0.1 for this.

`online_token`: token labeling with a teacher that answers during training. Paper: All Tokens Matter, online token
labeling (Table 4): the teacher sees the student's input and labels its tokens.
Equation 3: L = H(cls, y^cls) + β · mean over tokens of H(softmax(teacher token), token).
Differently: teacher grids of any size are resampled, and no K-wide target is kept. Cost: the teacher's forward pass.

`feature_distillation`: every token learns a teacher's token of its own place: mean over tokens of 1 - cos(P·x_i, y_i),
where x_i is the student's token, P a trained linear layer and y_i the teacher's token averaged over the same area of
the image, by the code that samples score maps (`sample_features`). No labels are needed.
Teacher and student may have grids of any size, and images may be mixed: the teacher sees every image before, and each
token learns the token of the image that it shows; one that shows two, both by its parts of the area.
Features can be computed once for the whole images and stored as score maps of all D channels; then crops, flips and
rotations are followed by placements. Cost: the teacher's forward pass, or reading 4 D bytes per stored token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import dense_soft_cross_entropy, distillation_loss
from everytoken.functional.sampling import sample_features, sample_maps
from everytoken.maps import Maps
from everytoken.mixing.guided import resize
from everytoken.mixing.mix import placed
from everytoken.models import TokenModel, TokenView
from everytoken.objectives.base import Objective, check_choice, need, need_token_logits
from everytoken.objectives.hard import HardLabels
from everytoken.step import FrozenTeacher


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


class FeatureDistillation(Objective):
    """Learn a teacher's tokens with the student's tokens [B, h, w, D].

    Args:
        teacher: a timm model, a TokenModel, any module with `num_features` that answers [B, h, w, D], a FrozenTeacher
            (if it wants images normalised otherwise), or `Maps` of its features.
        model: the TokenModel that is trained. Or `dim`.
        size: (height, width) to which images are resized for the teacher; None: as the student sees them.
        weight: of the term in the loss.
        dim: instead of `model`: the channels D of the student's token grids.

    Example:
        distillation = FeatureDistillation(timm.create_model("resnet50", pretrained=True), model)
        distillation(model(images), Batch(images))["loss"].backward()
        images, mix = MixToken()(images, grid=(14, 14))
        distillation(model(images, mix), Batch(images))["loss"].backward()     # Batch: images as they were before
    """

    name = "feature_distillation"
    multi_label = True
    built_from = frozenset({"teacher", "model", "dim"})

    def __init__(
        self,
        teacher: nn.Module | FrozenTeacher | Maps | None,
        model: TokenModel | None = None,
        size: tuple[int, int] | None = None,
        weight: float = 1.0,
        *,
        dim: int | None = None,
    ) -> None:
        super().__init__(weight)
        if (model is None) == (dim is None):
            raise ValueError("feature_distillation takes a TokenModel, or the channels of a grid, dim=384")
        self.size = None if size is None else (size[0], size[1])
        if teacher is None:
            raise EverytokenError(f"{self.name} needs a teacher (teacher: resnet50) or stored features (maps).")
        self.teacher: FrozenTeacher | None = None  # no module: it is neither trained nor saved
        if isinstance(teacher, Maps):
            self.requires, channels = frozenset({"maps"}), teacher.num_classes
            if teacher.meta.top_k < channels:
                kept = f"the best {teacher.meta.top_k} of {channels} classes"
                raise EverytokenError(f"{self.name}: {teacher.path} keeps {kept}, so these are no features.")
        else:
            if isinstance(teacher, nn.Module):
                network = TokenModel(teacher) if hasattr(teacher, "forward_features") else teacher
                teacher = FrozenTeacher(network, ((0.0,), (1.0,)), ((0.0,), (1.0,)))
            self.teacher, channels = teacher, int(teacher.model.num_features)
        device = None if model is None else next(model.parameters()).device
        self.projection = nn.Linear(dim or model.num_features, channels, device=device)  # type: ignore[union-attr]

    def before_mixing(self, batch: Batch) -> Batch:
        """The batch with the teacher's tokens; `TokenStep` asks before it mixes the images."""
        if self.teacher is None:
            return batch
        images = batch.images
        if self.size is not None:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        return replace(batch, teacher_tokens=self.teacher.tokens(images))

    def forward(self, view: TokenView | Tensor, batch: Batch | None = None) -> dict[str, Tensor]:
        """As `Objective.forward`; nothing in evaluation. The batch has the images as they were before mixing, unless
        `before_mixing` has been called; the view says how they were mixed."""
        if self.training and self.teacher is not None:
            batch = need(batch, self.name, "the images: feature_distillation(view, Batch(images))")
            if batch.teacher_tokens is None:
                if batch.mix is not None and batch.mix.level == "pixels":
                    wrong = "the teacher must see images before they are mixed: call before_mixing(batch) first"
                    raise EverytokenError(f"{self.name}: {wrong}, or give the images as they were without batch.mix.")
                batch = self.before_mixing(batch)
        return super().forward(view, batch)

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"token": mean distance}; nothing in evaluation."""
        if not self.training:
            return {}
        tokens = self.projection(view.grid)
        goal, weight = self.targets(batch, (tokens.shape[1], tokens.shape[2]))
        mix = None if batch.mix is None else batch.mix.shown
        if mix is None:
            parts = [(goal, weight)]
        else:
            own = mix.at((tokens.shape[1], tokens.shape[2])).expand(weight.shape)
            goals, weights = placed(goal, mix), placed(weight, mix)
            parts = [(goals[0], weights[0] * own), (goals[1], weights[1] * (1 - own))]
        rows = [w * (1 - F.cosine_similarity(tokens.float(), y, dim=-1)) for y, w in parts]
        return {"token": torch.stack(rows).sum() / torch.stack([w for _, w in parts]).sum().clamp(min=1e-6)}

    def targets(self, batch: Batch, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """What the tokens of a grid learn before mixing, [B, h, w, D], and how much each counts, [B, h, w]."""
        if self.teacher is not None:
            return sample_features(need(batch.teacher_tokens, self.name, "the teacher's tokens"), grid)
        maps = need(batch.maps, self.name, "stored features and placements in the batch")
        placement = need(batch.placement, self.name, "stored features and placements in the batch")
        sampled = sample_maps(maps, placement, grid, batch.sampling)
        return sampled.tokens[..., : maps.num_classes], sampled.weight  # all channels, in order; then filling
