"""Images and score maps of the study, made when a run first asks for them; what is there is left alone.

    WORK/cifar/seed0/train   1,000 images, 100 per class, of CIFAR-10's training set, drawn by the seed
    WORK/cifar/seed0/val     all 10,000 test images; for the tuning seed 2,000 other images of the training set
    WORK/flowers/seed0       200 photos per class of a zip with train/ and val/, and all of its val/
    WORK/cifar/seed0-linear-256   maps

`linear-S`: a linear classifier of the images' own classes on the frozen features of an ImageNet network (EfficientNet-
Lite0, images enlarged to S pixels), L2 by cross-validation, applied at each of its S/32 x S/32 cells. Variants:
`-mean`, the mean of all cells at every cell; `-coarse`, the mean over blocks of 2x2 cells. `cnn`: `everytoken annotate`
with a small CNN that is trained on the same images. `foreign-S`: the ImageNet network's own 1000 classes.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import plan as study
import torch
from PIL import Image
from torch import Tensor

import everytoken as et
from everytoken.data import open_dataset
from everytoken.demo.images import Images, find_images
from everytoken.keyed import generator
from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken.models.open import open_model

ANNOTATOR = "registry:efficientnet_lite0"
STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def images_of(work: Path, data: str, seed: int, flowers: str = "") -> Path:
    """The folder with train/ and val/ of a seed."""
    folder = work / data / f"seed{seed}"
    if not (folder / "done").exists():
        if data == "cifar":
            _cifar(work, folder, seed)
        else:
            _flowers(Path(flowers), folder, seed)
        (folder / "done").touch()
    return folder


def _write(images: Images, indices: np.ndarray, pixels: np.ndarray, labels: np.ndarray, folder: Path) -> None:
    for i in indices.tolist():
        path = folder / images.class_names[labels[i]] / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[i]).save(path)


def _cifar(work: Path, folder: Path, seed: int) -> None:
    images = find_images(print)
    if images.class_names[0] != "airplane":
        raise SystemExit("the study needs CIFAR-10, and it cannot be had here (see `everytoken demo`)")
    pixels, labels = images.train
    order = generator(seed, "study").permutation(len(labels))
    by_class = [order[labels[order] == number] for number in range(10)]
    _write(images, np.concatenate([own[:100] for own in by_class]), pixels, labels, folder / "train")
    if seed == study.TUNING_SEED:
        _write(images, np.concatenate([own[100:300] for own in by_class]), pixels, labels, folder / "val")
        return
    test = work / "cifar" / "test"
    if not (test / "done").exists():
        _write(images, np.arange(len(images.val[1])), *images.val, test / "images")
        (test / "done").touch()
    if not (folder / "val").is_symlink():
        (folder / "val").symlink_to(os.path.relpath(test / "images", folder))


def _flowers(source: Path, folder: Path, seed: int) -> None:
    with zipfile.ZipFile(source) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
        for name in names:
            split, kind = Path(name).parts[-3:-1]
            same = [n for n in names if Path(n).parts[-3:-1] == (split, kind)]
            rank = generator(seed, "study", kind).permutation(len(same))[same.index(name)]
            if split == "val" or rank < 200:
                path = folder / split / kind / Path(name).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))


def maps_of(work: Path, data: str, seed: int, kind: str) -> Path:
    """The folder of score maps of a seed."""
    images, out = work / data / f"seed{seed}", work / data / f"seed{seed}-{kind}"
    if (out / "done").exists():
        return out
    name, _, rest = kind.partition("-")
    if name == "cnn":
        et.annotate(images, out, "fit", workers=0, device="cpu")
    elif name == "foreign":
        et.annotate(images, out, ANNOTATOR, img_size=int(rest), foreign_classes=True, workers=0, device="cpu")
    elif rest.isdigit():
        _linear(images, out, int(rest))
    else:
        size, _, how = rest.partition("-")
        _changed(maps_of(work, data, seed, f"linear-{size}"), out, how)
    (out / "done").touch()
    return out


@torch.no_grad()
def _cells(images: Path, split: str, size: int, most: int = 0) -> tuple[Tensor, Tensor]:
    """Features [N, h, w, D] and labels [N] of an ImageNet network."""
    opened = open_model(ANNOTATOR)
    data = open_dataset(images, split)
    which = range(len(data)) if not most else range(0, len(data), -(-len(data) // most))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (opened.info.mean, opened.info.std))
    features = []
    for start in range(0, len(which), 25):
        pictures = [data.load(i).resize((size, size), Image.Resampling.BICUBIC) for i in which[start : start + 25]]
        pixels = torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2).float() / 255
        features.append(opened.model.backbone.forward_features((pixels - mean) / std).permute(0, 2, 3, 1))
    return torch.cat(features), torch.from_numpy(data.labels[list(which)])


def fit_linear(features: Tensor, labels: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Logistic regression: (weights [D, K], bias [K]) with L2 of this strength on standardised features."""
    weights = torch.zeros(features.shape[1], int(labels.max()) + 1, requires_grad=True)
    bias = torch.zeros(weights.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(features @ weights + bias, labels) + strength * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach(), bias.detach()


def _linear(images: Path, out: Path, size: int) -> None:
    cells, labels = _cells(images, "train", size)
    pooled = cells.mean((1, 2)).clone()
    centre, scale = pooled.mean(0), pooled.std(0) + 1e-6
    pooled = (pooled - centre) / scale
    fold = torch.arange(len(labels)) % 5  # files are sorted by class, so every fold has as many of each

    def right(strength: float) -> float:
        hits = 0
        for held in range(5):
            weights, bias = fit_linear(pooled[fold != held], labels[fold != held], strength)
            hits += int(((pooled[fold == held] @ weights + bias).argmax(1) == labels[fold == held]).sum())
        return hits / len(labels)

    scores = {strength: right(strength) for strength in STRENGTHS}
    strength = max(STRENGTHS, key=lambda s: scores[s])
    weights, bias = fit_linear(pooled, labels, strength)
    tested, truth = _cells(images, "val", size, 500)
    accuracy = ((((tested.mean((1, 2)) - centre) / scale) @ weights + bias).argmax(1) == truth).float().mean()
    about = {"name": "linear head", "of": ANNOTATOR, "size": size, "l2": strength, "cross_validated": scores[strength]}
    about["held_out"] = round(float(accuracy), 4)
    data = open_dataset(images, "train")
    _store(
        out,
        dict(zip(data.keys(), (((cells - centre) / scale) @ weights + bias).numpy(), strict=True)),
        data.class_names,
        about,
    )


def _changed(source: Path, out: Path, how: str) -> None:
    store = Maps(source)
    dense = {}
    for key in store:
        record = store[key]
        scores = np.zeros(record.scores.shape, np.float32)
        np.put_along_axis(scores, record.classes.astype(np.int64), record.scores.astype(np.float32), -1)
        side = scores.shape[0] if how == "mean" else 2
        h, w, k = scores.shape
        blocks = scores.reshape(h // side, side, w // side, side, k).mean((1, 3))
        dense[key] = blocks.repeat(side, 0).repeat(side, 1)
    _store(out, dense, store.class_names, {"name": how, "of": source.name})


def _store(out: Path, scores: dict[str, np.ndarray], names: list[str], about: dict) -> None:
    """All classes' scores of every cell."""
    h, w, k = next(iter(scores.values())).shape
    with MapWriter(out, list(scores), StoreMeta((h, w), k, tuple(names), annotator=about)) as writer:
        for key in list(writer.pending_keys()):
            writer.write({key: ScoreMap.from_logits(scores[key], k)})
        writer.finalize()
    (out / "about.json").write_text(json.dumps(describe(Maps(out), about)))


def describe(store: Maps, about: dict) -> dict:
    """How local an annotator's cells are, and how sharp.

    Part of the cells that repeat the class of their map's mean, and mean of a cell's highest probability, on the
    training images.
    """
    same, sharp, count = 0.0, 0.0, 0
    for key in store:
        record = store[key]
        scores = np.zeros(record.scores.shape, np.float32)
        np.put_along_axis(scores, record.classes.astype(np.int64), record.scores.astype(np.float32), -1)
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        same += float((scores.argmax(-1) == scores.mean((0, 1)).argmax()).mean())
        sharp += float((odds.max(-1) / odds.sum(-1)).mean())
        count += 1
    return {**about, "cells_like_image": round(same / count, 4), "sharpness": round(sharp / count, 4)}
