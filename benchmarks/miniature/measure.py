"""What the trained networks are good for besides top-1, one row per run: `python benchmarks/miniature/measure.py WORK`.

Needs the data of `run.py` and `--data` (its boxes), `--flowers`, `--caltech`, `--pacs`. Rows are appended to
WORK/measures.jsonl, answers per image to WORK/measured/KEY.npz; what is there is left alone. `untrained` is the network
at its random start.

    pointing    percent of the validation images whose strongest cell for the true class lies in its box
    mean_cell_top1      top-1 of the mean over cells
    box_iou     mean IoU of the box from the cells with the true one; whole_iou: the whole image taken for the box
    corrupted   top-1 over the 15 corruptions of ImageNet-C at severity 3, COUNT images
    flowers, caltech    top-1 of a linear probe (ridge): 10 and 15 training images per class, the test images
                        of the data (Caltech-101: 20 others per class)
    pacs_photo ...      a linear probe fitted to half of PACS's photos; on the other half, art, cartoons, sketches
    place, halves_pointing, halves_iou, share_rmse, ..., entropy, position    as in ../study/measure.py
    label_rmse, layers  TL-Align's Figures 3 and 4, as in ../papers/tl_align_figures.py, which also draws 5 and 6
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import plan as study
import torch
from run import append, file_name, read_rows
from scipy import ndimage
from sklearn.linear_model import RidgeClassifierCV
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional as F

from everytoken import keyed
from everytoken.data.batch import normalise
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import DataSet, open_dataset
from everytoken_lab.evaluation.locate import scaled
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.robust.corruptions import CORRUPTIONS, corrupt

COUNT = 1000  # validation images of the slower measurements
CACHE = Path()  # WORK/pixels: images as all these networks see them
STYLES = ("photo", "art_painting", "cartoon", "sketch")
Columns = dict[str, np.ndarray]  # per image: right or wrong, or an IoU


def load(place: str) -> ModuleType:
    """A script of another folder of benchmarks/."""
    path = Path(__file__).resolve().parents[1] / place
    spec = importlib.util.spec_from_file_location(f"beside_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cached(name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """An array that does not depend on the network, made once."""
    path = CACHE / f"{name}.npy"
    if not path.exists():
        part = path.with_name(f"{name}.part.npy")
        np.save(part, make())
        part.rename(path)
    return np.load(path)


def pixels(opened: OpenModel, data: DataSet, chosen: np.ndarray, name: str) -> np.ndarray:
    """uint8 [n, h, w, 3]: whole images, squashed."""
    view = replace(eval_view(opened.info), crop_pct=1.0, crop_mode="squash")
    return cached(name, lambda: np.stack([view(data.picture(int(i)))[0] for i in chosen]))


def batches(opened: OpenModel, images: np.ndarray, size: int = 100) -> list[Tensor]:
    parts = (torch.from_numpy(images[start : start + size]) for start in range(0, len(images), size))
    return [normalise(part.permute(0, 3, 1, 2), opened.info.mean, opened.info.std) for part in parts]


def located(opened: OpenModel, data: DataSet, boxes: dict[str, tuple[int, ...]], classes: list[int]) -> Columns:
    """Whether the strongest cell of the true class lies in the box, and IoUs, of 2 * COUNT images.

    Cells are the token head's, or the class head's at every token; a cell counts by its logit minus the mean over
    classes, scaled to 0..1, enlarged, and cut at 0.45.
    """
    chosen = keyed.generator(0, "located").permutation(len(data))[: 2 * COUNT]
    keys, out = list(data.keys()), {"pointing": [], "box_iou": [], "whole_iou": [], "mean_cell_top1": []}
    name = f"located-{opened.info.img_size[0]}"
    for start, images in enumerate(batches(opened, pixels(opened, data, chosen, name))):
        numbers = chosen[100 * start : 100 * start + len(images)]
        cells = opened.model.class_and_cell_logits(images)[1][..., classes]
        labels = torch.from_numpy(data.labels[numbers])
        out["mean_cell_top1"] += (cells.mean((1, 2)).argmax(1) == labels).tolist()
        heat = scaled(cells[torch.arange(len(cells)), :, :, labels] - cells.mean(-1))
        fine = scaled(F.interpolate(heat[:, None], (64, 64), mode="bilinear")[:, 0]).numpy()
        for i, coarse, values in zip(numbers, heat, fine, strict=True):
            left, top, right, bottom = boxes[keys[i].split("/")[-1]]
            true, (row, column) = (left, top, right + 1, bottom + 1), divmod(int(coarse.argmax()), coarse.shape[1])
            x, y = ((place + 0.5) / side for place, side in zip((column, row), coarse.shape[::-1], strict=True))
            out["pointing"].append(true[0] <= 64 * x < true[2] and true[1] <= 64 * y < true[3])
            out["box_iou"].append(iou(tuple(64 * side for side in box_of(values >= 0.45, (x, y))), true))
            out["whole_iou"].append(iou((0, 0, 64, 64), true))
    return {name: np.array(values, np.float32) for name, values in out.items()}


def box_of(mask: np.ndarray, at: tuple[float, float]) -> tuple[float, ...]:
    """The box, in fractions, of the connected part of a mask that is nearest to a point."""
    (rows, columns), (height, width) = np.nonzero(mask), mask.shape
    nearest = np.hypot((columns + 0.5) / width - at[0], (rows + 0.5) / height - at[1]).argmin()
    parts, _ = ndimage.label(mask, np.ones((3, 3)))
    rows, columns = np.nonzero(parts == parts[rows[nearest], columns[nearest]])
    return columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height


def iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def corrupted(opened: OpenModel, data: DataSet) -> Columns:
    """Percent of the 15 corruptions under which an image is right."""
    chosen = keyed.generator(0, "corrupted").permutation(len(data))[:COUNT]
    clean, right = pixels(opened, data, chosen, "clean"), np.zeros(COUNT, np.float32)
    for name in CORRUPTIONS:

        def make(name: str = name) -> np.ndarray:
            return np.stack([corrupt(p, name, 3, keyed.generator(0, name, i)) for i, p in enumerate(clean)])

        changed = cached(name, make)
        answers = torch.cat([opened.model(images).logits.argmax(1) for images in batches(opened, changed)])
        right += answers.numpy() == data.labels[chosen]
    return {"corrupted": right / len(CORRUPTIONS)}


def features(opened: OpenModel, data: DataSet, chosen: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the class head reads beside the mean token, and labels."""
    out = []
    for images in batches(opened, pixels(opened, data, chosen, name)):
        tokens = opened.model.backbone.forward_features(images)
        out.append(torch.cat((opened.model.backbone.forward_head(tokens, pre_logits=True), tokens[:, 1:].mean(1)), 1))
    return torch.cat(out).numpy(), data.labels[chosen]


