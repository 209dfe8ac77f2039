"""Draws docs/img/alignment.png: a small ViT is trained on digits with alignment, then watched on mixed digits.

python docs/img/alignment.py            (about two minutes; needs everytoken[plots,demo])
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from matplotlib.patches import Rectangle
from sklearn.datasets import load_digits
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.mixing.methods import CutMix
from everytoken.mixing.mix import apply_to_pixels
from everytoken.models.align import Aligner, Alignment

DEPTH, GRID, SIZE = 6, 8, 32
INK, OWN, PARTNER = "#222222", "#c0392b", "#2c6fbb"


def train(images: torch.Tensor, labels: torch.Tensor, steps: int = 600) -> torch.nn.Module:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=SIZE, patch_size=4, in_chans=1, embed_dim=48, num_heads=3, depth=DEPTH,
        num_classes=10,
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    aligner = Aligner(model)
    for step in range(steps):
        chosen = torch.from_numpy(rng.choice(len(images), 48, replace=False))
        mix = CutMix().draw(48, (SIZE, SIZE), (GRID, GRID), rng)
        mixed, y = apply_to_pixels(images[chosen], mix), labels[chosen]
        with aligner.watch(mix) as seen:
            logits = model(mixed)
        loss = aligned_cross_entropy(logits, y, y[mix.partner], seen.shares.image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 3))
    aligner.remove()
    return model.eval()


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None]
    images = F.interpolate(images, (SIZE, SIZE), mode="bilinear")
    labels = torch.tensor(digits.target)
    model = train(images[:1500], labels[:1500])
    with torch.no_grad():
        print("accuracy", (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item())

    first = {d: int(torch.nonzero(labels[1500:] == d)[0]) + 1500 for d in range(10)}
    pairs = [(3, 6), (0, 7)]
    masks = torch.ones(2, SIZE, SIZE)
    masks[0, 8:28, 14:] = 0
    masks[1, :, :10] = 0
    own = images[[first[a] for a, _ in pairs]]
    partner = images[[first[b] for _, b in pairs]]
    mixed = torch.where(masks[:, None] > 0, own, partner)
    mix = type("Mix", (), {"mask": masks, "ratio": masks.mean((1, 2))})
    with torch.no_grad(), Aligner(model, Alignment(history=True)).watch(mix) as seen:
        model(mixed)
    start = masks.view(2, GRID, 4, GRID, 4).mean((2, 4))
    by_layer = [torch.cat((mix.ratio[:, None], start.flatten(1)), 1), *seen.shares.history]

    shown = (0, 2, 4, DEPTH)
    fig, axes = plt.subplots(2, 6, figsize=(11, 4.1), width_ratios=[1, 1, 1, 1, 1, 1.55], layout="constrained")
    for i, row in enumerate(axes):
        a, b = pairs[i]
        row[0].imshow(mixed[i, 0], cmap="gray_r")
        y, x = torch.nonzero(masks[i] == 0)[0].tolist()
        h, w = (int((masks[i] == 0).any(1 - d).sum()) for d in (0, 1))
        row[0].add_patch(Rectangle((x - 0.5, y - 0.5), w, h, fill=False, ec=PARTNER, lw=2))
        row[0].set_title(f"{a} with a box from {b}", fontsize=9, color=INK)
        for axis, layer in zip(row[1:5], shown, strict=True):
            values = by_layer[layer][i, 1:].view(GRID, GRID)
            picture = axis.imshow(values, cmap="RdBu_r", vmin=0, vmax=1)
            axis.set_title("patches at the start" if layer == 0 else f"after layer {layer}", fontsize=9, color=INK)
        for axis in row[:5]:
            axis.set_xticks([])
            axis.set_yticks([])
        line = row[5]
        line.axhline(mix.ratio[i], color="#888888", ls="--", lw=1)
        line.plot([s[i, 0].item() for s in by_layer], color=OWN, marker="o", ms=3.5)
        line.set(ylim=(0.25, 1.0), xticks=range(DEPTH + 1))
        line.set_xlabel("layer" if i else "", fontsize=8)
        line.tick_params(labelsize=8)
        line.set_title(f"share of {a} in the class token", fontsize=9, color=INK)
        line.annotate("by area", (DEPTH, mix.ratio[i]), xytext=(0, -10), textcoords="offset points", ha="right",
                      fontsize=8, color="#888888")  # fmt: skip
        line.spines[["top", "right"]].set_visible(False)
    bar = fig.colorbar(picture, ax=axes[:, 1:5], location="bottom", shrink=0.5, aspect=40, pad=0.03)
    bar.set_ticks([0, 0.5, 1], labels=["partner", "half", "own image"], fontsize=8)
    fig.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
