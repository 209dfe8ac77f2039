"""How well `everytoken predict --locate` finds objects, step by step.

    python benchmarks/locate.py --coco instances.json IMAGES --boxes tiny-imagenet-200/val \\
        --models registry:efficientnet_lite0 registry:efficientnet_lite2

Of COCO's photos, those count whose largest object covers 5 to 70 %, and IoU is that with this object; they are in two
halves by the parity of their identifiers, so that a choice made on one can be checked on the other. Of Tiny-ImageNet,
the boxes of the first 200 validation images. The network is told neither class nor place: it goes by its own answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import normalise
from everytoken_lab.data.decode import Picture
from everytoken_lab.evaluation.locate import ALIKE, SIDE, THRESHOLD, Locator, box_of, object_map, scaled
from everytoken_lab.models.open import open_model
from everytoken_lab.stats import bootstrap

SMALLEST, LARGEST = 0.05, 0.70  # part of the photo that its largest object covers
CENTRED = 0.71  # sides of the centred box: half the area
BOXES = 200


def objects(file: Path, images: Path) -> Iterator[tuple[Path, np.ndarray, int]]:
    """(photo, mask of its largest object [SIDE, SIDE], half) of annotations in COCO's format."""
    content = json.loads(file.read_text())
    for image in content["images"]:
        size, largest = (image["height"], image["width"]), None
        for entry in content["annotations"]:
            if entry["image_id"] == image["id"] and not entry.get("iscrowd"):
                runs = coco.frPyObjects(entry["segmentation"], *size)
                mask = coco.decode(coco.merge(runs) if isinstance(runs, list) else runs)
                largest = mask if largest is None or mask.sum() > largest.sum() else largest
        if largest is not None and SMALLEST <= largest.mean() <= LARGEST:
            small = Image.fromarray(largest * 255).resize((SIDE, SIDE), Image.Resampling.BOX)
            yield images / Path(image["file_name"]).name, np.asarray(small) > 127, image["id"] % 2


def boxed(folder: Path) -> Iterator[tuple[Path, np.ndarray, int]]:
    """The same of Tiny-ImageNet's validation images; masks are boxes."""
    for number, line in enumerate((folder / "val_annotations.txt").read_text().splitlines()[:BOXES]):
        name, _, *edges = line.split()
        left, top, right, bottom = (int(edge) * SIDE // 64 for edge in edges)
        mask = np.zeros((SIDE, SIDE), bool)
        mask[top : bottom + SIDE // 64, left : right + SIDE // 64] = True
        yield folder / "images" / name, mask, number % 2


def filled(mask: np.ndarray) -> np.ndarray:
    """The box of a mask, as a mask; everything if there is none."""
    if not mask.any():
        return np.ones_like(mask)
    left, top, right, bottom = (round(edge * SIDE) for edge in box_of(mask))
    out = np.zeros_like(mask)
    out[top:bottom, left:right] = True
    return out


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """IoU of two masks."""
    return float((first & second).sum() / max(1, (first | second).sum()))


def masks_of(locator: Locator, images: Tensor) -> tuple[dict[str, np.ndarray], float]:
    """The mask after each step for one image [1, 3, H, W], and the CPU seconds that locating takes."""
    start = time.process_time()
    cells, guess, tokens = locator._look(images)
    seen = time.process_time() - start
    probabilities, classes = cells.mean((1, 2)).softmax(-1).topk(min(ALIKE, cells.shape[-1]))
    evidence = scaled(cells[..., classes[0, 0]] - cells.mean(-1))
    steps = {"the likeliest class": evidence, "where logits differ": scaled(guess), "tokens": object_map(guess, tokens)}
    steps |= {"edges": locator.heat(images, classes, probabilities)[1]}
    start = time.process_time()
    (location,) = locator.locate(images, classes, probabilities, [(SIDE, SIDE)])
    seconds = time.process_time() - start
    out = {
        name: F.interpolate(heat[:, None], (SIDE, SIDE), mode="bilinear")[0, 0].numpy() >= THRESHOLD
        for name, heat in steps.items()
    }
    out["main parts: --locate"] = np.zeros((SIDE, SIDE), bool) if location is None else location.mask()
    return out, max(seconds, seen)


@torch.no_grad()
def measure(model: str, what: str, scenes: list[tuple[Path, np.ndarray, int]], shape: Callable) -> None:
    """One table: IoU of each step in both halves; `shape` makes of a mask what is compared."""
    locator = Locator(open_model(model))
    edge = round(SIDE * (1 - CENTRED) / 2)
    centred = np.zeros((SIDE, SIDE), bool)
    centred[edge:-edge, edge:-edge] = True
    always = {"everything": np.ones((SIDE, SIDE), bool), "centred box": centred}
    ious: dict[str, list[float]] = {}
    seconds, empty = [], 0
    for path, truth, _ in scenes:
        pixels, _ = locator.view(Picture(path, str(path)))
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
        steps, took = masks_of(locator, normalise(images, locator.view.mean, locator.view.std))
        seconds.append(took)
        empty += not steps["main parts: --locate"].any()
        for name, mask in (always | steps).items():
            ious.setdefault(name, []).append(overlap(shape(mask), shape(truth)))
    halves = np.array([half for *_, half in scenes])
    print(f"\n{model}, {what}: {len(scenes)} photos, {empty} without a mask, {np.median(seconds):.2f} CPU s per photo")
    for name, values in ious.items():
        numbers = np.array(values)
        parts = "".join(f"{numbers[halves == half].mean():9.3f}" for half in (0, 1))
        found = bootstrap(numbers[:, None], lambda means: means[..., 0])
        print(f"{name:24}{parts}{found.value:9.3f} ({found.low:.3f} to {found.high:.3f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coco", nargs=2, type=Path, action="append", default=[], metavar=("JSON", "IMAGES"))
    parser.add_argument("--boxes", type=Path, help="Tiny-ImageNet's folder val")
    parser.add_argument("--models", nargs="+", default=["registry:efficientnet_lite0", "registry:efficientnet_lite2"])
    options = parser.parse_args()
    scenes = [scene for paths in options.coco for scene in objects(*paths)]
    for model in options.models:
        if scenes:
            measure(model, "masks", scenes, lambda mask: mask)
        if options.boxes:
            measure(model, "boxes", list(boxed(options.boxes)), filled)


if __name__ == "__main__":
    main()
