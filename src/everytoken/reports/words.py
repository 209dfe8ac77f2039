"""Sentences of a report: what came out, how sure that is, and what the methods do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everytoken.reports.build import Report
from everytoken.reports.charts import describe
from everytoken.reports.groups import Difference, Estimate, Group
from everytoken.reports.runs import Run

OBJECTIVES = {
    "hard": "one label per image, from its folder",
    "token": "a label for every token, from the annotator's score map, besides the label of the image",
    "token_labeling": "a label for every token, from the annotator's score map, besides the label of the image",
    "relabel": "one label per crop, read from the annotator's score map",
    "online-token": "a teacher's answer for every token while training",
    "distill": "a teacher's answer for the image",
    "drloc": "how far apart pairs of tokens are, which needs no labels",
    "alignment": "labels of mixed images that follow the tokens through the layers",
}


def headline(report: Report) -> str:
    """The result in one line."""
    if report.differences:
        best = max(report.differences, key=lambda d: d.estimate.mean)
        return difference_words(best)
    ranked = [(g, e) for g in report.groups if (e := g.accuracy) is not None]
    if not ranked:
        return "No run is finished yet."
    group, estimate = max(ranked, key=lambda pair: pair[1].mean)
    return f"{group.name}: {report.metric} {estimate.mean:.2f} % on the validation images"


def difference_words(found: Difference) -> str:
    """What a group gained over the first, honestly."""
    e, other, base = found.estimate, found.other.name, found.base.name
    if len(e.values) < 2:
        return f"{other} against {base}: {e.mean:+.2f} points with one seed, which proves nothing yet"
    if e.clear:
        return f"{other} is {abs(e.mean):.2f} points {'better' if e.mean > 0 else 'worse'} than {base}"
    if min(e.values) > 0 or max(e.values) < 0:
        way = "ahead of" if e.mean > 0 else "behind"
        return f"{other} is {way} {base} with every seed, by {abs(e.mean):.2f} points, but the interval includes zero"
    return f"No clear difference between {other} and {base}: {e.mean:+.2f} points"


def how_sure(found: Difference) -> str:
    """The spread behind `difference_words`."""
    e = found.estimate
    each = ", ".join(f"{v:+.2f}" for v in e.values)
    seeds = ", ".join(map(str, found.seeds))
    text = f"{found.other.name} minus {found.base.name}, seed by seed ({seeds}): {each} points"
    if e.low is None or e.high is None:
        return f"{text}. One pair of runs says nothing about chance; train more seeds of each."
    text += f"; mean {e.mean:+.2f}, 95 % interval {e.low:+.2f} to {e.high:+.2f}."
    if not e.clear:
        text += " The interval includes zero" + (
            ": with so few seeds it is wide; more seeds would narrow it." if len(e.values) < 5 else "."
        )
    return text


def group_words(group: Group) -> str:
    """A group's result."""
    e = group.accuracy
    left = len(group.runs) - len(group.finished)
    open_ = f"; {left} of {len(group.runs)} runs not finished" if left else ""
    return (describe(e, " %") if e is not None else "no finished run") + open_


def learns(config: Mapping[str, Any]) -> str:
    """What a run's network is asked to learn."""
    names = list(config.get("objectives") or {}) or ["hard"]
    said = [OBJECTIVES.get(str(name), str(name)) for name in names]
    mixing = ", ".join(map(str, config.get("mixing") or {}))
    return "; and ".join(said) + (f" (images mixed by {mixing})" if mixing else "")


def progress(run: Run) -> str:
    """Where a run stands."""
    if run.state == "unfinished":
        return f"unfinished, {run.done_epochs} of {run.planned_epochs} epochs"
    return run.state


def caution(report: Report) -> str:
    """What the interval does and does not cover."""
    counts = [len(e.values) for g in report.groups if (e := g.accuracy) is not None]
    text = f"Compared is {report.metric} on the validation images after the last epoch, not the best one. "
    if counts and max(counts) > 1:
        return text + "Intervals are over seeds (Student, 95 %): they say what another seed may give on these images."
    return text + "There is one seed of each; two runs that differ in the seed only can differ by a point or two."


def interval_words(e: Estimate | None) -> str:
    """For a table cell."""
    if e is None:
        return "–"
    if e.low is None or e.high is None:
        return f"{e.mean:.2f}"
    return f"{e.mean:.2f} ({e.low:.2f} to {e.high:.2f})"
