"""`everytoken explain`: pictures and numbers of some models on some images, written to a folder.

Every image becomes a card (a PNG): for each model what it sees, what its tokens say, how sure they are, the annotator's
map beside it and where both differ, and which places speak for each class. `overview.png` has all cards, `mix.png` the
story of a mixture, `explain.json` all numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken._version import version
from everytoken.classes import shown_name
from everytoken.draw import OTHER, PALETTE, cells_of, choose_colours, class_panel, confidence_panel
from everytoken.errors import EverytokenError
from everytoken.explanation import picture as pic
from everytoken.explanation.attention import evaluating
from everytoken.explanation.mixed import draw_box, follow_mix
from everytoken.explanation.relevance import Method, choose_method, relevance
from everytoken.explanation.subject import Look, Subject, name_of
from everytoken.explanation.tokens import (
    MapBeside,
    find_key,
    put_beside,
    summarize_cells,
    token_probabilities,
    translation,
)
from everytoken.maps import Maps
from everytoken.maps.summary import MapSummary

HOW = {
    "attention": "gradient-weighted attention relevance (Chefer et al.)",
    "rollout": "attention rollout, the same for all classes",
    "cam": "Grad-CAM",
}


@dataclass(frozen=True)
class Wanted:
    """What to explain.

    Attributes:
        classes: names or numbers; empty: the best two of the first model.
        method: of relevance.
        maps: an annotator's store, or None.
    """

    classes: tuple[str, ...] = ()
    method: Method = "auto"
    maps: Maps | None = None


class Colours:
    """A class keeps its colour from card to card and from model to model, as far as there are colours."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.known: dict[int, str] = {}

    def choose(self, names: dict[int, str]) -> dict[int, str]:
        """Class -> colour, for the classes of one card."""
        own = {c: self.numbers.setdefault(name, len(self.numbers)) for c, name in names.items()}
        for number in own.values():
            self.known.setdefault(number, PALETTE[number % len(PALETTE)])
        chosen = choose_colours(list(dict.fromkeys(own.values())), self.known)
        return {c: chosen[number] for c, number in own.items()}


def explain_images(subjects: Sequence[Subject], files: Sequence[str], out: Path, wanted: Wanted) -> list[Path]:
    """Write a card for each image, the overview and the numbers; the files that were written."""
    if not files:
        raise EverytokenError("there is nothing to explain: name at least one image file.")
    out.mkdir(parents=True, exist_ok=True)
    methods = [choose_method(subject.model, wanted.method) for subject in subjects]
    keys = _keys(wanted.maps, files)
    colours = Colours()
    cards, written, facts = [], [], []
    for number, file in enumerate(files, 1):
        rows, about = [], []
        classes: list[str] = list(wanted.classes)
        for subject, method in zip(subjects, methods, strict=True):
            row, fact, classes = _explain(subject, file, method, classes, wanted.maps, keys.get(file), colours)
            rows.append(row)
            about.append(fact)
        card = pic.draw_card(pic.Card(file, rows))
        written.append(_save(card, out / f"{number:02d}-{_plain(Path(file).stem)}.png"))
        cards.append(card)
        facts.append({"file": file, "picture": written[-1].name, "models": about})
    title = " against ".join(subject.name for subject in subjects)
    how = " · ".join(dict.fromkeys(HOW[method] for method in methods))
    written.append(_save(pic.draw_overview(title, f"relevance: {how}", cards), out / "overview.png"))
    models = [
        {"name": s.name, "source": s.source, "method": m, "classes": s.classes.count, "remark": s.remark}
        for s, m in zip(subjects, methods, strict=True)
    ]
    written.append(_write(out, {"everytoken": version(), "models": models, "images": facts}))
    return written


