"""`report`: collect everything about one or several runs, and write one page of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everytoken.errors import EverytokenError
from everytoken.files import disk_errors, write_atomically
from everytoken_lab import schema
from everytoken_lab.engine.run_folder import Run, find_runs
from everytoken_lab.reports import ReportOptions
from everytoken_lab.reports.groups import Difference, Group, config_differences, differences, group_runs

if TYPE_CHECKING:
    from everytoken_lab.data.datasets import DataSet
    from everytoken_lab.reports.predictions import PredictedRun

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
_silent: Progress = lambda title: nullcontext(lambda done, total: None)  # noqa: E731


@dataclass(frozen=True)
class Report:
    """Everything a report shows."""

    runs: list[Run]
    groups: list[Group]  # runs with the same settings; the first of each dataset is what the others are compared with
    differences: list[Difference]
    settings: list[tuple[str, list[Any]]]  # options that differ between groups
    classes: list[PredictedRun] = field(default_factory=list)  # one of each group, where there are predictions
    photos: list[dict[str, Any]] = field(default_factory=list)  # see `photos.photos`
    labelling: dict[str, Any] = field(default_factory=dict)  # see `photos.labelling`
    notes: list[str] = field(default_factory=list)  # what could not be shown
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, with the reason

    @property
    def metric(self) -> str:
        """What is compared: "top-1", unless the runs are of another task."""
        metrics = {run.metric for run in self.runs if run.scores}
        return metrics.pop() if len(metrics) == 1 else "score" if metrics else "top-1"

    @property
    def compared(self) -> list[PredictedRun]:
        """Those that are shown photo by photo."""
        return [c for c in self.classes if c.same_images(self.classes[0])][:4]

    @property
    def headline(self) -> str:
        """The result in one line."""
        from everytoken_lab.reports.page import headline

        return headline(self)


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    progress: Progress = _silent,
    images: DataSet | None = None,
    **options: Any,
) -> Report:
    """Compare runs and write one page about them: result, mistakes, doubtful labels, classes, curves.

    Example:
        >>> lab.report("runs", "report.html").headline
        'token is 4.69 points better than plain (95 % interval +2.14 to +7.24)'

    Args:
        runs: a run folder, a folder of run folders, or several. Runs that differ in the seed only are one group; the
            group of the first run is what the others on the same data are compared with (in a folder of runs, one that
            learns plain labels). Runs on other data are not compared with it.
        out: the file to write, a self-contained HTML page. None: write nothing.
        progress: shows how far it is: progress(title) is a context manager that gives tell(done, total).
        images: the validation images of all runs, if they are open already.
        options: fields of `ReportOptions`.
    """
    settings = schema.from_keywords(ReportOptions, options, "report()")
    target = None if out is None else Path(out)
    if target is not None and target.is_dir():
        raise EverytokenError(f"{target} is a folder; name a file, such as {target / 'report.html'}.")
    if target is not None and not target.parent.is_dir():
        raise EverytokenError(f"there is no folder {target.parent} to write {target.name} to.")
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    found = find_runs(paths)
    if all(run.state in ("damaged", "not begun") for run in found):
        reasons = [f"  {run.path}: {'; '.join(run.troubles) or f'{run.state}, no epoch is done'}" for run in found]
        text = "\n".join(["there is nothing to report on:", *reasons, "Name the folder of a training run."])
        raise EverytokenError(text)
    groups = group_runs(found)
    if len(paths) == 1:  # a folder of runs has no order of its own: what learns plain labels is the baseline
        groups.sort(key=lambda group: set(group.runs[0].config.get("objectives") or {"hard"}) != {"hard"})
    result = Report(found, groups, differences(groups), config_differences(groups))
    for run in found:
        result.skipped.update(run.skipped)
        result.notes.extend(f"{run.name}: {trouble}" for trouble in run.troubles)
        if run.bad_updates:
            why = "because the loss was not finite (bad-updates.jsonl lists the images)"
            result.notes.append(f"{run.name}: {run.bad_updates} updates were left out {why}.")
    if settings.predictions:
        _add_predictions(result, settings, progress, images, draws=target is not None)
    else:
        result.notes.append("Predictions were left out on request.")
    if target is not None:
        from everytoken_lab.reports.page import render_report

        with disk_errors(target.parent, "writing the report"):
            write_atomically(target, render_report(result, settings.title).encode())
    return result


def _add_predictions(
    report: Report, options: ReportOptions, progress: Progress, images: DataSet | None, draws: bool
) -> None:
    """Of one run of each group, and the photos that all of them answered, if somebody will see them."""
    from everytoken_lab.engine.distributed import pick_device
    from everytoken_lab.reports.photos import labelling, photos
    from everytoken_lab.reports.predictions import predict_run

    device = pick_device(options.device)
    for group in report.groups:
        for run in group.finished or group.runs:
            if run.state in ("damaged", "not begun"):
                continue
            if run.scores and not run.classifies:
                report.notes.append(f"{run.name}: predictions are shown for classifiers only; this is {run.metric}.")
                continue
            try:
                with progress(f"evaluating {run.name}") as tell:
                    found = predict_run(run, device, options.data, options.workers, tell, images)
            except (EverytokenError, OSError, RuntimeError) as error:
                report.notes.append(f"{run.name}: no predictions, because {_first_line(error)}")
                continue
            report.skipped.update(found.skipped)
            report.classes.append(replace(found, group=group.name))
            break
    if report.compared and draws:
        try:
            report.labelling.update(labelling(report.compared[0], options.data))
            with progress("drawing photos") as tell:
                report.photos.extend(photos(report.compared, options.samples, device, report.labelling["split"], tell))
        except (EverytokenError, OSError, RuntimeError) as error:
            report.notes.append(f"No photos, because {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
