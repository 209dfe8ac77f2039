"""`report`: collect everything about one or several runs, and write one page of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from everytoken.errors import EverytokenError
from everytoken.files import write_atomically
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration
from everytoken_lab.classes import shown_name
from everytoken_lab.engine.run_folder import Run, find_runs
from everytoken_lab.reports.groups import Difference, Group, config_differences, differences, group_runs
from everytoken_lab.stats import Estimate

if TYPE_CHECKING:
    from everytoken_lab.reports.predictions import PredictedRun
    from everytoken_lab.reports.samples import Agreement, Sample

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Classes:
    """Predictions of a group, added up over its runs.

    Attributes:
        tally: [3, classes] images that have a class, that are said to have it, and both; runs: how many were added.
        images: that a run was asked about.
        score: top-1, or mAP with several labels per image, of a single run over its images, percent, with its interval.
        calibration: of that run.
        confusion: [classes, classes], rows are labels; None with several labels per image.
        average_precision: [classes] percent, mean over the runs, with several labels per image.
    """

    group: Group
    names: list[str]
    tally: np.ndarray
    runs: int
    images: int
    score: Estimate
    calibration: Calibration
    confusion: np.ndarray | None = None
    average_precision: np.ndarray | None = None

    def recall(self) -> np.ndarray:
        """[classes] percent of each class's images that were found; nan without images."""
        return np.where(self.tally[0] > 0, 100 * self.tally[2] / np.maximum(self.tally[0], 1), np.nan)

    def precision(self) -> np.ndarray:
        """[classes] percent of what was called by a class's name and is; nan where nothing was."""
        return np.where(self.tally[1] > 0, 100 * self.tally[2] / np.maximum(self.tally[1], 1), np.nan)

    def taken_for(self, row: int) -> str:
        """What a class is most often mistaken for."""
        if self.confusion is None:
            return ""
        wrong = self.confusion[row].copy()
        wrong[row] = 0
        return self.names[int(wrong.argmax())] if wrong.any() else ""


@dataclass(frozen=True)
class Report:
    """Everything a report shows.

    Attributes:
        groups: runs with the same settings; the first group of each dataset is what the others are compared with.
        differences: of the other groups with it; settings: options that differ between groups.
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
        metrics = {run.metric for run in self.runs if run.scores}
        return metrics.pop() if len(metrics) == 1 else "score" if metrics else "top-1"

    @property
    def headline(self) -> str:
        """The result in one line."""
        from everytoken_lab.reports.text import headline

        return headline(self)


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows."""

    title: str = ""
    """Title of the page."""
    predictions: bool = True
    """Evaluate the best weights on the validation images, for class tables and sample predictions (kept in the run)."""
    samples: int = 12
    """Validation images to show."""
    data: str = ""
    """Where the images are now, if not where they were in training; also needed if they are at an address."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = 0
    """Loader processes."""


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Compare runs and write one page about them: result, curves, classes, sample predictions.

    Example:
        >>> lab.report("runs", "report.html").headline
        'token is 4.69 points better than plain (95 % interval +2.14 to +7.24)'

    Args:
        runs: a run folder, a folder of run folders, or several. Runs that differ in the seed only are one group; the
            group of the first run is what the others on the same data are compared with (in a folder of runs, one that
            learns plain labels). Runs on other data are not compared with it.
        out: the file to write, a self-contained HTML page. None: write nothing.
        progress: shows how far it is: progress(title) is a context manager that gives tell(done, total).
        options: fields of `ReportOptions`.
    """
    settings = schema.from_keywords(ReportOptions, options, "report()")
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    target = None if out is None else Path(out)
    if target is not None and target.is_dir():
        raise EverytokenError(f"{target} is a folder; name a file, such as {target / 'report.html'}.")
    if target is not None and not target.parent.is_dir():
        raise EverytokenError(f"there is no folder {target.parent} to write {target.name} to.")
    result = collect(paths, settings, progress)
    if target is not None:
        from everytoken_lab.reports.page import render_html

        try:
            write_atomically(target, render_html(result, settings.title).encode())
        except OSError as error:
            raise EverytokenError(f"the report cannot be written to {target}: {error}") from error
    return result


