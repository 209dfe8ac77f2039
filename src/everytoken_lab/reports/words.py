"""Sentences of a report: what came out, how sure that is, what probabilities mean."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from everytoken_lab import schema
from everytoken_lab.reports.collect import Report
from everytoken_lab.reports.groups import Difference, Group
from everytoken_lab.stats import Estimate, compared, paired_difference, percentage

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
    if classes.multi_label:
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
        if first.multi_label:
            continue
        one, two = first.predictions.correct, other.predictions.correct
        words = compared(paired_difference(one, two), other.group, first.group)
        gained, lost = np.sum(two & ~one), np.sum(one & ~two)
        counts = f"of {len(one):,} photos, {gained:,} are right only in {other.group}, {lost:,} only in {first.group}"
        lines.append(f"{words}: {counts}. Best weights of one run each; the interval is over photos.")
    return lines
