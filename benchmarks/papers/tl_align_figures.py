"""TL-Align's Figures 3 to 6 and its token presence (equations 2 and 3), for any models and images.

    python benchmarks/papers/tl_align_figures.py rmse DATA timm:deit_tiny_patch16_224.fb_in1k ...   # Figure 3
    python benchmarks/papers/tl_align_figures.py layers DATA RUN --maps MAPS                        # Figure 4
    python benchmarks/papers/tl_align_figures.py labels DATA RUN --images 8                         # Figures 5 and 6
    python benchmarks/papers/tl_align_figures.py presence DATA RUN                                  # equations 2 and 3

Models are run folders, weights files, timm:NAME, registry:NAME; `--untrained` gives timm:NAME random weights, to see
the script work without a download. Each command prints a table and writes a picture (`--out`, matplotlib).

    rmse      between the targets of CutMix and the aligned ones, over a dataset, one bar per model; pairs of one class
              count with 0, because both targets are the same. In parts of the label, and per entry of K-wide targets.
    layers    the own image's part of the tokens that fluctuate most (a tenth of them, by likeness to the unmixed
              images), after every layer: by TL-Align and by likeness; and what three methods give once for all layers:
              CutMix the area, TransMix its attention, token labeling the score maps of both images (`--maps`, made by
              `everytoken annotate DATA --split val`): the own class's part of what a token's target gives to the two
              classes. Without maps, "places" is the area that each token shows of its own image. Pairs of one class
              are left out. Models whose grid shrinks (Swin) have no token to follow from end to end: there it is what
              the head reads, all tokens, so that several methods are the area; equal lines are drawn as one.
    labels    images, mixture, labels at the start (on the grid of the patch embedding: 56 x 56 for Swin) and aligned.
    presence  of each token in the output of each attention over all tokens (not Swin's windows), 1 = neither grows nor
              fades; beside it a 7 x 7 convolution, for which it is 1 everywhere but at the border.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import Batch, normalise
from everytoken.errors import need
from everytoken.functional import label_tokens
from everytoken.functional.shares import patch_shares, row_normalised, similarity_shares
from everytoken.maps import Maps
from everytoken.mixing.methods import CutMix
from everytoken.mixing.mix import Mix, apply_to_pixels, mix_token_target
from everytoken.models.align import Aligner, Alignment, Shares
from everytoken.models.token_model import blocks_of
from everytoken_lab.classes import ClassList, match_classes
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.data.loader import Loader
from everytoken_lab.data.tree import NAMED, find_split
from everytoken_lab.explanation.saliency import record_attention
from everytoken_lab.models.open import OpenModel, open_model

BATCH = 16
FLUCTUATING = 0.1  # part of the tokens


def batches(opened: OpenModel, data: str, count: int, maps: str = "") -> Iterator[Batch]:
    """The first validation images in a fixed random order, normalised as the model wants them.

    With score maps, labels are the classes of the maps.
    """
    view = eval_view(opened.info)
    named = data.startswith(NAMED)
    dataset = open_dataset(data, "val" if named or find_split(data, "val") else "all")
    chosen = np.random.default_rng(0).permutation(len(dataset))[:count]
    store, classes = (Maps(maps) if maps else None), torch.arange(dataset.num_classes)
    if store is not None:
        known = ClassList(store.num_classes, tuple(store.class_names))
        classes = torch.from_numpy(match_classes(known, dataset.class_names, maps).labels)
    for batch in Loader(dataset.subset(chosen), view, BATCH, train=False, workers=0, maps=store):
        if len(batch) > 1:  # there must be a partner
            yield replace(batch, images=normalise(batch.images, view.mean, view.std), labels=classes[batch.labels])


def draw(images: Tensor, number: int, mode: str = "elem") -> tuple[Mix, Tensor]:
    """A CutMix of a batch, another box for every image, and the mixed images."""
    size = (images.shape[2], images.shape[3])
    mix = CutMix(mode=mode).draw(len(images), size, (1, 1), np.random.default_rng(number))
    assert mix is not None
    return mix, apply_to_pixels(images, mix)


def follow(opened: OpenModel, images: Tensor, mix: Mix, options: Alignment | None = None) -> Shares:
    """The shares of mixed images behind the last layer."""
    aligner = Aligner(opened.model.backbone, options)
    try:
        with torch.no_grad(), aligner.watch(mix) as watched:
            opened.model.backbone(images)
        return watched.shares
    finally:
        aligner.remove()


# Figure 3


def target_rmse(ratio: Tensor, shares: Tensor, differ: Tensor) -> Tensor:
    """Root mean square error between original and aligned share [B]; `differ`: the two classes are not the same."""
    return ((shares - ratio).square() * differ).mean().sqrt()


def rmse(opened: OpenModel, data: str, count: int) -> tuple[float, float]:
    """(in parts of the label, per entry of the K-wide targets)"""
    ratios, shares, differ = [], [], []
    for number, batch in enumerate(batches(opened, data, count)):
        mix, mixed = draw(batch.images, number)
        ratios.append(mix.ratio)
        shares.append(follow(opened, mixed, mix).image)
        differ.append(batch.labels != batch.labels[mix.partner])
    each = torch.cat(ratios), torch.cat(shares), torch.cat(differ)
    own = float(target_rmse(*each))
    return own, own * (2 / opened.num_classes) ** 0.5


# Figure 4


def layer_ratios(opened: OpenModel, data: str, count: int, maps: str = "") -> dict[str, list[float]]:
    """Method -> the own image's part, at the start and after every layer; methods that agree are one entry."""
    lines: dict[str, list[list[float]]] = {}
    for number, batch in enumerate(batches(opened, data, count, maps)):
        images = batch.images
        mix, mixed = draw(images, number)
        differ = batch.labels != batch.labels[mix.partner]
        if not differ.any():
            continue
        shares = follow(opened, mixed, mix, Alignment(history=True))
        likeness = _likeness(opened, mixed, images, mix)
        grid = (shares.grid.shape[1], shares.grid.shape[2])
        start = patch_shares(mix.mask, grid).flatten(1).expand(len(images), -1)
        patches = start.shape[1]
        same_grid = bool(likeness) and all(h.flatten(1).shape[1] >= patches for h in (*shares.history, *likeness))
        if same_grid and len({h.shape for h in shares.history}) == 1:
            last = likeness[-1][:, -patches:]
            rows = (last - start).abs().topk(max(1, int(FLUCTUATING * patches)), dim=1).indices
            aligned = [h.flatten(1)[:, -patches:].gather(1, rows)[differ].mean() for h in shares.history]
            alike = [h[:, -patches:].gather(1, rows)[differ].mean() for h in likeness]
        else:
            rows = torch.arange(patches).expand_as(start)
            aligned = [h.flatten(1)[differ].mean() for h in shares.history]
            alike = [h[differ].mean() for h in likeness]
        places = start.gather(1, rows)[differ].mean()
        labelled = label_ratios(batch, mix, grid).gather(1, rows)[differ].nanmean() if maps else places
        transmix = follow(opened, mixed, mix, Alignment(layers=(-1,), patches_only=True)).image[differ].mean()
        depth = len(aligned)
        found = {
            "TL-Align": [places, *aligned],
            "likeness": [places, *alike] if len(alike) == depth else [],
            "CutMix": [mix.ratio[differ].mean()] * (depth + 1),
            "TransMix": [transmix] * (depth + 1),
            "token labeling" if maps else "places": [labelled] * (depth + 1),
        }
        for name, values in found.items():
            lines.setdefault(name, []).append([float(value) for value in values])
    merged: dict[str, list[float]] = {}
    for name, values in lines.items():
        if values[0]:
            line = np.mean(values, axis=0).tolist()
            fixed = (
                other for other, known in merged.items() if len({*known}) == 1 and np.allclose(known, line, atol=1e-3)
            )
            same = next(fixed, None)
            merged[f"{same} = {name}" if same else name] = merged.pop(same) if same else line
    return merged


