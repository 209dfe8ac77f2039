"""`everytoken demo`: the whole way on real images, with the same commands that a user would type.

In minutes, if there are pretrained weights: `everytoken train images --minutes 3.5 --maps auto`, what the tokens say, a
page, and a file to deploy. Otherwise, and for an hour or a GPU, from scratch, which is what the method was made for:

Find images and show some, fit an annotator, annotate, train the plain model and the every-token model with the same
budget and seeds, evaluate, write a page, and say honestly what was gained. Every part can be rerun alone by the command
that is printed; an interrupted demo resumes where it stopped.

Both models have the same architecture, learning rate, augmentation, number of updates and seeds. What the every-token
model has more is what an annotator says about each token, and that annotator was trained on the same images.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from everytoken import draw, stats
from everytoken.annotators.features import available_weights
from everytoken.demo.images import find_images, write_tree
from everytoken.errors import EverytokenError
from everytoken.files import refuse_link, write_atomically, write_picture

if TYPE_CHECKING:
    from everytoken.data.datasets import DataSet

Run = Callable[[list[str]], int]


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Attributes:
        train, val: images; epochs, fit_epochs: passes of the models and of the annotator; folds: see `annotate`.
        seeds: runs of each model; batch, lr: of both models; model: arguments that name it.
    """

    train: int
    val: int
    epochs: int
    fit_epochs: int
    folds: int
    seeds: int
    batch: int
    lr: float
    model: tuple[str, ...]


# LV-ViT's convolutional stem learns from few updates; a plain ViT needs more than minutes. Of two
# learning rates the plain model was ahead with 1e-3 in its first four epochs (4000 images, batches of 64; that run was
# not finished, so this is a choice and not a tuning). What the class token learns was chosen by looking at seed 1; the
# weight of the tokens on seeds 11 and 12 (gains of 1.2 and 0.5 points with 1, of 0.5 and -0.1 with 0.5).
_SMALLEST = "model_kwargs={embed_dim: 96, depth: 4, num_heads: 3, stem_width: 16}"
SCALES = {
    "minutes": Scale(3000, 1000, 4, 7, 1, 2, 32, 1e-3, ("--model", "lvvit_nano_patch4_32", "--set", _SMALLEST)),
    "hour": Scale(10_000, 2000, 15, 12, 2, 3, 64, 1e-3, ("--model", "lvvit_nano_patch4_32")),
    "gpu": Scale(50_000, 10_000, 100, 30, 2, 5, 256, 2e-3, ("--model", "lvvit_mini_patch4_32", "--amp")),
}
KINDS = ("plain", "every-token")
PRETRAINED_IMAGES, PRETRAINED_VAL, PRETRAINED_MINUTES = 1000, 1000, 3.5
SMALLEST = "registry:efficientnet_lite0"


def demo(out: Path, run: Run, scale: str, data: str = "", seeds: int = 0) -> int:
    """Do all of it; returns an exit code.

    Args:
        out: folder for images, maps, runs, the page and the result.
        run: the command line, `everytoken.cli.main`.
        scale: one of SCALES.
        data: the user's own folder of class folders, instead of the demo's images.
        seeds: runs of each model; 0: the scale's.
    """
    for name in ("images", "maps", "model", "run", "runs"):
        refuse_link(out / name)
    chosen = SCALES[scale]
    started = time.monotonic()
    if scale == "minutes" and not seeds and available_weights():
        return _from_pretrained(out, run, data, started)
    count = seeds or chosen.seeds
    own = bool(data) and not _has_val(data)
    images = Path(data) if data else _prepare(out, chosen)
    chosen = budget(chosen, _show(out, str(images)))
    maps, runs, page = out / "maps", out / "runs", out / "report.html"
    held = ("--val-split", "0.2") if own else ()
    print(f"\n2. An annotator for these classes, and what it says about every part of every image -> {maps}")
    fit = [*("--annotator", "fit", "--fit-size", "32")]
    fit += [*("--fit-epochs", str(chosen.fit_epochs), "--folds", str(chosen.folds))]
    _do(run, ["annotate", str(images), "--out", str(maps), *fit, "--workers", "1", *held])
    print(f"\n3. The same network twice, {count} seeds each: one label per image, and labels for every token -> {runs}")
    scores: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(1, count + 1):
        for kind in KINDS:
            place = runs / f"{kind}-seed{seed}"
            _do(run, train_words(chosen, kind, str(images), maps, seed, place, held))
            scores[kind].append(_score(place))
    places = [str(runs / f"{kind}-seed{seed}") for kind in KINDS for seed in range(1, count + 1)]
    print(f"\n4. Evaluate every run on the validation images, and write a page about it -> {page}")
    title = f"everytoken demo: {images.name if data else (images / 'origin.txt').read_text()}"
    _do(run, ["report", *places, "--out", str(page), "--title", title, "--workers", "1"])
    _tell(out, page, scores, time.monotonic() - started)
    return 0


