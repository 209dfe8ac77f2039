"""What a finished network does with its tokens: the mechanisms that the three papers claim.

    python benchmarks/study/measure.py DATA RUN ...     TL-Align's labels if attention were sharper

All on test images, with fixed draws, so that the numbers of two runs are paired.

Token labels: the left half of one image next to the right half of another, of different classes.
    place       tokens that name the class of their own half minus those that name the other's, in points of all tokens
    pointing    how often the highest score for a class lies in its half, in percent; chance is 50
    iou         of each half with the tokens that score its class higher than the other's, in percent; chance is 33
Answers come from the token head if it has the dataset's classes, otherwise from the class head at every token.
TL-Align: random CutMix boxes, one for each image; r is the share of the own image in what the class head reads.
    share_rmse  root mean square difference between r and the part of the area (TL-Align's Figure 3)
    token_rmse  the same between the shares of tokens after the last layer and what their places show
    area_error, share_error   how far the network's own answer p(own) / (p(own) + p(partner)) is from the area's part,
                and from r, root mean square: TL-Align's label is the better one if the second is smaller
    entropy     of the attention, mean over layers, heads and queries; 1 = even
drloc: does a token know where it is?
    position    R² of a ridge regression from a token to its row and column, on other images than it was fitted to
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.data.batch import normalise
from everytoken.functional import drloc
from everytoken.mixing.methods import CutMix
from everytoken.mixing.mix import Mix, apply_to_pixels
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.models.open import OpenModel, open_model

COUNT, STEP = 1000, 100


@torch.inference_mode()
def measure(run: Path, data: Path) -> dict[str, float]:
    """All numbers of a run; `data` has the test images as val/."""
    opened = open_model(run)
    images, labels = _images(opened, data)
    model = opened.model.eval()
    out = {**_halves(opened, images, labels), **_position(model, images), **_entropy(model, images[:200])}
    model.align()
    return {**out, **_shares(model, images, labels)}


@torch.inference_mode()
def halves(run: Path, data: Path) -> dict[str, float]:
    """What tokens know about their place, alone."""
    opened = open_model(run)
    opened.model.eval()
    return {name: round(value, 2) for name, value in _halves(opened, *_images(opened, data)).items()}


@torch.inference_mode()
def sharpened(run: Path, data: Path, factors: tuple[float, ...] = (1, 2, 4, 8, 16)) -> list[dict[str, float]]:
    """Entropy of attention, TL-Align's numbers and top-1 of a ViT whose queries are multiplied by a factor."""
    opened = open_model(run)
    images, labels = _images(opened, data)
    model = opened.model.eval()
    layers = [m for m in model.modules() if hasattr(m, "fused_attn") and hasattr(m, "qkv")]
    rows = []
    for before, factor in zip((1, *factors), factors, strict=False):
        for layer in layers:
            layer.qkv.weight[: layer.qkv.in_features] *= factor / before
            if layer.qkv.bias is not None:
                layer.qkv.bias[: layer.qkv.in_features] *= factor / before
        top1 = float((model(images).logits.argmax(1) == labels).float().mean())
        entropy = _entropy(model, images[:200])
        with_shares = copy.deepcopy(model)
        with_shares.align()
        rows.append({"factor": factor, "top1": 100 * top1, **entropy, **_shares(with_shares, images, labels)})
    return rows


def drloc_constant(grid: tuple[int, int] = (7, 7)) -> float:
    """The l1 loss of the best constant answer."""
    targets = drloc.offset_targets(drloc.offsets(drloc.all_pairs(grid), grid), grid)
    middle = targets.median(0).values.expand_as(targets)
    return float(drloc.drloc_l1(middle[None], targets[None]))


def _images(opened: OpenModel, data: Path) -> tuple[Tensor, Tensor]:
    """Normalised images [COUNT, 3, H, W] and labels, spread over the classes in a fixed random order."""
    dataset, info = open_dataset(data, "val"), opened.info
    chosen = np.random.default_rng(0).permutation(len(dataset))[:COUNT]
    view = EvalTransform(info.img_size, info.crop_pct, interpolation=info.interpolation)
    pixels = np.stack([view(dataset.picture(int(i)))[0] for i in chosen])
    images = normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), info.mean, info.std)
    return images, torch.from_numpy(dataset.labels[chosen])


