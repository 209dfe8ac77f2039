"""Does a detector learn? A tiny backbone with Cascade Mask R-CNN overfits a handful of real images within minutes.

    python benchmarks/overfit_detect.py COCO_FOLDER_OR_JSON [--images 4] [--updates 200] [--side 144] [--out FOLDER]

Takes the images whose smallest object is largest (tiny things cannot be seen at this resolution), at most six objects
each, trains on them from random weights with `everytoken detect train`, and evaluates on the same images with COCO's
evaluator. Expected: box AP50 above 80 and mask AP50 above 70. Exit code 1 if not. Measured: see docs/detect.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from everytoken_lab.cli import main as everytoken
from everytoken_lab.dense.detect.data import InstanceSet, open_instances

_OBJECTS = 6


def choose(data: InstanceSet, images: int) -> list[int]:
    """The images whose smallest object is largest, of those with two to six objects and no crowd."""
    scored = []
    for i in range(len(data)):
        objects = data.objects(i)
        if 2 <= len(objects) <= _OBJECTS and not any(o.crowd for o in objects):
            scored.append((min(o.area for o in objects) / float(data.sizes[i].prod()), i))
    return [i for _, i in sorted(scored, reverse=True)[:images]]


def copy_some(data: InstanceSet, chosen: list[int], to: Path, times: int) -> int:
    """val/ with the images, their annotations and the categories that occur; train/ with all of it several times, so
    that an epoch, after which a run is saved, is not over at once. -> number of objects."""
    content: dict[str, Any] = json.loads(Path(data.name).read_text())
    ids = {int(data.image_ids[i]) for i in chosen}
    images = [m for m in content["images"] if m["id"] in ids]
    objects = [a for a in content["annotations"] if a["image_id"] in ids]
    categories = [c for c in content["categories"] if c["id"] in {a["category_id"] for a in objects}]
    for split, copies in (("train", times), ("val", 1)):
        (to / split / "images").mkdir(parents=True)
        made: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": categories}
        for copy in range(copies):
            for one in images:
                name = f"{copy}-{one['file_name']}"
                shutil.copy(Path(data.root) / one["file_name"], to / split / "images" / name)
                made["images"].append({**one, "id": one["id"] * times + copy, "file_name": name})
            made["annotations"] += [{**a, "image_id": a["image_id"] * times + copy} for a in objects]
        (to / split / "instances.json").write_text(json.dumps(made))
    return len(objects)


def run() -> int:
    """Parse, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--side", type=int, default=144)
    parser.add_argument("--out", default="")
    chosen = parser.parse_args()
    data = open_instances(chosen.data, "all")
    with tempfile.TemporaryDirectory() as temporary:
        folder, output = Path(temporary) / "data", Path(chosen.out or Path(temporary) / "run")
        side, epochs = chosen.side, 4
        objects = copy_some(data, choose(data, chosen.images), folder, chosen.updates // epochs)
        print(f"{chosen.images} images, {objects} objects")
        started = time.perf_counter()
        code = everytoken(
            [
                *("detect", "train", str(folder), "--out", str(output), "--model", "resnet10t", "--drop-path", "0"),
                *("--batch-size", str(chosen.images), "--sizes", str(side * 15 // 16), str(side)),
                *("--crop", "0", "--longest", str(side * 2), "--channels", "32", "--hidden", "128"),
                *("--regions", "32", "--proposals", "200", "--anchor-scale", "4", "--epochs", str(epochs)),
                *(
                    "--decay-milestones",
                    str(epochs - 1),
                    "--val-interval",
                    "2",
                    "--warmup-iters",
                    "20",
                    "--lr",
                    "0.002",
                ),
                *("--workers", "0", "--device", "cpu", "--threads", os.environ.get("OMP_NUM_THREADS", "2")),
                *("--log-interval", "20"),
            ]
        )
        seconds = time.perf_counter() - started
        if code:
            return code
        last = json.loads((output / "summary.json").read_text())["last"]
    box, mask = last["val_box_AP50"], last["val_mask_AP50"]
    print(json.dumps({"box AP50": box, "mask AP50": mask, "seconds": round(seconds, 1), "updates": chosen.updates}))
    return int(box <= 80 or mask <= 70)


if __name__ == "__main__":
    sys.exit(run())
