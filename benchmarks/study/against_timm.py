"""`everytoken train FOLDER` against what a practitioner would do without it, on the same photos and at equal CPU time.

    python benchmarks/study/against_timm.py prepare --work DIR --flowers F --caltech C --grocery G
    python benchmarks/study/against_timm.py run --work DIR [--arms linear timm ours]        continues where it stopped
    python benchmarks/study/against_timm.py table
    python benchmarks/study/against_timm.py chart                   draws docs/img/against.png

Flowers-102, Caltech-101 and Grocery Store, 8 and 20 photos per class, seeds that draw the photos, up to 1,000 test
photos that no run sees. Arms, each in one process with one thread:

linear  timm and scikit-learn: logistic regression on frozen features of the best of the three registry networks, photos
        squashed to the network's size. Network and penalty are chosen by 5-fold cross-validation on training photos.
timm    fine-tuning of the smallest of them at 224 px with a new head, AdamW, a cosine schedule, label smoothing, frozen
        batch norms and averaged weights, for as much CPU time as `ours` is given. The rate was chosen on other photos.
ours    the command with `--minutes 5` and nothing else.

One row per run in against-timm.jsonl: which test photos were right, CPU seconds, what was chosen, the version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROWS = Path(__file__).with_name("against-timm.jsonl")
CHART = Path(__file__).parents[2] / "docs" / "img" / "against.png"
BASELINES = {"linear": "logistic regression", "timm": "fine-tuning in timm"}
TITLES = {"flowers": "Flowers-102", "caltech": "Caltech-101", "grocery": "Grocery Store"}
DATASETS, SIZES, SEEDS = ("flowers", "caltech", "grocery"), (8, 20), (1, 2, 3)
NETWORKS = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
MINUTES, RATE, TESTED = 5.0, 5e-4, 1000


def ordered(paths: list[Path], seed: int = 0) -> list[Path]:
    """In an order that depends on the names alone."""
    return sorted(paths, key=lambda p: hashlib.sha256(f"{seed} {p.parent.name}/{p.name}".encode()).hexdigest())


def prepare(work: Path, flowers: Path, caltech: Path, grocery: Path) -> None:
    """DIR/NAME.json: photos to train on by class, and test photos with their classes."""
    found: dict[str, tuple[dict[str, list[Path]], list[Path]]] = {name: ({}, []) for name in DATASETS}
    for path in flowers.glob("*/*/*.jpg"):
        train, test = found["flowers"]
        _ = test.append(path) if path.parts[-3] == "test" else train.setdefault(path.parent.name, []).append(path)
    for folder in caltech.iterdir():
        if folder.name not in ("BACKGROUND_Google", "Faces"):  # the second holds the photos of Faces_easy again
            photos = ordered(list(folder.glob("*.jpg")))
            found["caltech"][1].extend(photos[:10])
            found["caltech"][0][folder.name] = photos[10:]
    for split in ("train", "val", "test"):
        for path in (grocery / split).rglob("*.jpg"):
            train, test = found["grocery"]
            _ = test.append(path) if split == "test" else train.setdefault(path.parent.name, []).append(path)
    work.mkdir(parents=True, exist_ok=True)
    for name, (train, test) in found.items():
        chosen = [(str(p), p.parent.name) for p in ordered(test)[:TESTED]]
        content = {"train": {c: [str(p) for p in ordered(v)] for c, v in sorted(train.items())}, "test": chosen}
        (work / f"{name}.json").write_text(json.dumps(content))
        print(
            f"{name}: {len(train)} classes, {min(map(len, train.values()))} photos at least, {len(chosen)} to test on"
        )


class Cell:
    """One dataset, size and seed: photos to train on and to test on, with class numbers."""

    def __init__(self, work: Path, dataset: str, per_class: int, seed: int) -> None:
        content = json.loads((work / f"{dataset}.json").read_text())
        self.what = {"dataset": dataset, "per_class": per_class, "seed": seed}
        self.classes = sorted(content["train"])
        chosen = {c: ordered([Path(p) for p in content["train"][c]], seed)[:per_class] for c in self.classes}
        self.train = [(p, k) for k, c in enumerate(self.classes) for p in chosen[c]]
        self.test = [(Path(p), self.classes.index(c)) for p, c in content["test"]]
        self.work, self.name = work, f"{dataset}-{per_class}-{seed}"

    def folder(self) -> Path:
        """The photos as a folder of class folders."""
        place = self.work / "photos" / self.name
        if not place.exists():
            for number, (path, k) in enumerate(self.train):  # names may occur twice
                (place / self.classes[k]).mkdir(parents=True, exist_ok=True)
                os.symlink(path, place / self.classes[k] / f"{number}-{path.name}")
        return place


def features(cell: Cell, network: str, photos: list[tuple[Path, int]]) -> tuple[np.ndarray, float]:
    """Frozen features and the CPU seconds that they take; kept on the disk, photo by photo."""
    import torch
    from PIL import Image, ImageOps

    place = cell.work / "features" / network
    place.mkdir(parents=True, exist_ok=True)
    model, rows, seconds = None, [], 0.0
    for path, _ in photos:
        file = place / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.npy"
        if not file.exists():
            model = model or plain_network(network, 0)
            started, size = time.process_time(), NETWORKS[network]
            with Image.open(path) as image:
                image.draft("RGB", (2 * size, 2 * size))
                small = ImageOps.exif_transpose(image).convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
            with torch.inference_mode():
                row = model(pixels.contiguous(memory_format=torch.channels_last))[0].numpy()
            np.save(file, np.append(row, time.process_time() - started).astype(np.float32))
        kept = np.load(file)
        rows.append(kept[:-1])
        seconds += float(kept[-1])
    return np.stack(rows), seconds


def plain_network(network: str, num_classes: int | None = None) -> Any:
    """timm's model with the weights of the registry package."""
    import timm
    import torch

    from everytoken_lab.models.open import open_model

    state = open_model(f"registry:{network}").model.backbone.state_dict()
    model: Any = timm.create_model(f"tf_{network}")
    model.load_state_dict(state)
    if num_classes is not None:
        model.reset_classifier(num_classes)
    return model.eval().to(memory_format=torch.channels_last)


