"""The confusion matrix as a table whose cells are shaded in eleven levels, with readable text on each of them."""

from __future__ import annotations

from html import escape

import numpy as np

from everytoken.reports.build import Classes

LEVELS = 11
MOST = 20  # classes in a matrix; of more, those that are confused most
# (background, shade, dark text, light text) of the light and the dark page; see style.css
SCHEMES = {
    "light": ("#ffffff", "#1f4fb0", "#000000", "#ffffff"),
    "dark": ("#0f1318", "#8fbcff", "#000000", "#ffffff"),
}


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two colours, 1 to 21."""

    def light(colour: str) -> float:
        parts = [c / 255 for c in _rgb(colour)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(first), light(second)), reverse=True)
    return (a + 0.05) / (b + 0.05)


def level_colours(scheme: str) -> list[tuple[str, str]]:
    """(background, text) of each level; the text is the more readable of two."""
    back, shade, dark, light = SCHEMES[scheme]
    out = []
    for level in range(LEVELS):
        part = level / (LEVELS - 1)
        mixed = [round(b + part * (s - b)) for b, s in zip(_rgb(back), _rgb(shade), strict=True)]
        colour = "#" + "".join(f"{c:02x}" for c in mixed)
        out.append((colour, max((dark, light), key=lambda text: contrast(colour, text))))
    return out


def level_styles() -> str:
    """The rules of the levels, for both schemes."""

    def rules(scheme: str) -> str:
        return "".join(f".l{i}{{background:{b};color:{t}}}" for i, (b, t) in enumerate(level_colours(scheme)))

    return f"{rules('light')}@media screen and (prefers-color-scheme: dark){{{rules('dark')}}}"


def confusion_table(classes: Classes) -> str:
    """Rows are labels, columns are answers; numbers are percent of the row."""
    counts = classes.confusion
    wrong = counts.sum(1) - counts.diagonal() + counts.sum(0) - counts.diagonal()
    kept = [i for i in np.argsort(-wrong, kind="stable").tolist() if counts[i].sum()][:MOST]
    kept.sort()
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    percent = 100 * counts / total
    names = [escape(classes.names[i]) for i in kept]
    head = "".join(f'<th scope="col" class="turn"><span>{name}</span></th>' for name in names)
    rows = []
    for i, name in zip(kept, names, strict=True):
        cells = []
        for j in kept:
            level = round(percent[i, j] / 100 * (LEVELS - 1))
            own = " own" if i == j else ""
            text = f"{percent[i, j]:.0f}" if counts[i, j] else ""
            said = escape(f"{classes.names[i]} taken for {classes.names[j]}: {percent[i, j]:.1f} %", quote=True)
            cells.append(f'<td class="l{level}{own}" title="{said}">{text}</td>')
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    some = (
        f"; the {len(kept)} of {len(classes.names)} classes that are confused most"
        if len(kept) < len(classes.names)
        else ""
    )
    over = f", {classes.runs} runs added up" if classes.runs > 1 else ""
    caption = f"{escape(classes.group.name)}: rows are labels, columns answers, percent of the row{over}{some}"
    label = escape(f"Confusion matrix of {classes.group.name}", quote=True)
    return (
        f'<p class="note">{caption}</p><div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
