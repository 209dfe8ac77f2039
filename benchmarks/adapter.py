"""What `with_maps` costs: somebody's torchvision v2 pipeline alone, and with score maps and the geometry followed.

    OMP_NUM_THREADS=1 python benchmarks/adapter.py [--images FOLDER] [--count 96] [--repeats 9]

Both sides decode and transform the same images one after the other in this process, interleaved, with the same random
numbers, in collated batches of 32 as DataLoader fetches them; CPU seconds, the smallest of the repeats for each batch.
Without `--images`, JPEGs of 500 x 375 pixels and about 110 KB are generated, as ImageNet's are on average. Maps have
18 x 18 cells of five classes. "typical" is crop, flip, colour jitter and normalisation on PIL images; "short" is the
least that anybody does, on which the overhead weighs most.
Exit code 1 when the typical pipeline's overhead is 3 % or more.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from everytoken.data.adapter import collate, with_maps
from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta

BATCH = 32
END = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
PIPELINES = {
    "typical": v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4), *END]),
    "short": v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *END]),
}


def photos(folder: Path, count: int) -> None:
    """Write random JPEGs with grain."""
    rng = np.random.default_rng(0)
    (folder / "photo").mkdir(parents=True)
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8))
        smooth = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
        grainy = (smooth + rng.normal(0, 9, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(grainy).save(folder / "photo" / f"{i:05d}.jpg", quality=90)


def store(folder: Path, data: ImageFolder) -> Maps:
    """Random score maps of all images."""
    rng = np.random.default_rng(0)
    keys = sorted(Path(path).relative_to(data.root).as_posix() for path, _ in data.samples)
    with MapWriter(folder, keys, StoreMeta(grid=(18, 18), top_k=5, num_classes=1000)) as writer:
        for key in keys:
            logits = np.full((18, 18, 1000), -9.0, np.float32)
            logits[:, :, rng.choice(1000, 60, replace=False)] = rng.normal(3, 2, (18, 18, 60))
            writer.write({key: ScoreMap.from_logits(logits, 5)})
        writer.finalize()
    return Maps(folder)


def fetch(data: Any, join: Callable[[Any], Any], indices: Sequence[int]) -> Any:
    """A batch, as a worker of DataLoader makes it."""
    return join(data.__getitems__(indices) if hasattr(data, "__getitems__") else [data[i] for i in indices])


def seconds(job: Callable[[], Any], seed: int) -> float:
    """CPU seconds of a job."""
    torch.manual_seed(seed)
    start = time.process_time()
    job()
    return time.process_time() - start


def compare(jobs: Sequence[Callable[[], Any]], seed: int, repeats: int) -> np.ndarray:
    """The smallest CPU seconds of each job, interleaved."""
    return np.min([[seconds(job, seed) for job in jobs] for _ in range(repeats)], axis=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of class folders with photos; default: generated ones")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=9)
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
            count, total = min(args.count, len(bare)), np.zeros(2)
            for i in range(0, count, BATCH):
                indices = range(i, min(i + BATCH, count))
                total += compare([partial(fetch, data, join, indices) for data, join in sides], i, args.repeats)
            alone, followed = total / count * 1e3
            overheads[name] = followed / alone - 1
            print(f"{name:<10} {alone:>9.3f} ms {followed:>9.3f} ms {overheads[name]:>8.1%}")
    return int(overheads["typical"] >= 0.03)


if __name__ == "__main__":
    raise SystemExit(main())
