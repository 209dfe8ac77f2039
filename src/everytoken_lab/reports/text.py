"""Sentences of a report: what came out, how sure that is, and what the methods do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from everytoken_lab.engine.run_folder import Run
from everytoken_lab.reports.charts import describe
from everytoken_lab.reports.collect import Classes, Report
from everytoken_lab.reports.groups import Difference, Group
from everytoken_lab.stats import Estimate, compared, percentage

if TYPE_CHECKING:
    from everytoken_lab.reports.samples import Agreement

OBJECTIVES = {
    "hard": "one label per image, from its folder",
    "token_labeling": "a label for every token, from the annotator's score map, besides the label of the image",
    "relabel": "one label per crop, read from the annotator's score map",
    "online_token": "a teacher's answer for every token while training",
    "distillation": "a teacher's answer for the image",
    "drloc": "how far apart pairs of tokens are, which needs no labels",
    "tl_align": "labels of mixed images that follow the tokens through the layers",
    "transmix": "labels of mixed images, by area and by the last layer's attention",
}


METHODS = {
    "hard": "label of the image",
    "token_labeling": "token labels",
    "relabel": "labels of crops",
    "online_token": "teacher's token labels",
    "distillation": "teacher's answer",
    "drloc": "relative localization",
    "tl_align": "aligned labels",
    "transmix": "TransMix",
    "cutmix": "CutMix",
    "mixup": "MixUp",
    "mixtoken": "MixToken",
}
OPTIONS = {
    "aa": "RandAugment",
    "amp": "mixed precision",
    "img_size": "image size",
    "lr": "learning rate",
    "lr_base": "learning rate before scaling",
    "lr_base_size": "batch of that learning rate",
    "lr_scaling": "learning rate by batch",
    "maps": "score maps",
    "min_lr": "last learning rate",
    "model": "network",
    "model_ema": "averaged weights",
    "model_ema_decay": "decay of averaged weights",
    "opt": "optimizer",
    "reprob": "chance of erasing",
    "sched": "schedule",
    "smoothing": "label smoothing",
    "warmup_lr": "first learning rate",
}


def option_words(name: str) -> str:
    """What people call an option: `objectives.token_labeling.beta` is "token labels: beta"."""
    first, *rest = name.split(".")
    if first in ("objectives", "mixing", "model_kwargs") and rest:
        return ": ".join([METHODS.get(rest[0], rest[0]), *rest[1:]]).replace("_", " ")
    return OPTIONS.get(name, name.replace("_", " "))


def term_words(term: str) -> str:
    """What people call a loss term: `token_labeling/token` is "token labels, token"."""
    objective, _, part = term.partition("/")
    return ", ".join([METHODS.get(objective, objective.replace("_", " ")), *([part] if part else [])])


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
        f"{group.name}: {report.metric} {estimate.value:.2f} %{_interval(group, estimate, report)}"
        for group, estimate in ranked
    )


def _interval(group: Group, estimate: Estimate, report: Report) -> str:
    """The interval that stands with a group's number: over its seeds; of one seed, over the validation images."""
    if estimate.low is not None and estimate.high is not None:
        return f" ({estimate.low:.2f} to {estimate.high:.2f} over {len(estimate.values)} seeds)"
    classes = next((c for c in report.classes if c.group is group), None) if len(estimate.values) == 1 else None
    if classes is not None and report.metric == "top-1":
        right = round(estimate.value / 100 * classes.images)
        of_images = percentage(np.arange(classes.images) < right)
        return f" of {classes.images:,} validation images (95 % interval {of_images.low:.1f} to {of_images.high:.1f})"
    if classes is not None and abs(classes.score.value - estimate.value) < 0.01:  # the best weights are the last
        low, high = classes.score.low, classes.score.high
        return f" on {classes.images:,} validation images (95 % interval {low:.1f} to {high:.1f})"
    seeds = len(estimate.values)
    return f" on the validation images ({seeds} seed{'s' if seeds > 1 else ''}, no interval)"


def best_differs(report: Report) -> bool:
    """Whether the best weights of the only run were not the last."""
    run = report.runs[0]
    return run.score is None or run.best is None or run.best > run.score


def not_compared(report: Report) -> list[str]:
    """Why groups that stand beside each other have no difference."""
    first, *others = report.groups
    compared = {group.name for d in report.differences for group in (d.base, d.other)}
    reasons = []
    for group in others:
        if not group.comparable(first):
            reasons.append(f"{group.name} and {first.name} have other validation images or classes: not compared.")
        elif group.name not in compared:
            reasons.append(f"{group.name} and {first.name} have no finished runs with the same seed: not compared.")
    return reasons


