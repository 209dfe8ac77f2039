"""Annotators (a timm classifier, one trained on your classes, the model itself, your function) and the job that fills a
store with their score maps.

    maps = annotate("photos", "maps", annotator="fit")

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken_lab.annotators.annotator import (
        ANNOTATORS,
        Annotator,
        AnnotatorError,
        Preprocessing,
        build_annotator,
    )
    from everytoken_lab.annotators.fit import fit_annotator
    from everytoken_lab.annotators.job import Outcome, annotate, fill_store, summarise
    from everytoken_lab.annotators.options import AnnotateOptions, FitOptions

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken_lab.annotators.annotator": [
            "ANNOTATORS",
            "Annotator",
            "AnnotatorError",
            "Preprocessing",
            "build_annotator",
        ],
        "everytoken_lab.annotators.fit": ["fit_annotator"],
        "everytoken_lab.annotators.job": ["Outcome", "annotate", "fill_store", "summarise"],
        "everytoken_lab.annotators.options": ["AnnotateOptions", "FitOptions"],
    },
)
__all__ = [
    "ANNOTATORS",
    "AnnotateOptions",
    "Annotator",
    "AnnotatorError",
    "FitOptions",
    "Outcome",
    "Preprocessing",
    "annotate",
    "build_annotator",
    "fill_store",
    "fit_annotator",
    "summarise",
]