def _from_pretrained(out: Path, run: Run, data: str, started: float) -> int:
    """The way of most people: `train` without a recipe, from pretrained weights."""
    images = (
        Path(data) if data else _prepare(out, replace(SCALES["minutes"], train=PRETRAINED_IMAGES, val=PRETRAINED_VAL))
    )
    _show(out, str(images))
    place, page, sheet, model = out / "run", out / "report.html", out / "tokens.png", out / "model"
    print(f"\n2. Train, from pretrained weights: everything is decided by looking at the photos -> {place}")
    words = ["train", str(images), "--out", str(place), "--minutes", str(PRETRAINED_MINUTES), "--maps", "auto"]
    if not data and SMALLEST in available_weights():  # for tiny images; otherwise, it would choose
        words += ["--weights", SMALLEST, "--img-size", "128"]
    _do(run, words)
    if (place / "maps").is_dir():
        print(f"\n3. What the tokens say, from image labels alone -> {sheet}")
        _do(run, ["maps", "sheet", str(place / "maps"), "--images", str(images), "--out", str(sheet)])
    print(f"\n4. A page about the models -> {page}")
    runs = [str(p) for p in (place / "linear", place / "fine-tuned") if (p / "best.safetensors").is_file()]
    title = f"everytoken demo: {images.name if data else (images / 'origin.txt').read_text()}"
    _do(run, ["report", *runs, "--out", str(page), "--title", title])
    result = json.loads((place / "auto.json").read_text())["result"]
    print(f"\n5. A file to deploy -> {model}")
    _do(run, ["export", str(place), "--to", "timm", "onnx", "--out", str(model)])
    result["seconds"] = round(time.monotonic() - started, 1)
    write_atomically(out / "result.json", json.dumps(result, indent=1).encode())
    print(f"\n{result['text']}")
    print(f"This took {result['seconds'] / 60:.1f} minutes. The same on your photos: everytoken train PHOTOS")
    print(f"Open {page.resolve()} to see classes and predictions.")
    print(f"{model / 'model.onnx'} runs without everytoken; {model / 'README.md'} says how.")
    return 0


