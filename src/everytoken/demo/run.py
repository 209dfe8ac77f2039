"""`everytoken demo`: the whole way on real images, with the same commands that a user would type.

Find images, fit an annotator, annotate, train the plain model and the every-token model with the same budget and seeds,
and say honestly what was gained. Every part can be rerun alone; interrupted, it goes on.
"""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.demo.images import find_images, write_tree
from everytoken.errors import EverytokenError

Run = Callable[[list[str]], int]


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Attributes:
        train, val: images; epochs: passes; seeds: runs of each model; model: arguments that name it.
    """

    train: int
    val: int
    epochs: int
    fit_epochs: int
    seeds: int
    model: tuple[str, ...]


_SMALL_VIT = ("--model", "vit_nano_patch4_32", "--set", "model_kwargs={embed_dim: 96, depth: 4, num_heads: 3}")
SCALES = {
    "minutes": Scale(2000, 1000, 10, 12, 2, _SMALL_VIT),
    "hour": Scale(5000, 2000, 40, 30, 3, ("--model", "vit_nano_patch4_32")),
    "gpu": Scale(50_000, 10_000, 100, 30, 3, ("--model", "lvvit_mini_patch4_32", "--batch-size", "256", "--amp")),
}


def demo(out: Path, run: Run, scale: str, data: str = "", seeds: int = 0) -> int:
    """Do all of it; returns an exit code.

    Args:
        out: folder for images, maps, runs and the result.
        run: the command line, `everytoken.cli.main`.
        scale: one of SCALES.
        data: the user's own folder of class folders, instead of the demo's images.
        seeds: runs of each model; 0: the scale's.
    """
    chosen = SCALES[scale]
    count = seeds or chosen.seeds
    started = time.monotonic()
    images = Path(data) if data else _prepare(out, chosen)
    maps = out / "maps"
    side = ("--img-size", "32")
    print(f"\n1. An annotator for these classes, and what it says about every part of every image -> {maps}")
    fit = ("--annotator", "fit", "--fit-epochs", str(chosen.fit_epochs), "--workers", "1", "--folds", "2")
    _do(run, ["annotate", str(images), "--out", str(maps), *fit, *(("--val-split", "0.2") if data else ())])
    kinds = {
        "plain": ("--set", "objectives.hard={}", "--set", "mixing.cutmix={prob: 0.5}"),
        "every token": (
            *("--labels", str(maps), "--set", "objectives.token={beta: 0.5, class_target: both, rho: 0.5}"),
            *("--set", "mixing.mixtoken={prob: 0.5}"),
        ),
    }
    common = (
        *("--epochs", str(chosen.epochs), "--warmup-epochs", "1", "--lr-base", "1e-3", "--lr-base-size", "64"),
        *("--scale", "0.5", "1", "--aa", "", "--reprob", "0", "--workers", "1", "--log-interval", "20"),
        *("--batch-size", "64", *chosen.model, *side, "--val-interval", str(max(1, chosen.epochs // 2))),
        *(("--val-split", "0.2") if data else ()),
    )
    scores: dict[str, list[float]] = {kind: [] for kind in kinds}
    print(f"\n2. The same network twice, {count} seeds each: plain labels, and labels for every token")
    for seed in range(1, count + 1):
        for kind, words in kinds.items():
            place = out / "runs" / f"{kind.replace(' ', '-')}-seed{seed}"
            _do(run, ["train", str(images), *common, *words, "--seed", str(seed), "--output", str(place)])
            scores[kind].append(json.loads((place / "summary.json").read_text())["last"]["score"])
    _tell(out, images if data else images / "train", scores, time.monotonic() - started)
    return 0


def _prepare(out: Path, scale: Scale) -> Path:
    folder = out / "images"
    if (folder / "origin.txt").exists():
        print(f"images: {(folder / 'origin.txt').read_text()} (already in {folder})")
        return folder
    images = find_images(print)
    print(f"images: {images.origin}; writing {scale.train} + {scale.val} of them to {folder}")
    write_tree(images, folder, scale.train, scale.val)
    (folder / "origin.txt").write_text(images.origin)
    return folder


def _do(run: Run, words: list[str]) -> None:
    print(f"\n$ everytoken {shlex.join(words)}")
    code = run(words)
    if code:
        raise EverytokenError(f"the demo stops here (exit code {code}); the same command goes on from this point")


def _tell(out: Path, images: Path, scores: dict[str, list[float]], seconds: float) -> None:
    """The last lines: what was gained, with the spread over seeds."""
    plain, every = scores["plain"], scores["every token"]
    gains = [b - a for a, b in zip(plain, every, strict=True)]
    result = {"top1": scores, "gain": gains, "seconds": round(seconds, 1)}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print("\n3. Validation accuracy (top-1, %)\n")
    print(f"  {'seed':<12}" + "".join(f"{i + 1:>9}" for i in range(len(plain))) + f"{'mean':>9}")
    for kind, values in (*scores.items(), ("gain", gains)):
        print(f"  {kind:<12}" + "".join(f"{v:9.2f}" for v in values) + f"{statistics.mean(values):9.2f}")
    print(f"\n{verdict(gains)}\nRuns, curves and weights: {out / 'runs'}. Look at the annotator's maps with:")
    print(f"  everytoken labels sheet {out / 'maps'} --images {images} --out sheet.png")


def verdict(gains: Sequence[float]) -> str:
    """One honest sentence."""
    mean = statistics.mean(gains)
    if len(gains) < 2:
        return f"Every token: {mean:+.2f} points with one seed, which proves nothing yet; try --seeds 3."
    spread = f"{min(gains):+.2f} to {max(gains):+.2f} over {len(gains)} seeds"
    if min(gains) > 0:
        return f"Training on every token gained {mean:+.2f} points ({spread})."
    if max(gains) < 0:
        return f"Training on every token lost {-mean:.2f} points here ({spread})."
    return f"No clear difference here: {mean:+.2f} points ({spread})."
