"""Textures for frost: the user's own photographs, or ones drawn by a formula.

The formula: needles of ice grow along ridges of smooth noise (1 - |noise|, sharpened) in several sizes and directions,
under a slowly changing cover, in bluish white. Mean and spread of brightness are set to 0.45 and 0.2, about what
photographs of frosted glass have. They are made once per size and process, from a fixed key.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken.data.datasets import is_image
from everytoken.data.decode import FORMATS
from everytoken.errors import EverytokenError
from everytoken.robust.corruptions.filters import gaussian, sample

_COUNT = 5  # the published program uses five
_TINT = np.array([0.88, 0.98, 1.08], np.float32)


@lru_cache(maxsize=8)
def drawn(height: int, width: int) -> list[np.ndarray]:
    """Five textures for images of this size, each 1.5 times as large, float32 [H, W, 3], 0..1."""
    return [_draw(round(1.5 * height) + 1, round(1.5 * width) + 1, number) for number in range(_COUNT)]


def _draw(height: int, width: int, number: int) -> np.ndarray:
    rng = keyed.generator(0, "frost", number)
    short = min(height, width)
    total = np.zeros((height, width), np.float32)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    for grain, weight in ((short / 12, 0.5), (short / 30, 0.35), (short / 80, 0.25)):
        for _ in range(2):
            turn = rng.uniform(0, np.pi)
            along, across = y * np.sin(turn) + x * np.cos(turn), x * np.sin(turn) - y * np.cos(turn)
            cells = rng.standard_normal((64, 64, 1)).astype(np.float32)
            field = sample(cells, along / (3 * grain), across / grain, "mirror")[..., 0]  # long in one direction
            total += weight * np.maximum(1 - np.abs(field), 0) ** 3
    cover = gaussian(rng.standard_normal((height, width)).astype(np.float32), short / 6, "reflect")
    cover = (cover - cover.min()) / max(float(np.ptp(cover)), 1e-6)
    total *= 0.4 + 0.6 * cover
    total = (total - total.mean()) / max(float(total.std()), 1e-6)
    return np.clip((0.45 + 0.2 * total)[..., None] * _TINT, 0, 1).astype(np.float32)


@lru_cache(maxsize=8)
def photographs(folder: str, height: int, width: int) -> list[np.ndarray]:
    """The pictures in a folder, enlarged where an image of this size would not fit into them."""
    paths = sorted(p for p in Path(folder).glob("*") if is_image(p.name)) if Path(folder).is_dir() else []
    if not paths:
        raise EverytokenError(f"--frost-textures {folder}: no folder with pictures. Leave it out to use drawn ones.")
    made = []
    for path in paths:
        with Image.open(path, formats=FORMATS) as opened:
            picture = opened.convert("RGB")
        factor = max(1.0, (height + 1) / picture.height, (width + 1) / picture.width)
        if factor > 1:
            picture = picture.resize((round(picture.width * factor), round(picture.height * factor)))
        made.append(np.asarray(picture, np.float32) / 255)
    return made