def baseline(report: Report) -> str:
    """What the differences of a report are differences to."""
    names = {d.base.name for d in report.differences} or {report.groups[0].name}
    return names.pop() if len(names) == 1 else "the first group on the same data"


def how_sure(difference: Difference) -> str:
    """The spread behind the headline."""
    e = difference.estimate
    each = ", ".join(f"{v:+.2f}" for v in e.values)
    seeds = ", ".join(map(str, difference.seeds))
    text = f"{difference.other.name} minus {difference.base.name}, seed by seed ({seeds}): {each} points"
    if e.low is None or e.high is None:
        return f"{text}. No interval: {'one seed' if len(e.values) < 2 else 'equal values'}; train more seeds of each."
    text += f"; mean {e.value:+.2f}, 95 % interval {e.low:+.2f} to {e.high:+.2f}."
    if not e.clear:
        text += " The interval includes zero" + (
            ": with so few seeds it is wide; more seeds would narrow it." if len(e.values) < 5 else "."
        )
    return text


def group_words(group: Group) -> str:
    """A group's result."""
    e = group.accuracy
    left = len(group.runs) - len(group.finished)
    unfinished = f"; {left} of {len(group.runs)} runs not finished" if left else ""
    return (describe(e, " %") if e is not None else "no finished run") + unfinished


def learns(config: Mapping[str, Any]) -> str:
    """What a run's network is asked to learn."""
    names = [str(name) for name in config.get("objectives") or {}] or ["hard"]
    parts = [OBJECTIVES.get(name, name) for name in names]
    mixing = ", ".join(METHODS.get(str(name), str(name)) for name in config.get("mixing") or {})
    return "; and ".join(parts) + (f" (images mixed by {mixing})" if mixing else "")


def facts(config: Mapping[str, Any]) -> str:
    """Model, size, initial weights, length and data of a run, as far as its configuration says."""
    size, weights, epochs, data = (config.get(name) for name in ("img_size", "weights", "epochs", "data"))
    model = str(config.get("model", "unknown model")) + (f" at {size} px" if size else "")
    parts = [
        (weights, f"from {weights}"),
        (epochs, f"{epochs} epoch{'' if epochs == 1 else 's'}"),
        (data, f"data {data}"),
    ]
    return ", ".join([model, *(text for value, text in parts if value)])


def agreement_words(agreement: Agreement) -> str:
    """What an annotator's score maps are like."""
    rows, columns = agreement.grid
    words = f"{rows} x {columns} cells per image."
    if agreement.held_out is not None:
        words += f" It was right on {agreement.held_out:.1%} of images held out from it."
    if agreement.agreement is None:
        words += " The names of the folders are not class names of the maps, so agreement cannot be measured."
    else:
        words += f" The main class of a map is the folder's for {agreement.agreement:.1%} of {agreement.maps:,} maps."
    return (
        f"{words} A cell is {agreement.confidence:.0%} sure on average, and a map names {agreement.vocabulary:.1f} "
        "classes."
    )


def confidence_words(classes: Classes) -> str:
    """What the probabilities of a group's first run mean."""
    calibration, name = classes.calibration, classes.group.name
    words = (
        f"Confidence of {name}: logits are divided by {calibration.temperature:.2f}, as `everytoken predict` does"
        f"{calibration.words()}."
    )
    threshold, coverage = calibration.threshold(0.95)
    if classes.average_precision is not None:
        best, precision, recall = calibration.best_threshold()
        return words + (
            f" It gives the labels with a probability of {best:.2f} or more: {precision:.0f} % of these are right, and "
            f"{recall:.0f} % of all labels are found."
        )
    if 0 < coverage < 100:
        words += f" At a threshold of {threshold:.2f}, precision is 95 % and coverage {coverage:.0f} %."
    return words


def progress(run: Run) -> str:
    """Where a run stands."""
    if run.state == "unfinished":
        return f"unfinished, {run.done_epochs} of {run.planned_epochs} epochs"
    return run.state


def caution(report: Report) -> str:
    """What the interval does and does not cover."""
    counts = [len(e.values) for g in report.groups if (e := g.accuracy) is not None]
    text = f"Compared is {report.metric} on the validation images after the last epoch, not the best one. "
    if len(report.runs) == 1:
        text = text.replace("Compared is", "This is")
        return text + "The interval is over images; another seed can differ by a point or two."
    if counts and max(counts) > 1:
        return text + "Intervals are over seeds (Student, 95 %): they say what another seed may give on these images."
    return text + "There is one seed of each; two runs that differ in the seed only can differ by a point or two."


def interval_words(e: Estimate | None) -> str:
    """For a table cell."""
    if e is None:
        return "–"
    if e.low is None or e.high is None:
        return f"{e.value:.2f}"
    return f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})"
