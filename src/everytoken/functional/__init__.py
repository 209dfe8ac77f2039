"""Pure functions on tensors: every equation of the papers once, under one name. Imports torch (and numpy) only.

Score maps to targets:  `vocabulary`, `collate_maps` -> `MapBatch`; `plan_sampling`, `label_tokens` -> `MapTargets`
(in two steps: `sample_maps` -> `SampledMaps`, `from_scores` -> `CompactTarget`); `from_labels`, `blend`,
`mix_with_truth`, `map_classes`.
Targets to losses:  `compact_cross_entropy`, `compact_binary_cross_entropy` (several labels per image),
`dense_soft_cross_entropy`, `distillation_loss`.
Dense relative localization:  the module `drloc`.  TL-Align:  the module `shares`.

Shapes: B images, (h, w) map cells, k scores per cell, (H, W) tokens, U classes in a vocabulary, K classes in all.
"""

from everytoken.functional.losses import (
    compact_binary_cross_entropy,
    compact_cross_entropy,
    dense_soft_cross_entropy,
    distillation_loss,
    label_cross_entropy,
    participating,
)
from everytoken.functional.maps import MapBatch, collate_maps, vocabulary
from everytoken.functional.sampling import (
    MapTargets,
    SampledMaps,
    SamplingPlan,
    label_tokens,
    plan_sampling,
    sample_features,
    sample_maps,
    spread,
)
from everytoken.functional.targets import (
    CompactTarget,
    blend,
    from_labels,
    from_scores,
    map_classes,
    mix_with_truth,
)

__all__ = [
    "CompactTarget",
    "MapBatch",
    "MapTargets",
    "SampledMaps",
    "SamplingPlan",
    "blend",
    "collate_maps",
    "compact_binary_cross_entropy",
    "compact_cross_entropy",
    "dense_soft_cross_entropy",
    "distillation_loss",
    "from_labels",
    "from_scores",
    "label_cross_entropy",
    "label_tokens",
    "map_classes",
    "mix_with_truth",
    "participating",
    "plan_sampling",
    "sample_features",
    "sample_maps",
    "spread",
    "vocabulary",
]