def explain_mix(
    subjects: Sequence[Subject], files: Sequence[str], out: Path, part: float, seed: int, boxes: int = 32
) -> list[Path]:
    """Mix two images and write the picture and the numbers of what each model makes of them."""
    if len(files) != 2:
        raise EverytokenError(f"--mix takes exactly two images, got {len(files)}.")
    out.mkdir(parents=True, exist_ok=True)
    rows, facts = [], []
    for subject in subjects:
        own, partner = (subject.look(file) for file in files)
        height, width = own.pixels.shape[:2]
        mask = draw_box(part, (height, width), seed)
        story = follow_mix(subject.model, own.images, partner.images, mask, boxes)
        keep = mask[0].numpy()[..., None] > 0
        mixed = np.where(keep, own.pixels, partner.pixels)
        photo = pic.photo_of(mixed)
        lines = [("by alignment", pic.OWN, story.layers)]
        if story.likeness:
            lines.append(("by likeness", pic.PARTNER, story.likeness))
        told = f"target {story.share:.2f} · tokens {story.aligned.min():.2f} to {story.aligned.max():.2f}"
        panels = [
            pic.Panel("first image", pic.photo_of(own.pixels), Path(files[0]).name),
            pic.Panel("second image", pic.photo_of(partner.pixels), Path(files[1]).name),
            pic.Panel("mixed", photo, f"{story.ratio:.0%} of the area is the first image"),
            pic.Panel("labels by area", pic.share_panel(story.start.numpy(), photo.size), f"target {story.ratio:.2f}"),
            pic.Panel("aligned labels", pic.share_panel(story.aligned.numpy(), photo.size), told),
            pic.Panel("share of the first, by layer", pic.chart(lines, story.ratio), "dashed: by area"),
        ]
        label = f"{subject.name}   RMSE of aligned shares over {boxes} random boxes: {story.rmse:.3f}"
        rows.append(pic.Row(label, panels, bars=[("first", "second", "share")], remark=subject.remark))
        facts.append(
            {
                "name": subject.name, "source": subject.source, "ratio": story.ratio, "share": story.share,
                "layers": _round(story.layers), "likeness": _round(story.likeness), "rmse": story.rmse, "boxes": boxes,
                "start": _round(story.start), "aligned": _round(story.aligned), "remark": subject.remark,
            }
        )  # fmt: skip
    card = pic.draw_card(pic.Card(f"{files[0]} with a box from {files[1]}", rows))
    written = [_save(card, out / "mix.png")]
    written.append(_write(out, {"everytoken": version(), "mix": {"files": list(files), "seed": seed, "models": facts}}))
    return written


def _explain(
    subject: Subject, file: str, method: Method, classes: list[str], maps: Maps | None, key: str | None,
    colours: Colours,
) -> tuple[pic.Row, dict[str, Any], list[str]]:  # fmt: skip
    """A row of panels, its numbers, and the classes that were looked at (for the next model)."""
    look = subject.look(file)
    with torch.no_grad(), evaluating(subject.model):
        chance = subject.model(look.images).logits[0].float().softmax(-1).cpu()
    best = chance.topk(min(5, len(chance))).indices.tolist()
    chosen = [subject.find_class(text) for text in classes] if classes else best[:2]
    names = [name_of(subject.classes, c) for c in chosen]
    cells, from_head = token_probabilities(subject.model, look.images)
    tokens = summarize_cells(cells[0])
    beside = None
    if maps is not None and key is not None:
        beside = put_beside(maps, key, tokens, look.area, translation(maps, subject.token_classes))
    scores = relevance(subject.model, look.images, chosen, method)[0].cpu().numpy()

    photo = pic.photo_of(look.pixels)
    panels, legend = _token_panels(subject, photo, tokens, from_head, beside, colours)
    for c, name, values in zip(chosen, names, scores, strict=True):
        heat = pic.heat_panel(photo, values)
        if method == "rollout":
            panels.append(pic.Panel("where attention comes from", heat, "the same for all classes"))
            break
        panels.append(pic.Panel(f"for {shown_name(name)}", heat, f"says {float(chance[c]):.1%}"))
    said = " · ".join(f"{shown_name(name_of(subject.classes, c))} {float(chance[c]):.1%}" for c in best[:3])
    bars = [("unsure", "sure", "heat"), ("irrelevant", "relevant", "heat")]
    remark = subject.remark or ("" if maps is None or key else "no map of this image in the store")
    row = pic.Row(f"{subject.name}   says: {said}", panels, legend, bars, remark)
    fact = _facts(subject, look, chance, best, tokens, from_head, beside)
    fact["relevance"] = [
        {"class": n, "index": c, "probability": _round(chance[c]), "method": method, "grid": _round(v)}
        for n, c, v in zip(names, chosen, scores, strict=True)
    ]
    return row, fact, classes or [n if subject.classes.names else str(c) for n, c in zip(names, chosen, strict=True)]


