"""Run the study, one training after the other, in this one process: `nice -n 19 python benchmarks/study/run.py WORK`.

WORK holds images, maps, run folders and `results.jsonl`, to which each finished run appends a row. Kill it at any
moment; the same command goes on: finished runs (of WORK, and of the log beside this file) are not repeated, a run that
was cut off goes on from its last checkpoint, of which there is one per epoch (seconds). Started twice, it uses two
cores. After every run it starts anew (exec), so nothing piles up over days. A run that fails is noted in
`failures.jsonl` and left out the next time.

    --list      what is to do, with the hours that it will take
    --flowers   the zip of flower photos with train/ and val/, for part d; without it that part is left out
    --parts     only these
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import plan as study

HOURS = 0.07  # of one core per 150 epochs of the smaller ViT
COST = {"c, LV-ViT": 2.0, "c, Swin": 1.5, "c, Swin with crops": 1.3, study.LARGER: 6.0}


def read_rows(path: Path) -> dict[str, dict]:
    """Rows by key; a line that was cut off by a kill does not count."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["key"]] = row
    return rows


def finished(work: Path) -> dict[str, dict]:
    """Rows of WORK, and of the log beside this file."""
    return read_rows(Path(__file__).with_name("results.jsonl")) | read_rows(work / "results.jsonl")


def append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def version() -> str:
    """Commit of the package that runs."""
    import everytoken

    words = ["git", "-C", str(Path(everytoken.__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def train(run: study.Run, work: Path, flowers: str) -> dict:
    """One run; its row."""
    from measure import drloc_constant, measure
    from prepare import describe, images_of, maps_of

    import everytoken_lab as lab
    from everytoken_lab.training.classify import Classification

    Classification.is_reported = False  # nobody looks at the pages of so many runs
    code = version()
    with (work / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        images = images_of(work, run.data, run.seed, flowers)
    with (work / "locks" / f"maps {run.data} {run.seed}").open("w") as lock:  # one annotator may take minutes
        fcntl.flock(lock, fcntl.LOCK_EX)
        maps = maps_of(work, run.data, run.seed, run.maps) if run.maps else None
    folder = work / "runs" / run.key.replace(" ", "-").replace(",", "")
    whole, started, cpu = not folder.exists(), time.time(), time.process_time()
    result = lab.train(images, maps=maps or "", seed=run.seed, out=str(folder), **run.settings)
    seconds, cpu = time.time() - started, time.process_time() - cpu
    last = result.summary["last"]
    row = {
        "key": run.key,
        "part": run.part,
        "name": run.name,
        "seed": run.seed,
        "code": code,
        "top1": last["val_top1"],
        "loss": last["val_loss"],
        "ece": last["val_ece"],
        "epochs": run.settings["epochs"],
        "lr": run.settings["lr"],
        "maps": run.maps,
        "objectives": run.settings["objectives"],
        "mixing": run.settings["mixing"],
        "train_loss": result.last("loss"),
        "cpu_seconds": round(cpu, 1) if whole else None,
        "seconds": round(seconds, 1) if whole else None,
    }
    if run.part != "tune":
        row |= {name: round(value, 5) for name, value in measure(folder, images).items()}
    if result.last("drloc/l1") is not None:
        row |= {"drloc_loss": result.last("drloc/l1"), "drloc_constant": round(drloc_constant(), 5)}
    if maps:
        row["annotator"] = describe(maps)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--flowers", default="")
    parser.add_argument("--parts", nargs="+", default=[])
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    work: Path = options.work
    (work / "locks").mkdir(parents=True, exist_ok=True)
    rows, failures = finished(work), read_rows(work / "failures.jsonl")
    runs = [r for r in study.plan() if r.key not in rows and r.key not in failures]
    runs = [r for r in runs if (not options.parts or r.part in options.parts)]
    runs = [r for r in runs if options.flowers or r.data != "flowers"]
    if options.list:
        for r in runs:
            print(r.key)
        hours = sum(HOURS * COST.get(r.part, 1) * r.settings["epochs"] / study.EPOCHS for r in runs)
        print(f"{len(rows)} done, {len(failures)} failed, {len(runs)} to do: about {hours:.1f} core-hours")
        return 0
    for run in runs:
        lock = (work / "locks" / run.key.replace("/", " ")).open("w")  # held until this process starts anew
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        if run.key in finished(work):
            continue
        print(f"{time.strftime('%d %H:%M')} {run.key}", flush=True)
        from everytoken_lab.engine.loop import Stopped  # imports torch, which a list of what is to do can do without

        try:
            append(work / "results.jsonl", train(run, work, options.flowers))
        except Stopped as stopped:  # by a signal; the run's state is saved
            return stopped.exit_code
        except Exception as error:
            append(work / "failures.jsonl", {"key": run.key, "code": version(), "error": repr(error)})
            traceback.print_exc()
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print("nothing left to do", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
