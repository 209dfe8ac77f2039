"""A report as one self-contained HTML page (style, script, charts and pictures inside)."""

from __future__ import annotations

from typing import Any

import jinja2
import numpy as np

from everytoken._version import version
from everytoken_lab.engine.accuracy import Predictions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.reports import words
from everytoken_lab.reports.charts import Chart, Series, line_chart
from everytoken_lab.reports.collect import Report
from everytoken_lab.reports.predictions import PredictedRun
from everytoken_lab.schema import printable

MATRIX_CLASSES = 20  # of more classes, those that are confused most


def render(template: str, **values: Any) -> str:
    """A page as text, with everything that it shows inside; all values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("everytoken_lab.reports"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["px"] = lambda value: f"{value:.1f}"
    return printable(environment.get_template(template).render(version=version(), **values))


def render_report(report: Report, title: str = "") -> str:
    """The page about runs."""
    sections = {
        "compared": "What was trained",
        "runs": "Runs",
        "curves": "Training curves",
        "classes": "Classes" if report.classes else "",
        "samples": "Sample predictions" if report.samples else "",
        "skipped": "What was skipped, and what is missing here",
    }
    painted = [answer.tokens for sample in report.samples for answer in sample.answers if answer.tokens is not None]
    return render(
        "report.html",
        report=report,
        title=title or f"Report: {', '.join(group.name for group in report.groups[:3])}",
        sections=[(name, heading) for name, heading in sections.items() if heading],
        words=words,
        curves=[chart for chart in _curves(report) if chart],
        matrices=[_matrix(c, c.predictions) for c in report.classes if isinstance(c.predictions, Predictions)],
        legend={entry.name: entry.colour for tokens in painted for entry in tokens.legend},
        asks_class_head=any(tokens.source == "class head" for tokens in painted),
    )


def _curves(report: Report) -> list[Chart | None]:
    colour = {run.name: i for i, group in enumerate(report.groups) for run in group.runs}

    def curve(run: Run, column: str, kind: str) -> list[tuple[float, float]]:
        """Of the averaged weights where there are any."""
        return run.curve(f"ema_{column}", kind) or run.curve(column, kind)

    def lines(column: str, kind: str = "step") -> list[Series]:
        return [Series(run.name, curve(run, column, kind), colour[run.name]) for run in report.runs]

    terms = dict.fromkeys(term for run in report.runs for term in run.terms)
    return [
        line_chart(f"Validation {report.metric}", " %", lines("score", "epoch"), least=4.0),
        line_chart("Validation loss", "", lines("val_loss", "epoch")),
        *(line_chart(f"Training: {term}", "", lines(term)) for term in list(terms)[:10]),
        line_chart("Learning rate", "", lines("lr")),
        line_chart("Images per second", "", lines("images_per_second")),
        line_chart("Waiting for data", " of the time", lines("waiting"), note="1: always; if high, use more workers"),
        line_chart("Gradient norm", "", lines("grad_norm")),
    ]


def _matrix(classes: PredictedRun, predictions: Predictions) -> dict[str, Any]:
    """The confusion matrix: rows are labels, columns are answers; numbers are percent of the row."""
    name, names = classes.group, classes.names
    pairs = predictions.label * len(names) + predictions.top[:, 0]
    counts = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), -1)
    wrong = counts.sum(1) - counts.diagonal() + counts.sum(0) - counts.diagonal()
    shown = sorted([i for i in np.argsort(-wrong, kind="stable").tolist() if counts[i].sum()][:MATRIX_CLASSES])
    percent = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    caption = f"{name}: rows are labels, columns answers, percent of the row"
    if len(shown) < len(names):
        caption += f"; the {len(shown)} of {len(names)} classes that are confused most"
    cells = {i: [(i == j, percent[i, j], f"{names[i]} taken for {names[j]}") for j in shown] for i in shown}
    return {
        "name": name,
        "caption": caption,
        "names": [names[i] for i in shown],
        "rows": [(names[i], row) for i, row in cells.items()],
    }
