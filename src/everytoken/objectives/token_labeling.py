"""`token_labeling`: the method of All Tokens Matter.

Equations 3, 4: L = H(cls) + β · mean over tokens of H(token), β = 0.5, with labels from score maps through RoIAlign.
Differently from the released code (`released=True`): β is 0.5 (there 1.0); the class token learns the class label y^cls
of equation 3 (there the annotator's label of the crop, `class_target="machine"`), so the token head may have other
classes than the class head; crops are read in the right order, maps follow rotations by interpolation, tokens
without a label do not count, and CutMix mixes token labels where it mixes pixels (there by one ratio).

`select`: "Fully Attentional Networks with Self-emerging Token Labeling" (ICCV 2023) labels tokens by a trained copy of
the model itself and finds wrong labels by their confidence. Its released code draws each token's class from the
softmax; here the least confident tokens of each image do not count, and the others keep their soft labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, MapTargets, compact_cross_entropy, participating
from everytoken.mixing.mix import Mix, mix_token_target
from everytoken.models import TokenView
from everytoken.objectives.base import draws, need_token_logits
from everytoken.objectives.relabel import FromMaps


class TokenLabeling(FromMaps):
    """H(cls) + β · mean H(token): class logits [B, K], token logits [B, h, w, C], score maps of C classes.

    Args:
        beta: β; None: 0.5 (paper), with `released` 1.0.
        participation: fraction of each image's tokens that counts (the paper's ablation); 1 = all.
        class_term: False leaves H(cls) to another objective.
        select: fraction of each image's tokens that counts, those of the surest labels; 1 = all. Tokens are selected
            before images are mixed.
        settings: those of `FromMaps`; `class_target` is "truth" (paper) unless it is said, "machine" with `released` or
            `class_map`.

    Example:
        model = TokenModel(timm.create_model("deit_small_patch16_224", num_classes=10), token_classes=10)
        batch = Batch(images, labels, placement=placement, maps=maps)
        TokenLabeling(beta=0.5)(model(batch.images), batch)["loss"].backward()

        loss = TokenLabeling()(logits, token_logits, labels=labels, token_labels=soft)   # of any network, see forward
    """

    name = "token_labeling"

    def __init__(
        self,
        beta: float | None = None,
        participation: float = 1.0,
        class_term: bool = True,
        select: float = 1.0,
        **settings: Any,
    ) -> None:
        by_machine = settings.get("released") or settings.get("class_map") is not None
        settings.setdefault("class_target", "machine" if by_machine else "truth")
        super().__init__(**settings)
        self.beta = (1.0 if self.released else 0.5) if beta is None else beta
        self.participation, self.select, self.teaches_class = participation, select, class_term
        if not class_term:
            self.requires, self.multi_label = frozenset({"maps"}), True
        self.requires |= {"token_logits"}

    def forward(
        self,
        view: TokenView | Tensor,
        batch: Batch | Tensor | None = None,
        *,
        labels: Tensor | None = None,
        token_labels: Tensor | None = None,
        mix: Mix | None = None,
    ) -> dict[str, Tensor]:
        """As `Objective.forward`, or with any network's logits and any dense targets.

        Args:
            view: what a TokenModel answered; or class logits [B, K].
            batch: as for every objective; or, beside class logits, token logits [B, h, w, C].
            labels: [B] or [B, K], as in a Batch; None: only tokens learn.
            token_labels: [B, h, w, C], probabilities, which are not smoothed; or int64 [B, h, w], the class of each
                token, -1 for none.
            mix: how the images were mixed, of class logits; a TokenModel's view knows it. Labels are not mixed before.
        """
        if not isinstance(view, Tensor) and labels is None and token_labels is None:
            return super().forward(view, batch)  # type: ignore[arg-type]
        if isinstance(batch, Tensor):
            view = TokenView(view, batch, token_logits=batch, mix=mix)  # type: ignore[arg-type]
        logits = need_token_logits(view, self.name)  # type: ignore[arg-type]
        dense = batch if isinstance(batch, Batch) else Batch(logits.movedim(-1, 1), mix=mix)
        target = dense.token_target if token_labels is None else self._dense_target(token_labels, logits)
        dense = replace(dense, labels=dense.labels if labels is None else labels, token_target=target)
        return super().forward(view, dense)

    def _dense_target(self, labels: Tensor, logits: Tensor) -> CompactTarget:
        soft = labels.is_floating_point()
        if labels.shape != (logits.shape if soft else logits.shape[:-1]):
            raise ValueError(f"token labels {list(labels.shape)} do not fit token logits {list(logits.shape)}")
        if soft:
            return CompactTarget.from_dense(labels)
        classes = F.one_hot(labels.clamp(min=0), logits.shape[-1]).float()
        return CompactTarget.from_dense(classes, (labels >= 0).float()).smooth(self.smoothing)

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"token": β · mean H(token), "class": H(cls)}; of ready-made token targets without labels, tokens alone."""
        logits = need_token_logits(view, self.name)
        target, sampled = self.token_target(batch, (logits.shape[1], logits.shape[2]))
        if logits.shape[-1] != target.num_classes:
            wrong = f"the token head has {logits.shape[-1]} outputs, but the maps have {target.num_classes} classes"
            raise EverytokenError(f"{wrong}: build TokenModel(backbone, token_classes={target.num_classes}).")
        weight = target.weight
        if self.participation < 1:
            generator = draws(batch, "participation", weight.device)
            weight = weight * participating(weight.shape, self.participation, generator, weight.device)
        terms = {"token": compact_cross_entropy(logits, target, weight=weight) * self.beta}
        tokens_alone = batch.token_target is not None and batch.labels is None and self.class_target == "truth"
        if self.teaches_class and not tokens_alone:
            terms["class"] = self.class_loss(view, batch, sampled)
        return terms

    def token_target(self, batch: Batch, grid: tuple[int, int]) -> tuple[CompactTarget, MapTargets | None]:
        """What the tokens of a view learn, [B, h, w], mixed as they are; and what was sampled from maps for it."""
        target, sampled = batch.token_target, None
        if target is None:
            sampled = self.map_targets(batch, grid)
            target = sampled.tokens
        if self.select < 1:
            target = replace(target, weight=target.weight * target.most_confident(self.select))
        shown = None if batch.mix is None else batch.mix.shown
        if shown is not None:
            if self.released and shown.level == "pixels":  # one ratio for all tokens, wherever the box is
                shown = replace(shown, mask=shown.ratio[:, None, None], moves=None)
            target = mix_token_target(target, shown)
        return target, sampled
