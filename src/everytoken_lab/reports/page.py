"""A report as one self-contained HTML page (style, script, charts and pictures inside)."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from PIL import Image

from everytoken._version import version
from everytoken_lab import draw
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.reports import tables, text
from everytoken_lab.reports.charts import Chart, Series, interval_chart, line_chart
from everytoken_lab.reports.collect import Classes, Report

if TYPE_CHECKING:
    from everytoken_lab.reports.samples import TokenMap

LEVELS = 11  # shades of the confusion matrix
MATRIX_CLASSES = 20  # of more classes, those that are confused most
# (background, shade, dark text, light text) of the light and the dark page; see style.css
SCHEMES = {
    "light": ("#ffffff", "#1f4fb0", "#000000", "#ffffff"),
    "dark": ("#0f1318", "#8fbcff", "#000000", "#ffffff"),
}


def render_html(report: Report, title: str = "") -> str:
    """The page as text. Nothing on it is fetched from anywhere."""
    colours = class_colours(report)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("everytoken_lab.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["px"] = lambda value: f"{value:.1f}"
    sections = {
        "compared": "What was compared" if len(report.groups) > 1 else "What was trained",
        "runs": "Runs",
        "curves": "Training curves",
        "classes": "Classes" if report.classes else "",
        "samples": "Sample predictions" if report.samples else "",
        "annotator": "The annotator" if report.agreements else "",
        "skipped": "What was skipped, and what is missing here",
        "machine": "Where and when" if any(run.starts for run in report.runs) else "",
    }
    return environment.get_template("report.html").render(
        report=report,
        title=title or f"Report: {', '.join(group.name for group in report.groups[:3])}",
        sections=[(name, words) for name, words in sections.items() if words],
        has_skipped=bool(
            report.notes
            or report.skipped
            or any(run.bad_updates for run in report.runs)
            or any(agreement.skipped for agreement in report.agreements)
        ),
        tables=tables,
        text=text,
        version=version(),
        headline_charts=[chart for chart in _headline_charts(report) if chart],
        curves=[chart for chart in _curves(report) if chart],
        matrices=[_matrix(classes, c) for classes in report.classes if (c := classes.confusion) is not None],
        level_styles=level_styles(),
        colours=colours,
        other=draw.OTHER,
        overlay=lambda tokens: overlay(tokens, colours),
        shares=_shares,
        asks_class_head=any(
            a.tokens is not None and a.tokens.source == "class head" for s in report.samples for a in s.answers
        ),
        has_token_labels=any(_learns_token_labels(group.runs[0]) for group in report.groups),
    )


def _learns_token_labels(run: Run) -> bool:
    return bool(set(run.config.get("objectives") or {}) & {"token", "token_labeling"})


def _headline_charts(report: Report) -> list[Chart | None]:
    colour = {group.name: i for i, group in enumerate(report.groups)}
    accuracies = [(g.name, e, colour[g.name]) for g in report.groups if (e := g.accuracy)]
    differences = [(d.other.name, d.estimate, colour[d.other.name]) for d in report.differences]
    if len(report.runs) == 1:  # a dot
        return []
    return [
        interval_chart(f"Validation {report.metric}", " %", accuracies),
        interval_chart(f"Difference to {text.baseline(report)}, seed by seed", " points", differences, zero=True),
    ]


def _curves(report: Report) -> list[Chart | None]:
    colour = {run.name: i for i, group in enumerate(report.groups) for run in group.runs}

    def lines(column: str, kind: str = "step") -> list[Series]:
        """One line per run; of the averaged weights where there are any."""
        curves = ((run, run.curve(f"ema_{column}", kind) or run.curve(column, kind)) for run in report.runs)
        return [Series(run.name, curve, colour[run.name]) for run, curve in curves]

    scores = [Series(run.name, run.scores, colour[run.name]) for run in report.runs]
    terms = list(dict.fromkeys(term for run in report.runs for term in run.terms))
    return [
        line_chart(f"Validation {report.metric}", " %", scores, least=4.0),
        line_chart("Validation loss", "", lines("val_loss", "epoch")),
        *(line_chart(f"Training: {text.term_words(term)}", "", lines(term)) for term in terms[:10]),
        line_chart("Learning rate", "", lines("lr")),
        line_chart("Images per second", "", lines("images_per_second")),
        line_chart("Waiting for data", " of the time", lines("waiting"), note="1: always; if high, use more workers"),
        line_chart("Gradient norm", "", lines("grad_norm")),
    ]


# -- pictures ---------------------------------------------------------------------------------------------------------


def class_colours(report: Report) -> dict[str, str]:
    """Class -> colour: the classes with the most tokens in what is shown, in the order of the classes."""
    maps = [a.tokens for sample in report.samples for a in sample.answers if a.tokens is not None]
    maps += [example.tokens for agreement in report.agreements for example in agreement.examples]
    counts: Counter[str] = Counter()
    for tokens in maps:
        counts.update(dict(tokens.shares()))
    every = draw.ClassColours([name for tokens in maps[:1] for name in tokens.names])
    shown = sorted(
        (name for name, _ in counts.most_common(len(draw.PALETTE))), key=lambda name: every.numbers.get(name, 0)
    )
    return every.choose(shown)


def overlay(tokens: TokenMap, colours: Mapping[str, str]) -> str:
    """The map as a `data:` picture, one pixel per token; opacity is the confidence."""
    table = np.array([draw.rgb(colours.get(name, draw.OTHER)) for name in tokens.names], np.uint8)
    opacity = 255 * (0.2 + 0.6 * np.clip(tokens.confidence, 0, 1))
    pixels = np.concatenate([table[tokens.top], opacity[..., None].astype(np.uint8)], axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _shares(tokens: TokenMap, count: int) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in tokens.shares()[:count])


# -- the confusion matrix ---------------------------------------------------------------------------------------------


def _matrix(classes: Classes, counts: np.ndarray) -> dict[str, Any]:
    """Rows are labels, columns are answers; numbers are percent of the row."""
    wrong = counts.sum(1) - counts.diagonal() + counts.sum(0) - counts.diagonal()
    shown = sorted([i for i in np.argsort(-wrong, kind="stable").tolist() if counts[i].sum()][:MATRIX_CLASSES])
    percent = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)

    def cell(i: int, j: int) -> dict[str, Any]:
        return {
            "level": round(percent[i, j] / 100 * (LEVELS - 1)),
            "diagonal": i == j,
            "text": f"{percent[i, j]:.0f}" if counts[i, j] else "",
            "words": f"{classes.names[i]} taken for {classes.names[j]}: {percent[i, j]:.1f} %",
        }

    caption = f"{classes.group.name}: rows are labels, columns answers, percent of the row"
    if classes.runs > 1:
        caption += f", {classes.runs} runs added up"
    if len(shown) < len(classes.names):
        caption += f"; the {len(shown)} of {len(classes.names)} classes that are confused most"
    return {
        "name": classes.group.name,
        "caption": caption,
        "names": [classes.names[i] for i in shown],
        "rows": [(classes.names[i], [cell(i, j) for j in shown]) for i in shown],
    }


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [c / 255 for c in draw.rgb(colour)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((luminance(first), luminance(second)), reverse=True)
    return (a + 0.05) / (b + 0.05)


def level_colours(scheme: str) -> list[tuple[str, str]]:
    """(background, text) of each level; the text is the more readable of two."""
    back, shade, dark, light = SCHEMES[scheme]
    levels = []
    for level in range(LEVELS):
        part = level / (LEVELS - 1)
        mixed = [round(b + part * (s - b)) for b, s in zip(draw.rgb(back), draw.rgb(shade), strict=True)]
        colour = "#" + "".join(f"{c:02x}" for c in mixed)
        levels.append((colour, dark if contrast(colour, dark) > contrast(colour, light) else light))
    return levels


def level_styles() -> str:
    """The CSS rules of the levels, for both schemes."""

    def rules(levels: Sequence[tuple[str, str]]) -> str:
        return "".join(f".l{i}{{background:{b};color:{t}}}" for i, (b, t) in enumerate(levels))

    dark = rules(level_colours("dark"))
    return f"{rules(level_colours('light'))}@media screen and (prefers-color-scheme: dark){{{dark}}}"
