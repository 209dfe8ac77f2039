"""Images per second of our loader against timm's own, same photos, same augmentation, same number of workers.

    python benchmarks/loader.py FOLDER [--workers 0 2] [--rounds 8] [--json out.json]

FOLDER: photos, at any depth. Measured: from files on disk to normalised float32 batches on the CPU.
    timm        timm.data.create_loader: RandomResizedCrop, flip, rand-m9-mstd0.5-inc1, erasing 0.25, prefetcher
    ours        the same augmentation through everytoken.data
    ours+maps   and an 18x18x5 score map per image, read from a real store, collated with its vocabulary
Each round runs all of them one after the other, in changing order; a row shows the median of the rounds' ratios, and
their smallest and largest, so that a busy machine disturbs all alike. Every loader's first epoch is not counted.
Without workers the CPU time is shown as well, which other programs disturb less.

Pillow 13 refuses to posterize to 0 bits, which timm 1.0.30 asks for with this augmentation; the benchmark mends that
in timm first, as timm would crash otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import timm.data.auto_augment as timm_aa
import torch
from PIL import Image
from timm.data import create_loader

from everytoken.data import AugmentOptions, Loader, Prefetcher, TrainTransform, open_dataset
from everytoken.data.datasets import DataSet
from everytoken.data.randaugment import posterize
from everytoken.maps import Maps, MapWriter, StoreMeta

AA, ERASE = "rand-m9-mstd0.5-inc1", 0.25


class Photos(torch.utils.data.Dataset):
    """The same files for timm, opened as timm's ImageDataset opens them."""

    transform: Callable[[Image.Image], torch.Tensor]

    def __init__(self, data: DataSet, times: int) -> None:
        self.paths = [data.where(i) for i in range(len(data))] * times

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[object, int]:
        with open(self.paths[i], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), 0


def make_store(data: DataSet, folder: Path) -> Maps:
    """A store of plausible maps: about 30 classes per image, as real annotators give."""
    rng = np.random.default_rng(0)
    meta = StoreMeta(grid=(18, 18), top_k=5, num_classes=1000, annotator={"name": "synthetic"})
    sizes = {data.key(i): data.picture(i).size for i in range(len(data))}
    with MapWriter(folder / "maps", sizes, meta) as writer:
        for shard in writer.pending_shards():
            for position in writer.shard_range(shard):
                words = rng.choice(1000, 30, replace=False)
                classes = words[rng.random((18, 18, 30)).argsort(-1)[..., :5]]
                scores = -np.sort(-rng.normal(5, 3, (18, 18, 5)), axis=-1)
                size = sizes[writer.key(position)]
                writer.put([position], scores[None], classes[None], [size], [(0.0, 0.0, 1.0, 1.0)])
        writer.finalize()
    return Maps(folder / "maps")


def contestants(data: DataSet, times: int, batch: int, workers: int, store: Maps) -> dict[str, Callable[[], int]]:
    """Name -> run one epoch and return the number of images."""
    view = TrainTransform(224, AugmentOptions(aa=AA, reprob=ERASE))
    theirs = create_loader(
        Photos(data, times), 224, batch, is_training=True, re_prob=ERASE, re_mode="pixel", auto_augment=AA,
        interpolation="random", num_workers=workers, device=torch.device("cpu"), mean=view.mean, std=view.std,
    )  # fmt: skip
    many = data.subset(np.tile(np.arange(len(data)), times))
    epochs = iter(range(10**9))

    def run_timm() -> int:
        return sum(len(images) for images, _ in theirs)

    def ours(with_maps: bool) -> Callable[[], int]:
        loader = Loader(many, view, batch, train=True, workers=workers, maps=store if with_maps else None)

        def run() -> int:
            batches = Prefetcher(loader.epoch(next(epochs)), "cpu", view.mean, view.std)
            return sum(len(batch) for batch in batches)

        return run

    return {"timm": run_timm, "ours": ours(False), "ours+maps": ours(True)}


def rotated(names: list[str], rounds: int) -> Iterator[list[str]]:
    """Another order in each round."""
    for k in range(rounds):
        yield names[k % len(names) :] + names[: k % len(names)]


def report(title: str, rates: dict[str, list[float]], results: dict[str, dict[str, object]]) -> None:
    """Print a table and keep its numbers."""
    print(f"\n{title:34} median   ratio to timm: median, smallest, largest")
    for name, values in rates.items():
        ratios = sorted(a / b for a, b in zip(values, rates["timm"], strict=True))
        middle = statistics.median(ratios)
        print(f"{name:34} {statistics.median(values):6.0f}   {middle:20.2f} {ratios[0]:9.2f} {ratios[-1]:8.2f}")
        results[f"{name}: {title}"] = {"values": values, "ratio_to_timm": middle}


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="photos, at any depth")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=256, help="images of one epoch, at least; photos are repeated")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    timm_aa.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **_: posterize(image, bits)

    data = open_dataset(args.folder, "all", labelled=False)
    times = -(-args.images // len(data))
    print(f"{len(data)} photos, {times} times an epoch, batches of {args.batch}, 224 px, {AA}, erasing {ERASE}")
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        store = make_store(data, Path(temporary))
        for workers in args.workers:
            runs = contestants(data, times, args.batch, workers, store)
            for run in runs.values():
                run()  # starts workers, warms the page cache
            walls: dict[str, list[float]] = {name: [] for name in runs}
            cores: dict[str, list[float]] = {name: [] for name in runs}
            for order in rotated(list(runs), args.rounds):
                for name in order:
                    wall, core = time.perf_counter(), time.process_time()
                    images = runs[name]()
                    walls[name].append(images / (time.perf_counter() - wall))
                    cores[name].append(images / (time.process_time() - core))
            report(f"images/s, {workers} workers", walls, results)
            if workers == 0:  # the work of other processes is not in this one
                report("images per second of CPU time", cores, results)
            del runs
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
