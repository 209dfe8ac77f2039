"""Annotators (a timm classifier, one trained on your classes, the model itself, your function) and the job that fills a
store with their score maps.

    from everytoken.annotate import JobOptions, annotate, build_annotator
    from everytoken.data.find import open_dataset

    annotator = build_annotator("registry:efficientnet_lite0", size=(448, 448))
    annotate(open_dataset("photos"), Path("maps"), annotator, JobOptions(foreign_classes=True))

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everytoken.annotate.annotator import Annotator, AnnotatorError, Preprocessing
    from everytoken.annotate.build import ANNOTATORS, build_annotator
    from everytoken.annotate.classes import ClassError, ClassList, ClassPlan, imagenet_classes, plan_classes
    from everytoken.annotate.fit import FitOptions, fit_annotator
    from everytoken.annotate.job import JobOptions, Outcome, Team, annotate
    from everytoken.annotate.summary import Summary, summarise

_HOME = {
    "ANNOTATORS": "build",
    "Annotator": "annotator",
    "AnnotatorError": "annotator",
    "ClassError": "classes",
    "ClassList": "classes",
    "ClassPlan": "classes",
    "FitOptions": "fit",
    "JobOptions": "job",
    "Outcome": "job",
    "Preprocessing": "annotator",
    "Summary": "summary",
    "Team": "job",
    "annotate": "job",
    "build_annotator": "build",
    "fit_annotator": "fit",
    "imagenet_classes": "classes",
    "plan_classes": "classes",
    "summarise": "summary",
}
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
    "Summary",
    "Team",
    "annotate",
    "build_annotator",
    "fit_annotator",
    "imagenet_classes",
    "plan_classes",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'everytoken.annotate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"everytoken.annotate.{_HOME[name]}"), name)
