"""A job that is killed again and again, and one that is not: python kill_job.py DATA KILLED CALM KILLS SEED.

Each kill comes a few random milliseconds after a random batch, so it hits the job at work on a machine of any speed.
Prints how many of the kills hit.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.annotators.annotator import Annotator
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import open_dataset


def run(data: Path, out: Path, kill_at: int = 0, kill_after: float = 0.0) -> None:
    """Annotate `data`; be killed `kill_after` seconds after the batch number `kill_at` began (0: never)."""
    torch.set_num_threads(1)
    batches = 0

    def score(images: torch.Tensor) -> torch.Tensor:
        """A score for each of three classes from the mean colour of each 8x8 block."""
        nonlocal batches
        batches += 1
        if batches == kill_at:
            threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if kill_at:
            time.sleep(0.01)
        return torch.nn.functional.avg_pool2d(images, 8).permute(0, 2, 3, 1) * 10

    names = ("blue", "green", "red")
    annotator = Annotator("test", EvalTransform((32, 32)), ClassList(3, names), {}, score)
    fill_store(open_dataset(data), out, annotator, AnnotateOptions(batch_size=3, workers=0, shard_size=4))


def main(data: str, out: str, calm: str, kills: str, seed: str) -> None:
    draw, hits = random.Random(int(seed)), 0
    for _ in range(int(kills)):
        at, after = draw.randint(1, 2), draw.uniform(0.0, 0.02)
        child = os.fork()  # the parent only imports, so a fork is safe and saves the imports
        if child == 0:
            run(Path(data), Path(out), at, after)
            os._exit(0)
        hits += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    run(Path(data), Path(out))
    run(Path(data), Path(calm))
    print(hits)


if __name__ == "__main__":
    main(*sys.argv[1:])
