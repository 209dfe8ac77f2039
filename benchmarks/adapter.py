"""What `with_maps` costs: somebody's torchvision v2 pipeline alone, and with score maps and the geometry followed.

    OMP_NUM_THREADS=1 python benchmarks/adapter.py [--images FOLDER] [--count 200] [--repeats 5]

Both sides decode and transform the same images one after the other in this process and collate them in batches of 32,
interleaved, with the same random numbers; CPU seconds, the smallest of the repeats. Without `--images`, JPEGs of 500 x
375 pixels are generated. The maps have 18 x 18 cells of five classes. "typical" is crop, flip, colour jitter and
normalisation on PIL images; "short" is the least that anybody does, on which the overhead weighs most.
Exit code 1 when the typical pipeline's overhead is 3 % or more.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from everytoken.data import collate, with_maps
from everytoken.maps import Maps, MapWriter, StoreMeta

BATCH = 32
END = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
PIPELINES = {
    "typical": v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4), *END]),
    "short": v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *END]),
}


def photos(folder: Path, count: int) -> None:
    """Write smooth random JPEGs."""
    rng = np.random.default_rng(0)
    (folder / "photo").mkdir(parents=True)
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(folder / "photo" / f"{i:05d}.jpg", quality=90)


def store(folder: Path, data: ImageFolder) -> Maps:
    """Random score maps of all images."""
    rng = np.random.default_rng(0)
    keys = sorted(Path(path).relative_to(data.root).as_posix() for path, _ in data.samples)
    with MapWriter.create_or_resume(folder, keys, StoreMeta(grid=(18, 18), top_k=5, num_classes=1000)) as writer:
        for shard in writer.pending_shards():
            for position in writer.shard_range(shard):
                few = rng.choice(1000, 60, replace=False).astype("u2")
                classes = few[np.argsort(rng.random((1, 18, 18, 60)), axis=-1)[..., :5]]
                scores = -np.sort(-rng.normal(3, 2, (1, 18, 18, 5)), axis=-1)
                writer.put([position], scores.astype("f2"), classes, [(0, 0)], [(0, 0, 1, 1)])
        writer.finalize()
    return Maps(folder)


def seconds(data: Any, join: Any, first: int, last: int) -> float:
    """CPU seconds for a batch."""
    torch.manual_seed(first)
    start = time.process_time()
    join([data[i] for i in range(first, last)])
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of class folders with photos; default: generated ones")
    parser.add_argument("--count", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    overheads = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.images or Path(temporary) / "photos"
        if args.images is None:
            photos(folder, args.count)
        bare = ImageFolder(folder)
        maps = store(Path(temporary) / "maps", bare)
        print(f"{'pipeline':<10} {'alone':>12} {'with maps':>12} {'overhead':>9}   per image")
        for name, pipeline in PIPELINES.items():
            sides = [(ImageFolder(folder, pipeline), default_collate), (with_maps(bare, maps, pipeline), collate)]
            batches = [(i, min(i + BATCH, len(bare))) for i in range(0, min(args.count, len(bare)), BATCH)]
            best = np.full((2, len(batches)), np.inf)
            for repeat in range(args.repeats):
                for j, batch in enumerate(batches):
                    for k in (0, 1) if repeat % 2 else (1, 0):
                        best[k, j] = min(best[k, j], seconds(*sides[k], *batch))
            alone, followed = best.sum(1) / batches[-1][1] * 1e3
            overheads[name] = followed / alone - 1
            print(f"{name:<10} {alone:>9.3f} ms {followed:>9.3f} ms {overheads[name]:>8.1%}")
    return int(overheads["typical"] >= 0.03)


if __name__ == "__main__":
    raise SystemExit(main())
