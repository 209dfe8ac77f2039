"""`explain`: pictures and numbers of some models on some images.

Every image becomes a card (a PNG): for each model what it sees, what its tokens say, how sure they are, the annotator's
map beside it and where both differ, and which regions support each class. `overview.png` has all cards, `mix.png` the
story of a mixture, `explain.json` all numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from everytoken._version import version
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically, write_picture
from everytoken_lab import draw, schema

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from everytoken.maps import Maps
    from everytoken_lab.explanation.model import ExplainedModel, ModelInput
    from everytoken_lab.explanation.tokens import AnnotatorMap
    from everytoken_lab.maps.summary import MapSummary
    from everytoken_lab.models.open import OpenModel

METHODS = {
    "attention": "gradient-weighted attention (Chefer et al., ICCV 2021)",
    "lrp": "relevance propagated through layers (Chefer et al., CVPR 2021)",
    "rollout": "attention rollout, the same for all classes",
    "cam": "Grad-CAM",
}


@dataclass(frozen=True)
class ExplainOptions:
    """What to explain, and how."""

    classes: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="class", metavar="NAME|INDEX")
    ] = ()
    """A class to explain; can be given several times. Default: the two that the model finds most likely."""
    method: Literal["auto", "attention", "lrp", "rollout", "cam"] = "auto"
    """attention: gradient-weighted attention relevance. lrp: relevance propagated through layers, as in the papers'
    pictures (ViT, DeiT, LV-ViT). rollout: attention rollout. cam: Grad-CAM. auto: attention for transformers with a
    class token, else cam."""
    maps: Path | None = None
    """A store of score maps: the annotator's map beside what the tokens say, and where they differ."""
    compare: str = ""
    """A second model, shown next to the first on the same images and classes."""
    mix: bool = False
    """Mix the two images given (a box of the second in the first) and follow the labels through the model."""
    mix_part: float = 0.4
    """mix: the second image's part of the area."""
    seed: int = 0
    """mix: where the box lies."""
    model: str = ""
    """timm model name, for weights without metadata."""
    weights: str = ""
    """With timm:NAME: own weights instead of pretrained ones."""
    compare_weights: str = ""
    """The same for compare with timm:NAME."""
    untrained: bool = False
    """With timm:NAME: random weights, to see that a method works; the pictures say so."""
    img_size: int = 0
    """Another input size; position embeddings are resized. 0: the model's own."""
    names: Path | None = None
    """Text file with one class name per line, for weights that do not know them."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` made.

    Attributes:
        cards: a picture for each image (with `mix`: one).
        facts: all numbers, as in explain.json.
        files: what was written.
        remarks: about the models, such as random weights.
    """

    cards: list[Image.Image]
    facts: dict[str, Any]
    files: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def explain(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    **options: Any,
) -> Explanation:
    """Draw what a model sees in images: what its tokens say, and which regions support which class.

    Example:
        >>> lab.explain("runs/first", "cat.jpg").cards[0].show()

    Args:
        source: a run folder, a weights file, an exported folder, timm:NAME, hf-hub:USER/NAME, registry:NAME, or a
            loaded model.
        images: image files.
        out: folder for the pictures and explain.json; None: write nothing.
        options: fields of `ExplainOptions`.
    """
    from everytoken_lab.classes import read_class_names
    from everytoken_lab.engine.distributed import pick_device
    from everytoken_lab.explanation.model import open_explained
    from everytoken_lab.models.open import OpenModel

    settings = schema.from_keywords(ExplainOptions, options, "explain()")
    files = [str(images)] if isinstance(images, str | Path) else [str(image) for image in images]
    sources: list[tuple[str | OpenModel, str, str]] = [
        (source if isinstance(source, OpenModel) else str(source), settings.weights, settings.model)
    ]
    if settings.compare:
        sources.append((settings.compare, settings.compare_weights, ""))
    if settings.untrained and not any(str(name).startswith("timm:") for name, _, _ in sources):
        raise EverytokenError(f"untrained goes with timm:NAME; {source} brings its weights.")
    device, names = pick_device(settings.device), read_class_names(settings.names)
    models = [
        open_explained(
            name,
            weights,
            model,
            settings.img_size,
            names,
            settings.untrained and str(name).startswith("timm:"),
            device,
        )
        for name, weights, model in sources
    ]
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    result = _explain_mix(models, files, settings) if settings.mix else _explain_images(models, files, settings)
    if folder is not None:
        _write(result, folder, files, settings)
    result.remarks.extend(f"{model.name}: {model.remark}" for model in models if model.remark)
    return result


