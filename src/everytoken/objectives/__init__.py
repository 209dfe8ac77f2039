"""Objectives: one named loss term each, over a token view and a batch.

`OBJECTIVES[name](**settings)` makes one; `total_loss(objectives, view, batch)` adds them up. Supervision modes:
`hard` (true labels), `relabel` (the annotator's label of the crop), `token` (token labeling), `online-token` (a teacher
labels tokens while training), `distill` (a teacher's class logits). Besides: `drloc` (distances between tokens) and
`alignment` (labels that follow the tokens of mixed images; `transmix`: by area and the last layer's attention).
A new one is a subclass of `Objective` in its own file and a line in OBJECTIVES.
"""

from everytoken.objectives.alignment import AlignedLabels, TransMix
from everytoken.objectives.base import Objective, View, total_loss
from everytoken.objectives.distillation import Distillation
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.online import OnlineTokens
from everytoken.objectives.relabel import ReLabel
from everytoken.objectives.token_labeling import TokenLabeling

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective
    for objective in (HardLabels, ReLabel, TokenLabeling, OnlineTokens, Distillation, Drloc, AlignedLabels, TransMix)
}

__all__ = [
    "OBJECTIVES",
    "AlignedLabels",
    "Distillation",
    "Drloc",
    "HardLabels",
    "Objective",
    "OnlineTokens",
    "ReLabel",
    "TokenLabeling",
    "TransMix",
    "View",
    "total_loss",
]
