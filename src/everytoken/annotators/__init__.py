"""Annotators (a timm classifier, one trained on your classes, the model itself, your function) and the job that fills a
store with their score maps.

    from everytoken.annotators import JobOptions, annotate, build_annotator
    from everytoken.data.datasets import open_dataset

    annotator = build_annotator("registry:efficientnet_lite0", size=(448, 448))
    annotate(open_dataset("photos"), Path("maps"), annotator, JobOptions(foreign_classes=True))

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.annotators.annotator import Annotator, AnnotatorError, Preprocessing
    from everytoken.annotators.build import ANNOTATORS, build_annotator
    from everytoken.annotators.fit import FitOptions, fit_annotator
    from everytoken.annotators.job import JobOptions, Outcome, Team, annotate
    from everytoken.annotators.summary import summarise
    from everytoken.classes import ClassError, ClassList, ClassPlan, imagenet_classes, plan_classes

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.annotators": ["JobOptions", "annotate", "build_annotator"],
        "everytoken.data.datasets": ["open_dataset"],
        "everytoken.annotators.annotator": ["Annotator", "AnnotatorError", "Preprocessing"],
        "everytoken.annotators.build": ["ANNOTATORS", "build_annotator"],
        "everytoken.annotators.fit": ["FitOptions", "fit_annotator"],
        "everytoken.annotators.job": ["JobOptions", "Outcome", "Team", "annotate"],
        "everytoken.annotators.summary": ["summarise"],
        "everytoken.classes": ["ClassError", "ClassList", "ClassPlan", "imagenet_classes", "plan_classes"],
    },
)
__all__ = [
    "ANNOTATORS",
    "Annotator",
    "AnnotatorError",
    "ClassError",
    "ClassList",
    "ClassPlan",
    "FitOptions",
    "JobOptions",
    "Outcome",
    "Preprocessing",
    "Team",
    "annotate",
    "build_annotator",
    "fit_annotator",
    "imagenet_classes",
    "plan_classes",
    "summarise",
]
