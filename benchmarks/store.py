"""What the store costs: bytes, opening, random reads against torch.load, writing, memory.

    python benchmarks/store.py                  # 100,000 maps, 0.7 GB
    python benchmarks/store.py --total 1281167  # 8.4 GB

Everything is measured in one run with interleaved repeats, so the ratios mean something on a busy machine; the
absolute times do not. Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from everytoken.maps import Maps, MapWriter, StoreMeta, verify

GRID, TOP_K, CLASSES = (18, 18), 5, 1000
META = StoreMeta(GRID, TOP_K, num_classes=CLASSES, annotator={"name": "benchmark"})


def keys(total: int) -> list[str]:
    """Paths like ImageNet's."""
    return [f"n{i % 1000:08d}/n{i % 1000:08d}_{i // 1000 * 7 + 10000}.JPEG" for i in range(total)]


def random_maps(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and distinct classes [count, 18, 18, 5]."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(-rng.normal(8, 3, (count, *GRID, TOP_K)).astype(np.float16), axis=-1)
    classes = (rng.integers(0, CLASSES, (count, *GRID, 1)) + np.arange(TOP_K) * 37) % CLASSES
    return scores, classes


def fill(folder: Path, total: int, batch: int = 32) -> float:
    """Write a real store; seconds."""
    scores, classes = random_maps(batch)
    names = keys(total)
    began = time.perf_counter()
    with MapWriter(folder, names, META) as writer:
        for first in range(0, total, batch):
            n = min(batch, total - first)
            writer.put(range(first, first + n), scores[:n], classes[:n], [(500, 375)] * n, [(0, 0, 1, 1)] * n)
        writer.finalize()
    return time.perf_counter() - began


OPENING = """
import json, sys, time
import numpy, everytoken.maps.store as s
def rss():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
before, t0 = rss(), time.perf_counter()
store = s.Maps(sys.argv[1]); t1 = time.perf_counter()
store[sys.argv[2]]; t2 = time.perf_counter()
print(json.dumps({'open': t1 - t0, 'first': t2 - t0, 'rss': rss() - before}))
"""

WRITING = """
import runpy, sys
from pathlib import Path
fill = runpy.run_path(sys.argv[1])["fill"]
fill(Path(sys.argv[2]), int(sys.argv[3]))
# the peak of this program only; getrusage would count the parent's, which has torch in it
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def child(code: str, *words: object) -> str:
    return subprocess.check_output([sys.executable, "-c", code, *map(str, words)], text=True)


def interleaved(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds per job and round; the jobs take turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - began)
    return times


def reading(folder: Path, written: list[str], pt: Path, rounds: int) -> dict[str, float]:
    """Microseconds per random read, and the median of the ratio to torch.load over the rounds."""
    import torch

    pt.mkdir()
    scores, classes = random_maps(300, seed=2)
    for i in range(300):  # as released: float16 [2, 5, 18, 18], a permuted view
        planes = torch.stack([torch.from_numpy(scores[i]), torch.from_numpy(classes[i]).half()])
        torch.save(planes.permute(0, 3, 1, 2), pt / f"{i}.pt")
    released = [pt / f"{i}.pt" for i in range(300)]
    maps = Maps(folder)
    some = written[:3000]

    def load_released() -> None:
        for path in released:
            torch.load(path, weights_only=True)

    def read() -> None:
        for key in some:
            maps[key]

    jobs = {"torch.load": load_released, "store": read}
    times = interleaved(jobs, rounds)
    per = {name: [t / (300 if name == "torch.load" else len(some)) for t in values] for name, values in times.items()}
    result = {name: statistics.median(values) * 1e6 for name, values in per.items()}
    result["ratio store"] = statistics.median(a / b for a, b in zip(per["store"], per["torch.load"], strict=True))
    return result


def writing(work: Path, total: int) -> tuple[float, float]:
    """Maps per second, and that as a part of what writing the same bytes in one go reaches."""
    raw = os.urandom(1 << 20) * (total * 6528 // (1 << 20))

    def bare() -> None:
        with (work / "bare").open("wb") as file:
            file.write(raw)
            os.fsync(file.fileno())

    def store() -> None:
        shutil.rmtree(work / "written", ignore_errors=True)
        fill(work / "written", total)

    times = interleaved({"bare": bare, "store": store}, 3)
    ratio = statistics.median(b / s for b, s in zip(times["bare"], times["store"], strict=True))
    return total / statistics.median(times["store"]), ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=100_000, help="maps of the store")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repeats of the reading test")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    rows: list[tuple[str, str, str, bool | None]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        fill(work / "large", options.total)
        some = np.random.default_rng(1).choice(options.total, min(4000, options.total), replace=False)
        names = keys(options.total)
        written = [names[i] for i in some]
        size = sum(path.stat().st_size for path in (work / "large").iterdir())
        each = size / options.total
        rows.append((f"bytes per image, 18x18x5, {options.total:,} images", f"{each:,.1f}", "<= 6,600", each <= 6600))

        opened = [json.loads(child(OPENING, work / "large", written[0])) for _ in range(5)]
        seconds, first = (statistics.median(one[k] for one in opened) for k in ("open", "first"))
        memory = max(one["rss"] for one in opened) / 1e6
        rows.append(("opening it", f"{seconds * 1e3:.1f} ms", "< 1 s", seconds < 1))
        rows.append(("opening it and the first read", f"{first * 1e3:.1f} ms", "< 1 s", first < 1))
        rows.append(("memory of both", f"{memory:.1f} MB", "< 20 MB", memory < 20))

        read = reading(work / "large", written, work / "pt", options.rounds)
        rows.append(("random read by key, checked", f"{read['store']:.1f} µs", "", None))
        rows.append(("torch.load of a released map", f"{read['torch.load']:.1f} µs", "", None))
        ratio = read["ratio store"]
        rows.append(("store / torch.load", f"1/{1 / ratio:.0f}", "<= 1/20", ratio <= 1 / 20))

        rate, part = writing(work, 4096)
        rows.append(("writing", f"{rate:,.0f} maps/s", "", None))
        rows.append(("writing / bare write of the same bytes", f"{part:.2f}", "", None))
        peaks = [int(child(WRITING, __file__, work / f"memory{n}", n)) / 1e6 for n in (2000, 40000)]
        grown = peaks[1] - peaks[0]
        # 38,000 more key strings and their plan are about 10 MB; the maps themselves would be 250 MB
        rows.append(("more memory for 40,000 maps than for 2,000", f"{grown:.1f} MB", "< 25 MB", grown < 25))

        began = time.perf_counter()
        verdict = verify(work / "memory40000")
        speed = verdict.bytes / (time.perf_counter() - began) / 1e6
        rows.append(("verify", f"{speed:,.0f} MB/s", "intact", verdict.ok))
    table = Table("store", "measured", "limit", "")
    for what, value, limit, good in rows:
        table.add_row(what, value, limit, "" if good is None else "ok" if good else "[red]BROKEN")
    Console(width=100).print(table)
    return int(any(good is False for *_, good in rows))


if __name__ == "__main__":
    sys.exit(main())
