"""What an objective is, and what it sees: a batch, a token view, and the moment of training.

An objective is one named loss term (or a few) over a token view and a batch. It is a small frozen dataclass; its
fields are its settings. `loss = Σ over objectives of weight · Σ of its terms`, see `total_loss`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch, TeacherView
from everytoken.errors import EverytokenError
from everytoken.functional import MapBatch


class View(Protocol):
    """The part of `everytoken.models.TokenView` that objectives read; a teacher offers the first two."""

    @property
    def logits(self) -> Tensor:
        """[B, K] of the class token."""

    @property
    def token_logits(self) -> Tensor | None:
        """[B, h, w, C] of the token head, or None."""

    @property
    def grid(self) -> Tensor:
        """[B, h, w, D] tokens."""

    @property
    def distill_logits(self) -> Tensor | None:
        """[B, K] of the distillation token, or None."""


@dataclass(frozen=True)
class Objective:
    """One named loss term over a token view and a batch.

    Args:
        weight: factor of all its terms in the loss.
    """

    weight: float = 1.0

    name: ClassVar[str] = ""

    @property
    def needs(self) -> frozenset[str]:
        """What must be there: of "labels", "maps", "token_logits", "distill_logits", "teacher", "progress"."""
        return frozenset()

    def modules(self) -> nn.Module | None:
        """Parameters of its own, to be trained with the backbone."""
        return None

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """Terms by name, scalars; the loss takes their sum times `weight`."""
        raise NotImplementedError(f"{type(self).__name__} has no terms")


def total_loss(objectives: Iterable[Objective], view: View, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, terms): terms are named "objective/term", detached, before weighting; keep them on the device."""
    loss: Tensor | None = None
    logged: dict[str, Tensor] = {}
    for objective in objectives:
        for name, term in objective(view, batch).items():
            part = term * objective.weight
            loss = part if loss is None else loss + part
            logged[f"{objective.name}/{name}"] = term.detach()
    if loss is None:
        raise EverytokenError("there is nothing to train on: no objective gave a term.")
    return loss, logged


def need_maps(batch: Batch) -> tuple[MapBatch, Tensor]:
    """The batch's maps and placements, or an error that says how to get them."""
    if batch.maps is None or batch.placement is None:
        raise EverytokenError(
            "this supervision needs score maps and placements in the batch. Make maps with `everytoken annotate` "
            "and name the store, or choose another supervision ('hard', 'distill')."
        )
    return batch.maps, batch.placement


def need_labels(batch: Batch) -> Tensor:
    """The batch's labels, or an error that says who wants them."""
    if batch.labels is None:
        raise EverytokenError("this supervision needs class labels, but the data set has none; see 'online-token'.")
    return batch.labels


def need_token_logits(view: View) -> Tensor:
    """The view's token logits, or an error that says how to get them."""
    if view.token_logits is None:
        raise EverytokenError("this supervision needs a token head: build TokenModel(backbone, token_classes=...).")
    return view.token_logits


def need_teacher(batch: Batch) -> TeacherView:
    """The teacher's answer, or an error that says who wants it."""
    if batch.teacher is None:
        raise EverytokenError("this supervision needs a teacher: name a model that has learnt these classes.")
    return batch.teacher


def draws(batch: Batch | None, purpose: str, device: torch.device | str) -> torch.Generator:
    """The generator of one purpose in this step: keyed, or seeded by torch's own where the batch has no key."""
    if batch is not None and batch.key is not None:
        return batch.key.torch_generator(purpose, device)
    unkeyed = torch.Generator(device=device)
    unkeyed.manual_seed(int(torch.randint(2**62, ())))
    return unkeyed
