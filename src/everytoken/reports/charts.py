"""Charts as plain SVG, drawn here, so that they are there without a script and on paper; script.js only adds hovering.

Every chart has a title and a description for screen readers, its numbers as JSON for the script, and takes the keyboard
focus: the arrow keys go from point to point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from everytoken.reports.groups import Estimate

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 36
COLOURS = 8  # --s0 ... --s7 of style.css


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), the number of its colour, and of its dash when colours run out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    out = [first * step]
    while out[-1] < high - 1e-9 * step:
        out.append((first + len(out)) * step)
    return [round(t, 12) for t in out]


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


def line_chart(title: str, unit: str, series: Sequence[Series], least: float = 0.0, note: str = "") -> str:
    """A figure with one line per series over the epochs; the axis of values spans `least` at least."""
    x_label = "epoch"
    drawn = [Series(s.name, thin(s.points), s.colour) for s in series if s.points]
    if not drawn:
        return ""
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    low, high = min(ys), max(ys)
    if high - low < least:  # a difference that means little is not blown up
        low, high = (low + high - least) / 2, (low + high + least) / 2
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(low, high)
    x0, x1, y0, y1 = min(xs), max(xs), y_ticks[0], y_ticks[-1]
    if x1 <= x0:
        x0, x1 = x0 - 0.5, x1 + 0.5

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(t, py(t)) for t in y_ticks]
    for t in x_ticks:
        if x0 - 1e-9 <= t <= x1 + 1e-9:
            parts.append(f'<text class="tick" x="{px(t):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{short(t)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    for s in drawn:
        where = [(px(x), py(y)) for x, y in s.points]
        style = f"stroke:var(--s{s.colour % COLOURS})"
        dash = ' stroke-dasharray="5 3"' if s.colour >= COLOURS else ""
        if len(where) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
            parts.append(f'<polyline class="line mark" style="{style}"{dash} points="{path}"/>')
        if len(where) <= 12:
            dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in where)
            parts.append(f'<g class="dots mark" style="fill:var(--s{s.colour % COLOURS})">{dots}</g>')
    data = {
        "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "x": [x0, x1], "y": [y0, y1], "label": x_label, "unit": unit,
        "series": [
            {"name": s.name, "c": s.colour % COLOURS, "p": [[_round(x), _round(y)] for x, y in s.points]} for s in drawn
        ],
    }  # fmt: skip
    ends = "; ".join(f"{s.name} ends at {short(s.points[-1][1])}{unit}" for s in drawn[:12])
    about = f"Line chart over the {x_label}: {ends}."
    return _figure(title, unit, about, "".join(parts), data, note)


def interval_chart(title: str, unit: str, rows: Sequence[tuple[str, Estimate, int]], zero: bool = False) -> str:
    """One row per group: a dot for each seed, a bar for the mean's interval; `zero`: show where nothing is gained."""
    values = [v for _, e, _ in rows for v in (*e.values, e.low, e.high) if v is not None]
    if not values:
        return ""
    spread = max(values) - min(values)
    # an interval of two seeds can be tens of points wide; it is cut at the edge rather than squeezing the dots together
    dots = [v for _, e, _ in rows for v in e.values]
    reach = max(4 * (max(dots) - min(dots)), 8.0)
    low, high = max(min(values), min(dots) - reach), min(max(values), max(dots) + reach)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = max(0.05 * spread, (4.0 - (high - low)) / 2, 0.0)  # an axis of four points at least
    marks = ticks(low - margin if low - margin < 0 or zero else max(0.0, low - margin), high + margin)
    x0, x1 = marks[0], marks[-1]
    height = TOP + 46 * len(rows) + BOTTOM

    def px(x: float) -> float:
        return 14 + (min(max(x, x0), x1) - x0) / (x1 - x0) * (WIDTH - 28)

    parts = []
    for t in marks:
        kind = "axis zero" if zero and abs(t) < 1e-9 else "axis"
        parts.append(f'<line class="{kind}" x1="{px(t):.1f}" x2="{px(t):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{px(t):.1f}" y="{height - 16}" text-anchor="middle">{short(t)}</text>')
    words = []
    for number, (name, e, colour) in enumerate(rows):
        y = TOP + 46 * number + 32
        style = f"--c:var(--s{colour % COLOURS})"
        said = describe(e, unit)
        words.append(f"{name}: {said}")
        parts.append(f'<text class="row" x="14" y="{y - 15}">{escape(name)}</text>')
        bar = ""
        if e.low is not None and e.high is not None:
            bar = f'<line class="bar mark" x1="{px(e.low):.1f}" x2="{px(e.high):.1f}" y1="{y}" y2="{y}"/>'
        dot = "".join(f'<circle class="seed mark" cx="{px(v):.1f}" cy="{y}" r="4"/>' for v in e.values)
        mean = f'<line class="mean mark" x1="{px(e.mean):.1f}" x2="{px(e.mean):.1f}" y1="{y - 9}" y2="{y + 9}"/>'
        parts.append(f'<g style="{style}"><title>{escape(name)}: {escape(said)}</title>{bar}{mean}{dot}</g>')
    about = "Dots are seeds, the stroke is their mean, the bar its 95 % interval. " + "; ".join(words) + "."
    return _figure(title, unit, about, "".join(parts), None, "dots: seeds · stroke: mean · bar: 95 % interval", height)


def describe(e: Estimate, unit: str, plus: bool = False) -> str:
    """An estimate in words."""
    sign = "+" if plus else ""
    count = f"{len(e.values)} seed{'s' if len(e.values) > 1 else ''}"
    if e.low is None or e.high is None:
        return f"{e.mean:{sign}.2f}{unit} ({count}, no interval)"
    return f"{e.mean:{sign}.2f}{unit} (95 % interval {e.low:{sign}.2f} to {e.high:{sign}.2f}, {count})"


def _grid(value: float, y: float) -> str:
    line = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _figure(title: str, unit: str, about: str, inside: str, data: object, note: str, height: int = HEIGHT) -> str:
    """The frame of a chart."""
    unit_words = f' <span class="unit">{escape(unit.strip())}</span>' if unit.strip() else ""
    caption = f"<figcaption>{escape(title)}{unit_words}</figcaption>"
    content = f' data-chart="{escape(json.dumps(data, allow_nan=False), quote=True)}"' if data is not None else ""
    label = escape(f"{title}. {about}", quote=True)
    focus = ' tabindex="0"' if data is not None else ""
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="chart">{caption}<div class="plot"><svg viewBox="0 0 {WIDTH} {height}" role="img"{focus} '
        f'aria-label="{label}"{content}><title>{escape(title)}</title><desc>{escape(about)}</desc>{inside}</svg></div>'
        f"{foot}</figure>"
    )
