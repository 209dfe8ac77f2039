"""Sentences and tables of a report: what came out, how sure that is, what was trained. A new column goes here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from everytoken_lab.progress import clock
from everytoken_lab.reports.collect import Report
from everytoken_lab.reports.groups import Difference, Group
from everytoken_lab.stats import Estimate, compared, percentage

if TYPE_CHECKING:
    from everytoken_lab.reports.predictions import PredictedRun


def headline(report: Report) -> str:
    """The result in one line."""
    if report.differences:
        best = max(report.differences, key=lambda d: d.estimate.value)
        return compared(best.estimate, best.other.name, best.base.name)
    ranked = [(g, e) for g in report.groups if (e := g.accuracy) is not None]
    if not ranked:
        return "No run is finished yet."
    if all(group.comparable(ranked[0][0]) for group, _ in ranked):
        ranked = [max(ranked, key=lambda pair: pair[1].value)]
    return "; ".join(
        f"{group.name}: {report.metric} {e.value:.2f} %{_interval(group, e, report)}" for group, e in ranked
    )


def _interval(group: Group, e: Estimate, report: Report) -> str:
    """The interval that stands with a group's number: over its seeds; of one seed, over the validation images."""
    seeds = len(e.values)
    if e.low is not None:
        return f" ({e.low:.2f} to {e.high:.2f} over {seeds} seeds)"
    for run in (c for c in report.classes if c.group == group.name and seeds == 1):
        images, of_images = len(run.predictions), run.score
        if report.metric == "top-1":  # that of the last epoch, which may not be the best
            of_images = percentage(np.arange(images) < round(e.value / 100 * images))
        if abs(of_images.value - e.value) <= 0.01:
            return f" of {images:,} validation images (95 % interval {of_images.low:.1f} to {of_images.high:.1f})"
    return f" on the validation images ({seeds} seed{'s' if seeds > 1 else ''}, no interval)"


def details(report: Report) -> list[str]:
    """What stands below the headline: differences seed by seed, and why others are not compared."""
    lines = [_how_sure(difference) for difference in report.differences]
    first, *others = report.groups
    shown = {group.name for d in report.differences for group in (d.base, d.other)}
    for group in others:
        if not group.comparable(first):
            lines.append(f"{group.name} and {first.name} have other validation images or classes: not compared.")
        elif group.name not in shown:
            lines.append(f"{group.name} and {first.name} have no finished runs with the same seed: not compared.")
    return lines


def _how_sure(difference: Difference) -> str:
    """The spread behind the headline."""
    e, seeds = difference.estimate, ", ".join(map(str, difference.seeds))
    each = ", ".join(f"{v:+.2f}" for v in e.values)
    text = f"{difference.other.name} minus {difference.base.name}, seed by seed ({seeds}): {each} points"
    if e.low is None:
        return f"{text}. No interval: {'one seed' if len(e.values) < 2 else 'equal values'}; train more seeds of each."
    text += f"; mean {e.value:+.2f}, 95 % interval {e.low:+.2f} to {e.high:+.2f}."
    return text if e.clear else f"{text} The interval includes zero; more seeds would narrow it."


def baseline(report: Report) -> str:
    """What the differences of a report are differences to."""
    names = {d.base.name for d in report.differences} or {report.groups[0].name}
    return names.pop() if len(names) == 1 else "the first group on the same data"


def about(config: Mapping[str, Any]) -> str:
    """Objectives, mixing, model, size, initial weights, length and data of a run, as far as its configuration says."""
    size, weights, epochs, data = (config.get(name) for name in ("img_size", "weights", "epochs", "data"))
    facts = [
        f"objectives: {', '.join(map(str, config.get('objectives') or ['hard']))}",
        f"mixing: {', '.join(map(str, config.get('mixing') or ['none']))}",
        str(config.get("model", "unknown model")) + (f" at {size} px" if size else ""),
        f"from {weights}" if weights else "",
        f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else "",
        f"data {data}" if data else "",
    ]
    return "; ".join(filter(None, facts))


