"""Datasets: numbered samples with a key, a label and the bytes of an image, opened from what the user typed.

`docs/data.md` has the table of what `open_dataset` accepts: class folders, archives of such folders, WebDataset shards,
`labels.csv`, lists of files, archives at an address (`tree` finds the files of all these), `subset:LIST:DATA`, and
`torchvision:NAME`.

A key is the image's path relative to the folder of its split, with "/" between the parts. It names the sample
everywhere: in the store of score maps, in random draws, in logs. Classes are the names of the first folders, sorted;
images may lie deeper. Samples are ordered by key. Keys and labels are kept in a few arrays, so that worker processes
share the memory instead of slowly copying it.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken.errors import DataError, did_you_mean
from everytoken.files import read_bytes
from everytoken_lab import schema
from everytoken_lab.data.archives import ArchiveReader, Strings
from everytoken_lab.data.decode import ImageError, Picture, naming_errors
from everytoken_lab.data.labels import NAME as LABELS_NAME
from everytoken_lab.data.labels import read_text
from everytoken_lab.data.tree import CLASS_LISTS, NAMED, SUBSET, FileTree, find_split, parse_subset, warn_once

__all__ = ["DataError", "DataSet", "FileSet", "Strings", "open_dataset", "open_splits"]

DEFAULT_VAL_SPLIT = 0.1
"""Fraction of the images that is held out where a dataset has no validation images and no other fraction was given."""


class DataSet(ABC):
    """Numbered samples.

    Attributes:
        name: what to call the dataset in messages.
        class_names: the name of each label; empty if the samples have no labels.
        labels: int64 [n], -1 where there is none; multi-label: uint8 [n, K], 1 for each label of the image.
    """

    PER_IMAGE: ClassVar[tuple[str, ...]] = ("labels",)  # attributes with an entry for each sample
    name: str
    class_names: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """Whether a sample may have several labels, or none."""
        return self.labels.ndim == 2

    def label(self, i: int) -> int:
        """The class of sample i, -1 if it has none; of several, the first."""
        if self.multi_label:
            return int(self.labels[i].argmax()) if self.labels[i].any() else -1
        return int(self.labels[i])

    def label_text(self, i: int) -> str:
        """The label of sample i in words; several as in `labels.csv`, with ";"."""
        numbers = np.flatnonzero(self.labels[i]).tolist() if self.multi_label else [self.label(i)]
        return ";".join(self.class_names[number] for number in numbers if number >= 0)

    def class_counts(self) -> np.ndarray:
        """[K] samples of each class."""
        if self.multi_label:
            return self.labels.sum(0, dtype=np.int64)
        return np.bincount(self.labels[self.labels >= 0], minlength=self.num_classes)

    def strata(self) -> np.ndarray:
        """[n] one class for each sample, for folds: the label; multi-label: the label that is rarest in the dataset."""
        if not self.multi_label:
            return self.labels
        rarity = np.where(self.labels > 0, self.class_counts(), len(self) + 1)
        return np.where(self.labels.any(1), rarity.argmin(1), self.num_classes)

    def keys(self) -> Iterator[str]:
        """All keys, in order."""
        return (self.key(i) for i in range(len(self)))

    @abstractmethod
    def key(self, i: int) -> str:
        """The name of sample i: a relative path with "/"."""

    @abstractmethod
    def open_bytes(self, i: int) -> bytes:
        """The image file of sample i."""

    def where(self, i: int) -> str:
        """What to call sample i in messages."""
        return self.key(i)

    def picture(self, i: int) -> Picture:
        """Sample i with its header read and its pixels not yet decoded."""
        where = self.where(i)
        with naming_errors(where):
            return Picture(self.open_bytes(i), where)

    def load(self, i: int) -> Image.Image:
        """Sample i as an upright RGB image."""
        return self.picture(i).upright()

    def subset(self, indices: Sequence[int] | np.ndarray) -> Self:
        """Some of the samples, with the same keys, labels and classes."""
        chosen, numbers = copy(self), np.asarray(indices, dtype=np.int64)
        for name in self.PER_IMAGE:
            values = getattr(self, name)
            some = Strings(values[i] for i in numbers) if isinstance(values, Strings) else values[numbers]
            setattr(chosen, name, some)
        return chosen


class FileSet(DataSet):
    """Image files of a folder; keys are their paths below it. Without `labels`, there are none."""

    PER_IMAGE: ClassVar[tuple[str, ...]] = ("labels", "images")

    def __init__(
        self,
        root: Path,
        images: Iterable[str],
        class_names: Sequence[str] = (),
        name: str = "",
        labels: np.ndarray | None = None,
    ) -> None:
        self.root, self.name, self.class_names = root, name or str(root), list(class_names)
        self.images = Strings(images)
        self.labels = np.full(len(self.images), -1) if labels is None else labels

    def key(self, i: int) -> str:
        return self.images[i]

    def where(self, i: int) -> str:
        return f"{self.root}/{self.images[i]}"

    def open_bytes(self, i: int) -> bytes:
        return read_bytes(self.where(i))


class ArchiveSet(FileSet):
    """Image files of tar files; `numbers`: those of the reader."""

    PER_IMAGE = ("labels", "images", "numbers")

    def __init__(self, reader: ArchiveReader, numbers: Sequence[int], *files: Any) -> None:
        super().__init__(*files)
        self.reader, self.numbers = reader, np.array(numbers)

    def where(self, i: int) -> str:
        return self.reader.where(int(self.numbers[i]))

    def open_bytes(self, i: int) -> bytes:
        return self.reader.read(int(self.numbers[i]))


# Opening ------------------------------------------------------------------------------------------------------------


def open_dataset(
    spec: str | os.PathLike[str],
    split: str = "train",
    *,
    val_split: float = 0.0,
    seed: int = 0,
    class_list: str | os.PathLike[str] | Sequence[str] | None = None,
    labelled: bool = True,
) -> DataSet:
    """Open one split of a dataset.

    Args:
        spec: what the user typed; see the top of this file.
        split: "train", "val", "test", "all" (every image below the folder), or "undivided" (every image of a dataset
            without validation images, for `hold_out`).
        val_split: fraction of each class to hold out for validation, for datasets without validation images.
        seed: decides, with each key, which images are held out.
        class_list: class names in the order of the labels, or a text file with one per line. Default: the folders'
            names, sorted. It may name classes without images.
        labelled: False: folders are not classes, every image has label -1.
    """
    spec = os.fspath(spec)
    if val_split and split in ("train", "val"):
        whole = open_dataset(spec, "undivided", class_list=class_list, labelled=labelled)
        return hold_out(whole, spec, val_split, seed)[split == "val"]
    chosen, data = parse_subset(spec)
    if chosen:
        return _choose(open_dataset(data, split, class_list=class_list), chosen, labelled)
    if not spec.startswith(NAMED):
        return _open_files(spec, split, None if class_list is None else _read_class_list(class_list), labelled)
    if class_list is not None:
        raise DataError(f"{spec}: class_list is for folders and archives; this dataset has its own class names.")
    return open_named(spec, "train" if split == "undivided" else split)


def open_splits(spec: str | os.PathLike[str], val_split: float = 0.0, *, seed: int = 0) -> tuple[DataSet, DataSet]:
    """(training, validation) images: a dataset's own splits, or with `val_split` one dataset, read once and divided."""
    if not val_split:
        return open_dataset(spec, "train"), open_dataset(spec, "val")
    return hold_out(open_dataset(spec, "undivided"), os.fspath(spec), val_split, seed)


