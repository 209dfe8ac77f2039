"""`tl_align` and `transmix`: labels that follow the tokens when images are mixed.

Paper: "Token-Label Alignment for Vision Transformers", equation (12): cross entropy of the class logits with
r·y_own + (1-r)·y_partner, where r is the share of the own image in what the head reads, after every layer has mixed
tokens. It replaces the mix ratio of ordinary CutMix; a batch that is not mixed is trained as usual.
With `beta` above 0, token labels follow as well: the label of every token is r·own + (1-r)·partner with the token's own
r, instead of the label of the place where it stands (token labeling and alignment together; not in the paper).
In somebody's own loop, on any model: `aligned`. Cost: see `everytoken.models.align`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import compact_cross_entropy
from everytoken.functional.shares import aligned_target
from everytoken.mixing.mix import Mix, placed_token_targets
from everytoken.models import TokenModel
from everytoken.models.align import AlignedPass, Aligner, Alignment, Shares
from everytoken.models.families import backbone_of
from everytoken.objectives.base import need, need_token_logits
from everytoken.objectives.token_labeling import FromMaps

if TYPE_CHECKING:
    from everytoken.models import TokenView


def _alignment(layers: Sequence[int] | None, residual: bool, normalise: bool, patches_only: bool) -> Alignment:
    return Alignment(None if layers is None else tuple(layers), residual, normalise, patches_only=patches_only)


class TLAlign(FromMaps):
    """Cross entropy with labels that followed the tokens. Give the model the mix: `model(images, mix)`.

    Args:
        model: the TokenModel that is trained; it follows shares from now on.
        layers: mixing layers that count, from 1, -1 the last; None: all (Table 8: (12,), (2, 4, 6, 8)).
        residual: average with the residual (equation 11); False: attention alone.
        normalise: the paper's Norm; False multiplies the loss by 2 for every residual connection (Table 8).
        patches_only: attention to class, distillation and register tokens does not count (TransMix).
        beta: weight of the tokens' own labels, which needs maps and a token head; 0 leaves them out (paper).
        settings: those of `FromMaps`; `class_target` is "truth" (paper) unless it is said.

    Example:
        tl_align = TLAlign(model)
        images, mix = CutMix()(images)
        tl_align(model(images, mix), Batch(images, labels, mix=mix))["loss"].backward()
    """

    name = "tl_align"

    def __init__(
        self,
        model: TokenModel,
        layers: Sequence[int] | None = None,
        residual: bool = True,
        normalise: bool = True,
        patches_only: bool = False,
        beta: float = 0.0,
        **settings: Any,
    ) -> None:
        settings.setdefault("class_target", "truth")
        super().__init__(**settings)
        self.beta = beta
        asked = frozenset({"labels"}) if self.class_target == "truth" else self.requires
        self.requires = asked | {"maps", "token_logits"} if beta else asked
        model = next((m for m in model.modules() if isinstance(m, TokenModel)), model)  # compiled, or in DDP
        model.align(_alignment(layers, residual, normalise, patches_only))

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"class": H(cls)}, and {"token": β · mean H(token)} with `beta`."""
        sampled, terms = None, {}
        if self.beta:
            logits = need_token_logits(view, self.name)
            target = batch.token_target
            if target is None:
                sampled = self.map_targets(batch, (logits.shape[1], logits.shape[2]))
                target = sampled.tokens
            if batch.mix is not None:
                target = aligned_target(*placed_token_targets(target, batch.mix), self._shares(view).grid)
            terms["token"] = compact_cross_entropy(logits, target) * self.beta
        target, total = self.image_target(view, batch, sampled), 1.0
        if batch.mix is not None:
            shares = self._shares(view)
            target, total = aligned_target(target, target[batch.mix.partner], shares.image), shares.total
        terms["class"] = self.class_cross_entropy(view, target, batch) * total
        return terms

    def _shares(self, view: TokenView) -> Shares:
        return need(view.shares, self.name, "shares: give the mix to the model it was built with, model(images, mix)")


class TransMix(TLAlign):
    """TransMix: the share is the mean of the mix ratio and of the class token's attention in the last layer.

    Paper: "TransMix: Attend to Mix for Vision Transformers" (CVPR 2022). The attention is averaged over heads and
    normalised over patches: λ = (area + Σ_patches A·M / Σ_patches A) / 2; use it with CutMix. The area is the residual
    half of alignment, as the class token holds the mix ratio before its last layer; `residual=False` leaves it out.
    What we do differently: a patch that the box cuts counts by its area, where TransMix takes the nearest pixel. A head
    that reads several tokens (distilled, pooled) gets the mean of their shares; TransMix itself is for class tokens.

    Args:
        model: the TokenModel that is trained.
        residual: count the area too.
        settings: others of `TLAlign`.

    Example: as for `TLAlign`.
    """

    name = "transmix"

    def __init__(
        self,
        model: TokenModel,
        layers: Sequence[int] | None = (-1,),
        patches_only: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(model, layers, patches_only=patches_only, **settings)


@contextmanager
def aligned(
    model: nn.Module,
    mix: Mix,
    layers: Sequence[int] | None = None,
    residual: bool = True,
    normalise: bool = True,
    patches_only: bool = False,
) -> Iterator[AlignedPass]:
    """Follow the labels of mixed images through one pass of any model (TL-Align); one block per pass.

    Args:
        model: a model of timm, torchvision or Hugging Face (`everytoken.models`), or whatever holds one: a TokenModel,
            DistributedDataParallel, FSDP2, a module of yours, a compiled model (whose pass is then not a compiled one;
            with TLAlign it is). It is watched inside of the block only and does not change.
        mix: of the images that the model is given.
        layers, residual, normalise, patches_only: as for `TLAlign`.

    Example:
        images, mix = et.CutMix()(images)
        with et.aligned(model, mix) as shares:
            logits = model(images)
        loss = shares.cross_entropy(logits, labels)
    """
    wrapper = next((m for m in model.modules() if isinstance(m, nn.DataParallel) and len(m.device_ids) > 1), None)
    if wrapper is not None:
        raise EverytokenError("aligned cannot follow DataParallel's threads on several GPUs; use one process for each.")
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    aligner = Aligner(backbone_of(model), _alignment(layers, residual, normalise, patches_only))
    try:
        # compiled code was made without these hooks
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), aligner.watch(mix) as followed:
            yield followed
    finally:
        aligner.remove()