def linear(cell: Cell) -> dict[str, Any]:
    """Fifteen lines of timm and scikit-learn."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    warnings.simplefilter("ignore")
    y = np.array([k for _, k in cell.train])
    best: tuple[float, str, float, Any] | None = None
    cpu = 0.0
    for network in NETWORKS:
        x, seconds = features(cell, network, cell.train)
        started = time.process_time()
        centre, scale = x.mean(0), 1 / ((x - x.mean(0)).std() * x.shape[1] ** 0.5)
        x = (x - centre) * scale
        for penalty in PENALTIES:
            model = LogisticRegression(C=penalty, max_iter=300)
            folds = StratifiedKFold(5, shuffle=True, random_state=cell.what["seed"])
            p = cross_val_predict(model, x, y, cv=folds, method="predict_proba")
            loss = -np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).mean()
            if best is None or loss < best[0]:
                best = (loss, network, penalty, (centre, scale, 100 * float((p.argmax(1) == y).mean())))
        cpu += seconds + time.process_time() - started
    assert best is not None
    _, network, penalty, (centre, scale, crossed) = best
    model = LogisticRegression(C=penalty, max_iter=1000).fit(
        (features(cell, network, cell.train)[0] - centre) * scale, y
    )
    answers = model.predict((features(cell, network, cell.test)[0] - centre) * scale)
    return {"answers": answers, "cpu": cpu, "chosen": f"{network}, C {penalty:g}", "cross_validated": round(crossed, 2)}


def fine_tuned(cell: Cell, seconds: float = 60 * MINUTES) -> dict[str, Any]:
    """timm's pieces in a plain loop, for so many CPU seconds."""
    import torch
    from PIL import Image
    from timm.data import create_transform
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    network, started = "efficientnet_lite0", time.process_time()
    torch.manual_seed(cell.what["seed"])
    model, size = plain_network(network, len(cell.classes)), NETWORKS[network]
    view = {"input_size": (3, size, size), "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic"}
    augment = create_transform(**view, is_training=True, scale=(0.5, 1.0), color_jitter=0.2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=0.05)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def batches() -> Any:
        while True:
            order = torch.randperm(len(cell.train)).tolist()
            for i in range(0, len(order) - 31 if len(order) > 32 else 1, 32):
                yield [cell.train[j] for j in order[i : i + 32]]

    source = batches()

    def update() -> None:
        chosen = next(source)
        pixels = torch.stack([augment(Image.open(p).convert("RGB")) for p, _ in chosen])
        labels = torch.tensor([k for _, k in chosen])
        loss_of(model(pixels.to(memory_format=torch.channels_last)), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    state = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        timed = time.process_time()
        update()
    total = max(10, int((seconds - (time.process_time() - started)) / (time.process_time() - timed)))
    model.load_state_dict(state)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=0.05)
    schedule = CosineLRScheduler(
        optimizer, t_initial=total, lr_min=1e-6, warmup_t=total // 10, warmup_lr_init=1e-6, t_in_epochs=False
    )
    average = ModelEmaV3(model, decay=1 - 1 / max(20, total / 5), use_warmup=True)
    for step in range(total):  # the model stays in evaluation mode: batch norms are frozen
        schedule.step_update(step)
        update()
        average.update(model, step=step)
    cpu = time.process_time() - started
    look = create_transform(**view, is_training=False, crop_pct=0.875)
    answers = []
    with torch.inference_mode():
        for path, _ in cell.test:
            pixels = look(Image.open(path).convert("RGB"))[None]
            answers.append(int(average.module(pixels.to(memory_format=torch.channels_last)).argmax()))
    return {"answers": np.array(answers), "cpu": cpu, "chosen": f"{network}, {total} updates"}


