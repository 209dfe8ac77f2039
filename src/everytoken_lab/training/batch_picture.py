"""batch.jpg: images of the first batch as the network gets them, and what it is to learn from them drawn on them.

A look at it tells whether labels are where things are: crops, flips, colours and mixing are those of the batch, and the
labels of the tokens are those that the objective compares with. Beside each image:

- the labels of its tokens, where they come from score maps; else, if images are mixed, from the images' own labels;
- some of the pairs of tokens whose distance is learnt (drloc).

Tokens that are mixed after the patch embedding (MixToken) are shown as if their pixels had been mixed. What networks
find on the way, such as the shares of TL-Align or a teacher's answer, is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.functional import CompactTarget, from_labels
from everytoken.functional.drloc import random_pairs
from everytoken.mixing.mix import Mix, apply_to_pixels, mix_token_target
from everytoken.objectives.base import draws
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.relabel import FromMaps
from everytoken.objectives.token_labeling import TokenLabeling
from everytoken_lab import draw
from everytoken_lab.classes import shown_name

IMAGES = 8
_PAIRS = 6


def batch_picture(
    batch: Batch,
    objectives: Iterable[nn.Module],
    grid: tuple[int, int],
    class_names: Sequence[str],
    token_names: Sequence[str] = (),
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Image.Image:
    """The first images of a batch, with their labels.

    Args:
        batch: normalised with `mean` and `std`, and mixed.
        objectives: what is learnt from it.
        grid: (h, w) of the tokens.
        class_names, token_names: of the class head, and of the maps.
    """
    objectives = list(objectives)
    images, mix = batch.images, batch.mix
    if mix is not None and mix.of_tokens is not None:
        images = apply_to_pixels(images, _as_pixels(mix.of_tokens, (images.shape[-2], images.shape[-1])))
    target, from_maps = _token_target(batch, objectives, grid, len(class_names))
    names = [shown_name(name) for name in (token_names if from_maps and token_names else class_names)]
    colours = draw.ClassColours(names)
    drloc = next((objective for objective in objectives if isinstance(objective, Drloc)), None)
    pairs = None if drloc is None else _some_pairs(batch, drloc, grid)
    count = min(IMAGES, len(batch))
    answers = None if target is None else _answers(target[slice(count)])
    cards = []
    for i, pixels in enumerate(pixels_of(images[:count], mean, std)):
        photo = draw.fit_photo(Image.fromarray(pixels))
        panels, legend = [draw.Panel("what the network gets", photo)], []
        if answers is not None:
            classes, confidence = answers[0][i], answers[1][i]
            shown, counts = np.unique(classes[classes >= 0], return_counts=True)
            order = shown[np.argsort(-counts, kind="stable")].tolist()
            chosen = colours.choose([names[c] for c in order])
            legend = [draw.Entry(colour, name) for name, colour in chosen.items()]
            if len(chosen) < len(order) or (classes < 0).any():
                legend.append(draw.Entry(draw.OTHER, "others, or no label"))
            paint = {c: chosen[names[c]] for c in order if names[c] in chosen}
            source = "from its score map" if from_maps else "by what is shown there"
            overlay = draw.class_overlay(photo, classes, confidence, paint)
            panels.append(draw.Panel("labels of its tokens", overlay, source))
        if pairs is not None:
            panels.append(
                draw.Panel("how far apart?", _with_pairs(photo, pairs[0][i], pairs[1][i], grid), f"{_PAIRS} pairs")
            )
        key = batch.keys[i] if i < len(batch.keys) else f"image {i}"
        cards.append(draw.Card(key, [draw.Row(_label(batch, i, class_names), panels, legend)]))
    how = "not mixed" if mix is None else f"{mix.level} mixed"
    meaning = [] if answers is None else ["colours: classes, stronger where the label is surer"]
    meaning += [] if pairs is None else ["lines: pairs of tokens whose distance is learnt"]
    return draw.draw_sheet(f"The first batch: {count} of {len(batch)} images, {how}", " · ".join(meaning), cards, 2)


def _as_pixels(mix: Mix, size: tuple[int, int]) -> Mix:
    """A mix of tokens as if it were one of the pixels below them."""
    return replace(mix, mask=mix.at(size), level="pixels", tokens=None)


def _token_target(
    batch: Batch, objectives: Sequence[nn.Module], grid: tuple[int, int], num_classes: int
) -> tuple[CompactTarget | None, bool]:
    """What the token at each place of the mixed images is to answer, and whether maps say so; None: nothing to see."""
    for objective in objectives:
        if isinstance(objective, TokenLabeling):
            target, _ = objective.token_target(batch, grid)
            tokens = None if batch.mix is None else batch.mix.of_tokens
            # the loss puts such tokens back to their own images; here they stay where they are
            return (target if tokens is None or not tokens.unmixes else mix_token_target(target, tokens)), True
        if isinstance(objective, FromMaps) and "token_logits" in objective.requires:
            target = batch.token_target or objective.map_targets(batch, grid).tokens
            return (target if batch.mix is None else mix_token_target(target, batch.mix)), True
    if batch.mix is None or batch.labels is None or batch.labels.dim() > 1:  # several labels have no place
        return None, False
    image = from_labels(batch.labels, num_classes)
    everywhere = (len(batch), *grid)
    target = CompactTarget(
        image.classes,
        image.mass[:, None, None].expand(*everywhere, -1),
        image.background[:, None, None].expand(everywhere),
        image.weight[:, None, None].expand(everywhere),
        num_classes,
    )
    return mix_token_target(target, batch.mix), False


def _answers(target: CompactTarget) -> tuple[np.ndarray, np.ndarray]:
    """The best class of each token, -1 where it has no label, and its part of the label; both [B, h, w]."""
    classes = torch.where(target.weight > 0.5, target.top_class(), -1)
    return classes.cpu().numpy(), target.dense().amax(-1).clamp(0, 1).cpu().numpy()


def pixels_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images [B, 3, H, W] as bytes [B, H, W, 3]."""
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in (std, mean))
    pixels = (images.detach().float().cpu() * scale + shift).mul(255).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).numpy()


