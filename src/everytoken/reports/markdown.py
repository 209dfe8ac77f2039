"""The report as Markdown: the same words and tables, without charts and pictures."""

from __future__ import annotations

from everytoken._version import version
from everytoken.reports import words
from everytoken.reports.build import Report
from everytoken.reports.tables import (
    Table,
    agreement_table,
    class_table,
    group_table,
    machine_table,
    run_table,
    settings_table,
)


def render(report: Report, title: str = "") -> str:
    """The report as text."""
    title = title or f"Report: {', '.join(group.name for group in report.groups[:3])}"
    parts = [f"# {title}", f"**{words.headline(report)}**"]
    parts += [words.how_sure(d) for d in report.differences]
    if not report.differences:
        parts += [f"{group.name}: {words.group_words(group)}" for group in report.groups]
    parts.append(words.caution(report))
    learned = [f"- **{g.name}** learns {words.learns(g.runs[0].config)}" for g in report.groups if g.runs[0].config]
    sections: list[tuple[str, list[str | Table | None]]] = [
        ("What was compared", ["\n".join(learned), group_table(report), settings_table(report)]),
        ("Runs", [run_table(report)]),
        ("Classes", [class_table(report)]),
        ("The annotator", _annotator(report)),
        ("What was skipped, and what is missing here", ["\n".join(_skipped(report))]),
        ("Where and when", [machine_table(report)]),
    ]
    for name, content in sections:
        texts = [_table(c) if isinstance(c, Table) else c for c in content if c]
        if any(texts):
            parts += [f"## {name}", *(t for t in texts if t)]
    return "\n\n".join(parts) + f"\n\nWritten by everytoken {version()}.\n"


def _annotator(report: Report) -> list[str | Table | None]:
    out: list[str | Table | None] = []
    for number, found in enumerate(report.agreements):
        agree = "agreement with the folders cannot be told"
        if found.agreement is not None:
            agree = f"main class equals the folder's for {found.agreement:.1%} of {found.looked_at:,} maps"
        out += [f"`{found.store}` by {found.annotator}: {agree}.", agreement_table(report, number)]
    return out


def _skipped(report: Report) -> list[str]:
    lines = [f"- {note}" for note in report.notes]
    lines += [f"- {run.name}: {run.bad_updates} updates left out" for run in report.runs if run.bad_updates]
    lines += [f"- `{key}`: {why}" for key, why in list(report.skipped.items())[:30]]
    lines += [f"- no map in {found.store}: {len(found.skipped)} images" for found in report.agreements if found.skipped]
    return lines or ["Nothing was skipped."]


def _table(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    marks = ["---" if i in table.text else "---:" for i in range(len(table.columns))]
    rows = [line(table.columns), line(marks), *(line(row) for row in table.rows)]
    return "\n".join([*([table.caption, ""] if table.caption else []), *rows])
