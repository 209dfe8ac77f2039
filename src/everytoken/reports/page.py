"""One self-contained HTML page: style, script, charts and pictures are inside; nothing is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from everytoken._version import version
from everytoken.reports import words
from everytoken.reports.build import Report
from everytoken.reports.charts import Series, interval_chart, line_chart
from everytoken.reports.matrix import confusion_table, level_styles
from everytoken.reports.pictures import agreement_pictures, class_key, colours_of, sample_cards
from everytoken.reports.runs import Run
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
    """The page as text."""
    title = title or f"Report: {', '.join(group.name for group in report.groups[:3])}"
    sections = [
        ("compared", "What was compared", _compared(report)),
        ("runs", "Runs", _html(run_table(report))),
        ("curves", "Training curves", _curves(report)),
        ("classes", "Classes", _classes(report)),
        ("samples", "Sample predictions", _samples(report)),
        ("annotator", "The annotator", _annotator(report)),
        ("skipped", "What was skipped, and what is missing here", _skipped(report)),
        ("machine", "Where and when", _html(machine_table(report))),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(text)}</h2>{content}</section>'
        for name, text, content in sections
    )
    style = _asset("style.css") + level_styles()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head><body>'
        f"<header><h1>{escape(title)}</h1>{_headline(report)}<nav aria-label='Contents'>{links}</nav></header>"
        f"<main>{body}</main>"
        f'<footer><p class="note">Written by everytoken {escape(version())}. This page holds everything it shows.</p>'
        '</footer><div id="live" class="hidden" aria-live="polite"></div><div id="page-errors" role="alert"></div>'
        f"<script>{_asset('script.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (resources.files("everytoken.reports") / name).read_text(encoding="utf-8")


def _colour(report: Report) -> dict[str, int]:
    """Group -> number of its colour."""
    return {group.name: i for i, group in enumerate(report.groups)}


def _headline(report: Report) -> str:
    colour = _colour(report)
    parts = [f'<div class="headline"><p class="big">{escape(words.headline(report))}</p>']
    parts += [f"<p>{escape(words.how_sure(d))}</p>" for d in report.differences]
    if not report.differences:
        parts += [f"<p>{escape(g.name)}: {escape(words.group_words(g))}</p>" for g in report.groups]
        parts += [_over_images(report)]
        if len(report.groups) > 1:
            parts.append("<p>No two finished runs have the same seed, so no paired difference is shown.</p>")
    parts.append(f'<p class="note">{escape(words.caution(report))}</p></div>')
    charts = interval_chart(
        f"Validation {report.metric}", " %", [(g.name, e, colour[g.name]) for g in report.groups if (e := g.accuracy)]
    )
    if report.differences:
        charts += interval_chart(
            f"Difference to {report.groups[0].name}, seed by seed", " points",
            [(d.other.name, d.estimate, colour[d.other.name]) for d in report.differences], zero=True,
        )  # fmt: skip
    return "".join(parts) + f'<div class="charts">{charts}</div>'


def _over_images(report: Report) -> str:
    """With a single run, chance comes from the choice of images."""
    if len(report.classes) != 1 or report.classes[0].runs != 1:
        return ""
    (low, high), images = report.classes[0].interval, int(report.classes[0].confusion.sum())
    return f"<p>95 % interval over the {images:,} validation images, best weights: {low:.2f} to {high:.2f} %.</p>"


def _compared(report: Report) -> str:
    items = []
    for group in report.groups:
        config = group.runs[0].config
        if not config:
            items.append(f"<li><b>{escape(group.name)}</b>: its configuration cannot be read.</li>")
            continue
        facts = f"{config.get('model')} at {config.get('img_size')} px, {config.get('epochs')} epochs"
        items.append(
            f"<li><b>{escape(group.name)}</b> learns {escape(words.learns(config))}. {escape(facts)}, "
            f"data <code>{escape(str(config.get('data')))}</code>.</li>"
        )
    why = ""
    if any(set(g.runs[0].config.get("objectives") or {}) & {"token", "token_labeling"} for g in report.groups):
        why = (
            "<p>Why labels for every token may help: ordinary training asks one question per image. Token labeling "
            "asks one per token, where the annotator says what is to be seen at that place, so the same images teach "
            "more. How much depends on the annotator: below is how often it agrees with the folders.</p>"
        )
    same = "" if report.settings or len(report.groups) < 2 else "<p>The groups have the same settings.</p>"
    table = _html(settings_table(report))
    groups = _html(group_table(report)) if len(report.groups) > 1 or len(report.runs) > 1 else ""
    return f"<ul>{''.join(items)}</ul>{why}{groups}{f'<h3>Configuration differences</h3>{table}' if table else same}"


def _curves(report: Report) -> str:
    colour = {run.name: i for i, group in enumerate(report.groups) for run in group.runs}

    def lines(pick: str, kind: str = "step", ema: bool = False) -> list[Series]:
        return [Series(run.name, _curve(run, pick, kind, ema), colour[run.name]) for run in report.runs]

    terms = list(dict.fromkeys(term for run in report.runs for term in run.terms))
    charts = [
        line_chart(
            f"Validation {report.metric}", " %", [Series(r.name, r.scores, colour[r.name]) for r in report.runs], 4.0
        ),
        line_chart("Validation loss", "", lines("val_loss", "epoch", ema=True)),
        *(line_chart(f"Training: {term}", "", lines(term)) for term in terms[:10]),
        line_chart("Learning rate", "", lines("lr")),
        line_chart("Images per second", "", lines("images_per_second")),
        line_chart(
            "Waiting for data", " of the time", lines("waiting"), note="1 means always; high values: more workers"
        ),
        line_chart("Gradient norm", "", lines("grad_norm")),
    ]
    if not any(charts):
        return "<p>No metrics were written yet.</p>"
    key = "".join(
        f'<li><i style="background:var(--s{i % 8})"></i>{escape(g.name)}</li>' for i, g in enumerate(report.groups)
    )
    how = "Move over a chart, touch it, or focus it and use the arrow keys, to read values. Losses of different terms "
    how += "and methods are not comparable with each other; validation accuracy and loss are."
    return f'<p class="sub">{how}</p><ul class="key">{key}</ul><div class="charts">{"".join(charts)}</div>'


def _curve(run: Run, name: str, kind: str, ema: bool) -> list[tuple[float, float]]:
    return (run.curve(f"ema_{name}", kind) if ema else []) or run.curve(name, kind)


def _classes(report: Report) -> str:
    table = class_table(report)
    if table is None:
        return ""
    matrices = "".join(f"<div>{confusion_table(c)}</div>" for c in report.classes)
    return f'{_html(table)}<h3>Confusion matrices</h3><div class="pair">{matrices}</div>'


def _samples(report: Report) -> str:
    if not report.samples:
        return ""
    colours = colours_of(report)
    heads = {s.tokens.source for sample in report.samples for s in sample.said if s.tokens is not None}
    how = (
        "The network's view of some validation images, and over it the best class of every token, stronger where it is "
        "surer. Images are picked by what the groups get right and wrong, in equal numbers, not by how nice they look."
    )
    if "class head" in heads:
        how += " Without a token head, the class head is asked at every token, for which it was not trained."
    return f'<p class="sub">{how}</p>{class_key(colours)}{sample_cards(report, colours)}'


def _annotator(report: Report) -> str:
    parts = []
    for number, found in enumerate(report.agreements):
        h, w = found.grid
        held = "" if found.held_out is None else f" It was right on {found.held_out:.1%} of images held out from it."
        agree = "The folders' names are no class names of the maps, so agreement cannot be told."
        if found.agreement is not None:
            agree = f"The main class of a map is the folder's for {found.agreement:.1%} of {found.looked_at:,} maps."
        parts.append(
            f"<p>Score maps <code>{escape(found.store)}</code> by <b>{escape(found.annotator)}</b>: {h} x {w} cells "
            f"per image.{held} {agree} A cell is {found.confidence:.0%} sure on average, and a map names "
            f"{found.vocabulary:.1f} classes.</p>"
        )
        if found.shown:
            parts.append("<h3>What the tokens were taught</h3>" + agreement_pictures(found, colours_of(report)))
        parts.append(_html(agreement_table(report, number)))
    return "".join(parts)


def _skipped(report: Report) -> str:
    parts = [f'<p class="trouble">{escape(note)}</p>' for note in report.notes]
    parts += [
        f'<p class="trouble">{escape(run.name)}: {run.bad_updates} updates were left out because the loss was not '
        "finite (bad-updates.jsonl lists the images).</p>"
        for run in report.runs
        if run.bad_updates
    ]
    parts += _skipped_list("images could not be read and were left out", report.skipped)
    for found in report.agreements:
        parts += _skipped_list(f"images have no score map in {found.store}", found.skipped)
    return "".join(parts) or "<p>Nothing was skipped: every image was read, and every update was made.</p>"


def _skipped_list(what: str, skipped: dict[str, str], most: int = 30) -> list[str]:
    if not skipped:
        return []
    items = "".join(f"<li><code>{escape(key)}</code>: {escape(why)}</li>" for key, why in list(skipped.items())[:most])
    more = f"<li>and {len(skipped) - most} more</li>" if len(skipped) > most else ""
    return [f"<p>{len(skipped)} {escape(what)}:</p><ul>{items}{more}</ul>"]


def _html(table: Table | None) -> str:
    """A table that scrolls by itself where the page is too narrow."""
    if table is None or not table.rows:
        return ""

    def cells(tag: str, row: Sequence[str]) -> str:
        out = []
        for i, value in enumerate(row):
            kind = ' class="text"' if i in table.text else ""
            if tag == "th":
                out.append(f'<th scope="col"{kind}>{escape(value)}</th>')
            elif i == 0:
                out.append(f'<th scope="row" class="text">{escape(value)}</th>')
            else:
                out.append(f"<td{kind}>{escape(value)}</td>")
        return "".join(out)

    caption = f'<p class="note">{escape(table.caption)}</p>' if table.caption else ""
    head = f"<thead><tr>{cells('th', table.columns)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    label = escape(table.caption or "table", quote=True)
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
    return f"{caption}{region}<table>{head}<tbody>{body}</tbody></table></div>"