def _token_panels(
    subject: Subject, photo: Image.Image, tokens: MapSummary, from_head: bool, beside: MapBeside | None,
    colours: Colours,
) -> tuple[list[pic.Panel], list[pic.Entry]]:  # fmt: skip
    weight = dict(tokens.shares)
    shown = list(weight)[: len(PALETTE)]
    if beside is not None:  # the main classes of both, in turns
        pairs = zip(list(weight) + [-1] * 9, [c for c, _ in beside.summary.shares] + [-1] * 9, strict=False)
        shown = [c for c in dict.fromkeys(c for pair in pairs for c in pair) if c >= 0][: len(PALETTE)]
    names = {c: _name(subject, beside, c) for c in shown}
    legend = colours.choose(names)
    cells, inside = cells_of(photo.size, _shape(tokens), (0.0, 0.0, 1.0, 1.0))
    said = "token head" if from_head else "no token head: classifier at every cell"
    panels = [
        pic.Panel("what the model sees", photo),
        pic.Panel("what the tokens say", class_panel(photo, cells, inside, tokens, legend), said),
        pic.Panel(
            "how sure they are",
            confidence_panel(photo, cells, inside, tokens),
            f"{tokens.confidence.min():.0%} to {tokens.confidence.max():.0%}",
        ),
    ]
    entries = [pic.Entry(legend[c], names[c], weight.get(c, 0.0)) for c in shown]
    rest = 1 - sum(weight.get(c, 0.0) for c in shown)
    if rest > 0.001:
        entries.append(pic.Entry(OTHER, "others", rest))
    if beside is not None:
        cells, inside = cells_of(photo.size, _shape(beside.summary), beside.area)
        drawn = class_panel(photo, cells, inside, beside.summary, legend)
        panels.append(pic.Panel("what the annotator says", drawn, beside.key))
        if beside.agreement is None:
            caption = "they share no classes"
        else:
            caption = f"same class in {beside.agreement:.0%} of the tokens"
            entries.append(pic.Entry(pic.DIFFER, "tokens and annotator differ"))
        panels.append(pic.Panel("where they differ", pic.difference_panel(photo, beside.same, beside.inside), caption))
    return panels, entries


def _facts(
    subject: Subject, look: Look, chance: torch.Tensor, best: list[int], tokens: MapSummary, from_head: bool,
    beside: MapBeside | None,
) -> dict[str, Any]:  # fmt: skip
    top = [{"class": name_of(subject.classes, c), "index": c, "probability": _round(chance[c])} for c in best]
    used = sorted({int(c) for c in tokens.top.ravel()})
    said: dict[str, Any] = {
        "from": "token head" if from_head else "classifier at every cell",
        "classes": tokens.top.tolist(),
        "confidence": _round(tokens.confidence),
        "names": {str(c): name_of(subject.token_classes, c) for c in used},
    }
    if beside is not None:
        said["annotator"] = {"key": beside.key, "agreement": beside.agreement, "same": beside.same.tolist()}
    return {"name": subject.name, "view": _round(look.area), "top": top, "tokens": said}


def _name(subject: Subject, beside: MapBeside | None, number: int) -> str:
    if beside is not None and number in beside.names:
        return shown_name(beside.names[number])
    return shown_name(name_of(subject.token_classes, number))


def _keys(maps: Maps | None, files: Sequence[str]) -> dict[str, str]:
    """File -> key in the store, for those that have a map. None at all is an error."""
    if maps is None:
        return {}
    found = {file: key for file in files if (key := find_key(maps, file)) is not None}
    if not found:
        raise EverytokenError(
            f"{maps.path} has no map of any of the images. Its keys are paths relative to the annotated folder, such "
            f"as {maps.key(0)!r}; {files[0]} ends in none of them. Only annotated images (usually those of train) have "
            "maps."
        )
    return found


def _shape(summary: MapSummary) -> tuple[int, int]:
    return summary.top.shape[0], summary.top.shape[1]


def _plain(stem: str) -> str:
    return re.sub(r"[^\w.-]+", "_", stem)[:60] or "image"


def _round(values: Any) -> Any:
    """Six significant digits are enough for pictures, and keep the file small."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        return float(f"{float(array):.6g}")
    return [_round(value) for value in array]


def _save(image: Image.Image, path: Path) -> Path:
    image.save(path, optimize=True)
    return path


def _write(out: Path, facts: dict[str, Any]) -> Path:
    path = out / "explain.json"
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False), encoding="utf-8")
    return path
