"""Drawn images with objects in COCO's format: discs as polygons, squares as run lengths."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ["disc", "square"]
CATEGORY = [3, 7]  # ids need not be consecutive


def run_lengths(mask: np.ndarray) -> list[int]:
    """Numbers of 0s, 1s, 0s, ... down the columns, the obvious way."""
    counts, last, length = [], 0, 0
    for value in mask.T.reshape(-1).tolist():
        if value != last:
            counts.append(length)
            last, length = value, 0
        length += 1
    return [*counts, length]


def draw(rng: np.random.Generator, size: tuple[int, int], empty: bool = False) -> tuple[np.ndarray, list[dict]]:
    """(pixels uint8 [h, w, 3], annotations without ids); size is (width, height)."""
    width, height = size
    pixels = rng.integers(90, 120, (height, width, 3)).astype(np.uint8)
    rows, columns = np.mgrid[:height, :width] + 0.5
    found = []
    for kind in () if empty else (0, 1):
        radius = int(rng.integers(10, 16))
        low = 0 if kind == 0 else width // 2  # one on each side, so that they do not overlap
        x = int(rng.integers(low + radius, low + width // 2 - radius + 1))
        y = int(rng.integers(radius, height - radius + 1))
        if kind == 0:
            mask = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
            turn = np.linspace(0, 2 * np.pi, 24, endpoint=False)
            shape = [np.stack([x + radius * np.cos(turn), y + radius * np.sin(turn)], 1).reshape(-1).round(2).tolist()]
        else:
            mask = np.maximum(abs(rows - y), abs(columns - x)) < radius
            shape = {"size": [height, width], "counts": run_lengths(mask.astype(int))}
        pixels[mask] = ((220, 60, 40), (50, 90, 230))[kind]
        box = [x - radius, y - radius, 2 * radius, 2 * radius]
        found.append(
            {"category_id": CATEGORY[kind], "bbox": box, "area": int(mask.sum()), "iscrowd": 0, "segmentation": shape}
        )
    return pixels, found


def make(root: Path, counts: dict[str, int], size: tuple[int, int] = (96, 64), empty: int = 1) -> Path:
    """SPLIT/images and SPLIT/instances.json for each split; the last `empty` images show nothing."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        (root / split / "images").mkdir(parents=True)
        images, annotations = [], []
        for i in range(count):
            pixels, found = draw(rng, size, i >= count - empty)
            Image.fromarray(pixels).save(root / split / "images" / f"{i}.png")
            images.append({"id": 100 + i, "file_name": f"{i}.png", "width": size[0], "height": size[1]})
            for one in found:
                annotations.append({"id": len(annotations) + 1, "image_id": 100 + i, **one})
        categories = [{"id": c, "name": n} for c, n in zip(CATEGORY, NAMES, strict=True)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / split / "instances.json").write_text(json.dumps(content))
    return root
