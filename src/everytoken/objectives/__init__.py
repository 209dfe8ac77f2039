"""Objectives: one loss term each, an `nn.Module` with `forward(view, batch=None) -> {"loss": ..., terms}`.

Supervision: `HardLabels` (true labels), `ReLabel` (the annotator's label of the crop), `TokenLabeling` (a label for
every token), `OnlineTokenLabeling` (a teacher labels tokens while training), `Distillation` and `FeatureDistillation`
(a teacher's class logits, a teacher's tokens).
Besides: `Drloc` (distances between tokens), `TLAlign` (labels that follow the tokens of mixed images) and `TransMix`.
A new one is a subclass of `Objective` (`base`) and a line in OBJECTIVES (`registry`).
Nothing is imported here, so that `registry` can be read without torch.
"""