def _label(batch: Batch, i: int, class_names: Sequence[str]) -> str:
    """The label of the image, and of its partner with their parts by area."""
    if batch.labels is None:
        return ""
    own = _names(batch.labels[i], class_names)
    if batch.mix is None or (ratio := float(batch.mix.ratio[i])) == 1:
        return f"label: {own}"
    partner = _names(batch.labels[batch.mix.partner[i]], class_names)
    return f"label: {own} {ratio:.0%} + {partner} {1 - ratio:.0%}"


def _names(label: Tensor, class_names: Sequence[str]) -> str:
    """Of a class, or of all classes of an image that may have several."""
    classes = label.nonzero().flatten().tolist() if label.dim() else [int(label)]
    return ", ".join(shown_name(class_names[c]) for c in classes if 0 <= c < len(class_names)) or "no label"


def _some_pairs(batch: Batch, drloc: Drloc, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The first pairs [B, m] of the last level."""
    generator = draws(batch, f"drloc/{len(drloc.heads) - 1}", batch.images.device)
    count = _PAIRS if drloc.pairs == "all" else int(drloc.pairs)
    first, second = random_pairs(len(batch), count, grid, generator)
    return first[:, :_PAIRS].cpu().numpy(), second[:, :_PAIRS].cpu().numpy()


def _with_pairs(photo: Image.Image, first: np.ndarray, second: np.ndarray, grid: tuple[int, int]) -> Image.Image:
    picture = photo.copy()
    pen = ImageDraw.Draw(picture)
    high, wide = photo.height / grid[0], photo.width / grid[1]

    def centre(place: int) -> tuple[float, float]:
        return (place % grid[1] + 0.5) * wide, (place // grid[1] + 0.5) * high

    for number, (a, b) in enumerate(islice(zip(first.tolist(), second.tolist(), strict=True), _PAIRS)):
        ends = (*centre(a), *centre(b))
        for width, colour in ((5, "white"), (3, draw.PALETTE[number])):
            pen.line(ends, fill=colour, width=width)
        for x, y in (ends[:2], ends[2:]):
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=draw.PALETTE[number], outline="white")
    return picture
