"""A page as one self-contained HTML file: `report.html` renders facts, which are inside as JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from everytoken._version import version
from everytoken.files import plain_json
from everytoken_lab import draw, schema
from everytoken_lab.engine.accuracy import Predictions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.reports import words
from everytoken_lab.reports.collect import Report
from everytoken_lab.reports.groups import Group
from everytoken_lab.reports.predictions import PredictedRun
from everytoken_lab.stats import Estimate

POINTS = 250  # of a curve, at most


def render(title: str, facts: Mapping[str, Any]) -> str:
    """A page as text. Nothing in the facts can end the element that holds them, or begin another; no secrets."""
    photos, others = facts.get("photos", ()), {name: value for name, value in facts.items() if name != "photos"}
    others |= {"version": version(), "palette": draw.PALETTE, "title": title}
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
        "details": words.details(report),
        "metric": report.metric,
        "bases": sorted({d.base.name for d in report.differences}),
        "groups": [_group(group, gains.get(group.name)) for group in report.groups],
        "settings": [(name, list(map(_setting, values))) for name, values in report.settings],
        "runs": [_run(run) | {"group": i} for i, group in enumerate(report.groups) for run in group.runs],
        "comparisons": words.photo_by_photo(report),
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
    wanted = ("objectives", "mixing", "model", "img_size", "weights", "epochs", "data")
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
    facts = {"name": c.group, "confidence": words.confidence_words(c), "seen": c.run.cross_validated}
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