def ours(cell: Cell) -> dict[str, Any]:
    """The command as a user types it."""
    import everytoken_lab as lab

    output = cell.work / "runs" / cell.name
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "everytoken_lab", "train", str(cell.folder()), "--minutes", f"{MINUTES:g}"]
    command += ["--out", str(output), "--seed", str(cell.what["seed"]), "--offline"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    log = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    if log.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.stdout}{log.stderr}")
    story, config = json.loads((output / "auto.json").read_text()), yaml.safe_load((output / "config.yaml").read_text())
    numbers = {name: number for number, name in enumerate(cell.classes)}
    answers = {}
    for name, source in (("answers", output), ("linear", output / "linear")):
        if name == "linear" and story["result"]["kept"] == "linear":
            answers[name] = answers["answers"]  # the same model
            continue
        found = lab.load(source).predict([str(p) for p, _ in cell.test], workers=0)
        by_path = {Path(image.path): numbers[image.classes[0]] for image in found}
        answers[name] = np.array([by_path[p] for p, _ in cell.test])
    truth = np.array([k for _, k in cell.test])
    return {
        "answers": answers["answers"],
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall": round(wall, 1),
        "chosen": f"{story['result']['kept']}, {config['model'].removeprefix('tf_')} at {config['img_size']} px",
        "mix": config.get("mix", 0.0),
        "linear_top1": round(100 * float((answers["linear"] == truth).mean()), 2),
        "estimate": round(story["result"]["top1"], 2),
    }


ARMS = {"linear": linear, "timm": fine_tuned, "ours": ours}


