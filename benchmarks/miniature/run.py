"""Run the plan, one training after the other: `python benchmarks/miniature/run.py WORK --data tiny-imagenet-200`.

First it tunes. WORK gets images (hard links), maps, run folders, `tuning.jsonl`, `right/KEY.npz` (what every validation
image was taken for) and `results.jsonl`, one row per finished run. Kill it at any moment; the same command goes on, a
run from its checkpoint. Several may work in one folder: each takes the next run that nobody has. After each run it
starts anew. A run that fails is noted in failures.jsonl and left out.
`--list` shows what is to do. The fitted head (`fit`) waits until its maps are there: `--fit` makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import plan as study
from filelock import FileLock, Timeout

SECONDS = 0.0034  # of one core per image


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


def append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def file_name(key: str) -> str:
    return key.replace("/", "_").replace(" ", "-")


def prepare(work: Path, data: Path) -> Path:
    """Images as WORK/images/{study,tune}/{train,val}/CLASS; the study's folder."""
    done = work / "images" / "done"
    if not done.exists():
        names = study.classes([p.name for p in (data / "train").iterdir() if p.is_dir()])
        for part, chosen in zip(("study", "tune"), names, strict=True):
            pairs = [(f, f"train/{c}") for c in chosen for f in (data / "train" / c / "images").glob("*.JPEG")]
            for line in (data / "val" / "val_annotations.txt").read_text().splitlines():
                name, c, *_ = line.split("\t")
                pairs += [(data / "val" / "images" / name, f"val/{c}")] if c in chosen else []
            for file, place in pairs:
                target = work / "images" / part / place / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    os.link(file, target)
        done.touch()
    return work / "images" / "study"


def drawn(images: Path, count: int, seed: int) -> tuple[set[str], set[str]]:
    """Names of the training images that a seed learns from, and of the others; fewer images are some of more."""
    from everytoken.keyed import generator

    chosen, others = set(), set()
    for folder in sorted((images / "train").iterdir()):
        names = sorted(f"{folder.name}/{f.name}" for f in folder.iterdir())
        order = generator(seed, "miniature", folder.name).permutation(len(names))
        chosen |= {names[i] for i in order[:count]}
        others |= {names[i] for i in order[count:]}
    return chosen, others


def maps_of(work: Path, images: Path, name: str, seed: int) -> Path:
    """Score maps, made when first asked for. lite0 and fit: only of the 50 images per class that the seed learns from,
    fit in out-of-fold predictions."""
    out = work / "maps" / (name if name == "lite2" else f"{name}-seed{seed}")
    (work / "maps").mkdir(exist_ok=True)
    with FileLock(out.with_suffix(".lock")):
        if not (out / "done").exists():
            annotate(work, images, name, seed, out)
            (out / "done").touch()
    return out


def annotate(work: Path, images: Path, name: str, seed: int, out: Path) -> None:
    import everytoken_lab as lab

    if name != "lite2":
        images = some(work, images, 50, seed)
    how: dict = {"img_size": study.SIZE, "workers": 0, "device": "cpu"}
    if name == "fit":
        lab.annotate(images, out, "fit", fit_model=study.ANNOTATOR, fit_size=study.SIZE, **how)
    else:
        lab.annotate(images, out, study.ANNOTATOR[:-1] + name[-1], **how)


def some(work: Path, images: Path, count: int, seed: int) -> Path:
    """A folder with train/ of the images that a seed draws."""
    folder = work / "images" / f"{count}-seed{seed}"
    for name in drawn(images, count, seed)[0]:
        target = folder / "train" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(images / "train" / name, target)
    return folder


