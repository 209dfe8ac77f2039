"""`token_labeling`: the method of All Tokens Matter.

Equations 3, 4: L = H(cls) + β · mean over tokens of H(token), β = 0.5, with labels from score maps through RoIAlign.
Differently from the released code (`released=True`): β is 0.5 (there 1.0); the class token learns the class label y^cls
of equation 3 (there the annotator's label of the crop, `class_target="machine"`), so the token head may have other
classes than the class head; crops are read in the right order, maps follow rotations by interpolation, tokens
without a label do not count, and CutMix mixes token labels where it mixes pixels (there by one ratio).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, MapTargets, compact_cross_entropy, participating
from everytoken.mixing.mix import mix_token_target
from everytoken.objectives.base import draws, need_token_logits
from everytoken.objectives.relabel import FromMaps

if TYPE_CHECKING:
    from everytoken.models import TokenView


class TokenLabeling(FromMaps):
    """H(cls) + β · mean H(token): class logits [B, K], token logits [B, h, w, C], score maps of C classes.

    Args:
        beta: β; None: 0.5 (paper), with `released` 1.0.
        participation: fraction of each image's tokens that counts (the paper's ablation); 1 = all.
        class_term: False leaves H(cls) to another objective.
        settings: those of `FromMaps`; `class_target` is "truth" (paper) unless it is said, "machine" with `released` or
            `class_map`.

    Example:
        model = TokenModel(timm.create_model("deit_small_patch16_224", num_classes=10), token_classes=10)
        batch = Batch(images, labels, placement=placement, maps=maps)
        TokenLabeling(beta=0.5)(model(batch.images), batch)["loss"].backward()
    """

    name = "token_labeling"

    def __init__(
        self,
        beta: float | None = None,
        participation: float = 1.0,
        class_term: bool = True,
        **settings: Any,
    ) -> None:
        by_machine = settings.get("released") or settings.get("class_map") is not None
        settings.setdefault("class_target", "machine" if by_machine else "truth")
        super().__init__(**settings)
        self.beta = (1.0 if self.released else 0.5) if beta is None else beta
        self.participation, self.teaches_class = participation, class_term
        if not class_term:
            self.requires, self.multi_label = frozenset({"maps"}), True
        self.requires |= {"token_logits"}

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"token": β · mean H(token), "class": H(cls)}"""
        logits = need_token_logits(view, self.name)
        target, sampled = self.token_target(batch, (logits.shape[1], logits.shape[2]))
        if logits.shape[-1] != target.num_classes:
            raise EverytokenError(
                f"the token head has {logits.shape[-1]} outputs, but the score maps have {target.num_classes} classes: "
                f"build TokenModel(backbone, token_classes={target.num_classes})."
            )
        weight = target.weight
        if self.participation < 1:
            generator = draws(batch, "participation", weight.device)
            weight = weight * participating(weight.shape, self.participation, generator, weight.device)
        terms = {"token": compact_cross_entropy(logits, target, weight=weight) * self.beta}
        if self.teaches_class:
            terms["class"] = self.class_loss(view, batch, sampled)
        return terms

    def token_target(self, batch: Batch, grid: tuple[int, int]) -> tuple[CompactTarget, MapTargets | None]:
        """What the tokens of a view learn, [B, h, w], mixed as they are; and what was sampled from maps for it."""
        target, sampled = batch.token_target, None
        if target is None:
            sampled = self.map_targets(batch, grid)
            target = sampled.tokens
        shown = None if batch.mix is None else batch.mix.shown
        if shown is not None:
            if self.released and shown.level == "pixels":  # one ratio for all tokens, wherever the box is
                shown = replace(shown, mask=shown.ratio[:, None, None], moves=None)
            target = mix_token_target(target, shown)
        return target, sampled