def hold_out(data: DataSet, spec: str, val_split: float, seed: int = 0) -> tuple[DataSet, DataSet]:
    """(training, validation) images of an undivided dataset that the user called `spec`."""
    train, val = split_off(data, val_split, seed)
    if not len(train) or not len(val):
        if len(data.class_names) == 1:
            raise DataError(f"{spec} has one class only: give every class a folder of its own, at least two.")
        why = "val, as no class has two images. Add images" if len(train) else "train. Choose another value"
        raise DataError(f"{spec}: val_split {val_split} leaves no image for {why}.")
    return data.subset(train), data.subset(val)


def split_off(data: DataSet, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation) indices: a fraction of each class is held out for validation.

    Every image decides for itself, by a hash of seed and key, so images that are added later move none of the others
    between the two parts (the fraction holds on average, not exactly). A class of two images or more has at least one
    in both parts: if chance left one part empty, the image nearest to the limit changes sides. With multi-label images
    this is done for rare classes first, and the last image of a class is not held out.
    """
    if not 0 < fraction < 1:
        raise DataError(f"val_split must be between 0 and 1, got {fraction}.")
    draws = np.array([keyed.uniform(seed, "val-split", key) for key in data.keys()])  # noqa: SIM118
    held_out = draws < fraction
    multi_label = data.labels.ndim == 2
    columns = data.labels.T > 0 if multi_label else (data.labels == label for label in np.unique(data.labels))
    classes = [np.flatnonzero(column) for column in columns]
    for members in sorted(classes, key=len) if multi_label else classes:
        if len(members) < 2:
            continue
        if not held_out[members].any():
            for chosen in members[np.argsort(draws[members], kind="stable")].tolist():
                others = np.flatnonzero(data.labels[chosen]).tolist() if multi_label else ()
                if all((~held_out[classes[other]]).sum() > 1 for other in others):
                    held_out[chosen] = True
                    break
        elif held_out[members].all():
            held_out[members[np.argmax(draws[members])]] = False
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def keys_hash(data: DataSet) -> str:
    """Changes with the names of the images and their labels."""
    content = hashlib.sha256()
    for key, label in zip(data.keys(), data.labels.tolist(), strict=True):
        content.update(f"{label} {key}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


def _read_class_list(class_list: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    if isinstance(class_list, (str, os.PathLike)):
        path = Path(__file__).with_name(CLASS_LISTS[name]) if (name := str(class_list)) in CLASS_LISTS else Path(name)
        if not path.is_file():
            raise DataError(f"class_list: there is no file {path}.")
        class_list = [line.strip() for line in read_text(path).splitlines()]
    names = [name for name in class_list if name]
    if not names:
        raise DataError("class_list: no names in it.")
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(f"class_list: names occur twice: {', '.join(twice[:5])}.")
    return names


def _choose(data: DataSet, class_list: str, labelled: bool) -> DataSet:
    """The images of some classes, which become the classes of the dataset."""
    names = sorted(_read_class_list(class_list))
    if missing := [name for name in names if name not in data.class_names]:
        raise DataError(
            f"{data.name} has no images of {len(missing)} of {len(names)} classes of the list {class_list}: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}."
        )
    if data.multi_label:
        raise DataError(f"{SUBSET} is for images with one label each, and {data.name} is multi-label.")
    number = np.full(data.num_classes, -1)
    number[[data.class_names.index(name) for name in names]] = np.arange(len(names))
    labels = number[data.labels]
    part = data.subset(np.flatnonzero(labels >= 0))
    part.class_names = names if labelled else []
    part.labels = labels[labels >= 0] if labelled else np.full(len(part), -1)
    return part


def _open_files(spec: str, split: str, class_names: list[str] | None, labelled: bool) -> DataSet:
    """A dataset in folders or archives."""
    train, val = find_split(spec, "train"), find_split(spec, "val")
    names_from = "the list"
    if split == "all" and labelled and (train or val):
        names = " and ".join(tree.name for tree in (train, val) if tree)
        raise DataError(f"{spec} is divided into splits: choose one of {names}.")
    if split == "undivided" and train and val:
        raise DataError(
            f"{spec} has validation images of its own ({val.name}): leave val_split out, or give {train.name}."
        )
    if split == "train" and val and not train:
        raise DataError(f"{spec} has {val.name} but no train/ folder next to it.")
    if split in ("train", "undivided", "all"):
        tree = find_split(spec, "") if split == "all" or train is None else train
    else:
        tree = val if split == "val" else find_split(spec, split)
        if tree and train and labelled and class_names is None:  # the training images number the classes
            shard = train.reader and _read_shards(train, train.images(), None)
            class_names, names_from = shard[1] if shard else train.folders(), train.name
    if tree is None:
        raise DataError(
            f"{spec} has no images for {split}. Make a folder {split}/ next to train/, or hold some of the images out "
            "with val_split, such as 0.1."
        )
    return _read_tree(tree, class_names, labelled, names_from)


def _read_tree(tree: FileTree, class_names: list[str] | None, labelled: bool, names_from: str) -> DataSet:
    """The dataset of a tree, with labels of a labels file, of shards, or from its first folders.

    Args:
        class_names: the classes; None: those that occur, sorted.
        names_from: where the names come from, for messages.
    """
    images = tree.images()
    if not images:
        raise DataError(
            f"{tree.name} holds no images (files with extensions such as .jpg, .png, .webp; hidden ones are ignored)."
        )
    if not labelled:
        return _data_set(tree, images)
    texts: list[tuple[str, ...]]
    if tree.rows:
        texts = [row.labels for row in tree.rows]
    elif tree.reader and (shards := _read_shards(tree, images, class_names)):
        texts, class_names = shards
    else:
        in_folders = [path for path in images if "/" in path]
        if not in_folders:
            raise DataError(
                f"{tree.name} holds {len(images)} images but no class folders. Put the images of each class into a "
                f"folder with the class's name, or write {LABELS_NAME} with path and label."
            )
        if left := len(images) - len(in_folders):
            warn_once(f"{tree.name}: left out {schema.counted(left, 'image')} outside the class folders")
        images, texts = in_folders, [(path.split("/", 1)[0],) for path in in_folders]
    used = {text for labels in texts for text in labels}
    if class_names is None:
        class_names = sorted(used)
        if empty := sorted(set(tree.folders()) - used):
            raise DataError(
                f"{tree.name}: the folder {empty[0]!r} holds no images. Remove it, or put images into it. "
                "(In Python, open_dataset(..., class_list=names) allows classes without images.)"
            )
    if unknown := sorted(used - set(class_names)):
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        line = next((f"line {row.line}: the label" for row in tree.rows if unknown[0] in row.labels), "the class")
        raise DataError(
            f"{tree.name}, {line} {unknown[0]!r}{others} is not one of the {len(class_names)} classes of {names_from}."
            f"{did_you_mean(unknown[0], class_names)}"
        )
    number = {name: k for k, name in enumerate(class_names)}
    if tree.multi_label:
        labels = np.zeros((len(images), len(class_names)), dtype=np.uint8)
        for i, row in enumerate(texts):
            labels[i, [number[text] for text in row]] = 1
    else:
        labels = np.array([number[text] for (text,) in texts])
    printable = map(schema.printable, class_names)  # folders' names need not be; weights and stores keep these
    return _data_set(tree, images, list(printable), labels)


def _data_set(tree: FileTree, images: Sequence[str], class_names: Sequence[str] = (), labels: Any = None) -> DataSet:
    about = (tree.folder or Path(), images, class_names, tree.name, labels)
    if tree.reader is None:
        return FileSet(*about)
    numbers = dict(tree.members)
    return ArchiveSet(tree.reader, [numbers[path] for path in images], *about)


def _read_shards(
    tree: FileTree, images: Sequence[str], class_names: list[str] | None
) -> tuple[list[tuple[str, ...]], list[str]] | None:
    """The label of each image in WebDataset shards, and the classes; None if the tree is not made of shards.

    The files of one sample share a name: 000123.jpg, 000123.cls; the latter holds the number of its class. The shards
    are indexed and read at random like other archives, so shuffling is complete and resuming exact.
    """
    reader, seen = tree.reader, Counter(path for path, _ in tree.members)
    files = {_stem(path): i for path, i in tree.members if path.endswith(".cls")}
    if reader is None or not any(_stem(path) in files for path in images):
        return None
    for path in images:
        if seen[path] > 1:
            raise DataError(f"{tree.name}: two samples have the name {path!r}. Names must be unique over all shards.")
        if _stem(path) not in files:
            raise DataError(f"{tree.name}: {path} has no label: there is no {_stem(path)}.cls.")
    texts = [reader.read(files[_stem(path)]).decode("utf-8", "replace").strip() for path in images]
    if wrong := [text for text in texts if not re.fullmatch(r"[0-9]{1,7}", text)]:
        raise DataError(f"{tree.name}: the label {wrong[0][:40]!r} is no number of a class.")
    numbers = list(map(int, texts))
    class_names = class_names or [str(k) for k in range(max(numbers) + 1)]
    known = dict(enumerate(class_names))
    return [(known.get(value, f"number {value}"),) for value in numbers], class_names


def _stem(path: str) -> str:
    """WebDataset's sample name: up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


