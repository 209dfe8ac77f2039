"""The table of one model, or of two side by side with paired differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everytoken.errors import EverytokenError
from everytoken.evaluation.accuracy import Predictions
from everytoken.robust.compare import Estimate, bootstrap, difference
from everytoken.robust.corruption_errors import ALEXNET, mean_corruption_error
from everytoken.robust.corruptions import EXTRA, SEVERITIES
from everytoken.robust.run import Result
from everytoken.robust.table import Cell, Table


@dataclass(frozen=True)
class Line:
    """One row: the images' right or wrong in columns, and what is made of the columns' means.

    Attributes:
        columns: [N, k] 0 or 1. statistic: [..., k] -> [...], percent. keys: [N].
        plain: the statistic is the share of one column.
    """

    name: str
    columns: np.ndarray
    statistic: Callable[[np.ndarray], np.ndarray]
    keys: list[str]
    plain: bool
    top5: float | None = None
    ece: float | None = None


def lines_of(results: Sequence[Result], each_severity: bool = False) -> list[Line]:
    """Rows of one model: every suite; corruptions as means over severities, then over all, mCE and relative mCE."""
    out: list[Line] = []
    done: set[str] = set()
    clean = next((r for r in results if r.suite.kind == "val"), None)
    for result in results:
        suite = result.suite
        if not suite.corruption:
            out.append(_plain(result, suite.name))
        elif suite.kind not in done:
            done.add(suite.kind)
            out += _corruption_lines([r for r in results if r.suite.kind == suite.kind], clean, each_severity)
    return out


def _plain(result: Result, name: str) -> Line:
    return Line(name, result.correct[:, None].astype(np.uint8), _first, result.keys, True, result.top5, result.ece)


def _first(means: np.ndarray) -> np.ndarray:
    return 100 * means[..., 0]


def _mean(means: np.ndarray) -> np.ndarray:
    return 100 * means.mean(-1)


def _corruption_lines(results: list[Result], clean: Result | None, each_severity: bool) -> list[Line]:
    label = "ImageNet-C" if results[0].suite.kind == "c" else "corrupt"
    by_place = {(r.suite.corruption, r.suite.severity): r for r in results}
    keys = results[0].keys
    if any(r.keys != keys for r in results):
        raise EverytokenError(f"{label}: the corruptions do not have the same images; check the folders")
    out = []
    ece = lambda places: float(np.mean([by_place[p].ece for p in places]))  # noqa: E731
    for name in dict.fromkeys(c for c, _ in by_place):
        places = [p for p in by_place if p[0] == name]
        if each_severity:
            out += [_plain(by_place[p], f"{label} {p[0]} {p[1]}") for p in places]
        top5 = float(np.mean([by_place[p].top5 for p in places]))
        out.append(Line(f"{label} {name}", _stack(by_place, places), _mean, keys, False, top5, ece(places)))
    standard = [p for p in by_place if p[0] in ALEXNET]
    for title, places in (("mean", standard), ("extra mean", [p for p in by_place if p[0] in EXTRA])):
        if places:
            out.append(Line(f"{label} {title}", _stack(by_place, places), _mean, keys, False, None, ece(places)))
    if not standard:
        return out
    columns = _stack(by_place, standard)

    def absolute(means: np.ndarray) -> np.ndarray:
        return np.asarray(mean_corruption_error({p: 1 - means[..., i] for i, p in enumerate(standard)}))

    out.append(Line(f"{label} mCE", columns, absolute, keys, False))
    if clean is not None and set(keys) <= set(clean.keys):
        place = {key: i for i, key in enumerate(clean.keys)}
        own = clean.correct[[place[key] for key in keys]][:, None]
        both = np.concatenate([columns, own.astype(np.uint8)], 1)

        def relative(means: np.ndarray) -> np.ndarray:
            errors = {p: 1 - means[..., i] for i, p in enumerate(standard)}
            return np.asarray(mean_corruption_error(errors, 1 - means[..., -1]))

        out.append(Line(f"{label} relative mCE", both, relative, keys, False))
    return out


def _stack(by_place: Mapping[tuple[str, int], Result], places: Sequence[tuple[str, int]]) -> np.ndarray:
    return np.stack([by_place[p].correct for p in places], 1).astype(np.uint8)


def estimate(line: Line) -> Estimate:
    """The row's value with its interval: Wilson's for a share, else by the bootstrap."""
    if not line.plain:
        return bootstrap(line.columns, line.statistic)
    right = line.columns[:, 0]
    zeros = np.zeros(len(right))
    wilson = Predictions(zeros, np.ones(len(right)), right[:, None], zeros, zeros).interval()
    return Estimate(100 * float(right.mean()), *wilson)


def table_of_one(name: str, results: Sequence[Result], each_severity: bool, facts: str) -> Table:
    """One model."""
    table = Table(f"{name}: {facts}", ["test set", "images", "top-1", "low", "high", "top-5", "ECE"])
    for line in lines_of(results, each_severity):
        e = estimate(line)
        row: list[Cell] = [line.name, len(line.columns), e.value, e.low, e.high, line.top5, line.ece]
        table.rows.append(row)
    table.notes = _notes(results)
    return table


def table_of_two(
    names: tuple[str, str],
    results: tuple[Sequence[Result], Sequence[Result]],
    each_severity: bool,
    facts: Sequence[str],
) -> Table:
    """Two models and the second minus the first, by a paired bootstrap over the images that both saw."""
    title = f"A = {names[0]} ({facts[0]}), B = {names[1]} ({facts[1]})"
    table = Table(title, ["test set", "images", "A", "B", "B - A", "low", "high", "ECE A", "ECE B"])
    second = {line.name: line for line in lines_of(results[1], each_severity)}
    for one in lines_of(results[0], each_severity):
        two = second.get(one.name)
        if two is None or one.keys != two.keys:
            raise EverytokenError(f"{one.name}: the two models did not see the same images")
        a, b = (float(line.statistic(line.columns.mean(0))) for line in (one, two))
        d = _difference(one, two)
        table.rows.append([one.name, len(one.columns), a, b, d.value, d.low, d.high, one.ece, two.ece])
    table.notes = [*_notes(results[0], "A, "), *_notes(results[1], "B, ")]
    table.notes.append("B - A with 95 % intervals of a bootstrap over images, the same draws for both models.")
    return table


def _difference(one: Line, two: Line) -> Estimate:
    if one.plain:
        return difference(one.columns[:, 0], two.columns[:, 0])
    width = one.columns.shape[1]
    both = np.concatenate([one.columns, two.columns], 1)
    return bootstrap(both, lambda means: two.statistic(means[..., width:]) - one.statistic(means[..., :width]))


def _notes(results: Sequence[Result], who: str = "") -> list[str]:
    notes = list(dict.fromkeys(f"{who}{note}" for r in results for note in r.notes))
    kinds = {r.suite.kind for r in results}
    for kind, label in (("c", "ImageNet-C"), ("corrupt", "corrupt")):
        places = {(r.suite.corruption, r.suite.severity) for r in results if r.suite.kind == kind}
        full = len([p for p in places if p[0] in ALEXNET]) == len(ALEXNET) * len(SEVERITIES)
        if kind in kinds and not full and places:
            notes.append(f"{label}: mCE over a part of corruptions and severities, over the same part of AlexNet's.")
    if "corrupt" in kinds:
        notes.append("corrupt: mCE divides by AlexNet's errors on ImageNet; on other data it only orders models.")
    if any(r.suite.kind == "corrupt" and r.suite.corruption == "frost" for r in results):
        notes.append("corrupt frost: its textures are drawn by a formula unless --frost-textures was given.")
    return notes if not who or who == "A, " else [n for n in notes if n.startswith(who)]
