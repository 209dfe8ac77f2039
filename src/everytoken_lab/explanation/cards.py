"""Every image becomes a card (a PNG): for each model what it sees, what its tokens say, how sure they are, and which
regions support each class. `overview.png` has all cards, `mix.png` the story of a mixture, `explain.json` all numbers.

The story of a mixture follows "Token-Label Alignment for Vision Transformers", section 4.4, Figures 4 to 6: the labels
of the patches at the start and after the last layer, and the share of the first image in what the head reads after each
layer. What we do differently: shares instead of K-wide labels (exact, see `everytoken.functional.shares`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from everytoken import __version__
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically, write_picture
from everytoken.functional.shares import patch_shares
from everytoken.mixing.mix import Mix, apply_to_pixels, box_masks
from everytoken.models.align import Aligner, Alignment, Shares
from everytoken.models.token_model import TokenModel
from everytoken_lab import draw, schema
from everytoken_lab.classes import shown_name
from everytoken_lab.data.decode import Picture
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.evaluation.locate import cell_classes
from everytoken_lab.evaluation.run import calibrated, network_inputs, open_with, shown_probabilities
from everytoken_lab.explanation import ExplainOptions
from everytoken_lab.explanation.saliency import Method, choose_method, evaluating, relevance
from everytoken_lab.models import PUBLISHED
from everytoken_lab.models.open import OpenModel

METHODS = {
    "attention": "gradient-weighted attention (Chefer et al., ICCV 2021)",
    "lrp": "relevance propagated through layers (Chefer et al., CVPR 2021)",
    "cam": "Grad-CAM",
}


@dataclass(frozen=True)
class Explanation:
    """What `explain` made."""

    cards: list[Image.Image]  # one for each image (with `mix`: one)
    facts: dict[str, Any]  # all numbers, as in explain.json
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class ExplainedModel:
    """A model with the calibration of its run, and a short name for pictures."""

    name: str
    opened: OpenModel

    def read(self, path: str | Path) -> tuple[np.ndarray, Tensor]:
        """An image file as evaluation shows it to the network: uint8 [H, W, 3], and normalised [1, 3, H, W]."""
        if not Path(path).is_file():
            more = " It is a folder: name the files, such as folder/*.jpg." if Path(path).is_dir() else ""
            raise EverytokenError(f"there is no image file {path}.{more}")
        device = next(self.opened.model.parameters()).device
        (pixels,), images = network_inputs(self.opened.info, [Picture(path, str(path))], device)
        return pixels, images

    def probabilities(self, images: Tensor) -> Tensor:
        """[K] of one image, as `predict` shows them."""
        info = self.opened.info
        with torch.no_grad(), evaluating(self.opened.model):
            return shown_probabilities(info, self.opened.model(images).voted(info.token_vote)[0]).cpu()


def open_explained(source: str | Path | OpenModel, options: InferenceOptions) -> ExplainedModel:
    """The model that `source` names, or a loaded one."""
    opened = open_with(source, options)
    if not hasattr(opened.model.backbone, "forward_features"):
        raise EverytokenError(f"{opened.source} has no gradients: explain the run that it was exported from.")
    if not options.img_size:
        opened, _ = calibrated(opened, options)
    path = Path(opened.source)
    folder = path.parent if path.suffix == ".safetensors" else path
    named = opened.source.startswith(PUBLISHED)
    return ExplainedModel(opened.source if named else f"{folder.name} · {opened.info.architecture}", opened)


def explain(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    **settings: Any,
) -> Explanation:
    """Draw what a model sees in images: what its tokens say, and which regions support which class.

    Example:
        >>> lab.explain("runs/first", "cat.jpg").cards[0].show()

    Args:
        source: as for `load`, or a loaded model; not an .onnx file.
        images: image files.
        out: folder for the pictures and explain.json; None: write nothing.
        settings: fields of `ExplainOptions`.
    """
    options = schema.from_keywords(ExplainOptions, settings, "explain()")
    files = [str(file) for file in ([images] if isinstance(images, str | Path) else images)]
    out = None if out is None else Path(out)
    how = InferenceOptions(img_size=options.img_size, device=options.device, workers=0)
    models = [open_explained(source, replace(how, model=options.model, weights=options.weights))]
    if options.compare:
        models.append(open_explained(options.compare, how))
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
        pictures["overview.png"] = draw.draw_sheet(title, f"relevance: {methods}", result.cards)
    for name, picture in pictures.items():
        write_picture(out / name, picture, optimize=True)
    write_atomically(out / "explain.json", json.dumps(result.facts, indent=1).encode())
    result.files.extend(out / name for name in [*pictures, "explain.json"])
    return result


def _explain_images(models: Sequence[ExplainedModel], files: Sequence[str], options: ExplainOptions) -> Explanation:
    if not files:
        raise EverytokenError("there is nothing to explain: name at least one image file.")
    methods = [choose_method(model.opened.model, options.method) for model in models]
    colours = draw.ClassColours([shown_name(name) for name in models[0].opened.token_classes.names])
    cards, facts = [], []
    for number, file in enumerate(files, 1):
        rows: list[draw.Row] = []
        of_models: list[dict[str, Any]] = []
        for model, method in zip(models, methods, strict=True):
            classes = options.classes or [fact["class"] for one in of_models[:1] for fact in one["relevance"]]
            row, fact = _explain_image(model, file, method, classes, colours)
            rows.append(row)
            of_models.append(fact)
        cards.append(draw.draw_card(draw.Card(file, rows)))
        stem = re.sub(r"[^\w.-]+", "_", Path(file).stem)[:60] or "image"
        facts.append({"file": file, "picture": f"{number:02d}-{stem}.png", "models": of_models})
    about = [
        {"name": model.name, "source": model.opened.source, "method": method, "classes": model.opened.num_classes}
        for model, method in zip(models, methods, strict=True)
    ]
    return Explanation(cards, {"everytoken": __version__, "models": about, "images": facts})


def _explain_image(
    model: ExplainedModel, file: str, method: Method, wanted: Sequence[str], colours: draw.ClassColours
) -> tuple[draw.Row, dict[str, Any]]:
    """A row of panels, and its numbers."""
    opened, (pixels, images) = model.opened, model.read(file)
    probabilities = model.probabilities(images)
    best = probabilities.topk(min(5, len(probabilities))).indices.tolist()
    chosen = [opened.classes.number(text.removeprefix("class ")) for text in wanted] if wanted else best[:2]
    with evaluating(opened.model):
        cells = cell_classes(opened, images)
    top, sure = cells.top[0], cells.confidence[0]
    heat = relevance(opened.model, images, chosen, method)[0].cpu().numpy()

    photo = draw.fit_photo(Image.fromarray(pixels))
    painted, legend = draw.class_picture(photo, top, sure, cells.names.__getitem__, colours)
    panels = [
        draw.Panel("what the model sees", photo),
        draw.Panel("what the tokens say", painted, cells.source),
        draw.Panel("how sure they are", draw.heat_overlay(photo, sure), f"{sure.min():.0%} to {sure.max():.0%}"),
    ]
    for c, values in zip(chosen, heat, strict=True):
        title, caption = f"for {shown_name(opened.class_names[c])}", f"says {probabilities[c]:.1%} · by {method}"
        picture = draw.heat_overlay(photo, values / max(values.max(), 1e-12), smooth=True)
        panels.append(draw.Panel(title, picture, caption))
    says = " · ".join(f"{shown_name(opened.class_names[c])} {probabilities[c]:.1%}" for c in best[:3])
    bars = [("unsure", "sure", "heat"), ("irrelevant", "relevant", "heat")]
    row = draw.Row(f"{model.name}   says: {says}", panels, legend, bars)

    def about(c: int) -> dict[str, Any]:
        return {"class": opened.class_names[c], "index": c, "probability": _round(probabilities[c])}

    tokens = {"from": cells.source, "classes": top.tolist(), "confidence": _round(sure)}
    tokens["names"] = {str(c): cells.names[c] for c in np.unique(top).tolist()}
    maps = [{**about(c), "method": method, "grid": _round(values)} for c, values in zip(chosen, heat, strict=True)]
    return row, {"name": model.name, "top": [about(c) for c in best], "tokens": tokens, "relevance": maps}


def _explain_mix(models: Sequence[ExplainedModel], files: Sequence[str], options: ExplainOptions) -> Explanation:
    """Mix two images and follow the labels through each model."""
    if len(files) != 2:
        raise EverytokenError(f"mix takes exactly two images, got {len(files)}.")
    rows, facts = [], []
    for model in models:
        (first, own), (second, partner) = (model.read(file) for file in files)
        mask = draw_box(options.mix_part, (own.shape[2], own.shape[3]), options.seed)
        story = follow_mix(model.opened.model, own, partner, mask)
        mixed = np.where(mask[0].numpy()[..., None] > 0, first, second)
        photos = [draw.fit_photo(Image.fromarray(pixels)) for pixels in (first, second, mixed)]
        size, aligned = photos[2].size, story.aligned.numpy()
        by_area, by_model = (draw.share_picture(shares, size) for shares in (story.start.numpy(), aligned))
        target = f"target {story.share:.2f} · tokens {aligned.min():.2f} to {aligned.max():.2f}"
        panels = [
            draw.Panel("first image", photos[0], Path(files[0]).name),
            draw.Panel("second image", photos[1], Path(files[1]).name),
            draw.Panel("mixed", photos[2], f"{story.ratio:.0%} of the area is the first image"),
            draw.Panel("labels by area", by_area, f"target {story.ratio:.2f}"),
            draw.Panel("aligned labels", by_model, target),
            draw.Panel("share of the first, by layer", draw.layer_chart(story.layers, story.ratio), "dashed: by area"),
        ]
        rows.append(draw.Row(model.name, panels, bars=[("first", "second", "share")]))
        numbers = {name: _round(value) for name, value in vars(story).items()}
        facts.append({"name": model.name, "source": model.opened.source, **numbers})
    card = draw.draw_card(draw.Card(f"{files[0]} with a box from {files[1]}", rows))
    mix = {"files": list(files), "seed": options.seed, "models": facts}
    return Explanation([card], {"everytoken": __version__, "mix": mix})


def _round(values: Any) -> Any:
    """Six significant digits are enough for pictures, and keep the file small."""
    array = np.asarray(values, dtype=np.float64)
    return float(f"{float(array):.6g}") if array.ndim == 0 else [_round(value) for value in array]


# -- two images mixed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixStory:
    """What became of one mixture; shares are those of the first image.

    `layers` are the shares of what the head reads, at the start and after every mixing layer (before a class token
    joins: of all tokens); only start and end where the model has no such layers.
    """

    ratio: float  # by area
    share: float  # of what the class head reads, after the last layer
    start: Tensor  # [h, w] of the patches
    aligned: Tensor  # [h, w] after the last layer
    layers: tuple[float, ...]


def draw_box(part: float, size: tuple[int, int], seed: int = 0) -> Tensor:
    """A mask [1, H, W], 0 in a box of this fraction of the area, wholly inside, at a random place."""
    rng = np.random.default_rng(seed)
    sides = [max(1, round(side * part**0.5)) for side in size]
    top, left = (int(rng.integers(0, full - side + 1)) for full, side in zip(size, sides, strict=True))
    return box_masks(np.array([[top, left, top + sides[0], left + sides[1]]]), size, None)


@torch.no_grad()
def follow_mix(model: TokenModel, own: Tensor, partner: Tensor, mask: Tensor) -> MixStory:
    """Mix two images and follow the shares through the model.

    Args:
        own, partner: [1, 3, H, W], normalised.
        mask: [1, H, W], 1 where the first image is kept.
    """
    backbone, mask = model.backbone, mask.to(own.device)
    both = torch.cat((own, partner))
    mix = Mix(torch.tensor([1, 0], device=own.device), mask, mask.mean((1, 2)).expand(2), "pixels")
    mixed = apply_to_pixels(both, mix)
    aligner = Aligner(backbone, Alignment(history=True))
    try:
        with evaluating(backbone):
            with aligner.watch(mix) as seen:
                backbone(mixed)
            shares = seen.shares
            read = [_read(aligner, shares, h)[0].item() for h in shares.history]
    finally:
        aligner.remove()
    ratio, share, grid = float(mix.ratio[0]), float(shares.image[0]), shares.grid[0]
    start = patch_shares(mask, (grid.shape[0], grid.shape[1]))[0]
    return MixStory(ratio, share, start.cpu(), grid.cpu(), (ratio, *(read or [share])))


def _read(aligner: Aligner, shares: Shares, values: Tensor) -> Tensor:
    """Those of a layer's shares that the head would read, [B]."""
    prefix = 0 if shares.prefix is None else shares.prefix.shape[1]
    if values.dim() == 3 or not prefix or values.shape[1] != prefix + shares.grid[0].numel():
        return values.flatten(1).mean(1)
    return aligner.read(values[:, prefix:].unflatten(1, shares.grid.shape[1:]), values[:, :prefix])
