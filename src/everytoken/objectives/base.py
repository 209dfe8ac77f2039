"""What an objective is: an `nn.Module` with `forward(view, batch=None) -> {"loss": ..., terms}`.

Its keywords are its settings, in Python as in recipes; what it trains is in `parameters()`; what it lacks is said by an
error. The loss is `weight` times the sum of its terms; terms are there for the log, before weighting.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from everytoken.data.batch import Batch, TeacherView
from everytoken.errors import EverytokenError
from everytoken.functional import MapBatch

if TYPE_CHECKING:
    from everytoken.models import TokenModel, TokenView


class Objective(nn.Module):
    """One loss term, or a few. Subclasses provide `terms`, or their own `forward`.

    Args:
        weight: factor of all its terms in the loss.

    Attributes:
        name: in recipes and in the log.
        requires: what must be there, of "labels", "maps", "token_logits", "distill_logits", "teacher" and "progress"
            (of the training, in the batch's key), so that training can complain before the first batch.
        teaches_class: it has a term for the class token; otherwise recipes add `hard`.
        multi_label: it can learn from images with several labels, [B, K].
    """

    name: str = ""
    requires: frozenset[str] = frozenset()
    teaches_class: bool = False
    multi_label: bool = False

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, view: TokenView, batch: Batch | None = None) -> dict[str, Tensor]:
        """{"loss": weight · sum of terms, and every term by name}, scalars.

        Args:
            view: what a TokenModel answered to the batch's images.
            batch: labels, maps and so on, whatever this objective requires. If the model was given a mix, the targets
                are mixed by it; `batch` itself stays as it was loaded.
        """
        if self.training and not torch.compiler.is_compiling():
            _warn_if_not_reduced(self)
        if batch is not None and not self.multi_label and isinstance(batch.labels, Tensor) and batch.labels.dim() == 2:
            raise EverytokenError(f"{type(self).__name__} learns one label per image, and this batch has several.")
        terms = self.terms(view, with_mix(view, batch, type(self).__name__))
        loss = view.logits.new_zeros(())
        for i, term in enumerate(terms.values()):
            loss = term * self.weight if i == 0 else loss + term * self.weight
        return {"loss": loss, **terms}

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"weight={self.weight:g}"

    def terms(self, view: TokenView, batch: Batch | None) -> dict[str, Tensor]:
        """Terms by name, scalars, before weighting."""
        raise NotImplementedError(f"{type(self).__name__} has no terms")


def _warn_if_not_reduced(objective: Objective) -> None:
    """Warn if processes train together, but not the objective's own parameters (drloc's MLP)."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    wrapped = DistributedDataParallel._get_active_ddp_module() is not None
    wrapped = wrapped or getattr(objective, "_is_fsdp_managed_module", False)
    if not wrapped and any(p.requires_grad for p in objective.parameters()):
        name = type(objective).__name__
        warnings.warn(
            f"{name} has parameters and runs outside of DistributedDataParallel and FSDP, so every process trains its "
            f"own copy of them. Wrap model and objectives together: DistributedDataParallel(TokenStep(model, "
            f"{{'{objective.name}': objective}})).",
            stacklevel=3,
        )


def with_mix(view: TokenView, batch: Batch | None, who: str) -> Batch | None:
    """The batch with the mix that the model was given; errors for what is not a view or a batch, or was not mixed."""
    if not hasattr(view, "logits"):
        raise EverytokenError(
            f"{who} reads what a TokenModel answers, not a {type(view).__name__}: view = TokenModel(model)(images); "
            f"{who}(view, batch)."
        )
    if batch is None:
        return None
    if not isinstance(batch, Batch):
        raise EverytokenError(f"{who} reads a Batch, not a {type(batch).__name__}: {who}(view, Batch(images, labels)).")
    mix = getattr(view, "mix", None)
    if batch.mix is None:
        return batch if mix is None else replace(batch, mix=mix)
    if mix is None and batch.mix.of_tokens is not None and hasattr(view, "mix"):
        raise EverytokenError(f"{who}: the batch's tokens are to be mixed, so call model(images, batch.mix).")
    return batch


def need_batch(batch: Batch | None, who: str) -> Batch:
    """The batch, or an error that says who wants it."""
    if batch is None:
        raise EverytokenError(f"{who} reads labels or maps from the batch: call it as {who}(view, batch).")
    return batch


def need_maps(batch: Batch, who: str) -> tuple[MapBatch, Tensor]:
    """The batch's maps and placements, or an error that says how to get them."""
    if batch.maps is None or batch.placement is None:
        raise EverytokenError(
            f"{who} needs score maps and placements in the batch (maps, placement), and this one has none. Annotate "
            "the images and give the maps to the loader, or take an objective without maps, such as 'hard'."
        )
    return batch.maps, batch.placement


def need_labels(batch: Batch, who: str) -> Tensor:
    """The batch's labels, or an error that says who wants them."""
    if batch.labels is None:
        raise EverytokenError(
            f"{who} needs class labels in the batch, and this one has none. 'distillation' and 'drloc' learn without."
        )
    return batch.labels


def need_token_logits(view: TokenView, who: str) -> Tensor:
    """The view's token logits, or an error that says how to get them."""
    if view.token_logits is None:
        raise EverytokenError(f"{who} needs a token head: build TokenModel(backbone, token_classes=...).")
    return view.token_logits


def need_teacher(batch: Batch, who: str) -> TeacherView:
    """The teacher's answer, or an error that says who wants it."""
    if batch.teacher is None:
        raise EverytokenError(f"{who} needs a teacher's answer in the batch: a model that has learnt these classes.")
    return batch.teacher


def need_token_model(model: object, who: str) -> TokenModel:
    """The model, or an error that says how to make one."""
    from everytoken.models import TokenModel

    if not isinstance(model, TokenModel):
        raise EverytokenError(
            f"{who} takes the TokenModel that is trained, not a {type(model).__name__}: TokenModel(model)."
        )
    return model


def check_choice(who: str, setting: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless a setting has one of its values."""
    if value not in choices:
        raise EverytokenError(f"{who}: {setting} is {value!r}; it can be {', '.join(map(repr, choices))}.")


def draws(batch: Batch | None, purpose: str, device: torch.device | str) -> torch.Generator:
    """The generator of one purpose in this step: keyed, or seeded by torch's own where the batch has no key."""
    if batch is not None and batch.key is not None:
        return batch.key.torch_generator(purpose, device)
    unkeyed = torch.Generator(device=device)
    unkeyed.manual_seed(int(torch.randint(2**62, ())))
    return unkeyed
