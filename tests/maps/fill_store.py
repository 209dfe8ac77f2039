"""Fill a store with maps that follow from the key alone; run as a program it is the victim of the kill tests."""

import sys
import time
import zlib
from pathlib import Path

import numpy as np

from everytoken.maps import MapWriter, ScoreMap, Skipped, StoreMeta

META = StoreMeta(grid=(3, 4), top_k=2, num_classes=11, annotator={"name": "test", "size": [96, 128]})


def keys(n: int) -> list[str]:
    return [f"class {i % 3}/deep.er/größe_{i:04d}.v1.JPEG" for i in range(n)]


def make_map(key: str, grid: tuple[int, int] = (3, 4), top_k: int = 2, num_classes: int = 11) -> ScoreMap:
    rng = np.random.default_rng(zlib.crc32(key.encode("utf-8", "surrogateescape")))
    scores = -np.sort(-rng.normal(size=(*grid, top_k)) * 4).astype(np.float16)
    classes = np.argsort(rng.random((*grid, num_classes)))[..., :top_k]
    area = (0.0, -0.25, 1.0, 1.25) if rng.random() < 0.5 else (0.125, 0.0, 0.875, 1.0)
    return ScoreMap(scores, classes.astype(np.uint16 if num_classes < 65536 else np.uint32), (640, 480), area)


def make_record(key: str) -> ScoreMap | Skipped:
    """Every tenth image cannot be read."""
    return Skipped("cannot be\nread") if "0." in key.split("_")[-1] else make_map(key)


def fill(
    path: Path, n: int = 40, shard_size: int = 8, rank: int = 0, world: int = 1, delay: float = 0, finish: bool = True
) -> None:
    with MapWriter(path, keys(n), META, shard_size, rank=rank, world=world) as writer:
        for key in writer.pending_keys():
            time.sleep(delay)
            writer.write({key: make_record(key)})
        if finish:
            writer.finalize()


if __name__ == "__main__":
    folder, count, size, number, processes, pause, end = sys.argv[1:]
    fill(Path(folder), int(count), int(size), int(number), int(processes), float(pause), bool(int(end)))