def split(data: DataSet, train: int, test: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Training images per class, and test images per class (0: all others)."""
    chosen, others = [], []
    for number in range(data.num_classes):
        order = keyed.generator(0, "split", number).permutation(np.flatnonzero(data.labels == number))
        chosen.append(order[:train])
        others.append(order[train : train + test] if test else order[train:])
    return np.concatenate(chosen), np.concatenate(others)


def probe(x: np.ndarray, y: np.ndarray, *tests: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """A ridge classifier, its penalty by leave-one-out; right or wrong on each test set."""
    scaler = StandardScaler().fit(x)
    head = RidgeClassifierCV(alphas=np.logspace(0, 5, 11)).fit(scaler.transform(x), y)
    return [(head.predict(scaler.transform(features)) == labels).astype(np.float32) for features, labels in tests]


def transfer(opened: OpenModel, options: argparse.Namespace) -> Columns:
    """Linear probes."""
    out = {}
    train, test = (open_dataset(options.flowers / name, "all") for name in ("train", "test"))
    fitted = features(opened, train, split(train, 10)[0], "flowers-train")
    out["flowers"] = probe(*fitted, features(opened, test, np.arange(len(test)), "flowers-test"))[0]
    data = open_dataset(options.caltech, "all")
    parts = zip(split(data, 15, 20), ("caltech-train", "caltech-test"), strict=True)
    first, others = (features(opened, data, chosen, name) for chosen, name in parts)
    out["caltech"] = probe(*first, others)[0]
    styles = {name: open_dataset(options.pacs / name, "all") for name in STYLES}
    orders = {name: keyed.generator(0, "pacs").permutation(len(data)) for name, data in styles.items()}
    photos, half = styles["photo"], len(styles["photo"]) // 2
    fitted = features(opened, photos, orders["photo"][:half], "photo-train")
    tests = {"photo": orders["photo"][half:], **{name: orders[name][:COUNT] for name in STYLES[1:]}}
    answers = probe(*fitted, *(features(opened, styles[name], chosen, name) for name, chosen in tests.items()))
    return out | {f"pacs_{name.split('_')[0]}": right for name, right in zip(tests, answers, strict=True)}


def boxes_of(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Left, top, right, bottom of each validation image, inclusive."""
    lines = (line.split("\t") for line in (options.data / "val" / "val_annotations.txt").read_text().splitlines())
    return {name: tuple(int(value) for value in box[-4:]) for name, *box in lines}


@torch.inference_mode()
def annotator(name: str, images: Path, options: argparse.Namespace) -> dict:
    """What the annotator itself knows about the validation images."""
    data, opened = open_dataset(images, "val"), open_model(f"registry:efficientnet_{name}", img_size=study.SIZE)
    opened.model.eval()
    classes = [opened.classes.find(wordnet) for wordnet in data.class_names]
    columns = located(opened, data, boxes_of(options), classes)
    return {name: round(100 * float(values.mean()), 2) for name, values in columns.items()}


@torch.inference_mode()
def measure(opened: OpenModel, images: Path, options: argparse.Namespace) -> tuple[dict, Columns]:
    """The row, and what it is the mean of."""
    data = open_dataset(images, "val")
    opened.model.eval()
    everywhere = located(opened, data, boxes_of(options), list(range(data.num_classes)))
    columns = {**everywhere, **corrupted(opened, data), **transfer(opened, options)}
    row: dict = {name: round(100 * float(values.mean()), 2) for name, values in columns.items()}
    old, figures = load("study/measure.py"), load("papers/tl_align_figures.py")
    some, labels = old._images(opened, images)
    halves = old._halves(opened, some, labels)
    row |= {name if name == "place" else f"halves_{name}": round(value, 2) for name, value in halves.items()}
    numbers = {**old._position(opened.model, some), **old._entropy(opened.model, some[:200])}
    row["layers"] = {
        name: [round(value, 4) for value in values]
        for name, values in figures.layer_ratios(opened, str(images), 256).items()
    }
    numbers["label_rmse"] = figures.rmse(opened, str(images), COUNT)[0]
    opened.model.align()
    numbers |= old._shares(opened.model, some, labels)
    return row | {name: round(value, 4) for name, value in numbers.items()}, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    for name in ("data", "flowers", "caltech", "pacs"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", default="", help="runs whose key contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work: Path = options.work
    global CACHE
    CACHE = work / "pixels"
    CACHE.mkdir(exist_ok=True)
    done, finished = read_rows(work / "measures.jsonl"), read_rows(work / "results.jsonl")
    (work / "measured").mkdir(exist_ok=True)
    keys = [run.key for run in study.plan() if run.key in finished and options.only in run.key]
    for name in ("lite2", "lite0"):
        if f"annotator {name}" not in done:
            row = annotator(name, work / "images" / "study", options)
            append(work / "measures.jsonl", {"key": f"annotator {name}", **row})
    for key in [*keys, *(["untrained"] if keys else [])]:
        if key in done:
            continue
        opened = open_model(work / "runs" / file_name(keys[0] if key == "untrained" else key))
        if key == "untrained":
            torch.manual_seed(0)
            opened.model.backbone.init_weights("")
        row, columns = measure(opened, work / "images" / "study", options)
        np.savez_compressed(work / "measured" / f"{file_name(key)}.npz", **columns)
        append(work / "measures.jsonl", {"key": key, **row})
        print(key, row, flush=True)


if __name__ == "__main__":
    main()
