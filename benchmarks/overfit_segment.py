"""Does a segmenter learn? A tiny backbone with UperNet overfits a handful of real images within minutes.

    python benchmarks/overfit_segment.py DATA [--images 6] [--updates 400] [--out FOLDER]

Takes the images of a folder of images and masks whose smallest class is largest (tiny things cannot be drawn at this
resolution), trains on them from random weights with `everytoken segment train`, and evaluates on the same images at
their own size. Expected: mIoU above 90. Exit code 1 if it is not. Measured: see docs/segment.md.
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

import numpy as np
from PIL import Image

from everytoken_lab.cli import main as everytoken
from everytoken_lab.dense.segment.data import MaskSet, open_masks


def choose(data: MaskSet, images: int) -> list[int]:
    """The images whose smallest class is largest, of those with two classes or more."""
    scored = []
    for i in range(len(data)):
        mask = data.mask(i)
        counts = np.bincount(mask[mask >= 0], minlength=data.num_classes)
        counts = counts[counts > 0]
        if len(counts) > 1:
            scored.append((counts.min() / mask.size, i))
    return [i for _, i in sorted(scored, reverse=True)[:images]]


def copy_some(data: MaskSet, chosen: list[int], to: Path) -> int:
    """The images as a pair of folders with the classes that occur; training and validation are the same. -> classes."""
    masks = {i: data.mask(i) for i in chosen}
    used = sorted({int(c) for m in masks.values() for c in np.unique(m) if c >= 0})
    table = np.full(data.num_classes + 1, 255, np.uint8)  # -1 is the last
    table[used] = np.arange(len(used))
    for split in ("train", "val"):
        for kind in ("images", "masks"):
            (to / kind / split).mkdir(parents=True)
        for i, mask in masks.items():
            shutil.copy(data.where(i), to / "images" / split)
            Image.fromarray(table[mask]).save(to / "masks" / split / f"{Path(data.key(i)).stem}.png")
    (to / "classes.txt").write_text("\n".join(data.class_names[c] for c in used))
    return len(used)


def run() -> int:
    """Parse, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--out", default="")
    chosen = parser.parse_args()
    data = open_masks(chosen.data, "all")
    with tempfile.TemporaryDirectory() as temporary:
        folder, output = Path(temporary) / "data", Path(chosen.out or Path(temporary) / "run")
        classes = copy_some(data, choose(data, chosen.images), folder)
        print(f"{chosen.images} images, {classes} classes")
        started = time.perf_counter()
        threads = os.environ.get("OMP_NUM_THREADS", "2")
        words = (
            f"--model resnet10t --channels 48 --aux-channels 32 --crop-size {chosen.side} --batch-size 3 --scale 1 1 "
            f"--hflip 0 --no-photometric --cat-max-ratio 1 --dropout 0 --drop-path 0 --iters {chosen.updates} "
            f"--val-iters {min(100, chosen.updates)} --warmup-iters 20 --lr 0.002 --min-lr 0.00001 --workers 0 "
            f"--device cpu --threads {threads} --log-interval 20"
        )
        code = everytoken(["segment", "train", str(folder), "--out", str(output), *words.split()])
        seconds = time.perf_counter() - started
        score = json.loads((output / "summary.json").read_text())["best"]["score"]
    print(json.dumps({"mIoU": round(score, 2), "seconds": round(seconds, 1), "updates": chosen.updates}))
    return code or int(score <= 90)


if __name__ == "__main__":
    sys.exit(run())