def _write(result: Explanation, folder: Path, files: Sequence[str], settings: ExplainOptions) -> None:
    if settings.mix:
        pictures = {"mix.png": result.cards[0]}
    else:
        pictures = dict(zip((fact["picture"] for fact in result.facts["images"]), result.cards, strict=True))
        title = " against ".join(model["name"] for model in result.facts["models"])
        methods = " · ".join(dict.fromkeys(METHODS[model["method"]] for model in result.facts["models"]))
        pictures["overview.png"] = draw.stack(title, f"relevance: {methods}", result.cards)
    for name, picture in pictures.items():
        write_picture(folder / name, picture, optimize=True)
        result.files.append(folder / name)
    result.files.append(folder / "explain.json")
    write_atomically(result.files[-1], json.dumps(result.facts, indent=1).encode())


def _explain_images(models: Sequence[ExplainedModel], files: Sequence[str], settings: ExplainOptions) -> Explanation:
    from everytoken.maps import Maps
    from everytoken_lab.classes import shown_name
    from everytoken_lab.explanation.saliency import choose_method

    if not files:
        raise EverytokenError("there is nothing to explain: name at least one image file.")
    maps = None if settings.maps is None else Maps(settings.maps, partial=True)
    methods = [choose_method(model.model, settings.method) for model in models]
    keys = _keys(maps, files)
    colours = draw.ClassColours([shown_name(name) for name in models[0].token_classes.names])
    cards, facts = [], []
    for number, file in enumerate(files, 1):
        rows, numbers = [], []
        classes: list[str] = list(settings.classes)
        for model, method in zip(models, methods, strict=True):
            row, fact, classes = _explain_image(model, file, method, classes, maps, keys.get(file), colours)
            rows.append(row)
            numbers.append(fact)
        cards.append(draw.draw_card(draw.Card(file, rows)))
        stem = re.sub(r"[^\w.-]+", "_", Path(file).stem)[:60] or "image"
        facts.append({"file": file, "picture": f"{number:02d}-{stem}.png", "models": numbers})
    about = [
        {"name": m.name, "source": m.source, "method": method, "classes": m.classes.count, "remark": m.remark}
        for m, method in zip(models, methods, strict=True)
    ]
    return Explanation(cards, {"everytoken": version(), "models": about, "images": facts})


def _explain_mix(
    models: Sequence[ExplainedModel], files: Sequence[str], settings: ExplainOptions, boxes: int = 32
) -> Explanation:
    """Mix two images and follow the labels through each model."""
    from PIL import Image

    from everytoken_lab.explanation.mixed import draw_box, follow_mix

    if len(files) != 2:
        raise EverytokenError(f"mix takes exactly two images, got {len(files)}.")
    rows, facts = [], []
    for model in models:
        own, partner = (model.read(file) for file in files)
        height, width = own.pixels.shape[:2]
        mask = draw_box(settings.mix_part, (height, width), settings.seed)
        story = follow_mix(model.model, own.images, partner.images, mask, boxes)
        mixed = np.where(mask[0].numpy()[..., None] > 0, own.pixels, partner.pixels)
        photos = [draw.fit_photo(Image.fromarray(pixels)) for pixels in (own.pixels, partner.pixels, mixed)]
        size = photos[2].size
        lines = [("by alignment", draw.OWN, story.layers)]
        if story.likeness:
            lines.append(("by likeness", draw.PARTNER, story.likeness))
        aligned = f"target {story.share:.2f} · tokens {story.aligned.min():.2f} to {story.aligned.max():.2f}"
        panels = [
            draw.Panel("first image", photos[0], Path(files[0]).name),
            draw.Panel("second image", photos[1], Path(files[1]).name),
            draw.Panel("mixed", photos[2], f"{story.ratio:.0%} of the area is the first image"),
            draw.Panel("labels by area", draw.share_picture(story.start.numpy(), size), f"target {story.ratio:.2f}"),
            draw.Panel("aligned labels", draw.share_picture(story.aligned.numpy(), size), aligned),
            draw.Panel("share of the first, by layer", draw.layer_chart(lines, story.ratio), "dashed: by area"),
        ]
        label = f"{model.name}   RMSE of aligned shares over {boxes} random boxes: {story.rmse:.3f}"
        rows.append(draw.Row(label, panels, bars=[("first", "second", "share")], remark=model.remark))
        facts.append(
            {
                "name": model.name,
                "source": model.source,
                "ratio": story.ratio,
                "share": story.share,
                "layers": _round(story.layers),
                "likeness": _round(story.likeness),
                "rmse": story.rmse,
                "boxes": boxes,
                "start": _round(story.start),
                "aligned": _round(story.aligned),
                "remark": model.remark,
            }
        )
    card = draw.draw_card(draw.Card(f"{files[0]} with a box from {files[1]}", rows))
    mix = {"files": list(files), "seed": settings.seed, "models": facts}
    return Explanation([card], {"everytoken": version(), "mix": mix})


