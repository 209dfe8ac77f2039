"""Draws docs/img/explain.png: a small ViT with a token head learns drawn shapes, and `everytoken explain` looks at it.

python docs/img/explain.py            (about two minutes)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch.nn import functional as F

from everytoken.models import TokenModel
from everytoken_lab.cli import main as everytoken
from everytoken_lab.draw import PAD, draw_sheet
from everytoken_lab.models.description import Description

SIZE, GRID = 64, 8
SHAPES = ("disc", "square", "triangle", "ring")
NAMES = (*SHAPES, "nothing")  # of the tokens
COLOURS = ((205, 70, 60), (70, 110, 205), (70, 160, 90), (225, 180, 60))
MEAN = STD = (0.5, 0.5, 0.5)


def draw(rng: np.random.Generator) -> tuple[np.ndarray, list[int], np.ndarray]:
    """An image [64, 64, 3] with two shapes, their classes, and the class of every cell [8, 8]."""
    tint = rng.integers(150, 215, 3)
    rough = rng.normal(0, 14, (SIZE // 4, SIZE // 4, 1))
    background = tint + np.asarray(rough.repeat(4, 0).repeat(4, 1)) + rng.normal(0, 6, (SIZE, SIZE, 3))
    image = Image.fromarray(background.clip(0, 255).astype(np.uint8))
    cells = np.full((GRID, GRID), len(SHAPES))
    classes = rng.choice(len(SHAPES), 2, replace=False).tolist()
    for i, shape in enumerate(classes):
        radius = int(rng.integers(9, 14))
        x = int(rng.integers(radius, SIZE // 2 - radius + 3)) + i * (SIZE // 2 - 1)
        y = int(rng.integers(radius, SIZE - radius))
        colour = tuple(int(c) for c in (np.array(COLOURS[shape]) + rng.integers(-25, 25, 3)).clip(0, 255))
        mask = Image.new("L", image.size)
        pen, box = ImageDraw.Draw(mask), (x - radius, y - radius, x + radius, y + radius)
        if SHAPES[shape] == "disc":
            pen.ellipse(box, fill=255)
        elif SHAPES[shape] == "square":
            pen.rectangle(box, fill=255)
        elif SHAPES[shape] == "triangle":
            pen.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=255)
        else:
            pen.ellipse(box, outline=255, width=5)
        image.paste(colour, mask=mask)
        part = np.asarray(mask, np.float32).reshape(GRID, 8, GRID, 8).mean((1, 3)) / 255
        cells[part > 0.3] = shape
    return np.asarray(image), classes, cells


def batch(count: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = [draw(rng) for _ in range(count)]
    images = torch.from_numpy(np.stack([d[0] for d in drawn])).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images, torch.tensor([d[1] for d in drawn]), torch.from_numpy(np.stack([d[2] for d in drawn]))


def train(steps: int = 350) -> tuple[TokenModel, Description]:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    arguments = {"img_size": SIZE, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 4}
    model = TokenModel(timm.create_model("vit_tiny_patch16_224", **arguments), len(NAMES)).train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        images, classes, cells = batch(32, rng)
        seen = model(images)
        target = torch.zeros(32, 4).scatter_(1, classes, 0.5)
        loss = F.cross_entropy(seen.logits, target) + F.cross_entropy(seen.token_logits.flatten(0, 2), cells.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3), flush=True)
    about = Description("vit_tiny_patch16_224", arguments, SHAPES, NAMES, (SIZE, SIZE), MEAN, STD, crop_pct=1.0)
    return model.eval(), about


def main() -> None:
    target = Path(__file__).resolve().with_suffix(".png")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        root = Path()
        model, about = train()
        (root / "shapes").mkdir()
        weights = root / "shapes" / "model.safetensors"
        save_file(model.backbone.state_dict(), weights, metadata=about.to_metadata())
        save_file(model.token_head.state_dict(), weights.with_name("model.token_head.safetensors"))
        rng = np.random.default_rng(5)
        for i in (1, 2, 3):
            Image.fromarray(draw(rng)[0]).save(root / f"{i}.png")
        images = [str(root / f"{i}.png") for i in (1, 2, 3)]
        common = ["--device", "cpu", "--out"]
        assert everytoken(["explain", str(weights), *images, *common, str(root / "a")]) == 0
        assert everytoken(["explain", str(weights), *images[1:], "--mix", *common, str(root / "b")]) == 0
        cards = [
            Image.open(path).convert("RGB") for path in (*sorted((root / "a").glob("0[12]-*.png")), root / "b/mix.png")
        ]
        sheet = draw_sheet("", "", cards)
        sheet = sheet.crop((0, 76 - PAD, sheet.width, sheet.height))
        sheet.save(target, optimize=True)


if __name__ == "__main__":
    main()
