"""What annotating costs beside the network: speed against the bare network, decoding included, and memory.

    OMP_NUM_THREADS=1 python benchmarks/annotate.py        # tf_efficientnet_lite0 at 448 px, random weights
    OMP_NUM_THREADS=1 python benchmarks/annotate.py --model resnet50 --img-size 576 --data PHOTOS

1. The same decoded batches in memory, through the bare network (class head at every cell), and the job's own work: the
   job with the network replaced by its answers, kept from before, so what remains is normalising, top k, checks,
   checksums, writing with fsync. Limit: the job reaches 95 % of the bare network's speed, bare / (bare + own). For
   comparison, the whole job at once, whose ratio has all the noise of two runs of the network, and the plain
   classifier, which pools before its head.
2. From JPEG files with decoding workers: seconds per image, and the part of it that the network waits for images.
3. Memory: the peak of a job over 400 and over 4,000 images, tiny network; it must not grow.

Times are CPU seconds (the network runs on the CPU here) of interleaved repeats, the smallest of each side; wall time is
shown too, but on a busy machine it says little. Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from ratios import Ratio, judge
from rich.console import Console
from rich.table import Table

from everytoken.data.batch import normalise
from everytoken.maps import MapWriter, StoreMeta
from everytoken.models import TokenModel
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.annotators.annotator import Annotator, CellScores
from everytoken_lab.annotators.features import ImageBatch, ImageReader, read_batches
from everytoken_lab.annotators.job import fill, fill_store, store_order
from everytoken_lab.classes import ClassList, plan_classes
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import DataSet, open_dataset

CPU = torch.device("cpu")
CLASSES = 1000


def photos(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """JPEG files that compress like photos: smooth noise."""
    rng = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    for number in range(count):
        coarse = rng.integers(0, 255, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
        fine = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        made = np.clip(fine + rng.normal(0, 6, fine.shape), 0, 255).astype(np.uint8)
        Image.fromarray(made).save(folder / "a" / f"{number:05d}.jpg", quality=90)
    return folder


def network(name: str, side: int) -> Annotator:
    torch.manual_seed(0)
    model = CellScores(TokenModel(timm.create_model(name, num_classes=CLASSES)))
    made = Annotator(name, EvalTransform((side, side), 1.0, "squash"), ClassList(CLASSES), {}, model)
    made.to(CPU)
    return made


def network_input(annotator: Annotator, batch: ImageBatch) -> torch.Tensor:
    wanted = annotator.preprocessing
    return normalise(batch.images, wanted.mean, wanted.std, channels_last=True)


class Answered(Annotator):
    """Gives the answers of another network, which were kept."""

    def remember(self, other: Annotator, decoded: list[ImageBatch]) -> None:
        with torch.inference_mode():
            self.kept = {int(b.indices[0]): other.score(network_input(other, b), b.indices) for b in decoded}

    def score(self, images: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
        return self.kept[int(indices[0])]

    def grid(self, device: torch.device) -> tuple[int, int]:
        _, h, w, _ = next(iter(self.kept.values())).shape
        return h, w


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds of this process, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


@torch.inference_mode()
def bare(annotator: Annotator, decoded: list[ImageBatch], pooled: bool) -> None:
    module = annotator.network.model.backbone if pooled else annotator.network
    for batch in decoded:
        module(network_input(annotator, batch))  # type: ignore[operator]


def job(annotator: Annotator, data: DataSet, decoded: list[ImageBatch]) -> None:
    """The job on decoded batches, with a new store."""
    plan = plan_classes(annotator.name, annotator.classes, data.name, [], foreign=True)
    meta = StoreMeta(annotator.grid(CPU), 5, num_classes=CLASSES)
    with (
        tempfile.TemporaryDirectory() as folder,
        MapWriter(Path(folder) / "maps", data.keys(), meta) as writer,
    ):
        for _ in fill(writer, annotator, plan, decoded, "", CPU):
            pass
        writer.finalize()


def speed(annotator: Annotator, data: DataSet, batch_size: int, repeats: int) -> dict[str, tuple[float, float]]:
    """CPU and wall seconds per image of each way, the smallest of interleaved repeats."""
    reader = ImageReader(data, store_order(data), annotator.preprocessing)
    spans = [range(i, min(i + batch_size, len(data))) for i in range(0, len(data), batch_size)]
    decoded = [reader.__getitems__(span) for span in spans]
    kept = Answered(annotator.name, annotator.preprocessing, annotator.classes, {}, annotator.network)
    kept.remember(annotator, decoded)
    ways: dict[str, Callable[[], object]] = {
        "bare network": lambda: bare(annotator, decoded, False),
        "the job's own work": lambda: job(kept, data, decoded),
        "the whole job": lambda: job(annotator, data, decoded),
        "plain classifier": lambda: bare(annotator, decoded, True),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for name in ways:
        ways[name]()  # warm up
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(timed(way))
    return {name: tuple(min(column) / len(data) for column in zip(*rows, strict=True)) for name, rows in found.items()}  # type: ignore[misc]


def waiting(annotator: Annotator, data: DataSet, batch_size: int, workers: int) -> tuple[float, float]:
    """(wall seconds per image, part spent waiting for decoded images) of the whole pipeline from files."""
    waited = 0.0
    plan = plan_classes(annotator.name, annotator.classes, data.name, [], foreign=True)
    meta = StoreMeta(annotator.grid(CPU), 5, num_classes=CLASSES)
    with (
        tempfile.TemporaryDirectory() as folder,
        MapWriter(Path(folder) / "maps", data.keys(), meta) as writer,
    ):
        reader = ImageReader(data, store_order(data), annotator.preprocessing)
        shards = [writer.shard_range(shard) for shard in writer.pending_shards()]
        spans = [shard[i : i + batch_size] for shard in shards for i in range(0, len(shard), batch_size)]
        stream = read_batches(reader, spans, workers)
        first = next(stream)  # starting the workers is not waiting

        def watched():  # type: ignore[no-untyped-def]
            nonlocal waited
            yield first
            while True:
                start = time.perf_counter()
                batch = next(stream, None)
                waited += time.perf_counter() - start
                if batch is None:
                    return
                yield batch

        begun = time.perf_counter()
        for _ in fill(writer, annotator, plan, watched(), "", CPU):
            pass
        seconds = time.perf_counter() - begun
    return seconds / len(data), waited / seconds


def peak_of(count: int, folder: str) -> int:
    """Peak memory in bytes of a job over `count` images; runs in a process of its own."""
    data = open_dataset(folder, labelled=False)
    data = data.subset(np.arange(len(data)))
    data = _Repeated(data, count)
    score = lambda images: torch.nn.functional.avg_pool2d(images, 8).permute(0, 2, 3, 1)  # noqa: E731
    annotator = Annotator("tiny", EvalTransform((64, 64)), ClassList(3), {}, score)
    with tempfile.TemporaryDirectory() as out:
        fill_store(data, Path(out) / "maps", annotator, AnnotateOptions(workers=0, foreign_classes=True))
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would tell the peak of the process that started this one
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Repeated(DataSet):
    """A data set shown as `count` images under other keys."""

    def __init__(self, base: DataSet, count: int) -> None:
        self.base, self.name, self.class_names = base, base.name, []
        self.labels = np.full(count, -1)

    def key(self, i: int) -> str:
        return f"{i:08d}.jpg"

    def open_bytes(self, i: int) -> bytes:
        return self.base.open_bytes(i % len(self.base))


def memory(folder: Path) -> tuple[int, int]:
    def ask(count: int) -> int:
        words = [sys.executable, __file__, "--peak-of", str(count), "--data", str(folder)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    return ask(400), ask(4000)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tf_efficientnet_lite0")
    options.add_argument("--img-size", type=int, default=448)
    options.add_argument("--images", type=int, default=32)
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--data", default="", help="folder of photos; default: made here, 500 x 375")
    options.add_argument("--peak-of", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.peak_of:
        print(peak_of(given.peak_of, given.data))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.data) if given.data else photos(Path(made) / "photos", given.images, (500, 375))
        data = open_dataset(folder, labelled=False)
        data = data.subset(np.arange(min(given.images, len(data))))
        annotator = network(given.model, given.img_size)
        found = speed(annotator, data, given.batch_size, given.repeats)
        table = Table("way", "CPU ms per image", "wall ms", "speed against the bare network (CPU)")
        base = found["bare network"][0]
        for name, (cpu, wall) in found.items():
            ratio = "" if name in ("bare network", "the job's own work") else f"{base / cpu:.1%}"
            table.add_row(name, f"{1e3 * cpu:.1f}", f"{1e3 * wall:.1f}", ratio)
        console = Console()
        console.print(f"{given.model} at {given.img_size} px, {len(data)} images in batches of {given.batch_size}")
        console.print(table)
        seconds, part = waiting(annotator, data, given.batch_size, given.workers)
        console.print(
            f"from JPEG files, {given.workers} decoding process(es): {1e3 * seconds:.1f} ms wall per image, "
            f"{part:.1%} of it waiting for images"
        )
        few, many = memory(folder)
        console.print(f"peak memory: {few / 1e6:.1f} MB for 400 images, {many / 1e6:.1f} MB for 4,000")
    reached = base / (base + found["the job's own work"][0])
    more = max(many - few, 0) / 3600
    held = judge("the annotating job's speed, of the bare network's", Ratio(reached, reached, reached), at_least=0.95)
    return 0 if judge("its memory, bytes more per image", Ratio(more, more, more), at_most=1111) and held else 1


if __name__ == "__main__":
    raise SystemExit(main())
