"""Runs that differ in the seed only belong together: their mean, its interval, and differences paired by seed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everytoken import stats
from everytoken.engine.run_folder import Run
from everytoken.stats import Estimate


@dataclass(frozen=True)
class Group:
    """Runs with the same settings.

    Attributes:
        name: what to call it; runs: one per seed, usually; accuracy: over the finished ones, None if there are none.
    """

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if run.state == "finished"]

    @property
    def accuracy(self) -> Estimate | None:
        """Validation score after the last epoch, over the finished runs."""
        values = [run.score for run in self.finished if run.score is not None]
        return stats.mean(values) if values else None


@dataclass(frozen=True)
class Difference:
    """What `other` has more than `base`, in points; `seeds` are those that matched (empty: groups of other seeds)."""

    base: Group
    other: Group
    estimate: Estimate
    seeds: tuple[int, ...]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order in which their first run was named."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        same = json.dumps(run.settings(), sort_keys=True, default=str) if run.config else f"damaged {run.path}"
        found.setdefault(same, []).append(run)
    groups, names = [], set[str]()
    for members in found.values():
        name = _name(members)
        while name in names:
            name += "'"
        names.add(name)
        groups.append(Group(name, tuple(members)))
    return groups


def _name(runs: Sequence[Run]) -> str:
    """The runs' names without their seed; else the first one's."""
    bare = {re.sub(r"[-_. ]*(seed|s)[-_=]?\d+$", "", run.name) for run in runs}
    if len(bare) == 1 and "" not in bare:
        return bare.pop()
    return runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more"


def difference(base: Group, other: Group) -> Difference | None:
    """The paired difference of accuracies; None when no two finished runs have the same seed."""
    first = {run.seed: run.score for run in base.finished if run.seed is not None}
    second = {run.seed: run.score for run in other.finished if run.seed is not None}
    seeds = tuple(sorted(s for s in first if s in second))
    gains = [b - a for s in seeds if (a := first[s]) is not None and (b := second[s]) is not None]
    return Difference(base, other, stats.mean(gains), seeds) if gains else None


def config_differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """(option, its value in each group) for the options that are not the same everywhere."""
    settings = [group.runs[0].settings() for group in groups]
    names = dict.fromkeys(name for values in settings for name in values)
    absent = object()
    rows = []
    for name in names:
        values = [values.get(name, absent) for values in settings]
        if any(value != values[0] for value in values[1:]):
            rows.append((name, [None if v is absent else v for v in values]))
    return rows
