"""A page as one self-contained HTML file: `report.html` renders facts, which are inside as JSON, and sentences of the
report among them: what came out, how sure that is, what probabilities mean.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import numpy as np

from everytoken import __version__
from everytoken.files import plain_json
from everytoken_lab import draw, schema
from everytoken_lab.engine.accuracy import Predictions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.reports.collect import Difference, Group, Report
from everytoken_lab.reports.predictions import PredictedRun
from everytoken_lab.stats import Estimate, compared, paired_difference, percentage

POINTS = 250  # of a curve, at most


def render(title: str, facts: Mapping[str, Any]) -> str:
    """A page as text. Nothing in the facts can end the element that holds them, or begin another; no secrets."""
    photos, others = facts.get("photos", ()), {name: value for name, value in facts.items() if name != "photos"}
    others |= {"version": __version__, "palette": draw.PALETTE, "title": title}
    public = schema.texts(json.loads(plain_json(others)), schema.without_secrets)
    content = plain_json({**public, "photos": photos}, None)
    for letter in "<>&":  # no part of JSON itself, only of its strings
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    values = {"title": html.escape(schema.shown(title)), "facts": content}
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{ (title|facts) \}\}", lambda found: values[found[1]], template)


def render_report(report: Report, title: str = "") -> str:
    """The page about runs."""
    gains = {d.other.name: d.estimate for d in report.differences}
    facts = {
        "headline": report.headline,
        "details": details(report),
        "metric": report.metric,
        "bases": sorted({d.base.name for d in report.differences}),
        "groups": [_group(group, gains.get(group.name)) for group in report.groups],
        "settings": [(name, list(map(_setting, values))) for name, values in report.settings],
        "runs": [_run(run) | {"group": i} for i, group in enumerate(report.groups) for run in group.runs],
        "comparisons": photo_by_photo(report),
        "classes": report.classes[0].names if report.classes else [],
        "models": [_model(c) for c in report.compared],
        "labelling": report.labelling,
        "photos": report.photos,
        "notes": report.notes,
        "skipped": report.skipped,
    }
    return render(title or f"Report: {', '.join(group.name for group in report.groups[:3])}", facts)


def _group(group: Group, gain: Estimate | None) -> dict[str, Any]:
    """Runs with the same settings: result, and what was trained."""
    wanted = ("method", "objectives", "mixing", "model", "img_size", "weights", "epochs", "data")
    config = {name: group.runs[0].config.get(name) for name in wanted} if group.runs[0].config else None
    estimates = {name: e and [e.value, e.low, e.high] for name, e in (("score", group.accuracy), ("gain", gain))}
    return {"name": group.name, "runs": len(group.runs), "finished": len(group.finished), "config": config} | estimates


def _setting(value: Any) -> str | None:
    return None if value in (None, "", {}) else value if isinstance(value, str) else json.dumps(value, default=str)


def _run(run: Run) -> dict[str, Any]:
    """A run: state, last values, and curves over the epochs, of the averaged weights where there are any."""
    columns = {"score": "epoch", "val_loss": "epoch", **dict.fromkeys(run.terms, "step")}
    columns |= dict.fromkeys(("lr", "images_per_second", "waiting", "grad_norm"), "step")
    curves = {name: run.curve(f"ema_{name}", kind) or run.curve(name, kind) for name, kind in columns.items()}
    return {
        **{name: getattr(run, name) for name in ("name", "state", "seed", "score", "best", "seconds", "terms")},
        "epochs": [run.done_epochs, run.planned_epochs],
        "last": {name: run.last(name) for name in run.terms},
        "highest": max((value for _, value in run.curve("lr")), default=None),
        "means": {name: run.mean(name) for name in ("images_per_second", "waiting")},
        "curves": {name: thin(points) for name, points in curves.items() if points},
    }


def _model(c: PredictedRun) -> dict[str, Any]:
    """A run whose answers are shown: numbers of each class, and how often which class was answered for which."""
    facts = {"name": c.group, "confidence": confidence_words(c), "seen": c.run.cross_validated}
    facts |= {"images": len(c.predictions), "wrong": int(np.sum(~c.predictions.correct))}
    facts |= {"classes": c.predictions.per_class(c.names), "confusion": []}
    if isinstance(c.predictions, Predictions):
        pairs = np.stack([c.predictions.label, c.predictions.top[:, 0]], 1)
        found, counts = np.unique(pairs, axis=0, return_counts=True)
        facts["confusion"] = np.column_stack([found, counts]).tolist()  # label, answer, images
    return facts


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `POINTS` points: means of neighbours, the last one as it is."""
    if len(points) <= POINTS:
        return list(points)
    parts = np.array_split(np.array(points[:-1]), POINTS - 1)
    return [*((float(x), float(y)) for x, y in (part.mean(0) for part in parts)), points[-1]]


# -- sentences ---------------------------------------------------------------------------------------------------------


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
        images, of_images = len(run.predictions), run.predictions.accuracy
        if report.metric == "top-1":  # that of the last epoch, which may not be the best
            of_images = percentage(np.arange(images) < round(e.value / 100 * images))
        if abs(of_images.value - e.value) <= 0.01:
            return f" of {images:,} validation images (95 % interval {of_images.low:.1f} to {of_images.high:.1f})"
    return f" on the validation images ({seeds} seed{'s' if seeds > 1 else ''}, no interval)"


def details(report: Report) -> list[str]:
    """What stands below the headline: what was kept, differences seed by seed, and why others are not compared."""
    lines = []
    for run in report.runs:  # those that were trained without a recipe
        with suppress(OSError, KeyError, schema.SchemaError):
            result = schema.read_json(run.path / "auto.json", dict[str, Any])["result"]
            lines.append(f"{run.name}: {result['text']}")
    lines += [_how_sure(difference) for difference in report.differences]
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


def confidence_words(classes: PredictedRun) -> str:
    """What the probabilities of a run mean."""
    calibration, name = classes.calibration, classes.group
    if calibration is None:
        return f"{name} has too few validation images to calibrate its probabilities."
    words = f"Confidence of {name}: logits are divided by {calibration.temperature:.2f}, as in everytoken predict."
    if classes.data.multi_label:
        threshold, precision, recall = calibration.best_threshold()
        return f"{words} At a threshold of {threshold:.2f}, precision is {precision:.0f} % and recall {recall:.0f} %."
    threshold, coverage = calibration.threshold(0.95)
    if 0 < coverage < 100:
        words += f" At a threshold of {threshold:.2f}, precision is 95 % and coverage {coverage:.0f} %."
    return words


def photo_by_photo(report: Report) -> list[str]:
    """The best weights of one run of each group against those of the first, on the same photos."""
    lines = []
    for other in report.compared[1:]:
        first = report.compared[0]
        if first.data.multi_label:
            continue
        one, two = first.predictions.correct, other.predictions.correct
        words = compared(paired_difference(one, two), other.group, first.group)
        gained, lost = np.sum(two & ~one), np.sum(one & ~two)
        counts = f"of {len(one):,} photos, {gained:,} are right only in {other.group}, {lost:,} only in {first.group}"
        lines.append(f"{words}: {counts}. Best weights of one run each; the interval is over photos.")
    return lines
