"""Collect everything a report shows; `page` and `markdown` write it down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everytoken.classes import shown_name
from everytoken.errors import EverytokenError
from everytoken.reports.groups import Difference, Group, config_differences, difference, group_runs
from everytoken.reports.runs import Run, find_runs

if TYPE_CHECKING:
    from everytoken.reports.predictions import Predicted
    from everytoken.reports.samples import Agreement, Sample

Meter = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Classes:
    """Predictions of a group, added up over its runs.

    Attributes:
        confusion: [classes, classes], rows are labels; runs: how many were added.
        interval: Wilson interval of a single run's top-1 over its images, percent.
    """

    group: Group
    names: list[str]
    confusion: np.ndarray
    runs: int
    interval: tuple[float, float]

    def recall(self) -> np.ndarray:
        """[classes] percent of each class's images that were found; nan without images."""
        total = self.confusion.sum(1)
        return np.where(total > 0, 100 * self.confusion.diagonal() / np.maximum(total, 1), np.nan)

    def precision(self) -> np.ndarray:
        """[classes] percent of what was called by a class's name and is; nan where nothing was."""
        total = self.confusion.sum(0)
        return np.where(total > 0, 100 * self.confusion.diagonal() / np.maximum(total, 1), np.nan)

    def taken_for(self, row: int) -> str:
        """What a class is most often mistaken for."""
        wrong = self.confusion[row].copy()
        wrong[row] = 0
        return self.names[int(wrong.argmax())] if wrong.any() else ""


@dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
        groups: runs with the same settings; the first group is what the others are compared with.
        differences: of the other groups with the first; settings: options that differ between groups.
        classes: per group, where there are predictions; samples, agreements: pictures.
        notes: what could not be shown, as sentences; skipped: images that could not be read, key -> reason.
    """

    runs: list[Run]
    groups: list[Group]
    differences: list[Difference]
    settings: list[tuple[str, list[Any]]]
    classes: list[Classes] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """What is compared: "top-1", unless the runs are of another task."""
        found = {run.metric for run in self.runs if run.scores}
        return found.pop() if len(found) == 1 else "score" if found else "top-1"


def collect(
    paths: Sequence[str | Path], *, data: str = "", predictions: bool = True, count: int = 12, device: str = "",
    workers: int = 0, meter: Meter | None = None,
) -> Report:  # fmt: skip
    """Read the runs and, with `predictions`, evaluate their best weights on their validation images.

    Args:
        data: where the images are now, if not where they were in training.
        count: images to show.
        device: for evaluation; empty: the best there is.
        meter: shows progress: meter(title) is a context manager that gives tell(done, total).
    """
    runs = find_runs(paths)
    if all(run.state in ("damaged", "not begun") for run in runs):
        told = "\n".join(f"  {run.path}: {'; '.join(run.troubles) or f'{run.state}, no epoch is done'}" for run in runs)
        raise EverytokenError(
            f"there is nothing to report on:\n{told}\nGive the folder that `everytoken train` wrote (its --output)."
        )
    groups = group_runs(runs)
    if len(paths) == 1:  # a folder of runs has no order of its own: what learns plain labels is the baseline
        groups.sort(key=lambda group: set(group.runs[0].config.get("objectives") or {"hard"}) != {"hard"})
    found = [difference(groups[0], other) for other in groups[1:]]
    report = Report(runs, groups, [d for d in found if d], config_differences(groups) if len(groups) > 1 else [])
    for run in runs:
        report.skipped.update(run.skipped)
        report.notes.extend(f"{run.name}: {trouble}" for trouble in run.troubles)
    if not predictions:
        report.notes.append("Predictions were left out on request (--no-predictions).")
        return report
    _add_predictions(report, data, count, device, workers, meter)
    _add_agreements(report, data)
    return report


def _add_predictions(report: Report, data: str, count: int, device: str, workers: int, meter: Meter | None) -> None:
    from everytoken.engine.distributed import pick_device
    from everytoken.reports.predictions import confusion, predict_run
    from everytoken.reports.samples import samples

    shown: list[tuple[str, Run, Predicted]] = []
    for group in report.groups:
        matrices, names, interval = list[np.ndarray](), list[str](), (0.0, 0.0)
        for run in group.runs:
            if run.state in ("damaged", "not begun"):
                continue
            if run.scores and run.metric in ("mIoU", "mAP"):
                report.notes.append(
                    f"{run.name}: predictions are shown for classifiers only; this run has {run.metric}."
                )
                continue
            try:
                if meter is None:
                    predicted = predict_run(run, pick_device(device), data, workers)
                else:
                    with meter(f"evaluating {run.name}") as tell:
                        predicted = predict_run(run, pick_device(device), data, workers, tell)
            except (EverytokenError, OSError, RuntimeError) as error:
                report.notes.append(f"{run.name}: no predictions, because {_first_line(error)}")
                continue
            report.skipped.update(predicted.skipped)
            if not matrices:
                shown.append((group.name, run, predicted))
                names, interval = predicted.class_names, predicted.predictions.interval()
            if predicted.class_names == names:
                matrices.append(confusion(predicted))
        if matrices:
            added = np.sum(matrices, axis=0)
            report.classes.append(Classes(group, [shown_name(name) for name in names], added, len(matrices), interval))
    # pictures are of the same images for all groups
    same = [s for s in shown if s[2].keys == shown[0][2].keys and s[2].class_names == shown[0][2].class_names]
    same = [s for s in same if np.array_equal(s[2].predictions.index, shown[0][2].predictions.index)]
    if same and count:
        try:
            report.samples.extend(samples(same[:4], count))
        except (EverytokenError, OSError, RuntimeError) as error:
            report.notes.append(f"No sample predictions, because {_first_line(error)}")


def _add_agreements(report: Report, data: str) -> None:
    from everytoken.evaluation.held_out import origin_of
    from everytoken.maps import Maps
    from everytoken.reports.predictions import splits
    from everytoken.reports.samples import annotator_agreement

    seen: set[str] = set()
    for run in report.runs:
        where = str(run.config.get("labels") or "")
        if not where or where in seen:
            continue
        seen.add(where)
        origin = origin_of(str(run.path))
        try:
            store = Maps(str((origin and origin.there("labels")) or where), partial=True)
        except (EverytokenError, OSError) as error:
            report.notes.append(f"{run.name}: nothing about its score maps, because {_first_line(error)}")
            continue
        try:
            images = splits(run, data)[0]
        except (EverytokenError, OSError):
            images = None
        try:
            report.agreements.append(annotator_agreement(store, images))
        except (EverytokenError, OSError) as error:
            report.notes.append(f"the score maps {where} cannot be read: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
