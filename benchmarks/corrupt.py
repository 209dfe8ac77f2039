"""Images per second of each corruption, one thread, 224 px, severity 3, the conversion from and to bytes included.

    OMP_NUM_THREADS=1 python benchmarks/corrupt.py [--size 224] [--seconds 0.5] [--photo FILE]

Times are CPU seconds. The last line is all 15 corruptions at 5 severities: what a whole ImageNet-C costs per image and
core, in milliseconds, besides decoding.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken_lab.robust.corruptions import CORRUPTIONS, SEVERITIES, corrupt, gaussian


def scene(size: int) -> np.ndarray:
    """Smooth noise with an object, when there is no photo."""
    rng = np.random.default_rng(0)
    base = gaussian(rng.random((size, size, 3)).astype(np.float32), size / 40)
    base = (base - base.min()) / np.ptp(base)
    base[size // 4 : size // 2, size // 3 : size // 2] = 0.9
    return (base * 255).astype(np.uint8)


def milliseconds(pixels: np.ndarray, name: str, severity: int, seconds: float) -> float:
    """CPU time of one corruption."""
    corrupt(pixels, name, severity, keyed.generator(0, "warm"))
    count, started = 0, time.process_time()
    while count < 3 or time.process_time() - started < seconds:
        corrupt(pixels, name, severity, keyed.generator(0, count))
        count += 1
    return 1000 * (time.process_time() - started) / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each corruption")
    parser.add_argument("--photo", default="", help="an image file instead of a made-up scene")
    options = parser.parse_args()
    side = options.size
    photo = Image.open(options.photo).convert("RGB").resize((side, side)) if options.photo else None
    pixels = np.asarray(photo) if photo else scene(side)
    print(f"{'corruption':<20}{'ms':>8}{'images/s':>10}")
    total = 0.0
    for name in CORRUPTIONS:
        cost = milliseconds(pixels, name, 3, options.seconds)
        print(f"{name:<20}{cost:8.1f}{1000 / cost:10.0f}")
        total += sum(milliseconds(pixels, name, s, options.seconds / 10) for s in SEVERITIES)
    print(f"\n15 corruptions at 5 severities: {total:.0f} ms per image")


if __name__ == "__main__":
    main()
