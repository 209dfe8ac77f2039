"""`relabel`: the class token learns what the annotator saw in the crop.

Paper: ReLabel; in All Tokens Matter it is the class token's label y^cls of eq. 3. The crop's averaged scores, softmax
over all K classes. Differently: crops are read in the right coordinate order, and what lies outside the map has no
say (`legacy=True` does as released). Cost: a few microseconds per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import (
    CompactTarget,
    MapTargets,
    SampledMaps,
    compact_cross_entropy,
    from_labels,
    from_scores,
    label_tokens,
    map_classes,
    mix_with_truth,
)
from everytoken.mixing import mix_image_target
from everytoken.objectives.base import Objective, View, need_labels, need_maps

ClassTarget = Literal["machine", "truth", "both"]


@dataclass(frozen=True)
class FromMaps(Objective):
    """Settings that all supervision by score maps shares.

    Args:
        smoothing: label smoothing s. The released code has 0.1; the paper does not say.
        temperature: scores are divided by it before the softmax.
        top_k: None is the papers' softmax over all classes; n shares all mass among the n best of the vocabulary.
        class_target: what the class token learns: the "machine" label of the crop (papers), the "truth", or "both".
        rho: the machine's part of "both"; None is the released rule, 0.5 where it agrees with the truth, else 0.9.
        class_map: for annotators with other classes than the data set: the data set's class for each of the
            annotator's, -1 = none.
        legacy: as the released code: swapped crop coordinates, and smoothed labels that sum to 1 + s/K.
    """

    smoothing: float = 0.1
    temperature: float = 1.0
    top_k: int | None = None
    class_target: ClassTarget = "machine"
    rho: float | None = None
    class_map: Sequence[int] | None = None
    legacy: bool = False

    def __post_init__(self) -> None:
        if self.class_target not in ("machine", "truth", "both"):
            raise EverytokenError(f"class_target is 'machine', 'truth' or 'both', not '{self.class_target}'.")

    @property
    def needs(self) -> frozenset[str]:
        """Maps, and labels when the truth is asked for."""
        return frozenset({"maps"} if self.class_target == "machine" else {"maps", "labels"})

    def labels(self, batch: Batch, grid: tuple[int, int]) -> MapTargets:
        """What the maps say about a grid of tokens and about the crop."""
        maps, placement = need_maps(batch)
        return label_tokens(
            maps, placement, grid, batch.sampling, self.temperature, self.top_k, self.smoothing, self.legacy
        )

    def soft_target(self, logits: Tensor, classes: Tensor, num_classes: int, weight: Tensor) -> CompactTarget:
        """Sampled scores [B, ..., U] as a smoothed target."""
        how = (self.temperature, self.top_k, self.smoothing, self.legacy)
        return from_scores(logits, classes, num_classes, weight, *how)

    def image_target(self, view: View, batch: Batch, made: MapTargets | SampledMaps | None) -> CompactTarget:
        """The class token's target [B], mixed as the images are. `made`: from the maps, if that has been done."""
        K = view.logits.shape[-1]
        target = batch.class_target
        if self.class_target == "truth":
            target = from_labels(need_labels(batch), K, self.smoothing)
        else:
            if target is None:
                target = self._machine_target(K, batch, made)
            if self.class_target == "both":
                target = mix_with_truth(target, need_labels(batch), self.rho, self.smoothing)
        return target if batch.mix is None else mix_image_target(target, batch.mix)

    def _machine_target(self, K: int, batch: Batch, made: MapTargets | SampledMaps | None) -> CompactTarget:
        maps, _ = need_maps(batch)
        made = made or self.labels(batch, (1, 1))
        if isinstance(made, SampledMaps):
            logits, weight = made.image, made.image_weight
        else:
            logits, weight = made.image_logits, made.image.weight
        classes = maps.classes
        if self.class_map is not None:
            if len(self.class_map) != maps.num_classes:
                raise EverytokenError(
                    f"class_map has {len(self.class_map)} entries, but the maps know {maps.num_classes} classes."
                )
            logits, classes = map_classes(logits, classes, torch.as_tensor(self.class_map, device=classes.device))
        elif maps.num_classes != K:
            raise EverytokenError(
                f"the class token has {K} outputs and the score maps speak {maps.num_classes} classes, so the maps "
                "cannot label whole images. Let the class token learn the data set's own labels "
                "(class_target='truth'), or say which classes correspond (class_map)."
            )
        return self.soft_target(logits, classes, K, weight)


@dataclass(frozen=True)
class ReLabel(FromMaps):
    """Cross entropy of the class token with the annotator's label of the crop."""

    name: ClassVar[str] = "relabel"

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{"class": H}"""
        return {"class": compact_cross_entropy(view.logits, self.image_target(view, batch, None))}