def label_ratios(batch: Batch, mix: Mix, grid: tuple[int, int]) -> Tensor:
    """[B, N]: of what a mixed token's target gives to the classes of its two images, the own image's part; NaN where
    the maps have no label."""
    target = mix_token_target(label_tokens(batch.maps, batch.placement, grid).tokens, mix)
    mass = target.dense().flatten(1, 2)
    own, other = (
        mass.gather(2, c.view(-1, 1, 1).expand(*mass.shape[:2], 1)) for c in (batch.labels, batch.labels[mix.partner])
    )
    return torch.where(target.weight.flatten(1) > 0, (own / (own + other)).squeeze(2), torch.nan)


@torch.no_grad()
def _likeness(opened: OpenModel, mixed: Tensor, images: Tensor, mix: Mix) -> list[Tensor]:
    """[B, N] after every block: how much a token is like that of the own image, rather than the partner's."""
    outputs: list[Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, out: outputs.append(out)) for b in blocks_of(opened.model.backbone)]
    try:
        opened.model.backbone(mixed)
        of_mixed, outputs[:] = list(outputs), []
        opened.model.backbone(images)
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(of_mixed, outputs, strict=True)
    tokens = [tuple(t.flatten(1, 2) if t.dim() == 4 else t for t in pair) for pair in pairs]
    return [similarity_shares(both, alone, alone[mix.partner]) for both, alone in tokens]


