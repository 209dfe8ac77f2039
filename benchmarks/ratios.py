"""Ratios that a busy machine disturbs least: CPU time, runs that take turns, and an interval that says what is known.

Other programs on the machine do not count in CPU time. They still slow single instructions down (caches, shared
cores), so the runs take turns: in each round everyone runs twice, in random order and then backwards, and every round
gives one ratio. A goal is `held` or `broken` when the whole 95 % interval of the median ratio is on one side of it, and
`not decided` when it is inside. Six rounds are the fewest that have such an interval.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ratio(NamedTuple):
    """A median and the interval that holds the true one with at least 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def cpu_seconds() -> float:
    """CPU time of this process and of its children that are alive (Linux; elsewhere of this process)."""
    total = time.process_time()
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            for thread in Path(f"/proc/{child}/task").glob("*/schedstat"):
                total += int(thread.read_text().split()[0]) / 1e9
    return total


def take_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each run in each round; the first call of each is not counted."""
    times: dict[str, list[float]] = {name: [0.0] * rounds for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for run in runs.values():
        run()
    for number in range(rounds):
        shuffle(order)
        for name in (*order, *order[::-1]):
            began = cpu_seconds()
            runs[name]()
            times[name][number] += (cpu_seconds() - began) / 2
    return times


def ratio(over: list[float], under: list[float]) -> Ratio:
    """The median of over / under, round by round, with order statistics as its interval."""
    values = sorted(a / b for a, b in zip(over, under, strict=True))
    n, low = len(values), 0
    if n < 6:  # too few to know
        return Ratio(statistics.median(values), -math.inf, math.inf)
    while 2 * sum(math.comb(n, k) for k in range(low + 2)) / 2**n <= 0.05:
        low += 1
    return Ratio(statistics.median(values), values[low], values[n - 1 - low])


def judge(what: str, reached: Ratio, at_least: float = -math.inf, at_most: float = math.inf) -> bool:
    """Print a goal and whether it is reached, in the form that `all.py` collects; False if it is broken."""
    goal = f"at least {at_least:g}" if at_least > -math.inf else f"at most {at_most:g}"
    if at_least <= reached.low and reached.high <= at_most:
        verdict = "held"
    elif reached.high < at_least or at_most < reached.low:
        verdict = "broken"
    else:
        verdict = "not decided"
    shown = reached if reached.low < reached.high else f"{reached.median:.3g}"
    print(f"goal: {what} | {goal} | {shown} | {verdict}")
    return verdict != "broken"
