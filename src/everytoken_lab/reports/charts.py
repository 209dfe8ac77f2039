"""The geometry of the report's charts; `templates/charts.html` draws them as SVG.

They are complete without a script and on paper; script.js only adds hovering. Every chart has a title and a description
for screen readers, its numbers as JSON for the script, and takes the keyboard focus: the arrow keys go from point to
point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everytoken_lab.stats import Estimate

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 36
ROW = 46  # height of a row of the interval chart
COLOURS = 8  # --s0 ... --s7 of style.css
INTERVAL_NOTE = "dots: seeds · stroke: mean · bar: 95 % interval"


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), the number of its colour, and of its dash when colours run out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True)
class Chart:
    """What the template draws.

    Attributes:
        kind: "line" or "interval", a macro of the template.
        about: the chart in words, for screen readers; data: its numbers as JSON, for the script.
        x_ticks, y_ticks: (position in pixels, text); marks: lines or rows, as the macro wants them.
    """

    kind: str
    title: str
    unit: str
    about: str
    height: int = HEIGHT
    note: str = ""
    data: str = ""
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    zero: float | None = None


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    values = [first * step]
    while values[-1] < high - 1e-9 * step:
        values.append((first + len(values)) * step)
    return [round(t, 12) for t in values]


def short(value: float) -> str:
    """A number for an axis or a tooltip."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 10_000 or size < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def thin(points: Sequence[tuple[float, float]], most: int = 250) -> list[tuple[float, float]]:
    """At most `most` points: means of equally many neighbours, the last one as it is."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most - 1))
    parts = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts] + [points[-1]]


def line_chart(title: str, unit: str, series: Sequence[Series], least: float = 0.0, note: str = "") -> Chart | None:
    """One line per series over the epochs; the axis of values spans at least `least`. None without any points."""
    series = [Series(s.name, thin(s.points), s.colour) for s in series if s.points]
    if not series:
        return None
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    low, high = min(ys), max(ys)
    if high - low < least:  # a difference that means little is not blown up
        low, high = (low + high - least) / 2, (low + high + least) / 2
    y_values = ticks(low, high)
    x0, x1, y0, y1 = min(xs), max(xs), y_values[0], y_values[-1]
    if x1 <= x0:
        x0, x1 = x0 - 0.5, x1 + 0.5
    px = _scale(x0, x1, LEFT, WIDTH - RIGHT)
    py = _scale(y0, y1, HEIGHT - BOTTOM, TOP)
    data = {
        "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "x": [x0, x1],
        "y": [y0, y1],
        "label": "epoch",
        "unit": unit,
        "series": [
            {"name": s.name, "c": s.colour % COLOURS, "p": [[_round(x), _round(y)] for x, y in s.points]}
            for s in series
        ],
    }
    ends = "; ".join(f"{s.name} ends at {short(s.points[-1][1])}{unit}" for s in series[:12])
    return Chart(
        kind="line",
        title=title,
        unit=unit.strip(),
        about=f"Line chart over the epoch: {ends}.",
        note=note,
        data=json.dumps(data, allow_nan=False),
        x_ticks=[(px(t), short(t)) for t in ticks(min(xs), max(xs)) if x0 - 1e-9 <= t <= x1 + 1e-9],
        y_ticks=[(py(t), short(t)) for t in y_values],
        marks=[
            {
                "colour": s.colour % COLOURS,
                "dashed": s.colour >= COLOURS,
                "points": [(round(px(x), 1), round(py(y), 1)) for x, y in s.points],
            }
            for s in series
        ],
    )


def interval_chart(
    title: str, unit: str, rows: Sequence[tuple[str, Estimate, int]], zero: bool = False
) -> Chart | None:
    """One row per group: a dot for each seed, a bar for the mean's interval; `zero`: show where nothing is gained."""
    values = [v for _, e, _ in rows for v in (*e.values, e.low, e.high) if v is not None]
    if not values:
        return None
    # an interval of two seeds can be tens of points wide; it is cut at the edge rather than squeezing the dots together
    dots = [v for _, e, _ in rows for v in e.values]
    reach = max(4 * (max(dots) - min(dots)), 8.0)
    low, high = max(min(values), min(dots) - reach), min(max(values), max(dots) + reach)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = max(0.05 * (max(values) - min(values)), (4.0 - (high - low)) / 2, 0.0)  # an axis of four points at least
    x_values = ticks(low - margin if low - margin < 0 or zero else max(0.0, low - margin), high + margin)
    px = _scale(x_values[0], x_values[-1], 14, WIDTH - 14)
    marks = []
    for number, (name, e, colour) in enumerate(rows):
        marks.append(
            {
                "name": name,
                "words": describe(e, unit),
                "colour": colour % COLOURS,
                "y": TOP + ROW * number + 32,
                "bar": None if e.low is None or e.high is None else (px(e.low), px(e.high)),
                "mean": px(e.value),
                "dots": [px(v) for v in e.values],
            }
        )
    words = "; ".join(f"{row['name']}: {row['words']}" for row in marks)
    return Chart(
        kind="interval",
        title=title,
        unit=unit.strip(),
        about=f"Dots are seeds, the stroke is their mean, the bar its 95 % interval. {words}.",
        height=TOP + ROW * len(rows) + BOTTOM,
        note=INTERVAL_NOTE,
        x_ticks=[(px(t), short(t)) for t in x_values],
        marks=marks,
        zero=px(0.0) if zero else None,
    )


def describe(e: Estimate, unit: str) -> str:
    """An estimate in words."""
    count = f"{len(e.values)} seed{'s' if len(e.values) > 1 else ''}"
    if e.low is None or e.high is None:
        return f"{e.value:.2f}{unit} ({count}, no interval)"
    return f"{e.value:.2f}{unit} (95 % interval {e.low:.2f} to {e.high:.2f}, {count})"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Values low..high to pixels start..end; what lies outside is moved to the edge."""
    return lambda value: start + (min(max(value, low), high) - low) / (high - low) * (end - start)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
