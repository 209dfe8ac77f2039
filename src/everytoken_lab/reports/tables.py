"""The tables of a report as plain cells; the template makes HTML of them. A new column goes here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everytoken_lab.engine.run_folder import Run
from everytoken_lab.progress import clock
from everytoken_lab.reports.collect import Report
from everytoken_lab.reports.text import baseline, interval_words, option_words, progress, term_words

if TYPE_CHECKING:
    from everytoken_lab.reports.samples import Agreement


@dataclass(frozen=True)
class Table:
    """A caption, the names of the columns, and rows of texts; `text` columns are left-aligned."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    text: frozenset[int] = frozenset({0})


def time_taken(seconds: float | None) -> str:
    """A time, or a dash."""
    return "–" if seconds is None else clock(seconds)


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def group_table(report: Report) -> Table:
    """One row per group."""
    paired = {d.other.name: d for d in report.differences}
    rows = []
    for group in report.groups:
        d = paired.get(group.name)
        gain = "–"
        if d is not None:
            e = d.estimate
            gain = f"{e.value:+.2f}" + ("" if e.low is None else f" ({e.low:+.2f} to {e.high:+.2f})")
        seconds = [run.seconds for run in group.runs if run.seconds is not None]
        rows.append(
            [
                group.name,
                f"{len(group.finished)} of {len(group.runs)}",
                interval_words(group.accuracy),
                gain,
                time_taken(sum(seconds) / len(seconds) if seconds else None),
            ]
        )
    against = f"gain over {baseline(report)}, paired"
    return Table(
        "Groups of runs with the same settings; in brackets the 95 % interval over seeds.",
        ["group", "runs finished", f"{report.metric} %", against, "time per run"],
        rows,
    )


def run_table(report: Report) -> Table:
    """One row per run."""
    terms = list(dict.fromkeys(term for run in report.runs for term in run.terms))[:8]
    columns = [
        "run",
        "state",
        "seed",
        f"{report.metric} %",
        f"best {report.metric} %",
        "validation loss",
        *(f"{term_words(t)} (training loss)" if t != "loss" else "training loss" for t in terms),
    ]
    columns += ["highest learning rate", "time", "images/s", "waiting for data"]
    return Table(
        "Last values; the learning rate is the highest on the way; images per second and waiting are means.",
        columns,
        [_run_row(run, terms) for run in report.runs],
        frozenset({0, 1}),
    )


def _run_row(run: Run, terms: Sequence[str]) -> list[str]:
    losses = run.curve("ema_val_loss", "epoch") or run.curve("val_loss", "epoch")
    lr = max((v for _, v in run.curve("lr")), default=None)
    waiting = run.mean("waiting")
    return [
        run.name,
        progress(run),
        "–" if run.seed is None else str(run.seed),
        number(run.score),
        number(run.best),
        number(losses[-1][1] if losses else None, ".3f"),
        *(number(run.last(term), ".3f") for term in terms),
        number(lr, ".2g"),
        time_taken(run.seconds),
        number(run.mean("images_per_second"), ",.0f"),
        "–" if waiting is None else f"{waiting:.0%}",
    ]


def settings_table(report: Report) -> Table | None:
    """Options that differ between groups."""
    if not report.settings:
        return None
    rows = [[option_words(name), *(_value(v) for v in values)] for name, values in report.settings]
    names = [group.name for group in report.groups]
    return Table("Settings that are not the same in all groups.", ["setting", *names], rows, frozenset(range(9)))


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if value == "":
        return "(empty)"
    if value == {}:
        return "yes"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def class_table(report: Report, most: int = 60) -> Table | None:
    """One row per class: recall in each group, or average precision with several labels; worst first."""
    if not report.classes:
        return None
    first = report.classes[0]
    same = [c for c in report.classes if c.names == first.names]
    last = same[-1]
    several = all(c.average_precision is not None for c in same)
    what = "average precision" if several else "recall"
    recalls = [c.recall() if c.average_precision is None else c.average_precision for c in same]
    order = [i for i in range(len(first.names)) if first.tally[0, i]]
    order.sort(key=lambda i: recalls[-1][i])
    columns = ["class", "images", *(f"{what} %: {c.group.name}" for c in same)]
    if len(same) > 1:
        columns.append("difference")
    columns += [f"recall %: {last.group.name}"] if several else []
    columns += [f"precision %: {last.group.name}"]
    columns += [] if several else [f"most often taken for ({last.group.name})"]
    recall, precision = last.recall(), last.precision()
    rows = []
    for i in order[:most]:
        row = [
            first.names[i],
            str(int(first.tally[0, i]) // first.runs),
            *(number(r[i], ".1f") for r in recalls),
        ]
        if len(same) > 1:
            row.append(number(recalls[-1][i] - recalls[0][i], "+.1f"))
        row += [number(recall[i], ".1f")] if several else []
        rows.append([*row, number(precision[i], ".1f"), *([] if several else [last.taken_for(i) or "–"])])
    cut = f" The {most} worst of {len(order)} classes." if len(order) > most else ""
    caption = f"Best weights on the validation images, mean over each group's runs; worst first.{cut}"
    caption += " Recall and precision are at a probability of a half." if several else ""
    return Table(caption, columns, rows, frozenset({0} if several else {0, len(columns) - 1}))


def agreement_table(agreement: Agreement, most: int = 40) -> Table | None:
    """How often the main class of a map is the folder's, per class."""
    if not agreement.per_class:
        return None
    rows = sorted(agreement.per_class, key=lambda row: row[2])[:most]
    return Table(
        "Maps whose main class is the folder's, worst first.",
        ["class", "maps looked at", "agree %"],
        [[name, str(count), f"{100 * share:.1f}"] for name, count, share in rows],
    )


def machine_table(report: Report) -> Table | None:
    """Where and with what the runs were made."""
    rows = []
    for run in report.runs:
        if not run.starts:
            continue
        last = run.starts[-1]
        gpus = ", ".join(map(str, last.get("gpus") or [])) or "none"
        versions = ", ".join(f"{n} {last[n]}" for n in ("everytoken", "python", "torch", "timm") if n in last)
        begun = str(run.starts[0].get("started", "–"))
        rows.append([run.name, begun, str(len(run.starts)), str(last.get("machine", "–")), gpus, versions])
    columns = ["run", "first start", "starts", "machine", "GPUs", "versions"]
    return Table("", columns, rows, frozenset({0, 1, 3, 4, 5})) if rows else None
