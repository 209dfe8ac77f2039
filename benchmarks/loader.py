"""Our loader against timm's own, in CPU time per image: same photos, same augmentation, same number of workers.

    python benchmarks/loader.py FOLDER [--workers 0 2] [--rounds 6]

FOLDER: photos, at any depth. Measured: from files on disk to normalised float32 batches on the CPU.
    timm        timm.data.create_loader: RandomResizedCrop, flip, rand-m9-mstd0.5-inc1, erasing 0.25, prefetcher
    ours        the same augmentation through everytoken.data
    ours+maps   and an 18x18x5 score map per image, read from a real store, collated with its vocabulary
The CPU time of all processes counts, workers included: wall time says little on a busy machine. The loaders take turns
(`ratios.py`). Every loader's first epoch is not counted. Exit code 1 when the goal is broken.

Pillow 13 refuses to posterize to 0 bits, which timm 1.0.30 asks for with this augmentation; the benchmark mends that
in timm first, as timm would crash otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm.data.auto_augment as timm_aa
import torch
from PIL import Image
from ratios import judge, ratio, take_turns
from timm.data import create_loader

from everytoken.data.batch import Prefetcher
from everytoken.data.randaugment import posterize
from everytoken.maps import Maps, MapWriter, StoreMeta
from everytoken_lab.data.augment import AugmentOptions, TrainTransform
from everytoken_lab.data.datasets import DataSet, open_dataset
from everytoken_lab.data.loader import Loader

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


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="photos, at any depth")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=256, help="images of one epoch, at least; photos are repeated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    timm_aa.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **_: posterize(image, bits)

    data = open_dataset(args.folder, "all", labelled=False)
    times = -(-args.images // len(data))
    print(f"{len(data)} photos, {times} times an epoch, batches of {args.batch}, 224 px, {AA}, erasing {ERASE}")
    held = True
    with tempfile.TemporaryDirectory() as temporary:
        store = make_store(data, Path(temporary))
        for workers in args.workers:
            runs = contestants(data, times, args.batch, workers, store)
            images = runs["ours"]()
            seconds = take_turns(runs, args.rounds)
            print(f"\n{f'{workers} workers':12} CPU ms per image   timm / this")
            for name, values in seconds.items():
                faster = ratio(seconds["timm"], values)
                print(f"{name:12} {1e3 * statistics.median(values) / images:16.2f}   {faster}")
            if workers:
                what = f"loader with maps against timm's, {workers} workers, images per CPU second"
                held &= judge(what, ratio(seconds["timm"], seconds["ours+maps"]), at_least=1.4)
            del runs
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
