"""What an objective is, and what it sees: a batch, a token view, and the moment of training.

An objective is one named loss term (or a few) over a token view and a batch. It is a small frozen dataclass; its
fields are its settings. `loss = Σ over objectives of weight · Σ of its terms`, see `total_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, MapBatch, SampledMaps, SamplingPlan, plan_sampling, sample_maps
from everytoken.mixing import Mix


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


class Teacher(Protocol):
    """What a teacher answered to the pixels that the student saw (before tokens were mixed)."""

    @property
    def logits(self) -> Tensor:
        """[B, K]"""

    @property
    def token_logits(self) -> Tensor | None:
        """[B, h, w, C] on any grid, or None."""


@dataclass(frozen=True)
class Batch:
    """One batch, ready for the network.

    Attributes:
        images: [B, 3, H, W] uint8 or float.
        labels: [B] int64 classes of the data set, -1 = not known; or None.
        keys: the samples' names.
        maps: score maps of the images, or None.
        placement: [B, 2, 3] float32, network input to source image, in fractions; needed with maps.
        plan: from `prepare`; without it, sampling on a GPU waits for the placements.
        token_target, class_target: ready-made targets, instead of maps.
        mix: how the images are mixed, or None. Pixels have been mixed already; targets never.
    """

    images: Tensor
    labels: Tensor | None = None
    keys: tuple[str, ...] = ()
    maps: MapBatch | None = None
    placement: Tensor | None = None
    plan: SamplingPlan | None = None
    token_target: CompactTarget | None = None
    class_target: CompactTarget | None = None
    mix: Mix | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def prepare(self, grid: tuple[int, int]) -> Batch:
        """The batch with its sampling planned for a token grid. Call it on the host, before `to`."""
        if self.maps is None or self.placement is None:
            return self
        return replace(self, plan=plan_sampling(self.placement, self.maps.area, self.maps.size, grid))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Everything on another device."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Everything in page-locked memory; torch's DataLoader calls this."""
        return self._each(lambda part: part.pin_memory() if hasattr(part, "pin_memory") else part)

    def sampled(self, grid: tuple[int, int], legacy_swap: bool = False) -> SampledMaps:
        """The maps' scores on a token grid, for objectives that make targets of their own."""
        maps, placement = need_maps(self)
        return sample_maps(maps, placement, grid, self.plan, legacy_swap)

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(part) for name, part in parts.items() if hasattr(part, "to")})


@dataclass(frozen=True)
class Context:
    """The moment of training that an objective runs in.

    Attributes:
        seed, step: key of all randomness in objectives.
        progress: part of the training that is done, 0..1; for terms that grow or fade. 0 is the start: a loop that
            never sets it leaves such terms there (drloc with the released schedule at 0).
        teacher: a teacher's answer to this batch, or None.
    """

    seed: int = 0
    step: int = 0
    progress: float = 0.0
    teacher: Teacher | None = None

    def generator(self, purpose: str, device: torch.device | str) -> torch.Generator:
        """Random numbers for one purpose in this step."""
        from everytoken.keyed import torch_generator  # here, as `data` makes batches and may import this room

        return torch_generator(self.seed, self.step, purpose, device=device)


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

    def __call__(self, view: View, batch: Batch, ctx: Context) -> dict[str, Tensor]:
        """Terms by name, scalars; the loss takes their sum times `weight`."""
        raise NotImplementedError(f"{type(self).__name__} has no terms")


def total_loss(
    objectives: Iterable[Objective], view: View, batch: Batch, ctx: Context
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, terms): terms are named "objective/term", detached, before weighting; keep them on the device."""
    loss: Tensor | None = None
    logged: dict[str, Tensor] = {}
    for objective in objectives:
        for name, term in objective(view, batch, ctx).items():
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
