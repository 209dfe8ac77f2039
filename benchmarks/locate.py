"""How well a classifier's cells locate objects, on COCO's masks: `everytoken predict --locate`, step by step.

    python benchmarks/locate.py --instances instances.json IMAGES --panoptic panoptic.json MASKS IMAGES \\
        --models registry:efficientnet_lite0 registry:efficientnet_lite2

An ImageNet classifier is asked where the object of a COCO category is: of the categories in an image that have ImageNet
classes and cover 2 % of it or more, the one that the network finds likeliest. So the class is given and the place is
not, as for one's own photos of one object each. The truth is all objects of that category together.

Printed are the part of images where the strongest cell lies on the object (pointing game), and the mean IoU of masks
and of boxes with its interval; everything is compared on the same images. Thresholds are fixed fractions of an image's
highest evidence: for each step the best one, so that no step wins by its threshold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco
from torch import Tensor
from torch.nn import functional as F

from everytoken.data.batch import normalise
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.decode import Picture
from everytoken_lab.evaluation.locate import ALIKE, SIDE, Locator, box_of, scaled
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.stats import bootstrap


def _numbers(text: str) -> list[int]:
    """'7-9 12' -> 7, 8, 9, 12."""
    parts = [list(map(int, part.split("-"))) for part in text.split()]
    return [number for part in parts for number in range(part[0], part[-1] + 1)]


# COCO's category: ImageNet's classes; ...
_TABLE = """
2: 444 671; 3: 436 468 511 609 627 656 661 705 717 751 817; 4: 665 670; 5: 404 895; 6: 654 779 874; 7: 466 547 565 820;
8: 555 569 675 717 864 867; 9: 472 554 576 625 628 724 780 814 914; 10: 920; 13: 919; 14: 704; 15: 703;
16: 7-24 80-100 127-146; 17: 281-285; 18: 151-268; 19: 339 603; 20: 348-349; 21: 345-346 690; 22: 385-386; 23: 294-297;
24: 340; 27: 414; 28: 879; 31: 748; 32: 457 906; 35: 795; 37: 430 522 574 722 747 768 805 852 890; 43: 752;
44: 440 720 737 898 899 901 907; 46: 572 966; 47: 504 968; 50: 910; 51: 659 809; 52: 954; 53: 948; 54: 933; 55: 950;
56: 937; 58: 934; 59: 963; 60: 931; 62: 423 559 765; 63: 831; 64: 738; 65: 564; 67: 532; 70: 861; 72: 782 851;
73: 620 681; 74: 673; 75: 761; 76: 508; 77: 487; 78: 651; 79: 766; 80: 859; 81: 896; 82: 760; 84: 921; 85: 409 530 892;
86: 883; 88: 850; 89: 589"""
CLASSES = {int(category): _numbers(text) for category, text in (entry.split(":") for entry in _TABLE.split(";"))}
SMALLEST = 0.02  # part of the image that an object covers
THRESHOLDS = np.arange(0.2, 0.71, 0.05)


@dataclass(frozen=True)
class Scene:
    """An image and the masks of its categories [H, W]."""

    path: Path
    masks: dict[int, np.ndarray]


def read_instances(file: Path, images: Path) -> Iterator[Scene]:
    """Images with instances in COCO's format."""
    content = json.loads(file.read_text())
    for image in content["images"]:
        size, masks = (image["height"], image["width"]), {}
        for entry in content["annotations"]:
            if entry["image_id"] == image["id"]:
                runs = coco.frPyObjects(entry["segmentation"], *size)
                mask = coco.decode(coco.merge(runs) if isinstance(runs, list) else runs) > 0
                masks[entry["category_id"]] = masks.get(entry["category_id"], False) | mask
        yield Scene(images / image["file_name"], masks)


def read_panoptic(file: Path, masks: Path, images: Path) -> Iterator[Scene]:
    """Images with panoptic labels."""
    content = json.loads(file.read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    for entry in content["annotations"]:
        pixels = np.asarray(Image.open(masks / entry["file_name"]).convert("RGB")).astype(int)
        ids = pixels @ [1, 256, 65536]
        categories = {segment["category_id"] for segment in entry["segments_info"]}
        segments = {c: [s["id"] for s in entry["segments_info"] if s["category_id"] == c] for c in categories}
        yield Scene(images / names[entry["image_id"]], {c: np.isin(ids, numbers) for c, numbers in segments.items()})


def views(opened: OpenModel, locator: Locator, path: Path) -> dict[str, tuple[Tensor, np.ndarray]]:
    """Ways to look at an image: the input [1, 3, H, W], and (x0, y0, x1, y1) of the image that it shows."""
    plain = eval_view(opened.info)
    square = type(plain)(plain.img_size, 1.0, "squash", plain.interpolation, plain.mean, plain.std)
    result = {}
    for name, view in (("as in evaluation", plain), ("whole image", square), ("twice as large", locator.view)):
        pixels, placement = view(Picture(path, str(path)))
        images = normalise(torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None], view.mean, view.std)
        corner = placement[:, 2]
        result[name] = (images, np.array([*corner, *(corner + placement[:, :2].sum(1))]))
    return result


