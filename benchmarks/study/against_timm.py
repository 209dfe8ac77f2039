"""`everytoken train FOLDER` against fine-tuning the same network with timm's own pieces, at equal CPU time.

    python benchmarks/study/against_timm.py run --data DATA --work DIR      continues where it stopped
    python benchmarks/study/against_timm.py table --work DIR

Flowers (5 classes) and CIFAR-10, 30 images per class, five seeds that draw the images, 1,000 test images that no run
sees. Ours is the command with a budget and nothing else: it chooses the network, its size and all the rest, and holds
out a tenth of the 30 images per class. timm then fine-tunes the network and size that ours has chosen, from its
pretrained weights with a new head, on all of the images, with AdamW at three rates, a cosine schedule, label smoothing
and averaged weights; each rate gets as much CPU time as ours took in all, its start included. The rate with the best
mean accuracy on the test images counts, which favours timm. One process and one thread; run one dataset per core.

Ours passes if the lower end of the paired 95 % interval over seeds is not more than one point below timm. One row per
run in DIR/against-timm.jsonl, with the version of the code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from pretrained import DATASETS, Study, read_rows
from timm.data import ImageDataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

from everytoken import stats
from everytoken.data.datasets import open_dataset
from everytoken.evaluation import evaluate
from everytoken.machine import keep_freed_memory
from everytoken.models.open import open_model

SEEDS = (1, 2, 3, 4, 5)
RATES = (3e-4, 1e-3, 3e-3)
BATCH = 32
MARGIN = 1.0  # points


def ours(images: Path, output: Path, seed: int, minutes: float) -> dict[str, Any]:
    """The command as a user types it, and what it made of the test images."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "everytoken", "train", str(images / "train"), "--minutes", f"{minutes:g}"]
    command += ["--output", str(output), "--seed", str(seed)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if log.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.stdout}{log.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = json.loads((output / "result.json").read_text())
    chosen = json.loads((output / "decisions.json").read_text())
    test = open_dataset(images, "val")
    scores = {
        name: evaluate(path, test, workers=0).predictions
        for name, path in (("top1", output), ("linear", output / "linear"))
    }
    row = {name: round(answers.accuracy.value, 2) for name, answers in scores.items()}
    updates = json.loads((output / "summary.json").read_text())["updates"]
    return {
        **row,
        "kept": result["kept"],
        "backbone": chosen["backbone"],
        "img_size": chosen["img_size"],
        "updates": updates,
        "cpu": round(cpu, 1),
    }


def with_timm(images: Path, backbone: str, size: int, rate: float, seed: int, seconds: float) -> dict[str, Any]:
    """timm's pieces in a plain loop, for `seconds` of CPU time."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    opened = open_model(backbone, img_size=size)  # the same weights; what timm.create_model(pretrained=True) would have
    names = sorted(path.name for path in (images / "train").iterdir())
    model: Any = timm.create_model(opened.info.architecture)
    model.load_state_dict(opened.model.backbone.state_dict())
    model.reset_classifier(len(names))
    model = model.to(memory_format=torch.channels_last)
    info = opened.info
    view = {"input_size": (3, size, size), "mean": info.mean, "std": info.std, "interpolation": info.interpolation}
    config = resolve_data_config({**view, "crop_pct": info.crop_pct}, model=model)
    loaders = []
    for split in ("train", "val"):
        data = ImageDataset(str(images / split))
        training = split == "train"
        more = (
            {"scale": (0.5, 1.0), "hflip": 0.5, "color_jitter": 0.2} if training else {"crop_pct": config["crop_pct"]}
        )
        loader = create_loader(
            data,
            config["input_size"],
            BATCH,
            is_training=training,
            use_prefetcher=False,
            interpolation=config["interpolation"],
            mean=config["mean"],
            std=config["std"],
            num_workers=0,
            persistent_workers=False,
            device=torch.device("cpu"),
            **more,
        )
        loaders.append(loader)
    per_epoch = len(loaders[0])
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def update(network: Any, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        pixels, labels = batch
        loss_of(network(pixels.to(memory_format=torch.channels_last)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    def optimizer_of(network: Any) -> Any:
        return create_optimizer_v2(network, opt="adamw", lr=rate, weight_decay=0.05)

    # how many updates fit: two epochs of a copy are timed, which does not count
    copy = timm.create_model(opened.info.architecture, num_classes=len(names)).to(memory_format=torch.channels_last)
    optimizer, times = optimizer_of(copy.train()), []
    for _ in range(2):
        started = time.process_time()
        for batch in loaders[0]:
            update(copy, optimizer, batch)
        times.append(time.process_time() - started)
    epochs = max(1, math.floor(seconds / times[-1]))
    torch.manual_seed(seed)
    np.random.seed(seed)
    optimizer, total = optimizer_of(model.train()), epochs * per_epoch
    schedule = CosineLRScheduler(
        optimizer, t_initial=total, lr_min=1e-6, warmup_t=total // 10, warmup_lr_init=1e-6, t_in_epochs=False
    )
    average = ModelEmaV3(model, decay=1 - 1 / max(20, total / 5), use_warmup=True)
    started, step = time.process_time(), 0
    for _ in range(epochs):
        for batch in loaders[0]:
            schedule.step_update(step)
            update(model, optimizer, batch)
            step += 1
            average.update(model, step=step)
    cpu = time.process_time() - started
    right = {"top1": 0, "top1_last": 0}
    for name, network in (("top1", average.module), ("top1_last", model)):
        network.eval()
        with torch.inference_mode():
            for pixels, labels in loaders[1]:
                right[name] += int((network(pixels.to(memory_format=torch.channels_last)).argmax(1) == labels).sum())
    tested = len(loaders[1].dataset)
    return {**{k: round(100 * v / tested, 2) for k, v in right.items()}, "epochs": epochs, "cpu": round(cpu, 1)}


def run(study: Study, datasets: tuple[str, ...], per_class: int, seeds: tuple[int, ...], minutes: float) -> None:
    """Everything that is not done."""
    version = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for dataset in datasets:
        for seed in seeds:
            what = {"dataset": dataset, "per_class": per_class, "seed": seed}
            images = study.images(dataset, per_class, seed)
            if not study.done(**what, arm="everytoken"):
                row = ours(images, study.work / "runs" / f"{dataset}-{per_class}-seed{seed}", seed, minutes)
                study.add({**what, "arm": "everytoken", "rate": 0.0, "minutes": minutes, **row, "version": version})
            (chosen,) = [
                r for r in study.rows() if r["arm"] == "everytoken" and all(r[k] == v for k, v in what.items())
            ]
            for rate in RATES:
                if not study.done(**what, arm="timm", rate=rate):
                    row = with_timm(images, chosen["backbone"], chosen["img_size"], rate, seed, chosen["cpu"])
                    study.add({**what, "arm": "timm", "rate": rate, **row, "version": version})


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy of ours, of the linear head, and of timm at each rate; the differences to timm's best rate."""
    lines = [
        "| data | per class | seeds | ours (CPU s) | linear head | timm, by rate | ours - best of timm | verdict |",
        "|" + "---|" * 8,
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["per_class"]].append(row)
    for (dataset, per_class), group in groups.items():
        own = {row["seed"]: row for row in group if row["arm"] == "everytoken"}
        by_rate: dict[float, dict[int, float]] = defaultdict(dict)
        for row in group:
            if row["arm"] == "timm":
                by_rate[row["rate"]][row["seed"]] = row["top1"]
        seeds = sorted(seed for seed in own if all(seed in scores for scores in by_rate.values()) and by_rate)
        if not seeds:
            continue
        means = {rate: float(np.mean([scores[seed] for seed in seeds])) for rate, scores in sorted(by_rate.items())}
        best = max(means, key=lambda rate: means[rate])
        gain = stats.mean([own[seed]["top1"] - by_rate[best][seed] for seed in seeds])
        interval, verdict = "", "one seed says nothing"
        if gain.low is not None and gain.high is not None:
            interval = f" ({gain.low:+.2f} to {gain.high:+.2f})"
            verdict = f"{'' if gain.low >= -MARGIN else 'not shown to be '}at most {MARGIN:g} point below"
        mean, cpu, linear = (np.mean([own[seed][name] for seed in seeds]) for name in ("top1", "cpu", "linear"))
        others = ", ".join(f"{rate:g}: {value:.2f}" for rate, value in means.items())
        lines.append(
            f"| {dataset} | {per_class} | {len(seeds)} | {mean:.2f} ({cpu:.0f}) | {linear:.2f} | {others} | "
            f"{gain.value:+.2f}{interval} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, run or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--per-class", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--datasets", nargs="+", choices=tuple(DATASETS), default=tuple(DATASETS))
    chosen = parser.parse_args()
    if chosen.what == "table":
        print(table(read_rows(chosen.work / "against-timm.jsonl")))
        return
    keep_freed_memory()
    torch.set_num_threads(1)
    chosen.work.mkdir(parents=True, exist_ok=True)
    study = Study(chosen.data, chosen.work)
    study.results = chosen.work / "against-timm.jsonl"
    run(study, tuple(chosen.datasets), chosen.per_class, tuple(chosen.seeds), chosen.minutes)


if __name__ == "__main__":
    main()
