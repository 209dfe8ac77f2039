"""batch.jpg: images of the first batch as the network gets them, with the labels of their tokens drawn on them.

Crops, flips, colours and mixing are those of the batch, so a look at it tells whether labels are where things are. The
labels come from score maps; without maps, if images are mixed, from the images' own labels. Tokens that are mixed after
the patch embedding (MixToken) are shown as if their pixels had been mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.functional import CompactTarget, from_labels
from everytoken.mixing.mix import Mix, apply_to_pixels, mix_token_target
from everytoken.objectives.token_labeling import FromMaps, TokenLabeling
from everytoken_lab import draw
from everytoken_lab.classes import shown_name

IMAGES = 8


def batch_picture(
    batch: Batch,
    objectives: Iterable[nn.Module],
    grid: tuple[int, int],
    class_names: Sequence[str],
    token_names: Sequence[str] = (),
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Image.Image:
    """The first images of a batch, normalised with `mean` and `std` and mixed, with their labels.

    Args:
        grid: (h, w) of the tokens.
        class_names, token_names: of the class head, and of the maps.
    """
    images, mix, count = batch.images, batch.mix, min(IMAGES, len(batch))
    if mix is not None and mix.of_tokens is not None:
        images = apply_to_pixels(images, _as_pixels(mix.of_tokens, (images.shape[-2], images.shape[-1])))
    target, from_maps = _token_target(batch, objectives, grid, len(class_names))
    names = [shown_name(name) for name in (token_names if from_maps and token_names else class_names)]
    colours = draw.ClassColours(names)
    cards = []
    for i, pixels in enumerate(pixels_of(images[:count], mean, std)):
        photo = draw.fit_photo(Image.fromarray(pixels))
        panels = [draw.Panel("what the network gets", photo)]
        legend: list[draw.Entry] = []
        if target is not None:
            own = target[slice(i, i + 1)]
            classes = torch.where(own.weight > 0.5, own.top_class(), -1)[0].cpu().numpy()
            confidence = own.dense().amax(-1).clamp(0, 1)[0].cpu().numpy()
            source = "from its score map" if from_maps else "by what is shown there"
            overlay, legend = draw.class_picture(photo, classes, confidence, names.__getitem__, colours)
            legend += [draw.Entry(draw.OTHER, "no label")] if (classes < 0).any() else []
            panels.append(draw.Panel("labels of its tokens", overlay, source))
        key = batch.keys[i] if i < len(batch.keys) else f"image {i}"
        cards.append(draw.Card(key, [draw.Row(_label(batch, i, class_names), panels, legend)]))
    how = "not mixed" if mix is None else f"{mix.level} mixed"
    meaning = "" if target is None else "colours: classes, stronger where the label is surer"
    return draw.draw_sheet(f"The first batch: {count} of {len(batch)} images, {how}", meaning, cards, 2)


def _as_pixels(mix: Mix, size: tuple[int, int]) -> Mix:
    """A mix of tokens as if it were one of the pixels below them."""
    return replace(mix, mask=mix.at(size), level="pixels", tokens=None)


def _token_target(
    batch: Batch, objectives: Iterable[nn.Module], grid: tuple[int, int], num_classes: int
) -> tuple[CompactTarget | None, bool]:
    """Labels of the tokens of the mixed images (None: nothing to show), and whether they come from maps."""
    for objective in objectives:
        if isinstance(objective, TokenLabeling):
            target, _ = objective.token_target(batch, grid)
            tokens = None if batch.mix is None else batch.mix.of_tokens
            # the loss puts such tokens back to their own images; here they stay where they are
            return (target if tokens is None or not tokens.unmixes else mix_token_target(target, tokens)), True
        if isinstance(objective, FromMaps) and "token_logits" in objective.requires:
            target = batch.token_target or objective.map_targets(batch, grid).tokens
            return (target if batch.mix is None else mix_token_target(target, batch.mix)), True
    if batch.mix is None or batch.labels is None or batch.labels.dim() > 1:  # multi-label: the place is not known
        return None, False
    image, shape = from_labels(batch.labels, num_classes), (len(batch), *grid)
    mass, background, weight = (x[:, None, None] for x in (image.mass, image.background, image.weight))
    everywhere = mass.expand(*shape, -1), background.expand(shape), weight.expand(shape)
    return mix_token_target(CompactTarget(image.classes, *everywhere, num_classes), batch.mix), False


def pixels_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images [B, 3, H, W] as bytes [B, H, W, 3]."""
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in (std, mean))
    pixels = (images.detach().float().cpu() * scale + shift).mul(255).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).numpy()


def _label(batch: Batch, i: int, class_names: Sequence[str]) -> str:
    """The label of the image and of its partner, with their fractions of the area."""

    def words(label: Tensor) -> str:
        classes = label.nonzero().flatten().tolist() if label.dim() else [int(label)]
        return ", ".join(shown_name(class_names[c]) for c in classes if 0 <= c < len(class_names)) or "no label"

    if batch.labels is None:
        return ""
    own, mix = words(batch.labels[i]), batch.mix
    if mix is None or (ratio := float(mix.ratio[i])) == 1:
        return f"label: {own}"
    return f"label: {own} {ratio:.0%} + {words(batch.labels[mix.partner[i]])} {1 - ratio:.0%}"
