"""A job that is killed again and again, and one that is not: python kill_job.py DATA KILLED CALM KILLS SEED.

Prints how many of the kills hit a job that was still at work.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from everytoken.annotate import ClassList, JobOptions, Preprocessing, annotate
from everytoken.annotate.own_function import FunctionAnnotator
from everytoken.data.find import open_dataset


def score(images):
    """A score for each of three classes from the mean colour of each 8x8 block; slow enough to be killed in the act."""
    time.sleep(0.01)
    return torch.nn.functional.avg_pool2d(images, 8).permute(0, 2, 3, 1) * 10


def run(data: Path, out: Path) -> None:
    torch.set_num_threads(1)
    names = ("blue", "green", "red")
    annotator = FunctionAnnotator("test", Preprocessing((32, 32)), ClassList(3, names), {}, score)
    annotate(open_dataset(data), out, annotator, JobOptions(batch_size=3, workers=0, shard_size=4))


def main(data: str, out: str, calm: str, kills: str, seed: str) -> None:
    draw, hits = random.Random(int(seed)), 0
    for _ in range(int(kills)):
        child = os.fork()  # the parent only imports, so a fork is safe and saves the imports
        if child == 0:
            run(Path(data), Path(out))
            os._exit(0)
        time.sleep(draw.uniform(0.0, 0.4))
        os.kill(child, signal.SIGKILL)
        hits += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    run(Path(data), Path(out))
    run(Path(data), Path(calm))
    print(hits)


if __name__ == "__main__":
    main(*sys.argv[1:])
