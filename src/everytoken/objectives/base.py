"""What an objective is: an `nn.Module` with `forward(view, batch=None) -> {"loss": ..., terms}`.

Its keywords are its settings, in Python as in recipes; what it trains is in `parameters()`. The loss is `weight` times
the sum of its terms; terms are there for the log, before weighting.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.models import TokenView

T = TypeVar("T")


class Objective(nn.Module):
    """One loss term, or a few. Subclasses provide `terms`, or their own `forward`. One that must see the images before
    they are mixed has `before_mixing(batch) -> batch`, which `TokenStep` calls.

    Args:
        weight: factor of all its terms in the loss.

    Attributes:
        name: in recipes and in the log.
        requires: what must be there, of "labels", "maps", "token_logits", "distill_logits", "teacher" and "progress"
            (of the training, in the batch's key), so that training can complain before the first batch.
        teaches_class: it has a term for the class token; otherwise recipes add `hard`.
        multi_label: it can learn from multi-label images, [B, K].
        built_from: parameters of the constructor that recipes do not set: training passes what there is of them.
    """

    name: str = ""
    requires: frozenset[str] = frozenset()
    teaches_class: bool = False
    multi_label: bool = False
    built_from: frozenset[str] = frozenset({"model"})

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, view: TokenView | Tensor, batch: Batch | None = None) -> dict[str, Tensor]:
        """{"loss": weight · sum of terms, and every term by name}, scalars.

        Args:
            view: what a TokenModel answered to the batch's images; for objectives that look at nothing else, a grid of
                tokens [B, h, w, D], of whatever network.
            batch: labels, maps and so on, whatever this objective requires. If the model was given a mix, the targets
                are mixed by it; `batch` itself stays as it was loaded.
        """
        if self.training and not torch.compiler.is_compiling():
            _warn_if_not_reduced(self)
        if isinstance(view, Tensor):
            if view.dim() != 4:
                way = "make it by tokens[:, prefix:].unflatten(1, (h, w)) or, from NCHW, features.permute(0, 2, 3, 1)"
                raise ValueError(f"a grid of tokens is [B, h, w, D], got {list(view.shape)}: {way}")
            view = TokenView(view.new_zeros(len(view), 0), view)
        if batch is None:  # the grid has the images' proportions, which is all that is known of them
            batch = Batch(view.grid.movedim(-1, 1))
        elif not self.multi_label and isinstance(batch.labels, Tensor) and batch.labels.dim() == 2:
            raise EverytokenError(f"{type(self).__name__} learns one label per image, and this batch has several.")
        terms = self.terms(view, _with_mix(view, batch))
        loss = sum((term * self.weight for term in terms.values()), start=view.logits.new_zeros(()))
        return {"loss": loss, **terms}

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"weight={self.weight:g}"

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """Terms by name, scalars, before weighting."""
        raise NotImplementedError(f"{type(self).__name__} has no terms")


def _warn_if_not_reduced(objective: Objective) -> None:
    """Warn if processes train together, but not the objective's own parameters (drloc's MLP)."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    wrapped = DistributedDataParallel._get_active_ddp_module() is not None
    wrapped = wrapped or getattr(objective, "_is_fsdp_managed_module", False)
    if not wrapped and any(p.requires_grad for p in objective.parameters()):
        warnings.warn(
            f"{type(objective).__name__} has parameters and runs outside of DistributedDataParallel and FSDP, so every "
            "process trains its own copy of them. Wrap model and objectives together: "
            f"DistributedDataParallel(TokenStep(model, {{'{objective.name}': objective}})).",
            stacklevel=3,
        )


def _with_mix(view: TokenView, batch: Batch) -> Batch:
    """The batch with the mix that the model was given."""
    mix = getattr(view, "mix", None)
    if batch.mix is None:
        return batch if mix is None else replace(batch, mix=mix)
    if mix is None and batch.mix.of_tokens is not None and hasattr(view, "mix"):
        raise EverytokenError("the batch's tokens are to be mixed, so call model(images, batch.mix).")
    return batch


def need(value: T | None, who: str, what: str) -> T:
    """The value, or an error that says who needs what."""
    if value is None:
        raise EverytokenError(f"{who} needs {what}.")
    return value


def need_token_logits(view: TokenView, who: str) -> Tensor:
    """The token logits, or an error."""
    return need(view.token_logits, who, "a token head: TokenModel(backbone, token_classes=...)")


def check_choice(who: str, setting: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless a setting has one of its values."""
    if value not in choices:
        raise EverytokenError(f"{who}: {setting} is {value!r}; it can be {', '.join(map(repr, choices))}.")


def draws(batch: Batch, purpose: str, device: torch.device | str) -> torch.Generator:
    """The generator of one purpose in this step: keyed, or seeded by torch's own where the batch has no key."""
    if batch.key is not None:
        return batch.key.torch_generator(purpose, device)
    unkeyed = torch.Generator(device=device)
    unkeyed.manual_seed(int(torch.randint(2**62, ())))
    return unkeyed