def tuned(work: Path) -> dict:
    """Learning rate and weight decay; rows that tuning.jsonl has not are run first."""
    import everytoken_lab as lab

    log = work / "tuning.jsonl"

    for rate in study.RATES:
        key = f"lr {rate:g}, weight decay {study.DECAY:g}"
        if key not in read_rows(log):
            print(f"{time.strftime('%d %H:%M')} {key}", flush=True)
            settings = {**study.RECIPE, "lr": rate, "weight_decay": study.DECAY, "iters": study.TUNING}
            how: dict = {"objectives": study.HARD, "mixing": study.CUTMIX, "warmup_iters": study.TUNING // 10}
            folder = work / "runs" / file_name(f"tune/{key}")
            result = lab.train(work / "images" / "tune", seed=100, out=str(folder), **how, **settings)
            append(log, {"key": key, "lr": rate, "top1": result.summary["last"]["val_top1"]})
    return {"lr": max(read_rows(log).values(), key=lambda row: row["top1"])["lr"], "weight_decay": study.DECAY}


def claimed(work: Path, runs: list[study.Run]) -> tuple[study.Run, FileLock] | None:
    """The first run that no other worker has; the lock goes with the process."""
    (work / "claims").mkdir(exist_ok=True)
    for run in runs:
        lock = FileLock(work / "claims" / f"{file_name(run.key)}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            continue
        if run.key not in read_rows(work / "results.jsonl"):
            return run, lock
        lock.release()
    return None


def settings_of(run: study.Run, work: Path, images: Path) -> dict:
    """Arguments of `everytoken_lab.train`; makes what a run needs."""
    with FileLock(work / "tuning.lock"):
        best = tuned(work)
    settings = {**study.RECIPE, **best, "iters": run.updates, "warmup_iters": run.updates // 10}
    if run.count < 500:
        left_out = work / "exclude" / f"{run.count}-seed{run.seed}.txt"
        left_out.parent.mkdir(exist_ok=True)
        left_out.write_text("\n".join(sorted(drawn(images, run.count, run.seed)[1])))
        settings["exclude"] = str(left_out)
    if run.arm.maps:
        settings["maps"] = str(maps_of(work, images, run.arm.maps, run.seed))
    return settings


def train(run: study.Run, work: Path, images: Path, settings: dict) -> dict:
    """One run; its row."""
    import everytoken as et
    import everytoken_lab as lab

    code = subprocess.run(
        ["git", "-C", str(Path(et.__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    folder = work / "runs" / file_name(run.key)
    whole, cpu = not folder.exists(), time.process_time()
    result = lab.train(
        images, objectives=run.arm.objectives, mixing=run.arm.mixing, seed=run.seed, out=str(folder), **settings
    )
    cpu = time.process_time() - cpu
    answers = predictions(folder, images)
    (work / "right").mkdir(exist_ok=True)
    np.savez_compressed(work / "right" / f"{file_name(run.key)}.npz", **answers)
    return {
        "key": run.key,
        "part": run.part,
        "name": run.name,
        "count": run.count,
        "seed": run.seed,
        "updates": run.updates,
        "lr": settings["lr"],
        "weight_decay": settings["weight_decay"],
        "code": code,
        "top1": round(100 * float((answers["answer"] == answers["label"]).mean()), 2),
        "loss": round(-float(np.log(answers["probability"].astype(np.float64).clip(1e-6)).mean()), 4),
        "train_loss": round(result.last("loss"), 4),
        "cpu_seconds": round(cpu) if whole else None,
    }


def predictions(folder: Path, images: Path) -> dict[str, np.ndarray]:
    """Label, answer and probability of the label of every validation image, in the dataset's order; in float32."""
    import torch

    from everytoken.data.batch import normalise
    from everytoken_lab.data.augment import eval_view
    from everytoken_lab.data.datasets import open_dataset
    from everytoken_lab.models.open import open_model

    opened, dataset = open_model(folder), open_dataset(images, "val")
    model, view, info = opened.model.eval(), eval_view(opened.info), opened.info
    odds = []
    with torch.inference_mode():
        for start in range(0, len(dataset), 100):
            pixels = np.stack([view(dataset.picture(i))[0] for i in range(start, min(start + 100, len(dataset)))])
            batch = normalise(torch.from_numpy(pixels).permute(0, 3, 1, 2), info.mean, info.std)
            odds.append(model(batch).logits.softmax(1))
    all_odds, labels = torch.cat(odds).numpy(), np.asarray(dataset.labels)
    return {
        "label": labels.astype(np.uint8),
        "answer": all_odds.argmax(1).astype(np.uint8),
        "probability": all_odds[np.arange(len(labels)), labels].astype(np.float16),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--fit", action="store_true", help="only make the maps of the fitted heads")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    rows, failures = read_rows(work / "results.jsonl"), read_rows(work / "failures.jsonl")
    waiting = {seed for seed in study.SEEDS if not (work / "maps" / f"fit-seed{seed}" / "done").exists()}
    runs = [r for r in study.plan() if r.key not in rows and r.key not in failures]
    ready = [r for r in runs if r.arm.maps != "fit" or r.seed not in waiting]
    if options.list:
        for r in runs:
            print(r.key, "" if r in ready else "(waits for --fit)")
        hours = sum(r.updates for r in runs) * study.RECIPE["batch_size"] * SECONDS / 3600
        print(f"{len(rows)} done, {len(failures)} failed, {len(runs)} to do: about {hours:.1f} core-hours")
        return 0
    with FileLock(work / "images.lock"):
        images = prepare(work, options.data)
    if options.fit:
        for seed in study.SEEDS:
            maps_of(work, images, "fit", seed)
        return 0
    taken = claimed(work, ready)
    if taken is None:
        print("nothing left to do", flush=True)
        return 0
    run, lock = taken
    from everytoken_lab.engine.loop import Stopped
    from everytoken_lab.training.classify import Classification

    Classification.is_reported = False  # nobody looks at the pages of so many runs
    print(f"{time.strftime('%d %H:%M')} {run.key}", flush=True)
    settings = settings_of(run, work, images)
    try:
        append(work / "results.jsonl", train(run, work, images, settings))
        shutil.rmtree(work / "runs" / file_name(run.key) / "checkpoints", ignore_errors=True)
    except Stopped as stopped:  # by a signal; the run's state is saved
        return stopped.exit_code
    except Exception as error:
        append(work / "failures.jsonl", {"key": run.key, "error": repr(error)})
        traceback.print_exc()
    sys.stdout.flush()
    lock.release()
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    raise SystemExit(main())
