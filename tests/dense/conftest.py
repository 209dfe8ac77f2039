"""Drawn datasets: discs and squares on noise, with masks or in COCO's format; runs that are killed on the way."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everytoken_lab.cli import main

CATEGORY_IDS = [3, 7]  # need not be consecutive


def draw_shapes(rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(pixels uint8 [h, w, 3], classes uint8 [h, w]); size is (width, height)."""
    width, height = size
    pixels = rng.integers(70, 110, (height, width, 3)).astype(np.uint8)
    mask = np.zeros((height, width), np.uint8)
    rows, columns = np.mgrid[:height, :width]
    for shape in (1, 2):
        y, x = rng.integers(10, height - 10), rng.integers(10, width - 10)
        down, across = abs(rows - y), abs(columns - x)
        inside = down**2 + across**2 < 90 if shape == 1 else np.maximum(down, across) < 8
        pixels[inside] = ((220, 60, 40), (50, 90, 230))[shape - 1]
        mask[inside] = shape
    return pixels, mask


def make_shapes(root: Path, train: int = 8, val: int = 4, size: tuple[int, int] = (56, 48)) -> Path:
    """images/, masks/ and classes.txt, in parts train and val; a border of one pixel is ignored."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels, mask = draw_shapes(rng, size)
            mask[0] = 255
            Image.fromarray(pixels).save(root / "images" / split / f"{i}.png")
            Image.fromarray(mask).save(root / "masks" / split / f"{i}.png")
    (root / "classes.txt").write_text("ground\ndisc\nsquare\n")
    return root


def run_lengths(mask: np.ndarray) -> list[int]:
    """Numbers of 0s, 1s, 0s, ... down the columns, the obvious way."""
    counts, last, length = [], 0, 0
    for value in mask.T.reshape(-1).tolist():
        if value != last:
            counts.append(length)
            last, length = value, 0
        length += 1
    return [*counts, length]


def draw_objects(rng: np.random.Generator, size: tuple[int, int], empty: bool = False) -> tuple[np.ndarray, list[dict]]:
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
        found.append({"category_id": CATEGORY_IDS[kind], "bbox": box, "area": int(mask.sum())})
        found[-1] |= {"iscrowd": 0, "segmentation": shape}
    return pixels, found


def make_objects(root: Path, counts: dict[str, int], size: tuple[int, int] = (96, 64), empty: int = 1) -> Path:
    """SPLIT/images and SPLIT/instances.json for each split; the last `empty` images show nothing."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        (root / split / "images").mkdir(parents=True)
        images, annotations = [], []
        for i in range(count):
            pixels, found = draw_objects(rng, size, i >= count - empty)
            Image.fromarray(pixels).save(root / split / "images" / f"{i}.png")
            images.append({"id": 100 + i, "file_name": f"{i}.png", "width": size[0], "height": size[1]})
            for one in found:
                annotations.append({"id": len(annotations) + 1, "image_id": 100 + i, **one})
        categories = [{"id": c, "name": n} for c, n in zip(CATEGORY_IDS, ["disc", "square"], strict=True)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / split / "instances.json").write_text(json.dumps(content))
    return root


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.fixture
def run_with_kills(monkeypatch):
    """Run a training command, lose the power after so many batches, and again, until it is done at last."""

    def run(task_type: type, kills: tuple[int, ...], words: list[str]) -> None:
        plain = task_type.train_batches
        for kill in kills:

            def batches(self, *position, left=[kill]):  # noqa: B006
                for batch in plain(self, *position):
                    if left[0] == 0:
                        raise Killed
                    left[0] -= 1
                    yield batch

            monkeypatch.setattr(task_type, "train_batches", batches)
            with pytest.raises(Killed):
                main(words)
        monkeypatch.setattr(task_type, "train_batches", plain)
        assert main(words) == 0

    return run
