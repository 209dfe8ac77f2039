"""Photographs with token maps over them, as HTML. A map is a picture of one pixel per token, laid over it."""

from __future__ import annotations

import base64
import io
from collections import Counter
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from everytoken import draw
from everytoken.reports.build import Report

if TYPE_CHECKING:
    from everytoken.reports.samples import Agreement, TokenMap

# Ten colours that can be told apart over a photograph; grey is for the rest.
PALETTE = (*draw.PALETTE, "#00c2b2", "#ff7ab8", "#7a4a1e")
OTHER = draw.OTHER


def colours_of(report: Report) -> dict[str, str]:
    """Class -> colour: the classes with the most tokens in what is shown, in a fixed order."""
    counts: Counter[str] = Counter()
    for sample in report.samples:
        for said in sample.said:
            if said.tokens is not None:
                counts.update(dict(said.tokens.shares()))
    for found in report.agreements:
        for _, _, _, tokens in found.shown:
            counts.update(dict(tokens.shares()))
    names = sorted(name for name, _ in counts.most_common(len(PALETTE)))
    return dict(zip(names, PALETTE, strict=False))


def class_key(colours: dict[str, str]) -> str:
    """The legend."""
    items = "".join(f'<li><i style="background:{c}"></i>{escape(name)}</li>' for name, c in colours.items())
    return (
        f'<ul class="key" aria-label="Colours of classes">{items}<li><i style="background:{OTHER}"></i>others</li></ul>'
    )


def overlay(tokens: TokenMap, colours: dict[str, str]) -> str:
    """The map as a `data:` picture, one pixel per token; opacity is the confidence."""
    shown = [colours.get(name, OTHER) for name in tokens.names]
    table = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in shown], np.uint8)
    strength = 255 * (0.2 + 0.6 * np.clip(tokens.confidence, 0, 1))
    pixels = np.concatenate([table[tokens.top], strength[..., None].astype(np.uint8)], axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _photo(address: str, alt: str) -> str:
    kind = ' class="small"' if address.startswith("data:image/png") else ""
    return f'<img{kind} src="{address}" alt="{escape(alt, quote=True)}">'


def _stack(address: str, tokens: TokenMap, colours: dict[str, str], who: str) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in tokens.shares()[:4])
    alt = escape(f"What the tokens say, by {who}: {shares}", quote=True)
    over = f'<img src="{overlay(tokens, colours)}" alt="{alt}" title="{alt}">'
    return f'<div class="stack">{_photo(address, "")}{over}</div>'


def sample_cards(report: Report, colours: dict[str, str]) -> str:
    """One card per validation image."""
    cards = []
    for sample in report.samples:
        figures = [
            f'<figure><div class="stack">{_photo(sample.picture, f"photo of class {sample.label}")}</div>'
            f"<figcaption>{escape(sample.label)}</figcaption></figure>"
        ]
        for said in sample.said:
            mark, kind = ("✓", "good") if said.right else ("✗", "bad")
            picture = _stack(sample.picture, said.tokens, colours, said.group) if said.tokens is not None else ""
            verdict = f'<span class="{kind}">{mark} {escape(said.guess)}</span> {said.confidence:.0%}'
            figures.append(f"<figure>{picture}<figcaption>{escape(said.group)}:<br>{verdict}</figcaption></figure>")
        cards.append(
            f'<article class="sample"><h3>{escape(sample.label)}</h3><p class="why">{escape(sample.why)}</p>'
            f'<div class="pics">{"".join(figures)}</div><p class="note">{escape(sample.key)}</p></article>'
        )
    return f'<div class="samples">{"".join(cards)}</div>'


def agreement_pictures(found: Agreement, colours: dict[str, str]) -> str:
    """Training images beside what the annotator says about each cell."""
    cards = []
    for key, picture, label, tokens in found.shown:
        said = ", ".join(f"{name} {share:.0%}" for name, share in tokens.shares()[:3])
        cards.append(
            f'<article class="sample"><h3>{escape(label)}</h3><div class="pics"><figure><div class="stack">'
            f"{_photo(picture, f'training photo of class {label}')}</div></figure><figure>"
            f"{_stack(picture, tokens, colours, 'the annotator')}</figure></div>"
            f'<p class="note">cells: {escape(said)}<br>{escape(key)}</p></article>'
        )
    return f'{class_key(colours)}<div class="samples">{"".join(cards)}</div>'
