"""Every image becomes a card (a PNG): for each model what it sees, what its tokens say, how sure they are, the
annotator's map beside it and where both differ, and which regions support each class. `overview.png` has all cards,
`mix.png` the story of a mixture, `explain.json` all numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken._version import version
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically, write_picture
from everytoken.maps import Maps
from everytoken_lab import draw
from everytoken_lab.classes import read_class_names, shown_name
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.explanation import ExplainOptions
from everytoken_lab.explanation.mixed import draw_box, follow_mix
from everytoken_lab.explanation.model import ExplainedModel, name_of, open_explained
from everytoken_lab.explanation.saliency import Method, choose_method, evaluating, relevance
from everytoken_lab.explanation.tokens import (
    AnnotatorMap,
    compare_with_map,
    find_key,
    summarize_cells,
    token_probabilities,
    translation,
)
from everytoken_lab.maps.summary import MapSummary
from everytoken_lab.models.open import OpenModel

METHODS = {
    "attention": "gradient-weighted attention (Chefer et al., ICCV 2021)",
    "lrp": "relevance propagated through layers (Chefer et al., CVPR 2021)",
    "rollout": "attention rollout, the same for all classes",
    "cam": "Grad-CAM",
}
BOXES = 32  # random ones, for the RMSE of a mixture


@dataclass(frozen=True)
class Explanation:
    """What `explain` made.

    Attributes:
        cards: a picture for each image (with `mix`: one).
        facts: all numbers, as in explain.json.
        files: what was written.
    """

    cards: list[Image.Image]
    facts: dict[str, Any]
    files: list[Path] = field(default_factory=list)


def explain_files(
    source: str | Path | OpenModel, files: Sequence[str], out: Path | None, options: ExplainOptions
) -> Explanation:
    """See `everytoken_lab.explanation.explain`."""
    how, names = (
        InferenceOptions(img_size=options.img_size, device=options.device, workers=0),
        read_class_names(options.names),
    )
    models = [open_explained(source, replace(how, model=options.model, weights=options.weights), names)]
    if options.compare:
        models.append(open_explained(options.compare, how, names))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    result = (_explain_mix if options.mix else _explain_images)(models, files, options)
    if out is None:
        return result
    pictures = {"mix.png": result.cards[0]}
    if not options.mix:
        pictures = dict(zip((fact["picture"] for fact in result.facts["images"]), result.cards, strict=True))
        methods = " · ".join(dict.fromkeys(METHODS[model["method"]] for model in result.facts["models"]))
        title = " against ".join(model.name for model in models)
        pictures["overview.png"] = draw.stack(title, f"relevance: {methods}", {"": result.cards})
    for name, picture in pictures.items():
        write_picture(out / name, picture, optimize=True)
    write_atomically(out / "explain.json", json.dumps(result.facts, indent=1).encode())
    result.files.extend(out / name for name in [*pictures, "explain.json"])
    return result


def _explain_images(models: Sequence[ExplainedModel], files: Sequence[str], options: ExplainOptions) -> Explanation:
    if not files:
        raise EverytokenError("there is nothing to explain: name at least one image file.")
    maps = None if options.maps is None else Maps(options.maps, partial=True)
    keys = {} if maps is None else {file: key for file in files if (key := find_key(maps, file)) is not None}
    if maps is not None and not keys:
        raise EverytokenError(
            f"{maps.path} has no map of any of the images. Its keys are paths relative to the annotated folder, such "
            f"as {maps.key(0)!r}; {files[0]} ends in none of them. Only annotated images (usually those of train) have "
            "maps."
        )
    methods = [choose_method(model.model, options.method) for model in models]
    colours = draw.ClassColours([shown_name(name) for name in models[0].token_classes.names])
    cards, facts = [], []
    for number, file in enumerate(files, 1):
        rows, of_models = [], []
        classes: list[str] = list(options.classes)
        for model, method in zip(models, methods, strict=True):
            row, fact, classes = _explain_image(model, file, method, classes, maps, keys.get(file), colours)
            rows.append(row)
            of_models.append(fact)
        cards.append(draw.draw_card(draw.Card(file, rows)))
        stem = re.sub(r"[^\w.-]+", "_", Path(file).stem)[:60] or "image"
        facts.append({"file": file, "picture": f"{number:02d}-{stem}.png", "models": of_models})
    about = [
        {"name": model.name, "source": model.source, "method": method, "classes": model.classes.count}
        for model, method in zip(models, methods, strict=True)
    ]
    return Explanation(cards, {"everytoken": version(), "models": about, "images": facts})


def _explain_image(
    model: ExplainedModel,
    file: str,
    method: Method,
    wanted: Sequence[str],
    maps: Maps | None,
    key: str | None,
    colours: draw.ClassColours,
) -> tuple[draw.Row, dict[str, Any], list[str]]:
    """A row of panels, its numbers, and the classes that were explained (for the next model)."""
    seen = model.read(file)
    with torch.no_grad(), evaluating(model.model):
        probabilities = model.probabilities(seen.images)
    best = probabilities.topk(min(5, len(probabilities))).indices.tolist()
    chosen = [model.find_class(text) for text in wanted] if wanted else best[:2]
    cells, from_head = token_probabilities(model.model, seen.images)
    tokens, annotated = summarize_cells(cells[0]), None
    if maps is not None and key is not None:
        annotated = compare_with_map(maps, key, tokens, seen.area, translation(maps, model.token_classes))
    heat = relevance(model.model, seen.images, chosen, method)[0].cpu().numpy()

    source = "token head" if from_head else "classifier at every cell"
    photo = draw.fit_photo(Image.fromarray(seen.pixels))
    panels, legend = _token_panels(model, photo, tokens, source, annotated, colours)
    for c, values in zip(chosen, heat, strict=True):
        title, caption = f"for {shown_name(name_of(model.classes, c))}", f"says {probabilities[c]:.1%} · by {method}"
        if method == "rollout":
            title, caption = "where attention comes from", "the same for all classes"
        panels.append(draw.Panel(title, draw.heat_overlay(photo, values), caption))
        if method == "rollout":
            break
    says = " · ".join(f"{shown_name(name_of(model.classes, c))} {probabilities[c]:.1%}" for c in best[:3])
    bars = [("unsure", "sure", "heat"), ("irrelevant", "relevant", "heat")]
    remark = "" if maps is None or key else "no map of this image in the store"
    row = draw.Row(f"{model.name}   says: {says}", panels, legend, bars, remark)

    def about(c: int) -> dict[str, Any]:
        return {"class": name_of(model.classes, c), "index": c, "probability": _round(probabilities[c])}

    fact: dict[str, Any] = {
        "name": model.name,
        "view": _round(seen.area),
        "top": [about(c) for c in best],
        "tokens": {
            "from": source,
            "classes": tokens.top.tolist(),
            "confidence": _round(tokens.confidence),
            "names": {str(c): name_of(model.token_classes, c) for c in np.unique(tokens.top).tolist()},
        },
        "relevance": [{**about(c), "method": method, "grid": _round(v)} for c, v in zip(chosen, heat, strict=True)],
    }
    if annotated is not None:
        fact["tokens"]["annotator"] = {
            "key": annotated.key,
            "agreement": annotated.agreement,
            "same": annotated.same.tolist(),
        }
    return row, fact, list(wanted) or [name_of(model.classes, c) if model.classes.names else str(c) for c in chosen]


def _token_panels(
    model: ExplainedModel,
    photo: Image.Image,
    tokens: MapSummary,
    source: str,
    annotated: AnnotatorMap | None,
    colours: draw.ClassColours,
) -> tuple[list[draw.Panel], list[draw.Entry]]:
    names = {} if annotated is None else annotated.names

    def name(number: int) -> str:
        return shown_name(names.get(number) or name_of(model.token_classes, number))

    fractions = dict(tokens.shares)
    others = [] if annotated is None else [c for c, _ in annotated.summary.shares]
    both = [c for c in chain(*zip_longest(fractions, others)) if c is not None]  # the main classes of both, in turns
    classes = list(dict.fromkeys(both))[: len(draw.PALETTE)]
    chosen = colours.choose([name(c) for c in classes])
    legend = {c: chosen[name(c)] for c in classes}
    sure = f"{tokens.confidence.min():.0%} to {tokens.confidence.max():.0%}"
    panels = [
        draw.Panel("what the model sees", photo),
        draw.Panel("what the tokens say", draw.class_overlay(photo, tokens.top, tokens.confidence, legend), source),
        draw.Panel("how sure they are", draw.confidence_overlay(photo, tokens.confidence), sure),
    ]
    entries = [draw.Entry(legend[c], name(c), fractions.get(c, 0.0)) for c in classes]
    rest = 1 - sum(fractions.get(c, 0.0) for c in classes)
    if rest > 0.001:
        entries.append(draw.Entry(draw.OTHER, "others", rest))
    if annotated is not None:
        summary = annotated.summary
        overlay = draw.class_overlay(photo, summary.top, summary.confidence, legend, annotated.area)
        panels.append(draw.Panel("what the annotator says", overlay, annotated.key))
        caption = "they have no classes in common"
        if annotated.agreement is not None:
            caption = f"same class in {annotated.agreement:.0%} of the tokens"
            entries.append(draw.Entry(draw.DIFFERENT, "tokens and annotator differ"))
        difference = draw.difference_overlay(photo, annotated.same, annotated.inside)
        panels.append(draw.Panel("where they differ", difference, caption))
    return panels, entries


def _explain_mix(models: Sequence[ExplainedModel], files: Sequence[str], options: ExplainOptions) -> Explanation:
    """Mix two images and follow the labels through each model."""
    if len(files) != 2:
        raise EverytokenError(f"mix takes exactly two images, got {len(files)}.")
    rows, facts = [], []
    for model in models:
        own, partner = (model.read(file) for file in files)
        height, width = own.pixels.shape[:2]
        mask = draw_box(options.mix_part, (height, width), options.seed)
        story = follow_mix(model.model, own.images, partner.images, mask, BOXES)
        mixed = np.where(mask[0].numpy()[..., None] > 0, own.pixels, partner.pixels)
        photos = [draw.fit_photo(Image.fromarray(pixels)) for pixels in (own.pixels, partner.pixels, mixed)]
        size, aligned = photos[2].size, story.aligned.numpy()
        lines = [("by alignment", draw.OWN, story.layers), ("by likeness", draw.PARTNER, story.likeness)]
        captions = [
            ("first image", photos[0], Path(files[0]).name),
            ("second image", photos[1], Path(files[1]).name),
            ("mixed", photos[2], f"{story.ratio:.0%} of the area is the first image"),
            ("labels by area", draw.share_picture(story.start.numpy(), size), f"target {story.ratio:.2f}"),
            (
                "aligned labels",
                draw.share_picture(aligned, size),
                f"target {story.share:.2f} · tokens {aligned.min():.2f} to {aligned.max():.2f}",
            ),
            ("share of the first, by layer", draw.layer_chart(lines, story.ratio), "dashed: by area"),
        ]
        label = f"{model.name}   RMSE of aligned shares over {BOXES} random boxes: {story.rmse:.3f}"
        rows.append(draw.Row(label, [draw.Panel(*panel) for panel in captions], bars=[("first", "second", "share")]))
        numbers = {name: _round(value) for name, value in vars(story).items()}
        facts.append({"name": model.name, "source": model.source, "boxes": BOXES, **numbers})
    card = draw.draw_card(draw.Card(f"{files[0]} with a box from {files[1]}", rows))
    mix = {"files": list(files), "seed": options.seed, "models": facts}
    return Explanation([card], {"everytoken": version(), "mix": mix})


def _round(values: Any) -> Any:
    """Six significant digits are enough for pictures, and keep the file small."""
    array = np.asarray(values, dtype=np.float64)
    return float(f"{float(array):.6g}") if array.ndim == 0 else [_round(value) for value in array]
