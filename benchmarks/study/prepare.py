"""Images and score maps of the study, made when a run first asks for them; what is there is left alone.

    WORK/cifar/seed0/train   1,000 images, 100 per class, of CIFAR-10's training set, drawn by the seed
    WORK/cifar/seed0/val     all 10,000 test images; for the tuning seed 2,000 other images of the training set
    WORK/flowers/seed0       200 photos per class of a zip with train/ and val/, and all of its val/
    WORK/cifar/seed0-linear-256   maps

Maps are made by `everytoken annotate`. `linear-S`: `fit`, a linear classifier of the images' own classes on the frozen
features of an ImageNet network (EfficientNet-Lite0, images enlarged to S pixels), applied at each of its S/32 x S/32
cells, every image annotated by a head that was not fitted on it. Variants: `-mean`, the mean of all cells at every
cell; `-coarse`, the mean over blocks of 2x2 cells; `-truth`, the image's own label at every cell. `foreign-S`: the
ImageNet network's own 1000 classes.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import plan as study
from PIL import Image

import everytoken_lab as lab
from everytoken.keyed import generator
from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken_lab.demo.images import Images, find_images

NETWORK = "registry:efficientnet_lite0"


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
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(n for n in archive.namelist() if n.endswith(".jpg")):
            groups.setdefault(Path(name).parts[-3:-1], []).append(name)
        for (split, kind), names in groups.items():
            chosen = generator(seed, "study", kind).permutation(names)[:200] if split == "train" else names
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
            for name in chosen:
                (folder / split / kind / Path(name).name).write_bytes(archive.read(name))


def maps_of(work: Path, data: str, seed: int, kind: str) -> Path:
    """The folder of score maps of a seed."""
    images, out = work / data / f"seed{seed}", work / data / f"seed{seed}-{kind}"
    if (out / "done").exists():
        return out
    name, _, rest = kind.partition("-")
    if name == "foreign":
        lab.annotate(images, out, NETWORK, img_size=int(rest), foreign_classes=True, workers=0, device="cpu")
    elif rest.isdigit():
        size = int(rest)
        lab.annotate(images, out, "fit", fit_model=NETWORK, fit_size=size, img_size=size, workers=0, device="cpu")
    else:
        size, _, how = rest.partition("-")
        _changed(maps_of(work, data, seed, f"linear-{size}"), out, how)
    (out / "done").touch()
    return out


def _changed(source: Path, out: Path, how: str) -> None:
    """The maps of a store with the mean of all cells, or of each block of 2x2, or the image's label in every one."""
    store = Maps(source)
    meta = StoreMeta(store.grid, store.top_k, tuple(store.class_names), annotator={"name": how, "of": source.name})
    with MapWriter(out, list(store), meta) as writer:
        for key in list(writer.pending_keys()):
            scores = dense(store[key])
            h, w, k = scores.shape
            if how == "truth":
                scores = np.zeros_like(scores)
                scores[..., store.class_names.index(key.split("/")[-2])] = 10
            side = 2 if how == "coarse" else h
            blocks = scores.reshape(h // side, side, w // side, side, k).mean((1, 3))
            writer.write({key: ScoreMap.from_logits(blocks.repeat(side, 0).repeat(side, 1), k)})
        writer.finalize()


def dense(record: ScoreMap) -> np.ndarray:
    """[h, w, k] in the order of the classes, of a map that keeps all of them."""
    scores = np.zeros(record.scores.shape, np.float32)
    np.put_along_axis(scores, record.classes.astype(np.int64), record.scores.astype(np.float32), -1)
    return scores


def describe(path: Path) -> dict:
    """What an annotator knows, how local its cells are and how sharp, on the training images.

    Accuracy of the map's mean; part of the cells that repeat its class; mean of a cell's highest probability. Nothing
    for foreign classes.
    """
    store = Maps(path)
    if store.top_k != store.num_classes:
        return {}
    right = same = sharp = 0.0
    for key in store:
        scores = dense(store[key])
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        answer = int(scores.mean((0, 1)).argmax())
        right += store.class_names[answer] == key.split("/")[-2]
        same += float((scores.argmax(-1) == answer).mean())
        sharp += float((odds.max(-1) / odds.sum(-1)).mean())
    parts = {"right": right, "cells_like_image": same, "sharpness": sharp}
    return {name: round(value / len(store), 4) for name, value in parts.items()}
