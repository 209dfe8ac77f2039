"""Two versions of everytoken against each other: the same commands, interleaved, in CPU seconds.

    git worktree add /tmp/old v0.1.0
    python benchmarks/versions.py /tmp/old . --photos folder

Every round runs each command once with the old and once with the new source tree (first one, then the other, by turns),
on one thread. What is compared is the CPU time of the whole process and its children, less the time of the same command
with less to do, so that starting up does not count. A ratio is new / old: the median over rounds with a bootstrap
interval. "worse" means that the interval lies wholly above 1.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = [
    *("--img-size", "96", "--batch-size", "16", "--workers", "0", "--threads", "1", "--device", "cpu"),
    *("--warmup-epochs", "0", "--val-interval", "100", "--seed", "1", "--log-interval", "1000"),
]
TOKEN = "objectives.token={class_target: truth}"
STEPS = {
    "step, plain ViT": ["--model", "vit_micro_patch8_96"],
    "step, token labels, LV-ViT": ["--model", "lvvit_micro_patch8_96", "--labels", "{maps}", "--set", TOKEN],
    "step, TL-Align, Swin": [
        *("--model", "swin_nano_patch4_window6_96", "--set", "objectives.alignment={}", "--set", "mixing.cutmix={}"),
    ],
    "step, drloc, ViT": ["--model", "vit_micro_patch8_96", "--set", "objectives.drloc={}"],
}


def cpu_seconds(tree: Path, words: list[str]) -> float:
    """CPU time of one command, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# What a version calls these things; a tree without `everytoken.maps` is 0.1.
LOADERS = {
    "0.1": """
from everytoken.data import AugmentConfig, Loader, TrainTransform, open_dataset
from everytoken.labels import Store
view = TrainTransform(AugmentConfig(img_size=224, aa="rand-m9-mstd0.5-inc1", reprob=0.25))
loader = Loader(open_dataset(PHOTOS, "train"), view, 32, train=True, workers=0, store=Store(MAPS))
""",
    "0.2": """
from everytoken.data import AugmentOptions, Loader, TrainTransform, open_dataset
from everytoken.maps import Maps
view = TrainTransform(224, AugmentOptions(aa="rand-m9-mstd0.5-inc1", reprob=0.25))
loader = Loader(open_dataset(PHOTOS, "train"), view, 32, train=True, workers=0, maps=Maps(MAPS))
""",
}
EPOCHS = """
for epoch in range(EPOCHS):
    for batch in loader.epoch(epoch):
        pass
"""


def measure(tree: Path, what: str, photos: Path, maps: Path, work: Path) -> float:
    """CPU seconds of the work itself."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        if what == "loader":
            version = "0.2" if (tree / "src/everytoken/maps").is_dir() else "0.1"
            names = f"PHOTOS, MAPS = {str(photos)!r}, {str(maps)!r}\n"
            code = f"{names}{LOADERS[version]}EPOCHS = %d\n{EPOCHS}"
            less, more = (cpu_seconds(tree, ["-c", code % epochs]) for epochs in (0, 3))
        elif what == "annotate":
            words = ["-m", "everytoken", "annotate", str(photos), "--annotator", "registry:efficientnet_lite0"]
            words += ["--img-size", "224", "--workers", "0", "--device", "cpu", "--foreign-classes", "--out"]
            few = work / "few"
            less = cpu_seconds(tree, [*words[:3], str(few), *words[4:], f"{folder}/a"])
            more = cpu_seconds(tree, [*words, f"{folder}/b"])
        else:
            words = ["-m", "everytoken", "train", str(photos), *TRAIN]
            words += [word.replace("{maps}", str(maps)) for word in STEPS[what]]
            less = cpu_seconds(tree, [*words, "--epochs", "1", "--out", f"{folder}/a"])
            more = cpu_seconds(tree, [*words, "--epochs", "3", "--out", f"{folder}/b"])
    return more - less


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--photos", type=Path, required=True, help="a folder with train/ and val/")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    trees = [options.old.resolve(), options.new.resolve()]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        few = work / "few"
        for path in sorted(options.photos.glob("train/*/*"))[::20]:
            target = few / path.relative_to(options.photos)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        maps = work / "maps"
        words = ["-m", "everytoken", "annotate", str(options.photos), "--annotator", "registry:efficientnet_lite0"]
        cpu_seconds(trees[0], [*words, "--img-size", "224", "--foreign-classes", "--out", str(maps)])
        for what in options.only or ["loader", "annotate", *STEPS]:
            ratios = []
            for number in range(options.rounds):
                order = [0, 1] if number % 2 == 0 else [1, 0]
                spent = {i: measure(trees[i], what, options.photos, maps, work) for i in order}
                ratios.append(spent[1] / spent[0])
            low, high = interval(ratios)
            verdict = "worse" if low > 1 else "better" if high < 1 else "no difference shown"
            print(f"{what:<28} {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]  {verdict}", flush=True)


if __name__ == "__main__":
    main()
