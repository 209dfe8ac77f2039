"""Pure functions on tensors: every equation of the papers once, under one name. Imports torch (and numpy) only.

Score maps to targets:  `vocabulary`, `collate_maps` -> `MapBatch`; `plan_sampling`, `label_tokens` -> `MapTargets`
(in two steps: `sample_maps` -> `SampledMaps`, `from_scores` -> `CompactTarget`); `from_labels`, `blend`,
`mix_with_truth`, `map_classes`.
Targets to losses:  `compact_cross_entropy`, `compact_binary_cross_entropy` (several labels per image),
`dense_soft_cross_entropy`, `distillation_loss`.
Dense relative localization:  `drloc`.  TL-Align:  `shares`.

Shapes: B images, (h, w) map cells, k scores per cell, (H, W) tokens, U classes in a vocabulary, K classes in all.
"""

from everytoken.functional.drloc import (
    all_pairs,
    class_count,
    drloc_ce,
    drloc_l1,
    drloc_reg,
    offset_classes,
    offset_targets,
    offsets,
    pair_hidden,
    pool_grid,
    ramp,
    random_pairs,
    same_image,
)
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
    sample_maps,
    spread,
)
from everytoken.functional.shares import (
    aligned_cross_entropy,
    aligned_target,
    convolved_shares,
    kernel_of,
    mean_shares,
    merged_shares,
    mixed_by_matrix,
    patch_shares,
    row_normalised,
    similarity_shares,
    target_rmse,
    token_presence,
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
    "aligned_cross_entropy",
    "aligned_target",
    "all_pairs",
    "blend",
    "class_count",
    "collate_maps",
    "compact_binary_cross_entropy",
    "compact_cross_entropy",
    "convolved_shares",
    "dense_soft_cross_entropy",
    "distillation_loss",
    "drloc_ce",
    "drloc_l1",
    "drloc_reg",
    "from_labels",
    "from_scores",
    "kernel_of",
    "label_cross_entropy",
    "label_tokens",
    "map_classes",
    "mean_shares",
    "merged_shares",
    "mix_with_truth",
    "mixed_by_matrix",
    "offset_classes",
    "offset_targets",
    "offsets",
    "pair_hidden",
    "participating",
    "patch_shares",
    "plan_sampling",
    "pool_grid",
    "ramp",
    "random_pairs",
    "row_normalised",
    "same_image",
    "sample_maps",
    "similarity_shares",
    "spread",
    "target_rmse",
    "token_presence",
    "vocabulary",
]
