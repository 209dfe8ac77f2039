"""Find the samples of a data set from what the user typed.

Accepted (`docs/data.md` shows each):
    a folder with train/ and val/ (or test/), one folder per class in each;
    a folder with one folder per class, with `val_split`;
    a zip or tar file of such folders, or a folder with train.zip and val.zip;
    WebDataset shards: `shards/train-{000..099}.tar`, `shards/*.tar`, or the folder that holds them;
    `torchvision:CIFAR10`, `torchvision:CIFAR10:folder`, `hf:owner/name`.

Classes are the names of the first folders, sorted; images may lie deeper. Order is by key, everywhere the same. Keys
are relative to the split's own folder, so that `data` and `data/train` name the training images alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from everytoken.data import webdataset
from everytoken.data.places import Place, part, whole
from everytoken.data.sources import DataError, DataSet, ReaderSet, split_off
from everytoken.errors import did_you_mean

_log = logging.getLogger(__name__)


def open_dataset(
    spec: str | os.PathLike[str],
    split: str = "train",
    *,
    val_split: float = 0.0,
    seed: int = 0,
    class_list: str | os.PathLike[str] | Sequence[str] | None = None,
    labelled: bool = True,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
) -> DataSet:
    """Open one part of a data set.

    Args:
        spec: what the user typed; see the top of this file.
        split: "train", "val", "test", or "all" (no division: every image below the folder).
        val_split: share of each class to set aside for validation, for data that has no part of its own for that.
        seed: decides, with each key, which images are set aside.
        class_list: class names in the order of the labels, or a text file with one per line, when the folders' sorted
            names will not do. It may name classes without images.
        labelled: False: folders are not classes, every image has label -1.
        root: where data sets with a name (`torchvision:...`) are, or are to be downloaded to;
            the folder in `torchvision:NAME:FOLDER` goes before it.
        download: allow that download.
    """
    spec = os.fspath(spec)
    names = _read_class_list(class_list)
    dividing = bool(val_split) and split in ("train", "val")
    if spec.startswith(("torchvision:", "hf:")):
        from everytoken.data.named import open_named

        if names is not None:
            raise DataError(f"{spec}: class_list is for folders and archives; this data set has its own class names.")
        data = open_named(spec, "train" if dividing else split, root, download)
    else:
        data = _open_files(spec, split, dividing, names, labelled)
    if dividing:
        data = data.subset(split_off(data, val_split, seed)[split == "val"])
        if not len(data):
            raise DataError(f"{spec}: val_split {val_split} leaves no image for {split}. Choose another value.")
    return data


def _read_class_list(given: str | os.PathLike[str] | Sequence[str] | None) -> list[str] | None:
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        if not path.is_file():
            raise DataError(f"class_list: there is no file {path}.")
        given = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    names = [name for name in given if name]
    if not names:
        raise DataError("class_list: no names in it.")
    if len(set(names)) < len(names):
        double = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"class_list: names occur twice: {', '.join(double[:5])}.")
    return names


def _open_files(spec: str, split: str, dividing: bool, names: list[str] | None, labelled: bool) -> DataSet:
    """The data set in folders or archives; with `dividing`, all of what is to be divided."""
    if split == "all":
        place = whole(spec)
        parts = [found.name for found in (part(spec, "train"), part(spec, "val")) if found]
        if labelled and parts:
            raise DataError(f"{place.name} is divided into parts: choose one of {' and '.join(parts)}.")
        return _classes(place, names, labelled)
    if dividing:
        train = part(spec, "train")
        held = part(spec, "val")
        if train and held:
            raise DataError(
                f"{spec} has images for validation of its own ({held.name}): leave val_split (--val-split) out, or "
                f"give only the training images ({train.name})."
            )
        return _classes(train or whole(spec), names, labelled)
    own = part(spec, split)
    if split != "train":
        if own is None:
            raise DataError(
                f"{spec} has no part for {split}. Make a folder {split}/ next to train/, or set a part of the images "
                "aside with val_split (--val-split 0.1)."
            )
        train = part(spec, "train")
        if train and labelled and names is None:
            names = _class_names(train)
            return _classes(own, names, labelled, like=train.name)
    elif own is None:
        held = part(spec, "val")
        if held:
            raise DataError(f"{spec} has {held.name} but no train/ folder next to it.")
        own = whole(spec)
    return _classes(own, names, labelled)


def _class_names(place: Place) -> list[str]:
    shards = webdataset.open_shards(place)
    return shards.class_names if shards else place.folders()


def _classes(place: Place, names: list[str] | None, labelled: bool, like: str = "") -> DataSet:
    """The data set of a tree, its first folders as classes.

    Args:
        names: the classes; None: the folders' sorted names.
        like: where the names come from, for messages.
    """
    shards = webdataset.open_shards(place, names)
    if shards:
        return shards
    reader, images = place.images()
    if not images:
        raise DataError(
            f"{place.name} holds no images (files with extensions such as .jpg, .png, .webp; hidden ones are ignored)."
        )
    if not labelled:
        return ReaderSet(place.name, reader, [i for _, i in images], (p for p, _ in images), [-1] * len(images), [])
    inside = [(path, i) for path, i in images if "/" in path]
    if not inside:
        raise DataError(
            f"{place.name} holds {len(images)} images but no class folders. Put the images of each class into a folder "
            "with the class's name."
        )
    if len(inside) < len(images):
        _log.warning("%s: %d images outside the class folders are left out", place.name, len(images) - len(inside))
    seen = {path.split("/", 1)[0] for path, _ in inside}
    if names is None:
        names = sorted(seen)
        empty = sorted(set(place.folders()) - seen)
        if empty:
            others = f" ({len(empty)} such folders)" if len(empty) > 1 else ""
            raise DataError(
                f"{place.name}: the folder {empty[0]!r} holds no images{others}. Remove it, or put images into it. "
                "(In Python, open_dataset(..., class_list=names) allows classes without images.)"
            )
    unknown = sorted(seen - set(names))
    if unknown:
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise DataError(
            f"{place.name}: the class {unknown[0]!r}{others} is not one of the {len(names)} classes of "
            f"{like or 'the list'}.{did_you_mean(unknown[0], names)}"
        )
    number = {name: k for k, name in enumerate(names)}
    labels = [number[path.split("/", 1)[0]] for path, _ in inside]
    return ReaderSet(place.name, reader, [i for _, i in inside], (p for p, _ in inside), labels, names)
