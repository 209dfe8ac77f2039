"""Charts of a report: what lies where, in pixels; `templates/report.html` draws them as SVG.

They are complete without a script and on paper; script.js adds hovering and the arrow keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 250, 50, 12, 12, 36
COLOURS = 8  # --s0 ... --s7 of style.css


@dataclass(frozen=True)
class Series:
    """One line: its points (x, y) and the number of its colour; it is dashed when colours run out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True)
class Chart:
    """What the template draws."""

    title: str
    unit: str
    about: str  # in words, for screen readers
    x_ticks: list[tuple[float, str]]  # (position in pixels, text)
    y_ticks: list[tuple[float, str]]
    lines: list[tuple[int, bool, list[tuple[float, float]]]]  # colour, whether it is dashed, points in pixels
    note: str
    data: str  # its numbers as JSON, for the script


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float]], most: int = 250) -> list[tuple[float, float]]:
    """At most `most` points: means of neighbours, the last one as it is."""
    if len(points) <= most:
        return list(points)
    parts = np.array_split(np.array(points[:-1]), most - 1)
    return [*((float(x), float(y)) for x, y in (part.mean(0) for part in parts)), points[-1]]


def line_chart(title: str, unit: str, series: Sequence[Series], least: float = 0.0, note: str = "") -> Chart | None:
    """One line per series over the epochs; the axis of values spans at least `least`. None without any points."""
    series = [Series(s.name, thin(s.points), s.colour) for s in series if s.points]
    if not series:
        return None
    every = np.array([point for s in series for point in s.points])
    (x0, low), (x1, high) = every.min(0).tolist(), every.max(0).tolist()
    spare = max(0.0, least - (high - low)) / 2  # a difference that means little is not blown up
    px, x_values = _axis(x0, x1, LEFT, WIDTH - RIGHT)
    py, y_values = _axis(low - spare, high + spare, HEIGHT - BOTTOM, TOP)
    data = {
        "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "x": [x_values[0], x_values[-1]],
        "y": [y_values[0], y_values[-1]],
        "unit": unit,
        "series": [{"name": s.name, "c": s.colour % COLOURS, "p": s.points} for s in series],
    }
    ends = "; ".join(f"{s.name} ends at {s.points[-1][1]:.4g}{unit}" for s in series[:12])
    return Chart(
        title,
        unit.strip(),
        f"Line chart over the epoch: {ends}.",
        [(px(value), f"{value:g}") for value in x_values],
        [(py(value), f"{value:.4g}") for value in y_values],
        [(s.colour % COLOURS, s.colour >= COLOURS, [(px(x), py(y)) for x, y in s.points]) for s in series],
        note,
        json.dumps(data, allow_nan=False),
    )


def _axis(low: float, high: float, start: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """A function from values to pixels start..end, which moves what lies outside to the edge, and its ticks."""
    values = ticks(low, high)
    first, last = values[0], values[-1]
    return lambda v: start + (min(max(v, first), last) - first) / (last - first) * (end - start), values