def _halves(opened: OpenModel, images: Tensor, labels: Tensor) -> dict[str, float]:
    own_head = tuple(opened.info.token_class_names) == tuple(opened.info.class_names)
    model, half = opened.model, images.shape[-1] // 2
    own = other = tokens = pointed = asked = 0
    iou = 0.0
    for start in range(0, COUNT - STEP + 1, STEP):
        left = slice(start, start + STEP)
        right = torch.arange(start, start + STEP).roll(1)
        keep = labels[left] != labels[right]
        mixed = torch.cat((images[left][..., :half], images[right][..., half:]), -1)[keep]
        pair = torch.stack((labels[left], labels[right]), 1)[keep]
        scores = model(mixed).token_logits if own_head else model.cell_logits(mixed)
        answers, middle = scores.argmax(-1), scores.shape[2] // 2
        at_left = (torch.arange(scores.shape[2]) < middle).expand_as(answers)
        of_class = [scores[torch.arange(len(pair)), :, :, pair[:, side]] for side in (0, 1)]
        for side, shown in ((0, at_left), (1, ~at_left)):
            own += int(((answers == pair[:, side, None, None]) & shown).sum())
            other += int(((answers == pair[:, 1 - side, None, None]) & shown).sum())
            highest = of_class[side].flatten(1).argmax(1, keepdim=True)
            pointed += int(shown.flatten(1).gather(1, highest).sum())
            named = of_class[side] > of_class[1 - side]
            iou += float(((named & shown).sum((1, 2)) / (named | shown).sum((1, 2))).sum())
            asked += len(pair)
        tokens += answers.numel()
    return {"place": 100 * (own - other) / tokens, "pointing": 100 * pointed / asked, "iou": 100 * iou / asked}


def _shares(model: Any, images: Tensor, labels: Tensor) -> dict[str, float]:
    rng = np.random.default_rng(0)
    size = (images.shape[-2], images.shape[-1])
    columns: dict[str, list[Tensor]] = {name: [] for name in ("ratio", "share", "answer", "token_error")}
    for start in range(0, COUNT - STEP + 1, STEP):
        part, truth = images[start : start + STEP], labels[start : start + STEP]
        mix = CutMix(mode="elem").draw(STEP, size, (1, 1), rng, part.device)
        assert isinstance(mix, Mix)
        view = model(apply_to_pixels(part, mix), mix)
        odds = view.logits.softmax(1)
        first, second = (odds[torch.arange(STEP), t] for t in (truth, truth[mix.partner]))
        keep = (truth != truth[mix.partner]) & (mix.ratio > 0.05) & (mix.ratio < 0.95)
        shown = mix.at(tuple(view.shares.grid.shape[1:])).expand_as(view.shares.grid)
        columns["ratio"].append(mix.ratio[keep])
        columns["share"].append(view.shares.image[keep])
        columns["answer"].append((first / (first + second))[keep])
        columns["token_error"].append((view.shares.grid - shown).square().mean((1, 2))[keep])
    ratio, share, answer, token_error = (torch.cat(columns[name]) for name in columns)
    return {
        "share_rmse": float((share - ratio).square().mean().sqrt()),
        "token_rmse": float(token_error.mean().sqrt()),
        "area_error": float((answer - ratio).square().mean().sqrt()),
        "share_error": float((answer - share).square().mean().sqrt()),
    }


def _entropy(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Of attention layers as timm has them; nothing for networks without."""
    layers = [m for m in model.modules() if hasattr(m, "fused_attn") and hasattr(m, "attn_drop")]
    if not layers:
        return {}
    values: list[float] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        weights = args[0].float()
        values.append(float(torch.special.entr(weights).sum(-1).mean()) / math.log(weights.shape[-1]))

    handles = [layer.attn_drop.register_forward_hook(note) for layer in layers]
    before = [layer.fused_attn for layer in layers]
    try:
        for layer in layers:
            layer.fused_attn = False
        model(images)
    finally:
        for layer, fused in zip(layers, before, strict=True):
            layer.fused_attn = fused
        for handle in handles:
            handle.remove()
    return {"entropy": sum(values) / len(values)}


def _position(model: Any, images: Tensor, ridge: float = 1e-3) -> dict[str, float]:
    grid = torch.cat([model(images[start : start + STEP]).grid for start in range(0, 600, STEP)]).double()
    n, h, w, d = grid.shape
    places = torch.stack(torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij"), -1).double()
    places = (places - places.mean((0, 1))).expand(n, h, w, 2)
    fitted, tested = slice(None, n // 2), slice(n // 2, None)
    x, y = grid[fitted].reshape(-1, d), places[fitted].reshape(-1, 2)
    centre = x.mean(0)
    x = x - centre
    weights = torch.linalg.solve(x.T @ x + ridge * len(x) * torch.eye(d, dtype=x.dtype), x.T @ y)
    error = ((grid[tested].reshape(-1, d) - centre) @ weights - places[tested].reshape(-1, 2)).square().mean()
    return {"position": float(1 - error / places[tested].square().mean())}


if __name__ == "__main__":
    runs = [sharpened(Path(run), Path(sys.argv[1])) for run in sys.argv[2:]]
    for rows in zip(*runs, strict=True):
        print("  ".join(f"{name} {np.mean([row[name] for row in rows]):.4g}" for name in rows[0]))
