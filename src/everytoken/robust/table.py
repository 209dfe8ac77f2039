"""One table, as text, csv, Markdown or HTML."""

from __future__ import annotations

import csv
import html
import io
from dataclasses import dataclass, field

from everytoken._json import plain_json
from everytoken.errors import EverytokenError

Cell = str | float | int | None
FORMATS = ("text", "csv", "md", "html", "json")


@dataclass
class Table:
    """Columns and rows; numbers stay numbers until they are written.

    Attributes:
        title: above the table. columns: headings. rows: cells. notes: lines below it.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, form: str) -> str:
        """As text of one of FORMATS."""
        if form not in FORMATS:
            raise EverytokenError(f"a table can be written as {', '.join(FORMATS)}, not {form!r}")
        made: str = getattr(self, f"_{form}")()
        return made

    def _cells(self) -> list[list[str]]:
        return [[_shown(cell) for cell in row] for row in self.rows]

    def _text(self) -> str:
        cells = [self.columns, *self._cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [self.title, ""]
        for number, row in enumerate(cells):
            padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(padded).rstrip())
            if not number:
                lines.append("-" * (sum(widths) + 2 * len(widths) - 2))
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])

    def _csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(["" if c is None else round(c, 4) if isinstance(c, float) else c for c in row])
        return out.getvalue().rstrip("\n")

    def _md(self) -> str:
        line = lambda cells: "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"  # noqa: E731
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        notes = ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join([f"**{self.title}**", "", line(self.columns), rule, *map(line, self._cells()), *notes])

    def _html(self) -> str:
        row = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"  # noqa: E731
        style = (
            "body{font:15px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
            "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}"
            "td:first-child,th:first-child{text-align:left}"
        )
        body = "\n".join(row(cells, "td") for cells in self._cells())
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f"<style>{style}</style><h1>{html.escape(self.title)}</h1>\n<table>\n{row(self.columns, 'th')}\n{body}\n"
            f"</table>{notes}</html>"
        )

    def _json(self) -> str:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return plain_json({"title": self.title, "rows": rows, "notes": self.notes})


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