def train_words(
    scale: Scale, kind: str, images: str, maps: Path, seed: int, place: Path, held: Sequence[str]
) -> list[str]:
    """The `train` command of one run. Only the objective (and the maps it reads) differs between the kinds."""
    learn = {
        "plain": ["--set", "objectives.hard={}"],
        "every-token": [
            *("--maps", str(maps), "--set", "objectives.token_labeling={beta: 1.0, class_target: truth}"),
        ],
    }[kind]
    return [
        *("train", images, "--epochs", str(scale.epochs), "--warmup-epochs", str(min(5, scale.epochs / 10))),
        *("--lr", str(scale.lr), "--batch-size", str(scale.batch), "--scale", "0.5", "1", "--aa", "", "--reprob", "0"),
        *("--img-size", "32", "--workers", "1", "--log-interval", "20", *scale.model, *held, *learn),
        *("--val-interval", str(max(1, scale.epochs // 10)), "--seed", str(seed), "--out", str(place)),
    ]


def _has_val(data: str) -> bool:
    from everytoken.data.datasets import find_split

    return data.startswith(("torchvision:", "hf:")) or find_split(data, "val") is not None


def _prepare(out: Path, scale: Scale) -> Path:
    folder = out / "images"
    done = folder / "origin.txt"
    print(f"1. Images -> {folder}")
    if done.exists():
        print(f"{done.read_text()} (already there)")
        return folder
    images = find_images(print)
    count = (min(scale.train, len(images.train[1])), min(scale.val, len(images.val[1])))
    print(f"{images.origin}; writing {count[0]:,} + {count[1]:,} of them")
    write_tree(images, folder, *count)
    write_atomically(done, images.origin.split(" from the cache")[0].encode())
    return folder


def budget(scale: Scale, count: int) -> Scale:
    """The scale with its number of passes over `count` training images set to fit its time budget."""
    times = scale.train / max(1, count)
    epochs, fit = (max(1, min(40, round(times * e))) for e in (scale.epochs, scale.fit_epochs))
    return replace(scale, epochs=epochs, fit_epochs=fit) if count < 0.9 * scale.train or count > scale.train else scale


def _show(out: Path, images: str) -> int:
    """A picture of the data, to look at while the rest runs; returns the number of images."""
    from everytoken.data.datasets import open_dataset

    file = out / "data.png"
    train = open_dataset(images, "train")
    if not file.exists():
        rows = [(name, _examples(train, label)) for label, name in enumerate(train.class_names[:20])]
        write_picture(file, draw.contact_sheet(rows))
    print(f"{len(train):,} images of {train.num_classes} classes; some of each: {file}")
    return len(train)


def _examples(data: DataSet, label: int, most: int = 12) -> list[Image.Image]:
    """Some images of a class, evenly spread over it."""
    members = np.flatnonzero(data.labels == label)
    count = min(most, len(members))
    photos = []
    for i in range(count):
        with contextlib.suppress(EverytokenError):  # `everytoken doctor` names unreadable images
            photos.append(data.load(int(members[i * len(members) // count])))
    return photos


def _do(run: Run, words: list[str]) -> None:
    print(f"\n$ everytoken {shlex.join(words)}", flush=True)
    code = run(words)
    if code:
        raise EverytokenError(f"the demo stops here (exit code {code}); the same command resumes from this point")


def _score(place: Path) -> float:
    """Validation accuracy after the last epoch."""
    last = json.loads((place / "summary.json").read_text())["last"]
    return float(last.get("ema_score", last["score"]))


def _tell(out: Path, page: Path, scores: dict[str, list[float]], seconds: float) -> None:
    """The last lines: what was gained, with the spread over seeds."""
    plain, every = scores["plain"], scores["every-token"]
    gains = [b - a for a, b in zip(plain, every, strict=True)]
    result = {"top1": scores, "gain": gains, "seconds": round(seconds, 1)}
    write_atomically(out / "result.json", json.dumps(result, indent=1).encode())
    print("\nValidation accuracy after the last epoch (top-1, %)\n")
    print(f"  {'seed':<12}" + "".join(f"{i + 1:>9}" for i in range(len(plain))) + f"{'mean':>9}")
    for kind, values in (*scores.items(), ("gain", gains)):
        print(f"  {kind:<12}" + "".join(f"{v:9.2f}" for v in values) + f"{sum(values) / len(values):9.2f}")
    print(f"\n{verdict(gains)}")
    print(f"The annotator was trained on the same images; its time is in the {seconds / 60:.1f} minutes of this demo.")
    print(f"Open {page.resolve()} to see curves, classes, and what the tokens say.")


def verdict(gains: Sequence[float]) -> str:
    """One honest sentence, and what more seeds would be needed for."""
    e = stats.mean(gains)
    more = "" if e.clear else f" Try --seeds {3 if len(gains) < 2 else 5}."
    return f"Result: {stats.compared(e, 'training on every token', 'plain training')}.{more}"
