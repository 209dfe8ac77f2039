"""Runs that differ in the seed only belong together: their mean, its interval, and differences paired by seed."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everytoken_lab import schema, stats
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.stats import Estimate


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
