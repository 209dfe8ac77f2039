"""Kill a training run with SIGKILL at random moments, again and again, and compare the end with an undisturbed run.

    python benchmarks/resume.py DATA [--kills 20] [--epochs 5]

DATA is any folder of class folders. Prints how many kills there were and whether the final weights are the same bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--batch-size", "32", "--warmup-epochs", "1"),
    *("--lr", "0.001", "--checkpoint-steps", "2", "--threads", "1", "--device", "cpu", "--log-interval", "1"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 64, depth: 3, num_heads: 2}", "--drop-path", "0.2"),
    *("--set", "mixing.mixtoken={}", "--set", "objectives.drloc={}", "--set", "objectives.hard={}", "--model-ema"),
]


def weights(folder: Path) -> bytes:
    """The last checkpoint's weights and averages, as bytes."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return (newest / "model.safetensors").read_bytes() + (newest / "ema.safetensors").read_bytes()


def main() -> int:
    """Run, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as root:
        whole, cut = Path(root, "whole"), Path(root, "cut")
        base = [sys.executable, "-m", "everytoken", "train", options.data, *MODEL, "--epochs", str(options.epochs)]
        started = time.monotonic()
        subprocess.run([*base, "--output", str(whole), "--workers", "1"], check=True, stdout=subprocess.DEVNULL)
        length = time.monotonic() - started
        kills = 0
        while kills < options.kills:
            words = [*base, "--output", str(cut), "--workers", str(kills % 3)]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                process.wait(timeout=rng.uniform(0.3, 1.0) * length)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
                continue
            break
        subprocess.run([*base, "--output", str(cut), "--workers", "2"], check=True, stdout=subprocess.DEVNULL)
        same = weights(whole) == weights(cut)
        print(f"{kills} kills; the final weights are {'the same bytes' if same else 'DIFFERENT'}")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
