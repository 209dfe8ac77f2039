"""Drawn images with masks: discs and squares on noise, in two colours each."""

from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ["ground", "disc", "square"]


def draw(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(pixels uint8 [h, w, 3], classes uint8 [h, w]); size is (width, height)."""
    width, height = size
    pixels = rng.integers(70, 110, (height, width, 3)).astype(np.uint8)
    mask = np.zeros((height, width), np.uint8)
    rows, columns = np.mgrid[:height, :width]
    for shape in (1, 2):
        y, x = rng.integers(10, height - 10), rng.integers(10, width - 10)
        inside = (
            (rows - y) ** 2 + (columns - x) ** 2 < 90 if shape == 1 else np.maximum(abs(rows - y), abs(columns - x)) < 8
        )
        pixels[inside] = ((220, 60, 40), (50, 90, 230))[shape - 1]
        mask[inside] = shape
    return pixels, mask


def make(root: Path, train: int = 8, val: int = 4, size: tuple[int, int] = (56, 48)) -> Path:
    """images/, masks/ and classes.txt, in parts train and val; a border of one pixel is ignored."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels, mask = draw(rng, size)
            mask[0] = 255
            Image.fromarray(pixels).save(root / "images" / split / f"{i}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("\n".join(NAMES) + "\n")
    return root