def spread(heat: Tensor, area: np.ndarray) -> np.ndarray:
    """A heat map [h, w] of a part of the image, on the whole image [SIDE, SIDE]; 0 outside of the part."""
    x0, y0, x1, y1 = np.clip((area * SIDE).round().astype(int), 0, SIDE)
    out = np.zeros((SIDE, SIDE), np.float32)
    inside = F.interpolate(scaled(heat[None])[None], (int(y1 - y0), int(x1 - x0)), mode="bilinear")
    out[y0:y1, x0:x1] = inside[0, 0].numpy()
    return out


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """IoU of two masks."""
    return float((first & second).sum() / max(1, (first | second).sum()))


def box_overlap(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """IoU of two boxes."""
    width, height = (min(first[i + 2], second[i + 2]) - max(first[i], second[i]) for i in (0, 1))
    inside = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return inside / (sum(areas) - inside)


@torch.no_grad()
def measure(model: str, scenes: list[Scene]) -> None:
    """One table."""
    opened = open_model(model)
    locator = Locator(opened)
    heats: dict[str, list[np.ndarray]] = {}
    points: dict[str, list[bool]] = {}
    truths = []
    for scene in scenes:
        looks = views(opened, locator, scene.path)
        probabilities = opened.model(looks["as in evaluation"][0]).logits.softmax(-1)[0]
        known = {c: m for c, m in scene.masks.items() if c in CLASSES and m.mean() >= SMALLEST}
        if not known:
            continue
        category = max(known, key=lambda c: float(probabilities[CLASSES[c]].sum()))
        values, order = probabilities[CLASSES[category]].topk(min(ALIKE, len(CLASSES[category])))
        classes = torch.tensor(CLASSES[category])[order][None]
        image = Image.fromarray(known[category].astype(np.uint8) * 255).resize((SIDE, SIDE), Image.Resampling.BOX)
        truth = np.asarray(image) > 127
        if not truth.any():
            continue
        truths.append(truth)
        for name, (images, area) in looks.items():
            evidence, fine = locator.heat(images, classes, values[None])
            maps = {name: spread(evidence[0], area)}
            if name == "twice as large":
                maps["with the guided filter"] = fine[0].numpy()
            for step, heat in maps.items():
                at = np.unravel_index(maps[name].argmax(), truth.shape)
                heats.setdefault(step, []).append(heat)
                points.setdefault(step, []).append(bool(truth[at]))
    whole = (0.0, 0.0, 1.0, 1.0)
    boxes = [box_of_truth(truth) for truth in truths]
    everything = np.array([[truth.mean(), box_overlap(whole, box)] for truth, box in zip(truths, boxes, strict=True)])
    covered = everything[:, 0].mean()
    print(f"{model}, {len(truths)} images\n{'':24}{'pointing':>9}{'mask IoU':>24}{'threshold':>10}{'box IoU':>9}")
    print(f"{'everything':24}{covered:9.2f}{covered:10.3f}{'':24}{everything[:, 1].mean():9.3f}")
    before = None
    for step, maps in heats.items():
        table = np.array(
            [[overlap(heat >= t, truth) for heat, truth in zip(maps, truths, strict=True)] for t in THRESHOLDS]
        )
        best = int(table.mean(1).argmax())
        found = bootstrap(table[best][:, None], lambda means: means[..., 0])
        box = np.mean(
            [
                box_overlap(box_of(heat >= THRESHOLDS[best], peak(heat)), box)
                for heat, box in zip(maps, boxes, strict=True)
            ]
        )
        more = ""
        if before is not None:
            gain = bootstrap((table[best] - before)[:, None], lambda means: means[..., 0])
            more = f"   {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) over the step before"
        before = table[best]
        interval = f"{found.value:10.3f} ({found.low:.3f}-{found.high:.3f})"
        print(f"{step:24}{np.mean(points[step]):9.2f}{interval}{THRESHOLDS[best]:10.2f}{box:9.3f}{more}")


def peak(heat: np.ndarray) -> tuple[float, float]:
    """(x, y) of the highest value, in fractions."""
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    return (column + 0.5) / heat.shape[1], (row + 0.5) / heat.shape[0]


def box_of_truth(mask: np.ndarray) -> tuple[float, float, float, float]:
    """The box around all of a mask, in fractions."""
    rows, columns = np.nonzero(mask)
    height, width = mask.shape
    return columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", nargs=2, type=Path, action="append", default=[], metavar=("JSON", "IMAGES"))
    parser.add_argument(
        "--panoptic", nargs=3, type=Path, action="append", default=[], metavar=("JSON", "MASKS", "IMAGES")
    )
    parser.add_argument("--models", nargs="+", default=["registry:efficientnet_lite0", "registry:efficientnet_lite2"])
    options = parser.parse_args()
    scenes = [scene for paths in options.instances for scene in read_instances(*paths)]
    scenes += [scene for paths in options.panoptic for scene in read_panoptic(*paths)]
    for model in options.models:
        measure(model, scenes)


if __name__ == "__main__":
    main()
