"""everytoken_lab: the application on top of everytoken. Train, annotate, evaluate, predict, export, explain, report.

    import everytoken_lab as lab

Each function has a command of the same name (`everytoken train --help`). Nothing heavy is imported until it is needed.
"""

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken_lab.annotators.job import annotate
    from everytoken_lab.engine.run_folder import Run
    from everytoken_lab.evaluation.exporting import export
    from everytoken_lab.evaluation.predictions import predict
    from everytoken_lab.evaluation.run import evaluate
    from everytoken_lab.explanation.cards import explain
    from everytoken_lab.models.open import load
    from everytoken_lab.reports.collect import report
    from everytoken_lab.training.classify import train

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken_lab.annotators.job": ["annotate"],
        "everytoken_lab.engine.run_folder": ["Run"],
        "everytoken_lab.evaluation.exporting": ["export"],
        "everytoken_lab.evaluation.predictions": ["predict"],
        "everytoken_lab.evaluation.run": ["evaluate"],
        "everytoken_lab.explanation.cards": ["explain"],
        "everytoken_lab.models.open": ["load"],
        "everytoken_lab.reports.collect": ["report"],
        "everytoken_lab.training.classify": ["train"],
    },
)
__all__ = ["Run", "annotate", "evaluate", "explain", "export", "load", "predict", "report", "train"]