def _explain_image(
    model: ExplainedModel,
    file: str,
    method: Literal["attention", "lrp", "rollout", "cam"],
    classes: list[str],
    maps: Maps | None,
    key: str | None,
    colours: draw.ClassColours,
) -> tuple[draw.Row, dict[str, Any], list[str]]:
    """A row of panels, its numbers, and the classes that were explained (for the next model)."""
    import torch
    from PIL import Image

    from everytoken_lab.classes import shown_name
    from everytoken_lab.explanation.model import name_of
    from everytoken_lab.explanation.saliency import evaluating, relevance
    from everytoken_lab.explanation.tokens import compare_with_map, summarize_cells, token_probabilities, translation

    view = model.read(file)
    with torch.no_grad(), evaluating(model.model):
        probabilities = model.probabilities(view.images)
    best = probabilities.topk(min(5, len(probabilities))).indices.tolist()
    chosen = [model.find_class(text) for text in classes] if classes else best[:2]
    names = [name_of(model.classes, c) for c in chosen]
    cells, from_head = token_probabilities(model.model, view.images)
    tokens = summarize_cells(cells[0])
    annotator_map = None
    if maps is not None and key is not None:
        annotator_map = compare_with_map(maps, key, tokens, view.area, translation(maps, model.token_classes))
    heat = relevance(model.model, view.images, chosen, method)[0].cpu().numpy()

    photo = draw.fit_photo(Image.fromarray(view.pixels))
    panels, legend = _token_panels(model, photo, tokens, from_head, annotator_map, colours)
    for c, name, values in zip(chosen, names, heat, strict=True):
        picture = draw.heat_overlay(photo, values)
        if method == "rollout":
            panels.append(draw.Panel("where attention comes from", picture, "the same for all classes"))
            break
        panels.append(
            draw.Panel(f"for {shown_name(name)}", picture, f"says {float(probabilities[c]):.1%} · by {method}")
        )
    answers = " · ".join(f"{shown_name(name_of(model.classes, c))} {float(probabilities[c]):.1%}" for c in best[:3])
    bars = [("unsure", "sure", "heat"), ("irrelevant", "relevant", "heat")]
    remark = model.remark or ("" if maps is None or key else "no map of this image in the store")
    row = draw.Row(f"{model.name}   says: {answers}", panels, legend, bars, remark)
    fact = _facts(model, view, probabilities, best, tokens, from_head, annotator_map)
    fact["relevance"] = [
        {"class": n, "index": c, "probability": _round(probabilities[c]), "method": method, "grid": _round(v)}
        for n, c, v in zip(names, chosen, heat, strict=True)
    ]
    return row, fact, classes or [n if model.classes.names else str(c) for n, c in zip(names, chosen, strict=True)]


