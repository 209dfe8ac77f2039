"""What pays when training starts from pretrained weights: linear heads, fine-tuning, token labels, CutMix.

    python benchmarks/study/pretrained.py run --data DATA --work DIR      continues where it stopped
    python benchmarks/study/pretrained.py table --work DIR

Flowers (5 classes) and CIFAR-10, 30 images per class first, EfficientNet-Lite0 of the registry at 128 px, five seeds,
1,000 validation images. A seed draws the images and everything that is random in training; arms are compared seed by
seed. Learning rates are tuned for the plain arms on the first two seeds, and the other arms take the best plain rate,
so that what is compared with token labels is the best that plain fine-tuning can do. One row per run in
DIR/results.jsonl: accuracy after the last epoch with averaged weights, never the best of several epochs, and how well
cells know what they show (`place`, `pointing`: measure.py).

DATA holds flowers-128/photos and cifar10-mini/cifar10-mini, unpacked (train/CLASS/..., val/CLASS/...).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from measure import halves

from everytoken.keyed import generator
from everytoken_lab import stats
from everytoken_lab.annotators.features import FrozenBackbone, compute_features, fit_features
from everytoken_lab.annotators.job import annotate
from everytoken_lab.data.datasets import DataSet, open_dataset
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.machine import keep_freed_memory
from everytoken_lab.training.classify import train

NETWORK, SIZE = "registry:efficientnet_lite0", 128
DATASETS = {"flowers": ("flowers-128/photos", 30), "cifar10": ("cifar10-mini/cifar10-mini", 20)}
"""Folder, and epochs with 30 images per class; other sizes have as many updates, within a factor of 2."""
SEEDS, TUNING = (1, 2, 3, 4, 5), (1, 2)
RATES = (1e-4, 3e-4, 1e-3)
RECIPE: dict[str, Any] = {
    "model": "tf_efficientnet_lite0",
    "img_size": SIZE,
    "batch_size": 32,
    "workers": 0,
    "threads": 1,
    "opt": "adamw",
    "weight_decay": 0.05,
    "warmup_epochs": 2,
    "warmup_lr": 1e-7,
    "min_lr": 1e-7,
    "sched": "cosine",
    "scale": [0.5, 1.0],
    "aa": "",
    "color_jitter": 0.2,
    "reprob": 0.0,
    "smoothing": 0.1,
    "norm_eval": True,
    "channels_last": True,
    "model_ema": True,
    "model_ema_decay": 0.98,
    "val_interval": 1000,
    "keep": 1,
    "checkpoint_minutes": 1000,
}
CUTMIX = {"mixing": {"cutmix": {"alpha": 1.0, "prob": 0.5}}}
OWN = {"maps": "own", "objectives": {"token_labeling": {"beta": 0.5, "class_target": "truth"}}}
FOREIGN = {"maps": "foreign", "objectives": {"token_labeling": {"beta": 0.5, "class_target": "truth"}}}
ARMS: dict[str, dict[str, Any]] = {  # besides the plain ones; all start from the linear head with the best plain rate
    "own maps": OWN,
    "cutmix": CUTMIX,
    "foreign maps": FOREIGN,
    "own maps + cutmix": {**OWN, **CUTMIX},
}
SETTINGS: dict[str, dict[str, Any]] = {  # of plain fine-tuning; on the seeds for tuning only
    "layer decay 0.8": {"layer_decay": 0.8},
    "batch norm trained": {"norm_eval": False},
}


class Study:
    """One folder of results."""

    def __init__(self, data: Path, work: Path) -> None:
        self.data, self.work, self.results = data, work, work / "results.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """What is done."""
        return read_rows(self.results)

    def add(self, row: dict[str, Any]) -> None:
        """One more."""
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def run(self, sizes: tuple[int, ...], datasets: tuple[str, ...]) -> None:
        """Everything that is not done, cheap and basic things first."""
        self.work.mkdir(parents=True, exist_ok=True)
        for per_class in sizes:
            for dataset in datasets:
                for seed in SEEDS:
                    self.linear(dataset, per_class, seed)
                for rate in RATES:
                    for seed in TUNING:
                        self.fine_tune(dataset, per_class, seed, "plain", rate, {})
                best = best_rate(self.rows(), dataset, per_class, "plain")
                for seeds, arms in ((SEEDS, {"plain": {}, **ARMS}), (TUNING, SETTINGS)):
                    for arm, changes in arms.items():
                        for seed in seeds:
                            self.fine_tune(dataset, per_class, seed, arm, best, changes)

    def done(self, **what: Any) -> bool:
        """Whether there is a row of this kind."""
        return any(all(row.get(key) == value for key, value in what.items()) for row in self.rows())

    def images(self, dataset: str, per_class: int, seed: int) -> Path:
        """A folder with the images of a seed: train/CLASS and val/CLASS."""
        place = self.work / "images" / f"{dataset}-{per_class}-seed{seed}"
        if not place.is_dir():
            source = self.data / DATASETS[dataset][0]
            work = place.with_name(f".{place.name}")
            shutil.rmtree(work, ignore_errors=True)
            train_set = open_dataset(source, "train")
            chosen = [
                generator(seed, dataset, name).permutation(np.flatnonzero(train_set.labels == label))[:per_class]
                for label, name in enumerate(train_set.class_names)
            ]
            copy_images(train_set, np.concatenate(chosen), work / "train")
            val_set = open_dataset(source, "val")
            copy_images(val_set, np.arange(len(val_set)), work / "val")
            work.rename(place)
        return place

    def linear(self, dataset: str, per_class: int, seed: int) -> Path:
        """The linear head as a run folder; a row for it."""
        place = self.work / "linear" / f"{dataset}-{per_class}-seed{seed}"
        if not self.done(dataset=dataset, per_class=per_class, seed=seed, arm="linear") or not place.is_dir():
            images = self.images(dataset, per_class, seed)
            train_set, val_set = open_dataset(images, "train"), open_dataset(images, "val")
            started = time.process_time()
            backbone, cache = FrozenBackbone(NETWORK, SIZE), self.work / "features"
            features = compute_features(train_set, backbone, None, workers=0)
            fit = fit_features(features, train_set, seed=seed)
            spent = time.process_time() - started
            values = compute_features(val_set, backbone, cache, workers=0).values
            correct = (values @ fit.head.weight.numpy().T + fit.head.bias.numpy()).argmax(1) == val_set.labels
            model, info = backbone.with_head(fit.head, train_set.class_names)
            place.mkdir(parents=True, exist_ok=True)
            write_weights(place / "best.safetensors", model.state_dict(), info.to_metadata())
            top1 = round(100 * float(correct.mean()), 2)
            row = {"dataset": dataset, "per_class": per_class, "seed": seed, "arm": "linear", "rate": 0.0, "top1": top1}
            if not self.done(dataset=dataset, per_class=per_class, seed=seed, arm="linear"):
                row |= {"cross_validation": round(100 * fit.accuracy, 2), "cpu": round(spent, 1)}
                self.add({**row, **halves(place, images)})
        return place

    def maps(self, kind: str, dataset: str, per_class: int, seed: int) -> Path:
        """Score maps of the training images: of ImageNet's classes, or of the linear head's."""
        place = self.work / "maps" / f"{kind}-{dataset}-{per_class}-seed{seed}"
        more: dict[str, Any] = {"foreign_classes": True, "img_size": (224,)}
        if kind == "own":
            more = {"fit_model": NETWORK, "fit_size": SIZE, "img_size": (224,), "val_split": 1e-9}
            # the folder has a validation part: nothing is to be held out of the training images
        annotator = "fit" if kind == "own" else NETWORK
        images = open_dataset(self.images(dataset, per_class, seed), "train")
        annotate(images, place, annotator, workers=0, device="cpu", **more)
        return place

    def fine_tune(
        self, dataset: str, per_class: int, seed: int, arm: str, rate: float, changes: dict[str, Any]
    ) -> None:
        """One run, if it is not done."""
        what = {"dataset": dataset, "per_class": per_class, "seed": seed, "arm": arm, "rate": rate}
        if self.done(**what):
            return
        epochs = max(8, round(DATASETS[dataset][1] * (30 / per_class) ** 0.5))
        recipe = {**RECIPE, "epochs": epochs, "lr": rate, **changes}
        started = time.process_time()
        if "maps" in recipe:
            recipe["maps"] = str(self.maps(recipe["maps"], dataset, per_class, seed))
        annotating = time.process_time() - started
        recipe["weights"] = str(self.linear(dataset, per_class, seed))
        output = self.work / "runs" / f"{dataset}-{per_class}-seed{seed}-{arm}-{rate:g}".replace(" ", "_")
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        started = time.process_time()
        run = train(
            self.images(dataset, per_class, seed), recipe=str(output / "recipe.yaml"), seed=seed, out=str(output)
        )
        last = run.history[-1]
        row = {"top1": last["ema_score"], "top1_last": last["score"], "loss": last["ema_val_loss"], "epochs": epochs}
        spent = {"cpu": round(time.process_time() - started, 1), "cpu_annotating": round(annotating, 1)}
        self.add({**what, **row, **spent, **halves(output, self.images(dataset, per_class, seed))})
        shutil.rmtree(output)


def copy_images(data: DataSet, indices: np.ndarray, folder: Path) -> None:
    """The files of some images, in class folders."""
    for index in sorted(indices.tolist()):
        path = folder / data.key(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.open_bytes(index))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def best_rate(rows: list[dict[str, Any]], dataset: str, per_class: int, arm: str) -> float:
    """The rate with the best mean accuracy over the seeds for tuning."""
    scores: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if (row["dataset"], row["per_class"], row["arm"]) == (dataset, per_class, arm) and row["seed"] in TUNING:
            scores[row["rate"]].append(row["top1"])
    return max(scores, key=lambda rate: float(np.mean(scores[rate])))


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy of every arm, and its difference to plain fine-tuning at its best rate, seed by seed."""
    lines = [
        "| data | per class | arm | rate | seeds | top-1 | difference to plain | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["per_class"]].append(row)
    for (dataset, per_class), group in groups.items():
        plain = {}
        if any(row["arm"] == "plain" for row in group):
            best = best_rate(group, dataset, per_class, "plain")
            plain = {row["seed"]: row["top1"] for row in group if row["arm"] == "plain" and row["rate"] == best}
        for arm, rate in dict.fromkeys((row["arm"], row["rate"]) for row in group):
            runs = [row for row in group if (row["arm"], row["rate"]) == (arm, rate)]
            mean = np.mean([row["top1"] for row in runs])
            gains = [row["top1"] - plain[row["seed"]] for row in runs if row["seed"] in plain]
            difference = ""
            if gains and gains != [0.0] * len(gains):
                e = stats.mean(gains)
                interval = f" [{e.low:+.1f}, {e.high:+.1f}]" if e.low is not None and e.high is not None else ""
                difference = f"{e.value:+.1f}{interval}"
            cpu = np.mean([row.get("cpu", 0) + row.get("cpu_annotating", 0) for row in runs])
            lines.append(
                f"| {dataset} | {per_class} | {arm} | {rate:g} | {len(runs)} | {mean:.1f} | {difference} | {cpu:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse, run or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--per-class", type=int, nargs="+", default=(30,))
    parser.add_argument("--datasets", nargs="+", choices=tuple(DATASETS), default=tuple(DATASETS))
    chosen = parser.parse_args()
    keep_freed_memory()
    if chosen.what == "table":
        print(table(read_rows(chosen.work / "results.jsonl")))
    else:
        Study(chosen.data, chosen.work).run(tuple(chosen.per_class), tuple(chosen.datasets))


if __name__ == "__main__":
    main()
