"""Objectives: one loss term each, an `nn.Module` with `forward(view, batch=None) -> {"loss": ..., terms}`.

Supervision: `HardLabels` (true labels), `ReLabel` (the annotator's label of the crop), `TokenLabeling` (a label for
every token), `OnlineTokenLabeling` (a teacher labels tokens while training), `Distillation` (a teacher's class logits).
Besides: `Drloc` (distances between tokens), `TLAlign` (labels that follow the tokens of mixed images) and `TransMix`.
A new one is a subclass of `Objective` in its own file and a line in OBJECTIVES (`registry`).
Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.objectives.base import Objective
    from everytoken.objectives.distillation import Distillation
    from everytoken.objectives.drloc import Drloc
    from everytoken.objectives.hard import HardLabels
    from everytoken.objectives.online_token import OnlineTokenLabeling
    from everytoken.objectives.registry import (
        OBJECTIVES,
        build_objectives,
        find_objective,
        required_by,
    )
    from everytoken.objectives.relabel import ReLabel
    from everytoken.objectives.tl_align import TLAlign, TransMix, aligned
    from everytoken.objectives.token_labeling import TokenLabeling

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.objectives.base": ["Objective"],
        "everytoken.objectives.distillation": ["Distillation"],
        "everytoken.objectives.drloc": ["Drloc"],
        "everytoken.objectives.hard": ["HardLabels"],
        "everytoken.objectives.online_token": ["OnlineTokenLabeling"],
        "everytoken.objectives.registry": [
            "OBJECTIVES",
            "build_objectives",
            "find_objective",
            "required_by",
        ],
        "everytoken.objectives.relabel": ["ReLabel"],
        "everytoken.objectives.tl_align": ["TLAlign", "TransMix", "aligned"],
        "everytoken.objectives.token_labeling": ["TokenLabeling"],
    },
)
__all__ = [
    "OBJECTIVES",
    "Distillation",
    "Drloc",
    "HardLabels",
    "Objective",
    "OnlineTokenLabeling",
    "ReLabel",
    "TLAlign",
    "TokenLabeling",
    "TransMix",
    "aligned",
    "build_objectives",
    "find_objective",
    "required_by",
]