# Figures 5 and 6


def label_maps(opened: OpenModel, images: Tensor) -> tuple[Tensor, Mix, Tensor, Tensor]:
    """(mixed images, the mix, labels at the start [B, h, w] on the patch embedding's grid, aligned [B, h', w'])"""
    mix, mixed = draw(images, 1)
    aligned = follow(opened, mixed, mix).grid
    embed = getattr(opened.model.backbone, "patch_embed", None)
    grid = getattr(embed, "grid_size", None) or tuple(aligned.shape[1:])
    return mixed, mix, patch_shares(mix.mask, (int(grid[0]), int(grid[1]))), aligned


# Equations 2 and 3


@torch.no_grad()
def presences(opened: OpenModel, images: Tensor) -> list[Tensor]:
    """[..., N] presence of every token, for each attention layer, the mean over heads."""
    with record_attention(opened.model.backbone) as matrices:
        opened.model.backbone(images)
    return [row_normalised(matrix.float().mean(1)).sum(-2) for matrix in matrices]


def convolution_presence(side: int = 14, kernel: int = 7) -> Tensor:
    """[side, side] the same for a convolution (equation 3) with positive random weights."""
    weight = torch.rand(1, 1, kernel, kernel, generator=torch.Generator().manual_seed(0))
    inputs = torch.eye(side * side).view(-1, 1, side, side)
    matrix = F.conv2d(inputs, weight, padding=kernel // 2).flatten(1).T  # output m from input n
    return (matrix / weight.sum()).sum(0).view(side, side)


# Tables and pictures


def untrained(name: str, img_size: int | None = None) -> OpenModel:
    """timm:NAME with random weights, always the same: to see that something works."""
    torch.manual_seed(0)
    model = timm.create_model(name.removeprefix("timm:"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.safetensors"
        save_file(model.state_dict(), path)
        return open_model(path, architecture=name.removeprefix("timm:"), img_size=img_size)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, compute, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=("rmse", "layers", "labels", "presence"))
    parser.add_argument("data", help="a dataset with class folders, or what everytoken accepts")
    parser.add_argument("models", nargs="+", metavar="RUN|FILE|timm:NAME")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--img-size", type=int, default=0)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument(
        "--maps", default="", help="score maps of the images, for the line of token labeling in `layers`"
    )
    parser.add_argument("--out", type=Path, default=None, help="picture; default: FIGURE.png")
    options = parser.parse_args(argv)
    plots = need("matplotlib.figure", "plots", "pictures")
    size = options.img_size or None
    opened = [
        untrained(name, size) if options.untrained and name.startswith("timm:") else open_model(name, img_size=size)
        for name in options.models
    ]
    out = options.out or Path(f"{options.figure}.png")
    drawing = {"rmse": _draw_rmse, "layers": _draw_layers, "labels": _draw_labels, "presence": _draw_presence}
    more = [options.maps] if options.figure == "layers" else []
    figure = drawing[options.figure](plots.Figure, options.models, opened, options.data, options.images, *more)
    figure.savefig(out, dpi=120, bbox_inches="tight")
    print(f"\n{out}")


def _draw_rmse(make, names: list[str], opened: list[OpenModel], data: str, count: int):
    values = [rmse(model, data, count) for model in opened]
    print(f"{'model':<48}{'M parameters':>14}{'RMSE':>10}{'per entry':>12}")
    for name, model, (share, entry) in zip(names, opened, values, strict=True):
        print(f"{name:<48}{model.parameters / 1e6:14.1f}{share:10.4f}{entry:12.6f}")
    figure = make(figsize=(1.5 + 1.2 * len(names), 3.5))
    axes = figure.add_subplot()
    axes.bar([name.removeprefix("timm:") for name in names], [share for share, _ in values])
    axes.set_ylabel("RMSE of the aligned targets")
    axes.tick_params(axis="x", rotation=60)
    return figure


def _draw_layers(make, names: list[str], opened: list[OpenModel], data: str, count: int, maps: str):
    figure = make(figsize=(5 * len(names), 3.5))
    for place, (name, model) in enumerate(zip(names, opened, strict=True)):
        axes = figure.add_subplot(1, len(names), place + 1)
        print(name)
        for method, values in layer_ratios(model, data, count, maps).items():
            print(f"  {method:<28}" + " ".join(f"{value:.3f}" for value in values))
            axes.plot(values, label=method, linestyle="-" if method in ("TL-Align", "likeness") else "--")
        axes.set(title=name.removeprefix("timm:"), xlabel="layer", ylabel="part of the own image")
        axes.legend()
    return figure


def _draw_labels(make, names: list[str], opened: list[OpenModel], data: str, count: int):
    rows = min(count, BATCH // 2)
    figure = make(figsize=(10, 2 * rows * len(names)))
    for number, (name, model) in enumerate(zip(names, opened, strict=True)):
        images = next(batches(model, data, BATCH)).images
        mixed, mix, start, aligned = label_maps(model, images)
        print(
            f"{name}: {start.shape[1]} x {start.shape[2]} at the start, {aligned.shape[1]} x {aligned.shape[2]} aligned"
        )
        for row in range(min(rows, len(images))):
            pictures = (images[row], images[mix.partner[row]], mixed[row], start[row], aligned[row])
            titles = ("first", "second", f"mixed, {mix.ratio[row]:.2f}", "labels", "aligned")
            for column, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
                axes = figure.add_subplot(rows * len(names), 5, (number * rows + row) * 5 + column + 1)
                if picture.dim() == 3:
                    low, high = picture.amin(), picture.amax()
                    axes.imshow(((picture - low) / (high - low)).permute(1, 2, 0).numpy())
                else:  # red is the first image, blue the second
                    axes.imshow(picture.numpy(), cmap="coolwarm", vmin=0, vmax=1)
                axes.set_title(title, fontsize=8)
                axes.axis("off")
    return figure


def _draw_presence(make, names: list[str], opened: list[OpenModel], data: str, count: int):
    figure = make(figsize=(5, 3.5))
    axes = figure.add_subplot()
    print(f"{'layer':<8}{'mean':>8}{'sd':>8}{'least':>8}{'most':>8}")
    for name, model in zip(names, opened, strict=True):
        images = next(batches(model, data, min(count, BATCH))).images
        found = presences(model, images)
        print(name)
        for layer, p in enumerate(found, 1):
            print(f"{layer:<8}{p.mean():8.3f}{p.std():8.3f}{p.min():8.3f}{p.max():8.3f}")
        axes.plot(range(1, len(found) + 1), [float(p.std()) for p in found], label=name.removeprefix("timm:"))
    inner = convolution_presence()[3:-3, 3:-3]
    print(
        f"7 x 7 convolution, inside\n{'':<8}{inner.mean():8.3f}{inner.std():8.3f}{inner.min():8.3f}{inner.max():8.3f}"
    )
    axes.axhline(0, linestyle="--", label="convolution, inside")
    axes.set(xlabel="layer", ylabel="spread of the tokens' presence")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
