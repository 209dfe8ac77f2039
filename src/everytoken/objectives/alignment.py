"""`alignment`: labels that follow the tokens when images are mixed (TL-Align).

Paper: "Token-Label Alignment for Vision Transformers", equation (12): cross entropy of the class logits with
r·y_own + (1-r)·y_partner, where r is the share of the own image in what the head reads, after every layer has mixed
tokens. It replaces the mix ratio of ordinary CutMix; a batch that is not mixed is trained as usual.
With `beta` above 0, token labels follow as well: the label of every token is r·own + (1-r)·partner with the token's own
r, instead of the label of the place where it stands (token labeling and alignment together; not in the paper).
The shares come from the backbone: call `attach` once, or `TokenModel.align`.
Cost: see `everytoken.models.align`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import compact_cross_entropy, sample_maps
from everytoken.functional.shares import aligned_target
from everytoken.mixing import placed_token_targets
from everytoken.objectives.base import View, need_maps, need_token_logits
from everytoken.objectives.relabel import ClassTarget, FromMaps

if TYPE_CHECKING:
    from everytoken.models import TokenModel
    from everytoken.models.align import Shares


@dataclass(frozen=True)
class AlignedLabels(FromMaps):
    """Cross entropy with labels that followed the tokens. Further settings are those of supervision by score maps.

    Args:
        class_target: whose label of the image follows: the "truth" (paper), the annotator's ("machine"), or "both".
        layers: mixing layers that count, from 1, -1 the last; None: all (Table 8: (12,), (2, 4, 6, 8)).
        residual: average with the residual (equation 11); False: attention alone.
        normalise: the paper's Norm; False multiplies the loss by 2 for every residual connection (Table 8).
        patches_only: attention to class, distillation and register tokens does not count (TransMix).
        beta: weight of the tokens' own labels; 0 leaves them out (paper).
    """

    class_target: ClassTarget = "truth"
    layers: Sequence[int] | None = None
    residual: bool = True
    normalise: bool = True
    beta: float = 0.0
    patches_only: bool = False

    name: ClassVar[str] = "alignment"

    @property
    def needs(self) -> frozenset[str]:
        """Labels or maps, by `class_target`; maps and a token head with `beta`."""
        asked = frozenset({"labels"}) if self.class_target == "truth" else super().needs
        return asked | {"maps", "token_logits"} if self.beta else asked

    def attach(self, model: TokenModel) -> None:
        """Let the model follow the shares of mixed images."""
        from everytoken.models.align import Alignment

        layers = None if self.layers is None else tuple(self.layers)
        model.align(Alignment(layers, self.residual, self.normalise, patches_only=self.patches_only))

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"class": H(cls)}, and {"token": β · mean H(token)} with `beta`."""
        plain = replace(batch, mix=None)
        sampled = None
        terms = {}
        if self.beta:
            logits = need_token_logits(view)
            target = batch.token_target
            if target is None:
                maps, placement = need_maps(batch)
                grid = (logits.shape[1], logits.shape[2])
                sampled = sample_maps(maps, placement, grid, batch.sampling, self.legacy)
                target = self.soft_target(sampled.tokens, maps.classes, maps.num_classes, sampled.weight)
            if batch.mix is not None:
                target = aligned_target(*placed_token_targets(target, batch.mix), need_shares(view).grid)
            terms["token"] = compact_cross_entropy(logits, target) * self.beta
        target = self.image_target(view, plain, sampled)
        if batch.mix is None:
            terms["class"] = compact_cross_entropy(view.logits, target)
        else:
            shares = need_shares(view)
            target = aligned_target(target, target[batch.mix.partner], shares.image)
            terms["class"] = compact_cross_entropy(view.logits, target) * shares.total
        return terms


@dataclass(frozen=True)
class TransMix(AlignedLabels):
    """TransMix: the share is the mean of the mix ratio and of the class token's attention in the last layer.

    Paper: "TransMix: Attend to Mix for Vision Transformers" (CVPR 2022). The attention is averaged over heads and
    normalised over patches: λ = (area + Σ_patches A·M / Σ_patches A) / 2; use it with CutMix. The area is the residual
    half of alignment, as the class token holds the mix ratio before its last layer; `residual=False` leaves it out.
    What we do differently: a patch that the box cuts counts by its part, where TransMix takes the nearest pixel. A head
    that reads several tokens (distilled, pooled) gets the mean of their shares; TransMix itself is for class tokens.
    """

    layers: Sequence[int] | None = (-1,)
    patches_only: bool = True

    name: ClassVar[str] = "transmix"


def need_shares(view: View) -> Shares:
    """The view's shares, or an error that says how to get them."""
    shares: Shares | None = getattr(view, "shares", None)
    if shares is None:
        raise EverytokenError(
            "alignment needs the shares of mixed images: call attach(model) once before training, and give the model "
            "the mix: model(images, mix)."
        )
    return shares