# torchvision's datasets ---------------------------------------------------------------------------------------------

_SPELLINGS = {  # of splits there, in the order of preference
    "train": ("train", "training", "trainval", "train-standard"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test",),
}


class TorchvisionSet(DataSet):
    """One split of a torchvision dataset: Pillow images, whose keys are "split/number" (train/00000012)."""

    PER_IMAGE = ("labels", "numbers")

    def __init__(self, name: str, split: str, data: Any, labels: Any, class_names: Iterable[Any] | None) -> None:
        self.name, self.split, self.data, self.labels = name, split, data, np.asarray(labels, dtype=np.int64)
        names = [", ".join(name) if isinstance(name, (tuple, list)) else str(name) for name in class_names or ()]
        self.numbers = np.arange(len(self.labels))
        top = int(self.labels.max(initial=-1))
        self.class_names = names if len(names) > top else [str(k) for k in range(top + 1)]

    def key(self, i: int) -> str:
        return f"{self.split}/{self.numbers[i]:08d}"

    def where(self, i: int) -> str:
        return f"{self.name}, {self.split} image {self.numbers[i]}"

    def open_bytes(self, i: int) -> bytes:
        """The image as a PNG file (lossless)."""
        file = io.BytesIO()
        self.picture(i).image.save(file, "PNG")
        return file.getvalue()

    def picture(self, i: int) -> Picture:
        try:
            image = self.data[int(self.numbers[i])][0]
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{self.where(i)}: cannot be read ({error}).") from error
        if not isinstance(image, Image.Image):
            raise DataError(f"{self.name} gives {type(image).__name__} instead of images; it cannot be used here.")
        return Picture(image, self.where(i))


def open_named(spec: str, split: str) -> DataSet:
    """Open one split ("train", "val" or "test") of torchvision:NAME or torchvision:NAME:FOLDER."""
    from torchvision import datasets

    if split not in _SPELLINGS:
        raise DataError(f"{spec}: the split {split!r} is none of {', '.join(_SPELLINGS)}.")
    _, name, *folder = spec.split(":", 2)
    root = Path("".join(folder) or "~/.cache/everytoken/datasets").expanduser()
    names = {n.lower(): n for n in datasets.__all__ if inspect.isclass(getattr(datasets, n, None))}
    if name.lower() not in names:
        raise DataError(f"torchvision has no dataset {name!r}.{did_you_mean(name, names.values())}")
    name = names[name.lower()]
    make = getattr(datasets, name)
    accepted = inspect.signature(make).parameters
    choices: list[dict[str, Any]] = [{}]
    if "train" in accepted:
        choices = [{"train": split == "train"}]
    elif "split" in accepted:
        choices = [{"split": spelling} for spelling in _SPELLINGS[split]]
    elif split != "train":
        raise DataError(f"torchvision:{name} is not divided into splits; hold images out with val_split, such as 0.1.")
    refusal: Exception | None = None
    for choice in choices:
        try:
            data = make(str(root), **choice)
        except ValueError as error:  # no split of that name
            refusal = error
            continue
        except Exception as error:  # not there, damaged, or wants other arguments: many kinds
            given = ", ".join(f"{key}={value!r}" for key, value in {"root": str(root), **choice}.items())
            raise DataError(
                f"torchvision:{name} cannot be opened in {root}: {error}\n"
                f"If you have it, name the folder that holds it: torchvision:{name}:FOLDER. To download it, once:\n"
                f'  python -c "from torchvision.datasets import {name}; {name}({given}, download=True)"'
            ) from error
        try:
            labels, classes = _labels(data), getattr(data, "classes", None)
            return TorchvisionSet(f"torchvision:{name}", str(choice.get("split", split)), data, labels, classes)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise DataError(f"torchvision:{name} has no class for each image, so it cannot be used here.") from error
    raise DataError(f"torchvision:{name} has no images for {split}: {refusal}")


def _labels(data: Any) -> list[int]:
    for attribute in ("targets", "labels", "_labels", "y", "samples", "_samples", "imgs"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data):
            return [int(value[1] if isinstance(value, (tuple, list)) else value) for value in values]
    return [int(data[i][1]) for i in range(len(data))]  # decodes everything once; the last resort