def collect(paths: Sequence[str | Path], options: ReportOptions, progress: Progress | None = None) -> Report:
    """Read the runs and evaluate their best weights on their validation images."""
    runs = find_runs(paths)
    if all(run.state in ("damaged", "not begun") for run in runs):
        reasons = "\n".join(
            f"  {run.path}: {'; '.join(run.troubles) or f'{run.state}, no epoch is done'}" for run in runs
        )
        raise EverytokenError(f"there is nothing to report on:\n{reasons}\nName the folder of a training run.")
    groups = group_runs(runs)
    if len(paths) == 1:  # a folder of runs has no order of its own: what learns plain labels is the baseline
        groups.sort(key=lambda group: set(group.runs[0].config.get("objectives") or {"hard"}) != {"hard"})
    result = Report(runs, groups, differences(groups), config_differences(groups) if len(groups) > 1 else [])
    for run in runs:
        result.skipped.update(run.skipped)
        result.notes.extend(f"{run.name}: {trouble}" for trouble in run.troubles)
    if not options.predictions:
        result.notes.append("Predictions were left out on request.")
        return result
    _add_predictions(result, options, progress or _silent)
    _add_agreements(result, options.data)
    return result


@contextmanager
def _silent(title: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


def _add_predictions(report: Report, options: ReportOptions, progress: Progress) -> None:
    from everytoken_lab.engine.distributed import pick_device
    from everytoken_lab.reports.predictions import predict_run
    from everytoken_lab.reports.samples import samples

    device = pick_device(options.device)
    shown: list[tuple[str, PredictedRun]] = []
    for group in report.groups:
        same_classes: list[PredictedRun] = []
        for run in group.runs:
            if run.state in ("damaged", "not begun"):
                continue
            if run.scores and not run.classifies:
                report.notes.append(f"{run.name}: predictions are shown for classifiers only; this is {run.metric}.")
                continue
            try:
                with progress(f"evaluating {run.name}") as tell:
                    predicted = predict_run(run, device, options.data, options.workers, tell)
            except (EverytokenError, OSError, RuntimeError) as error:
                report.notes.append(f"{run.name}: no predictions, because {_first_line(error)}")
                continue
            report.skipped.update(predicted.skipped)
            if not same_classes or predicted.class_names == same_classes[0].class_names:
                same_classes.append(predicted)
        if same_classes:
            first = same_classes[0]
            shown.append((group.name, first))
            report.classes.append(_classes(group, same_classes))
    # pictures are of the same images for all groups
    comparable = [(name, predicted) for name, predicted in shown if predicted.same_images(shown[0][1])]
    if comparable and options.samples:
        try:
            report.samples.extend(samples(comparable[:4], options.samples, device))
        except (EverytokenError, OSError, RuntimeError) as error:
            report.notes.append(f"No sample predictions, because {_first_line(error)}")


def _classes(group: Group, runs: Sequence[PredictedRun]) -> Classes:
    first = runs[0]
    confusions = [c for run in runs if (c := run.confusion()) is not None]
    precisions = [p for run in runs if (p := run.average_precision()) is not None]
    return Classes(
        group,
        [shown_name(name) for name in first.class_names],
        np.sum([run.tally() for run in runs], axis=0),
        len(runs),
        len(first.predictions),
        first.predictions.accuracy,
        first.calibration,
        np.sum(confusions, axis=0) if confusions else None,
        np.mean(precisions, axis=0) if precisions else None,
    )


def _add_agreements(report: Report, data: str) -> None:
    from everytoken.maps import Maps
    from everytoken_lab.evaluation.calibrated import splits
    from everytoken_lab.reports.samples import annotator_agreement

    done: set[str] = set()
    for run in report.runs:
        where = str(run.config.get("maps") or "")
        if not where or where in done:
            continue
        done.add(where)
        try:
            store = Maps(str(run.place("maps") or where), partial=True)
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