def rows() -> list[dict[str, Any]]:
    """What is done."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def run(work: Path, arms: list[str], datasets: list[str], sizes: list[int], seeds: list[int]) -> None:
    """Everything that is not done, seed by seed."""
    import torch

    torch.set_num_threads(1)
    version = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for seed in seeds:
        for per_class in sizes:
            for dataset in datasets:
                cell = Cell(work, dataset, per_class, seed)
                for arm in arms:
                    if any(r["arm"] == arm and all(r[k] == v for k, v in cell.what.items()) for r in rows()):
                        continue
                    result = ARMS[arm](cell)
                    right = result.pop("answers") == np.array([k for _, k in cell.test])
                    row = {**cell.what, "arm": arm, "top1": round(100 * float(right.mean()), 2), **result}
                    row |= {"cpu": round(result["cpu"], 1), "version": version}
                    row["right"] = np.packbits(right).tobytes().hex()
                    with ROWS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print({k: v for k, v in row.items() if k != "right"}, flush=True)


Difference = tuple[float, float, float]


def difference(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Difference:
    """Points of the second over the first, [seeds] x [test photos], with a 95 % bootstrap interval over both."""
    change = np.stack([b.astype(float) - a for a, b in pairs])
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(2000):
        some = change[rng.integers(0, len(change), len(change))]
        draws.append(some[:, rng.integers(0, change.shape[1], change.shape[1])].mean())
    low, high = np.percentile(draws, [2.5, 97.5])
    return 100 * float(change.mean()), 100 * float(low), 100 * float(high)


def comparisons() -> Iterator[tuple[str, int, dict[str, dict[int, dict[str, Any]]], dict[str, Difference | None]]]:
    """Dataset, photos per class, rows by arm and seed, and ours minus each baseline over the seeds that both have."""
    done: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows():
        done.setdefault((row["dataset"], row["per_class"], row["arm"]), {})[row["seed"]] = row

    def right(row: dict[str, Any]) -> np.ndarray:
        count = {"flowers": 819}.get(row["dataset"], TESTED)
        return np.unpackbits(np.frombuffer(bytes.fromhex(row["right"]), np.uint8))[:count].astype(bool)

    for dataset in DATASETS:
        for per_class in SIZES:
            arms = {arm: done.get((dataset, per_class, arm), {}) for arm in ARMS}
            differences: dict[str, Difference | None] = {}
            for arm in BASELINES:
                seeds = sorted(set(arms[arm]) & set(arms["ours"]))
                pairs = [(right(arms[arm][s]), right(arms["ours"][s])) for s in seeds]
                differences[arm] = difference(pairs) if pairs else None
            yield dataset, per_class, arms, differences


def table() -> str:
    """Accuracy and CPU seconds of each arm, and ours minus each baseline."""
    lines = [
        "| data | per class | seeds | linear (CPU s) | timm (CPU s) | ours (CPU s) | ours - linear | ours - timm |",
        "|" + "---|" * 8,
    ]
    for dataset, per_class, arms, differences in comparisons():
        cells = []
        for arm in arms.values():
            mean = (np.mean([r[name] for r in arm.values()]) for name in ("top1", "cpu"))
            cells.append("{:.1f} ({:.0f})".format(*mean) if arm else "")
        cells += ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*d) if d else "" for d in differences.values()]
        lines.append(f"| {dataset} | {per_class} | {len(arms['ours'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chart() -> None:
    """docs/img/against.png: both differences of every dataset and size, with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = list(comparisons())[::-1]
    image, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axis.axvline(0, color="0.5", linewidth=1)
    axis.grid(axis="x", color="0.92")
    for (arm, name), colour, offset in zip(BASELINES.items(), ("#0072b2", "#d55e00"), (0.14, -0.14), strict=True):
        known = [(height, line[3][arm]) for height, line in enumerate(found)]
        shown = [(height + offset, *d) for height, d in known if d]
        heights, values, lows, highs = np.array(shown).T
        bars = [values - lows, highs - values]
        axis.errorbar(values, heights, xerr=bars, fmt="o", color=colour, capsize=3, label=f"against {name}")
    labels = [f"{TITLES[dataset]}, {per_class} per class" for dataset, per_class, _, _ in found]
    axis.set_yticks(range(len(found)), labels)
    axis.set_xlabel("points of accuracy gained by `everytoken train`; bars: 95 % intervals")
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=2, frameon=False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    image.savefig(CHART, dpi=130, metadata={"Software": None})


def main() -> None:
    """Parse, prepare, run or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "table", "chart"))
    parser.add_argument("--work", type=Path)
    for name in DATASETS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    chosen = parser.parse_args()
    if chosen.what == "table":
        print(table())
    elif chosen.what == "chart":
        chart()
    elif chosen.what == "prepare":
        prepare(chosen.work, chosen.flowers, chosen.caltech, chosen.grocery)
    else:
        run(chosen.work, chosen.arms, chosen.datasets, chosen.sizes, chosen.seeds)


if __name__ == "__main__":
    main()
