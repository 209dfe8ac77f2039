"""`relabel`: the class token learns what the annotator saw in the crop.

Paper: ReLabel, to which All Tokens Matter compares; its released code also takes this label for y^cls of eq. 3. The
crop's averaged scores, softmax over all K classes. Differently: crops are read in the right coordinate order, and what
lies outside the map does not count (`released=True` does as the released code).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

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
)
from everytoken.mixing.mix import mix_image_target
from everytoken.objectives.base import Objective, check_choice, need

if TYPE_CHECKING:
    from everytoken.models import TokenView

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