def _token_panels(
    model: ExplainedModel,
    photo: Image.Image,
    tokens: MapSummary,
    from_head: bool,
    annotator_map: AnnotatorMap | None,
    colours: draw.ClassColours,
) -> tuple[list[draw.Panel], list[draw.Entry]]:
    from everytoken_lab.classes import shown_name
    from everytoken_lab.explanation.model import name_of

    def name(number: int) -> str:
        foreign = annotator_map.names.get(number) if annotator_map is not None else None
        return shown_name(foreign or name_of(model.token_classes, number))

    shares = dict(tokens.shares)
    classes = list(shares)
    if annotator_map is not None:  # the main classes of both, in turns
        others = [c for c, _ in annotator_map.summary.shares]
        longest = max(len(classes), len(others))
        classes = [c for i in range(longest) for c in (*classes[i : i + 1], *others[i : i + 1])]
    classes = list(dict.fromkeys(classes))[: len(draw.PALETTE)]
    chosen = colours.choose([name(c) for c in classes])
    legend = {c: chosen[name(c)] for c in classes}
    cells, inside = draw.cells_of(photo.size, _shape(tokens), (0.0, 0.0, 1.0, 1.0))
    source = "token head" if from_head else "no token head: classifier at every cell"
    sure = f"{tokens.confidence.min():.0%} to {tokens.confidence.max():.0%}"
    panels = [
        draw.Panel("what the model sees", photo),
        draw.Panel("what the tokens say", draw.class_overlay(photo, cells, inside, tokens, legend), source),
        draw.Panel("how sure they are", draw.confidence_overlay(photo, cells, inside, tokens), sure),
    ]
    entries = [draw.Entry(legend[c], name(c), shares.get(c, 0.0)) for c in classes]
    rest = 1 - sum(shares.get(c, 0.0) for c in classes)
    if rest > 0.001:
        entries.append(draw.Entry(draw.OTHER, "others", rest))
    if annotator_map is not None:
        cells, inside = draw.cells_of(photo.size, _shape(annotator_map.summary), annotator_map.area)
        overlay = draw.class_overlay(photo, cells, inside, annotator_map.summary, legend)
        panels.append(draw.Panel("what the annotator says", overlay, annotator_map.key))
        caption = "they share no classes"
        if annotator_map.agreement is not None:
            caption = f"same class in {annotator_map.agreement:.0%} of the tokens"
            entries.append(draw.Entry(draw.DIFFERENT, "tokens and annotator differ"))
        difference = draw.difference_overlay(photo, annotator_map.same, annotator_map.inside)
        panels.append(draw.Panel("where they differ", difference, caption))
    return panels, entries


def _facts(
    model: ExplainedModel,
    view: ModelInput,
    probabilities: torch.Tensor,
    best: list[int],
    tokens: MapSummary,
    from_head: bool,
    annotator_map: AnnotatorMap | None,
) -> dict[str, Any]:
    from everytoken_lab.explanation.model import name_of

    top = [{"class": name_of(model.classes, c), "index": c, "probability": _round(probabilities[c])} for c in best]
    classes = sorted({int(c) for c in tokens.top.ravel()})
    answers: dict[str, Any] = {
        "from": "token head" if from_head else "classifier at every cell",
        "classes": tokens.top.tolist(),
        "confidence": _round(tokens.confidence),
        "names": {str(c): name_of(model.token_classes, c) for c in classes},
    }
    if annotator_map is not None:
        answers["annotator"] = {
            "key": annotator_map.key,
            "agreement": annotator_map.agreement,
            "same": annotator_map.same.tolist(),
        }
    return {"name": model.name, "view": _round(view.area), "top": top, "tokens": answers}


def _keys(maps: Maps | None, files: Sequence[str]) -> dict[str, str]:
    """File -> key in the store, for those that have a map. None at all is an error."""
    from everytoken_lab.explanation.tokens import find_key

    if maps is None:
        return {}
    keys = {file: key for file in files if (key := find_key(maps, file)) is not None}
    if not keys:
        raise EverytokenError(
            f"{maps.path} has no map of any of the images. Its keys are paths relative to the annotated folder, such "
            f"as {maps.key(0)!r}; {files[0]} ends in none of them. Only annotated images (usually those of train) have "
            "maps."
        )
    return keys


def _shape(summary: MapSummary) -> tuple[int, int]:
    return summary.top.shape[0], summary.top.shape[1]


def _round(values: Any) -> Any:
    """Six significant digits are enough for pictures, and keep the file small."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0:
        return float(f"{float(array):.6g}")
    return [_round(value) for value in array]
