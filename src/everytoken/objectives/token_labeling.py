"""Supervision by score maps: `token_labeling`, the method of All Tokens Matter, and `relabel`.

Equations 3, 4: L = H(cls) + β · mean over tokens of H(token), β = 0.5, with labels from score maps through RoIAlign.
Differently from the released code (`released=True`): β is 0.5 (there 1.0); the class token learns the class label y^cls
of equation 3 (there the annotator's label of the crop, `class_target="machine"`), so the token head may have other
classes than the class head; crops are read in the right order, maps follow rotations by interpolation, tokens
without a label do not count, and CutMix mixes token labels where it mixes pixels (there by one ratio).

`select`: "Fully Attentional Networks with Self-emerging Token Labeling" (ICCV 2023) labels tokens by a trained copy of
the model itself and finds wrong labels by their confidence. Its released code draws each token's class from the
softmax; here the least confident tokens of each image do not count, and the others keep their soft labels.

`relabel`: the class token learns what the annotator saw in the crop. Paper: ReLabel, to which All Tokens Matter
compares; its released code also takes this label for y^cls of eq. 3. The crop's averaged scores, softmax over all K
classes. Differently: crops are read in the right coordinate order, and what lies outside the map does not count
(`released=True` does as the released code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import (
    CompactTarget,
    MapBatch,
    MapTargets,
    compact_cross_entropy,
    from_labels,
    from_scores,
    label_cross_entropy,
    label_tokens,
    map_classes,
    mix_with_truth,
    participating,
)
from everytoken.mixing.mix import Mix, mix_image_target, mix_token_target
from everytoken.models import TokenView
from everytoken.objectives.base import Objective, check_choice, draws, need, need_token_logits

ClassTarget = Literal["machine", "truth", "both"]


class FromMaps(Objective):
    """Settings that all supervision by score maps shares.

    Args:
        smoothing: label smoothing s. The released code has 0.1; the paper does not say.
        temperature: scores are divided by it before the softmax.
        top_k: None is the papers' softmax over all classes; n shares all mass among the n best of the vocabulary.
        class_target: what the class token learns: the "machine" label of the crop, the "truth", or "both".
        rho: the machine's fraction of "both"; None is the released rule, 0.5 where it agrees with the truth, else 0.9.
        class_map: for annotators with other classes than the dataset: the dataset's class for each of the
            annotator's, -1 = none.
        released: as the released code: swapped crop coordinates, maps rotated and sheared to the nearest cell, and
            smoothed labels that sum to 1 + s/K.
        weight: of all terms in the loss.
    """

    teaches_class = True

    def __init__(
        self,
        smoothing: float = 0.1,
        temperature: float = 1.0,
        top_k: int | None = None,
        class_target: ClassTarget = "machine",
        rho: float | None = None,
        class_map: Sequence[int] | None = None,
        released: bool = False,
        weight: float = 1.0,
    ) -> None:
        super().__init__(weight)
        check_choice(self.name, "class_target", class_target, get_args(ClassTarget))
        self.smoothing, self.temperature, self.top_k = smoothing, temperature, top_k
        self.class_target, self.rho, self.class_map, self.released = class_target, rho, class_map, released
        self.requires = frozenset({"maps"} if class_target == "machine" else {"maps", "labels"})
        self.multi_label = class_target == "truth"

    def map_targets(self, batch: Batch, grid: tuple[int, int]) -> MapTargets:
        """What the maps say about a grid of tokens and about the crop."""
        placement = need(batch.placement, self.name, "score maps and placements in the batch")
        how = (self.temperature, self.top_k, self.smoothing, self.released)
        return label_tokens(self._maps(batch), placement, grid, batch.sampling, *how)

    def _maps(self, batch: Batch) -> MapBatch:
        return need(batch.maps, self.name, "score maps and placements in the batch: annotate the images")

    def _labels(self, batch: Batch) -> Tensor:
        return need(batch.labels, self.name, "class labels in the batch")

    def image_target(self, view: TokenView, batch: Batch, sampled: MapTargets | None) -> CompactTarget:
        """The class token's target [B], not mixed. `sampled`: of `map_targets`, if that has been done."""
        K = view.logits.shape[-1]
        if self.class_target == "truth":
            return from_labels(self._labels(batch), K, self.smoothing)
        target = batch.class_target
        if target is None:
            target = self._machine_target(K, batch, sampled or self.map_targets(batch, (1, 1)))
        if self.class_target == "both":
            target = mix_with_truth(target, self._labels(batch), self.rho, self.smoothing)
        return target

    def class_loss(self, view: TokenView, batch: Batch, sampled: MapTargets | None = None) -> Tensor:
        """H(cls), with the target mixed as the images are."""
        target = self.image_target(view, batch, sampled)
        target = target if batch.mix is None else mix_image_target(target, batch.mix)
        return self.class_cross_entropy(view, target, batch)

    def class_cross_entropy(self, view: TokenView, target: CompactTarget, batch: Batch) -> Tensor:
        """Of the class token with its target, which may have several labels if it is the truth."""
        if self.class_target == "truth":
            return label_cross_entropy(view.logits, target, self._labels(batch))
        return compact_cross_entropy(view.logits, target)

    def _machine_target(self, K: int, batch: Batch, sampled: MapTargets) -> CompactTarget:
        maps = self._maps(batch)
        if self.class_map is not None:
            if len(self.class_map) != maps.num_classes:
                raise EverytokenError(f"class_map has {len(self.class_map)} entries for {maps.num_classes} classes.")
            table = torch.as_tensor(self.class_map).to(maps.classes.device, non_blocking=True)
            logits, classes = map_classes(sampled.image_logits, maps.classes, table)
            how = (self.temperature, self.top_k, self.smoothing, self.released)
            return from_scores(logits, classes, K, sampled.image.weight, *how)
        if maps.num_classes != K:
            raise EverytokenError(
                f"the class token has {K} outputs and the score maps have {maps.num_classes} classes: set "
                "class_target='truth', or say which classes correspond (class_map)."
            )
        return sampled.image


class ReLabel(FromMaps):
    """Cross entropy of class logits [B, K] with the annotator's label of the crop. Settings: `FromMaps`.

    Example: `ReLabel()(model(images), Batch(images, maps=maps, placement=placement))["loss"].backward()`
    """

    name = "relabel"

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{"class": H}"""
        return {"class": self.class_loss(view, batch)}


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
