"""`report`: collect everything about one or several runs, and write one page of it.

Runs that differ in the seed only belong together: their mean, its interval, and differences paired by seed.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everytoken.errors import EverytokenError
from everytoken.files import disk_errors, write_atomically
from everytoken_lab import schema, stats
from everytoken_lab.engine.run_folder import Run, find_runs
from everytoken_lab.reports import ReportOptions
from everytoken_lab.stats import Estimate

if TYPE_CHECKING:
    from everytoken_lab.data.datasets import DataSet
    from everytoken_lab.reports.predictions import PredictedRun

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
_silent: Progress = lambda title: nullcontext(lambda done, total: None)  # noqa: E731


@dataclass(frozen=True)
class Group:
    """Runs with the same settings on the same data."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if run.state == "finished"]

    @property
    def by_seed(self) -> dict[int | None, float]:
        """Validation score after the last epoch for each seed; of several finished runs with one seed, their mean."""
        scores: dict[int | None, list[float]] = {}
        for run in self.finished:
            if run.score is not None:
                scores.setdefault(run.seed, []).append(run.score)
        return {seed: statistics.mean(values) for seed, values in scores.items()}

    @property
    def accuracy(self) -> Estimate | None:
        """Validation score after the last epoch, over the seeds of the finished runs."""
        values = list(self.by_seed.values())
        return stats.mean(values) if values else None

    def comparable(self, other: Group) -> bool:
        """Whether both were validated by the same score on the same data, with as many images of each class."""
        first, second = ((g.finished or g.runs)[0] for g in (self, other))
        if _data(first) != _data(second):
            return False
        if not (self.finished and other.finished):
            return True  # nothing to compare yet
        of_classes = [_validated_on(run) for run in (first, second)]
        return first.metric == second.metric and (of_classes[0] == of_classes[1] or None in of_classes)


@dataclass(frozen=True)
class Difference:
    """What `other` has more than `base`, in points, over the seeds that both have."""

    base: Group
    other: Group
    estimate: Estimate
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Everything a report shows."""

    runs: list[Run]
    groups: list[Group]  # runs with the same settings; the first of each dataset is what the others are compared with
    differences: list[Difference]
    settings: list[tuple[str, list[Any]]]  # options that differ between groups
    classes: list[PredictedRun] = field(default_factory=list)  # one of each group, where there are predictions
    photos: list[dict[str, Any]] = field(default_factory=list)  # see `predictions.photos`
    labelling: dict[str, Any] = field(default_factory=dict)  # see `predictions.labelling`
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
        what = "there is nothing to report on. Name the folder of a training run, such as runs/mine."
        raise EverytokenError("\n".join([what, *reasons]))
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
    from everytoken_lab.reports.predictions import labelling, photos, predict_run

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


# -- groups of runs ----------------------------------------------------------------------------------------------------


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order in which their first run was named."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = {**run.settings(), "data": _data(run)}
        same = json.dumps(settings, sort_keys=True, default=str) if run.config else f"damaged {run.path}"
        found.setdefault(same, []).append(run)
    groups: dict[str, Group] = {}
    for members in found.values():
        name = _name(members)
        while name in groups:
            name += "'"
        groups[name] = Group(name, tuple(members))
    return list(groups.values())


def _name(runs: Sequence[Run]) -> str:
    """The runs' names without their seed; else the first one's."""
    bare = {re.sub(rf"[-_. ]+(seed|s)[-_=]?{run.seed}$", "", run.name) for run in runs}
    if len(bare) == 1:
        return bare.pop()
    return runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more"


def _data(run: Run) -> str:
    """The run's data, as a full path where it is found."""
    return str(run.place() or run.config.get("data"))


def _validated_on(run: Run) -> list[tuple[str, Any]] | None:
    """Classes of the validation images with how much there is of each: images, objects or pixels; None if unknown."""
    try:
        rows = schema.read_json(run.path / "classes.json", list[dict[str, Any]])
    except (OSError, schema.SchemaError):
        return None
    amounts = [(str(row.get("class")), row.get("images", row.get("objects", row.get("pixels")))) for row in rows]
    return [(name, amount) for name, amount in amounts if amount]


def differences(groups: Sequence[Group]) -> list[Difference]:
    """Of every group with the first one that was validated on the same data."""
    pairs = ((next(base for base in groups if base.comparable(other)), other) for other in groups)
    return [found for base, other in pairs if base is not other and (found := difference(base, other))]


def difference(base: Group, other: Group) -> Difference | None:
    """The paired difference of accuracies; None when no two finished runs have the same seed."""
    first, second = base.by_seed, other.by_seed
    seeds = tuple(sorted(s for s in first if s is not None and s in second))
    return Difference(base, other, stats.mean([second[s] - first[s] for s in seeds]), seeds) if seeds else None


def config_differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """(option, its value in each group) for the options that are not the same everywhere; None: not set."""
    settings = [group.runs[0].settings() for group in groups]
    rows = [(name, [values.get(name) for values in settings]) for name in dict.fromkeys(n for s in settings for n in s)]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values[1:])]
