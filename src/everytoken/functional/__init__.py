"""Pure functions on tensors: the equations of the papers, each under one name. Imports torch (and numpy) only.

From records to targets:  `vocabulary`, `collate_maps` -> `MapBatch`; `plan_sampling`, `label_tokens` -> `MapTargets`
(in two steps: `sample_maps` -> `SampledMaps`, `from_scores` -> `CompactTarget`); `from_labels`, `blend`,
`mix_with_truth`, `map_classes`.
From targets to losses:  `compact_cross_entropy`, `token_label_loss`, `dense_soft_cross_entropy`, `distillation_loss`.

Shapes: B images, (h, w) map cells, k scores per cell, (H, W) tokens, U classes in a vocabulary, K classes in all.
"""

from everytoken.functional.losses import (
    TokenLabelLoss,
    compact_cross_entropy,
    dense_soft_cross_entropy,
    distillation_loss,
    participating,
    token_label_loss,
)
from everytoken.functional.maps import MapBatch, collate_maps, vocabulary
from everytoken.functional.sampling import (
    MapTargets,
    SampledMaps,
    SamplingPlan,
    label_tokens,
    plan_sampling,
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
    "TokenLabelLoss",
    "blend",
    "collate_maps",
    "compact_cross_entropy",
    "dense_soft_cross_entropy",
    "distillation_loss",
    "from_labels",
    "from_scores",
    "label_tokens",
    "map_classes",
    "mix_with_truth",
    "participating",
    "plan_sampling",
    "sample_maps",
    "spread",
    "token_label_loss",
    "vocabulary",
]