def confidence_words(classes: PredictedRun) -> str:
    """What the probabilities of a run mean."""
    calibration, name = classes.calibration, classes.group
    if calibration is None:
        return f"{name} has too few validation images to calibrate its probabilities."
    words = (
        f"Confidence of {name}: logits are divided by {calibration.temperature:.2f}, as `everytoken predict` does"
        f"{calibration.words()}."
    )
    if classes.multi_label:
        threshold, precision, recall = calibration.best_threshold()
        return f"{words} At a threshold of {threshold:.2f}, precision is {precision:.0f} % and recall {recall:.0f} %."
    threshold, coverage = calibration.threshold(0.95)
    if 0 < coverage < 100:
        words += f" At a threshold of {threshold:.2f}, precision is 95 % and coverage {coverage:.0f} %."
    return words


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows (column -> cell) under a caption; the first column and those in `left` are left-aligned."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    left: Sequence[str] = ()


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def _estimate(e: Estimate | None, form: str = ".2f") -> str:
    interval = "" if e is None or e.low is None else f" ({e.low:{form}} to {e.high:{form}})"
    return number(None if e is None else e.value, form) + interval


def group_table(report: Report) -> Table:
    """One row per group."""
    gains = {d.other.name: d.estimate for d in report.differences}
    rows = [
        {
            "group": group.name,
            "runs finished": f"{len(group.finished)} of {len(group.runs)}",
            f"{report.metric} %": _estimate(group.accuracy),
            f"gain over {baseline(report)}, paired": _estimate(gains.get(group.name), "+.2f"),
        }
        for group in report.groups
    ]
    return Table("Groups of runs with the same settings; in brackets the 95 % interval over seeds.", rows)


def run_table(report: Report) -> Table:
    """One row per run."""
    terms = list(dict.fromkeys(term for run in report.runs for term in run.terms))[:8]
    rows = []
    for run in report.runs:
        losses = run.curve("ema_val_loss", "epoch") or run.curve("val_loss", "epoch")
        epochs = f"{run.done_epochs} of {run.planned_epochs}"
        rows.append(
            {
                "run": run.name,
                "state": f"unfinished, {epochs} epochs" if run.state == "unfinished" else run.state,
                "seed": "–" if run.seed is None else str(run.seed),
                f"{report.metric} %": number(run.score),
                f"best {report.metric} %": number(run.best),
                "validation loss": number(losses[-1][1] if losses else None, ".3f"),
                **{f"training: {term}": number(run.last(term), ".3f") for term in terms},
                "highest learning rate": number(max((v for _, v in run.curve("lr")), default=None), ".2g"),
                "time": "–" if run.seconds is None else clock(run.seconds),
                "images/s": number(run.mean("images_per_second"), ",.0f"),
                "waiting for data": number(run.mean("waiting"), ".0%"),
            }
        )
    return Table("Last values; images per second and waiting are means.", rows, ["state"])


def settings_table(report: Report) -> Table:
    """Options that differ between groups."""
    names = [group.name for group in report.groups]
    cells = [(name, [_value(value) for value in values]) for name, values in report.settings]
    rows = [{"setting": n, **dict(zip(names, row, strict=True))} for n, row in cells if len(set(row)) > 1]
    return Table("Settings that are not the same in all groups.", rows, names)


def _value(value: Any) -> str:
    if value in (None, "", {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def class_table(report: Report, most: int = 60) -> Table:
    """One row per class: recall in each group, or average precision of multi-label images; worst first."""
    same = [c for c in report.classes if c.names == report.classes[0].names]
    last = same[-1]
    key, what = ("AP", "average precision") if last.multi_label else ("recall", "recall")
    every = zip(*(c.predictions.per_class(c.names) for c in same), strict=True)
    found = [rows for rows in every if rows[0]["images"]]
    found.sort(key=lambda rows: rows[-1][key] or 0.0)
    table = []
    for rows in found[:most]:
        first, final = rows[0], rows[-1]
        row = {"class": first["class"], "images": str(first["images"])}
        row |= {f"{what} %: {c.group}": number(r[key], ".1f") for c, r in zip(same, rows, strict=True)}
        if len(same) > 1:
            row["difference"] = "–" if None in (final[key], first[key]) else f"{final[key] - first[key]:+.1f}"
        if last.multi_label:
            row[f"recall %: {last.group}"] = number(final["recall"], ".1f")
        row[f"precision %: {last.group}"] = number(final["precision"], ".1f")
        if not last.multi_label:
            row["most often taken for"] = final["taken for"] or "–"
        table.append(row)
    caption = "Best weights of one run of each group on the validation images; worst first."
    caption += f" The {most} worst of {len(found)} classes." if len(found) > most else ""
    caption += " Recall and precision are at a probability of a half." if last.multi_label else ""
    return Table(caption, table, ["most often taken for"])
