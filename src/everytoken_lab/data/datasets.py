"""Datasets: numbered samples with a key, a label and the bytes of an image, opened from what the user typed.

Accepted by `open_dataset` (`docs/data.md` shows each):
    a folder with train/ and val/ (or test/), one folder per class in each;
    a folder with one folder per class, with `val_split`;
    a zip or tar file of such folders, or a folder with train.zip and val.zip;
    WebDataset shards: `shards/train-{000..099}.tar`, `shards/*.tar`, or the folder that holds them;
    `labels.csv`, or a folder with this file in it: labels, and perhaps splits, by path (see `labels`);
    archives at an address, through a local cache: `s3://bucket/train-{000..099}.tar` (see `remote`);
    a list of image files, `infograph_train.txt`, with `infograph_test.txt` or the like beside it for validation;
    `subset:LIST:DATA`, some of the classes of one of these: `subset:imagenet100:/data/imagenet`;
    `torchvision:CIFAR10`, `torchvision:CIFAR10:folder`, `hf:owner/name` (see `named`).

A key is the image's path relative to the folder of its split, with "/" between the parts, so that `data` and
`data/train` name the training images alike. It names the sample everywhere: in the store of score maps, in random
draws, in logs. Classes are the names of the first folders, sorted; images may lie deeper. Samples are ordered by key.

Keys and labels of millions of images are kept in a few arrays rather than in Python objects, so that worker processes
share the memory instead of slowly copying it.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken.errors import DataError, EverytokenError, did_you_mean
from everytoken_lab import schema
from everytoken_lab.data.archives import LABEL_FILES, Archive, ArchiveReader, Strings
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.labels import NAME as LABELS_NAME
from everytoken_lab.data.labels import LabelTable, Row, find_labels, read_labels, unusable_labels
from everytoken_lab.data.labels import class_names as class_names_of
from everytoken_lab.data.remote import RemoteFile, find_remote, is_remote

__all__ = ["DataError", "DataSet", "ImageSet", "ReaderSet", "Strings", "Subset", "open_dataset", "open_splits"]

EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga", ".avif"),
    )
)
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing"),
}
_LABEL_SPLITS = {"val": ("val", "test")}  # as with folders: test images validate where there are no others
DEFAULT_VAL_SPLIT = 0.1
"""Part of the images that is held out where a dataset has no validation images and no other part was asked for."""
NAMED = ("torchvision:", "hf:")  # how names of datasets start that are not paths
SUBSET = "subset:"
CLASS_LISTS = {"imagenet100": "imagenet100.txt"}
"""Lists of classes in the package; ImageNet-100 is that of Contrastive Multiview Coding (Tian et al.) and of drloc."""
_ARCHIVES = (".zip", ".tar")
_log = logging.getLogger(__name__)


def is_image(path: str) -> bool:
    """Whether a relative path names an image: by its extension, and no part of it is hidden."""
    name = path.rsplit("/", 1)[-1]
    dot = name.rfind(".")
    return dot > 0 and name[dot:].lower() in EXTENSIONS and not hidden(path)


def hidden(path: str) -> bool:
    """Names that start with a dot, and what macOS puts into archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


class DataSet(ABC):
    """Numbered samples.

    Attributes:
        name: what to call the dataset in messages.
        class_names: the name of each label; empty if the samples have no labels.
        labels: int64 [n], -1 where there is none; or uint8 [n, K], 1 for each label of an image that may have several.
    """

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
        """[n] one class for each sample, for dealing samples out evenly: of several labels, the rarest of the set."""
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
        try:
            data = self.open_bytes(i)
        except OSError:
            return Picture(where, where)  # raises an error that names the file
        return Picture(data, where)

    def load(self, i: int) -> Image.Image:
        """Sample i as an upright RGB image."""
        return self.picture(i).upright()

    def subset(self, indices: Sequence[int] | np.ndarray) -> DataSet:
        """Some of the samples, with the same keys, labels and classes."""
        return Subset(self, np.asarray(indices, dtype=np.int64))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self):,} images, {self.num_classes} classes)"


class Subset(DataSet):
    """Some samples of another dataset."""

    def __init__(self, base: DataSet, indices: np.ndarray) -> None:
        self.base, self.indices = base, indices
        self.name, self.class_names, self.labels = base.name, base.class_names, base.labels[indices]

    def key(self, i: int) -> str:
        """The key in the whole dataset."""
        return self.base.key(int(self.indices[i]))

    def where(self, i: int) -> str:
        """What the whole dataset calls it."""
        return self.base.where(int(self.indices[i]))

    def open_bytes(self, i: int) -> bytes:
        """The image file."""
        return self.base.open_bytes(int(self.indices[i]))

    def picture(self, i: int) -> Picture:
        """As the whole dataset opens it."""
        return self.base.picture(int(self.indices[i]))


class FolderReader:
    """Files of a folder."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.root, self.paths = root, Strings(paths)

    def read(self, i: int) -> bytes:
        """The bytes of file i."""
        with open(self.where(i), "rb") as file:
            return file.read()

    def where(self, i: int) -> str:
        """Its path."""
        return f"{self.root}/{self.paths[i]}"


class ReaderSet(DataSet):
    """Samples whose bytes come from a reader: of a folder, or of zip or tar files.

    Args:
        name: what to call the dataset.
        reader, positions: sample i is file `positions[i]` of the reader.
        keys, labels, class_names: as in `DataSet`.
    """

    def __init__(
        self,
        name: str,
        reader: FolderReader | ArchiveReader,
        positions: Sequence[int],
        keys: Iterable[str],
        labels: Sequence[int] | np.ndarray,
        class_names: Sequence[str],
    ) -> None:
        self.name, self.reader = name, reader
        self.positions = np.asarray(positions, dtype=np.int64)
        self._keys = Strings(keys)
        self.labels = np.asarray(labels)
        self.labels = self.labels.astype(np.int64 if self.labels.ndim < 2 else np.uint8)
        self.class_names = list(class_names)

    def key(self, i: int) -> str:
        """The path relative to the dataset's root."""
        return self._keys[i]

    def where(self, i: int) -> str:
        """The file, or the archive and the member."""
        return self.reader.where(int(self.positions[i]))

    def open_bytes(self, i: int) -> bytes:
        """The image file of sample i."""
        return self.reader.read(int(self.positions[i]))


class ImageSet(DataSet):
    """Samples that exist as Pillow images rather than as files; a subclass says how to get one."""

    @abstractmethod
    def image(self, i: int) -> Image.Image:
        """Sample i."""

    def open_bytes(self, i: int) -> bytes:
        """The image as a PNG file (lossless)."""
        file = io.BytesIO()
        self.image(i).save(file, "PNG")
        return file.getvalue()

    def picture(self, i: int) -> Picture:
        """Sample i, without a detour through a file."""
        return Picture(self.image(i), self.where(i))


# Opening ------------------------------------------------------------------------------------------------------------


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
    """Open one split of a dataset.

    Args:
        spec: what the user typed; see the top of this file.
        split: "train", "val", "test", or "all" (not divided: every image below the folder).
        val_split: part of each class to hold out for validation, for datasets without validation images.
        seed: decides, with each key, which images are held out.
        class_list: class names in the order of the labels, or a text file with one per line, when the folders' sorted
            names will not do. It may name classes without images.
        labelled: False: folders are not classes, every image has label -1.
        root: where datasets with a name (`torchvision:...`) are, or are to be downloaded to;
            the folder in `torchvision:NAME:FOLDER` goes before it.
        download: allow that download.
    """
    spec = os.fspath(spec)
    class_names = _read_class_list(class_list)
    held_out = bool(val_split) and split in ("train", "val")
    if spec.startswith(NAMED):
        from everytoken_lab.data.named import open_named

        if class_names is not None:
            raise DataError(f"{spec}: class_list is for folders and archives; this dataset has its own class names.")
        data = open_named(spec, "train" if held_out else split, root, download)
    else:
        data = _open_files(spec, split, held_out, class_names, labelled)
    return _hold_out(data, spec, val_split, seed)[split == "val"] if held_out else data


def open_splits(spec: str | os.PathLike[str], val_split: float = 0.0, *, seed: int = 0) -> tuple[DataSet, DataSet]:
    """(training, validation) images: a dataset's own splits, or with `val_split` one dataset, read once and divided."""
    spec = os.fspath(spec)
    if not val_split:
        return open_dataset(spec, "train"), open_dataset(spec, "val")
    return _hold_out(open_undivided(spec), spec, val_split, seed)


def open_undivided(spec: str | os.PathLike[str]) -> DataSet:
    """Every image of a dataset without validation images, which `open_splits` would divide."""
    spec = os.fspath(spec)
    return open_dataset(spec, "train") if spec.startswith(NAMED) else _open_files(spec, "train", True, None, True)


def _hold_out(data: DataSet, spec: str, val_split: float, seed: int) -> tuple[DataSet, DataSet]:
    train, val = split_off(data, val_split, seed)
    for split, indices in (("train", train), ("val", val)):
        if not len(indices):
            if len(data.class_names) == 1:
                raise DataError(f"{spec} has one class only: give every class a folder of its own, at least two.")
            raise DataError(
                f"{spec}: val_split {val_split} leaves no image for {split}, as no class has two images. Add images."
                if split == "val"
                else f"{spec}: val_split {val_split} leaves no image for {split}. Choose another value."
            )
    return data.subset(train), data.subset(val)


def split_off(data: DataSet, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation) indices: a part of each class is held out for validation.

    Every image decides for itself, by a hash of seed and key, so images that are added later move none of the others
    between the two parts (each part's share is `fraction` on average, not exactly). A class of two images or more has
    at least one in both parts: if chance left one part empty, the image nearest to the limit changes sides. With
    several labels per image this is done for rare classes first, and the last image of a class is not held out.
    """
    if not 0 < fraction < 1:
        raise DataError(f"val_split must be between 0 and 1, got {fraction}.")
    draws = np.array([keyed.uniform(seed, "val-split", key) for key in data.keys()])  # noqa: SIM118
    held_out = draws < fraction
    several = data.labels.ndim == 2
    columns = data.labels.T > 0 if several else (data.labels == label for label in np.unique(data.labels))
    classes = [np.flatnonzero(column) for column in columns]
    for members in sorted(classes, key=len) if several else classes:
        if len(members) < 2:
            continue
        if not held_out[members].any():
            for chosen in members[np.argsort(draws[members], kind="stable")].tolist():
                others = np.flatnonzero(data.labels[chosen]).tolist() if several else ()
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


def _read_class_list(class_list: str | os.PathLike[str] | Sequence[str] | None) -> list[str] | None:
    if class_list is None:
        return None
    if isinstance(class_list, (str, os.PathLike)):
        path = Path(__file__).with_name(CLASS_LISTS[name]) if (name := str(class_list)) in CLASS_LISTS else Path(name)
        if not path.is_file():
            raise DataError(f"class_list: there is no file {path}.")
        try:
            class_list = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"class_list: {path} cannot be read as UTF-8 text ({error}).") from error
    names = [name for name in class_list if name]
    if not names:
        raise DataError("class_list: no names in it.")
    if len(set(names)) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"class_list: names occur twice: {', '.join(twice[:5])}.")
    return names


def _open_files(spec: str, split: str, held_out: bool, class_names: list[str] | None, labelled: bool) -> DataSet:
    """A dataset in folders or archives; with `held_out`, all of the images that are to be divided."""
    if split == "all":
        tree = _find_all(spec)
        splits = [inner.name for inner in (find_split(spec, "train"), find_split(spec, "val")) if inner]
        if labelled and splits:
            raise DataError(f"{tree.name} is divided into splits: choose one of {' and '.join(splits)}.")
        return _read_tree(tree, class_names, labelled)
    train = find_split(spec, "train")
    val = find_split(spec, "val")
    if held_out:
        if train and val:
            raise DataError(
                f"{spec} has validation images of its own ({val.name}): leave val_split out, or give only the training "
                f"images ({train.name})."
            )
        return _read_tree(train or _find_all(spec), class_names, labelled)
    if split == "train":
        if train is None and val:
            raise DataError(f"{spec} has {val.name} but no train/ folder next to it.")
        return _read_tree(train or _find_all(spec), class_names, labelled)
    tree_of_split = find_split(spec, split)
    if tree_of_split is None:
        raise DataError(
            f"{spec} has no images for {split}. Make a folder {split}/ next to train/, or hold some of the images out "
            "with val_split, such as 0.1."
        )
    if train and labelled and class_names is None:  # the training images number the classes
        shards = _read_shards(train)
        class_names = shards.class_names if shards else train.folders()
        return _read_tree(tree_of_split, class_names, labelled, names_from=train.name)
    return _read_tree(tree_of_split, class_names, labelled)


def _read_tree(tree: FileTree, class_names: list[str] | None, labelled: bool, names_from: str = "") -> DataSet:
    """The dataset of a tree, its first folders as classes.

    Args:
        class_names: the classes; None: the folders' sorted names.
        names_from: where the names come from, for messages.
    """
    shards = _read_shards(tree, class_names)
    if shards:
        return shards
    if tree.table is not None and labelled:
        return _read_labelled(tree, tree.table, class_names, names_from)
    reader, images = tree.images()
    if not images:
        raise DataError(
            f"{tree.name} holds no images (files with extensions such as .jpg, .png, .webp; hidden ones are ignored)."
        )
    if not labelled:
        return ReaderSet(tree.name, reader, [i for _, i in images], (p for p, _ in images), [-1] * len(images), [])
    in_folders = [(path, i) for path, i in images if "/" in path]
    if not in_folders:
        why = unusable_labels(tree.folder) if tree.folder is not None else ""
        raise NoClassFoldersError(
            f"{tree.name} holds {len(images)} images but no class folders. Put the images of each class into a folder "
            f"with the class's name, or write {LABELS_NAME} with path and label.{why and f' ({why})'}"
        )
    if len(in_folders) < len(images):
        _log.warning("%s: %d images outside the class folders are left out", tree.name, len(images) - len(in_folders))
    folders = {path.split("/", 1)[0] for path, _ in in_folders}
    if class_names is None:
        class_names = sorted(folders)
        empty = sorted(set(tree.folders()) - folders)
        if empty:
            others = f" ({len(empty)} such folders)" if len(empty) > 1 else ""
            raise DataError(
                f"{tree.name}: the folder {empty[0]!r} holds no images{others}. Remove it, or put images into it. "
                "(In Python, open_dataset(..., class_list=names) allows classes without images.)"
            )
    unknown = sorted(folders - set(class_names))
    if unknown:
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise DataError(
            f"{tree.name}: the class {unknown[0]!r}{others} is not one of the {len(class_names)} classes of "
            f"{names_from or 'the list'}.{did_you_mean(unknown[0], class_names)}"
        )
    number = {name: k for k, name in enumerate(class_names)}
    labels = [number[path.split("/", 1)[0]] for path, _ in in_folders]
    names = list(map(schema.printable, class_names))  # folders need not be; weights and stores keep these
    return ReaderSet(tree.name, reader, [i for _, i in in_folders], (p for p, _ in in_folders), labels, names)


def _read_labelled(tree: FileTree, table: LabelTable, class_names: list[str] | None, names_from: str) -> ReaderSet:
    """The dataset of a labels file."""
    rows = tree.rows()
    names = class_names if class_names is not None else tree.folders()
    number = {name: k for k, name in enumerate(names)}
    for row in rows:
        unknown = next((label for label in row.labels if label not in number), None)
        if unknown is not None:
            raise DataError(
                f"{table.file}, line {row.line}: the label {unknown!r} is not one of the {len(names)} classes of "
                f"{names_from or 'the list'}.{did_you_mean(unknown, names)}"
            )
    labels = np.zeros((len(rows), len(names)), dtype=np.uint8)
    for i, row in enumerate(rows):
        labels[i, [number[label] for label in row.labels]] = 1
    reader, images = tree.images()
    printable = list(map(schema.printable, names))
    chosen = labels if table.multi_label else labels.argmax(1)
    return ReaderSet(tree.name, reader, [i for _, i in images], (path for path, _ in images), chosen, printable)


class NoClassFoldersError(DataError):
    """A folder holds images, but they do not lie in class folders."""


# Files in folders and archives ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileTree:
    """The files below a folder, or below a path inside archives.

    Attributes:
        name: what to call it.
        folder: its path; for archives, None.
        reader: of the archives.
        prefix: the part of the archives that is meant: "" or a path that ends with "/".
        listed: the files of the folder that a list names; None: all that are there.
        classes: the folders directly inside that count; None: all of them.
        table: labels by path, instead of class folders. split: the rows of it that are meant; "": all.
    """

    name: str
    folder: Path | None
    reader: ArchiveReader | None = None
    prefix: str = ""
    listed: tuple[str, ...] | None = None
    classes: frozenset[str] | None = None
    table: LabelTable | None = None
    split: str = ""

    def rows(self) -> list[Row]:
        """Those of the labels file that are meant."""
        rows = self.table.rows if self.table is not None else ()
        return [row for row in rows if not self.split or row.split == self.split]

    def folders(self) -> list[str]:
        """Names of the folders directly inside, sorted, without hidden ones; of a labels file, its classes."""
        if self.classes is not None:
            return sorted(self.classes)
        if self.table is not None:
            return class_names_of(self.rows())
        if self.listed is not None:
            names = {path.split("/", 1)[0] for path in self.listed if "/" in path}
        elif self.folder is not None:
            names = {entry.name for entry in os.scandir(self.folder) if entry.is_dir()}
        else:
            names = {path.split("/", 1)[0] for path, _ in self.members() if "/" in path}
        return sorted(name for name in names if not hidden(name))

    def inside(self, name: str) -> FileTree:
        """The tree below one of its folders."""
        if self.folder is not None:
            return FileTree(f"{self.name}/{name}", self.folder / name)
        return FileTree(f"{self.name}!{self.prefix}{name}", None, self.reader, f"{self.prefix}{name}/")

    def members(self) -> list[tuple[str, int]]:
        """(path relative to this tree, number in the reader) of each file in the archives."""
        paths = self.reader.paths if self.reader is not None else ()
        return [(path[len(self.prefix) :], i) for i, path in enumerate(paths) if path.startswith(self.prefix)]

    def images(self) -> tuple[FolderReader | ArchiveReader, list[tuple[str, int]]]:
        """A reader, and (path relative to this tree, number in the reader) of each image, sorted by path."""
        if self.reader is not None:
            members = sorted((path, i) for path, i in self.members() if is_image(path))
            return self.reader, [(path, i) for path, i in members if self._counts(path)]
        assert self.folder is not None
        paths = sorted(filter(self._counts, self.listed if self.listed is not None else list_files(self.folder)))
        return FolderReader(self.folder, paths), [(path, i) for i, path in enumerate(paths)]

    def _counts(self, path: str) -> bool:
        return self.classes is None or path.split("/", 1)[0] in self.classes

    def choose(self, classes: frozenset[str]) -> FileTree:
        """Some of the classes, all of which must be there."""
        if self.table is not None:
            raise DataError(f"{SUBSET} chooses class folders, and {self.name} is a labels file: leave its lines out.")
        missing = sorted(classes - set(self.folders()))
        if missing:
            raise DataError(
                f"{self.name} has no folder for {len(missing)} of {len(classes)} classes of the list: "
                f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}."
            )
        return replace(self, classes=classes)


def dataset_path(spec: str) -> str | None:
    """The path or pattern in what the user typed; None for a dataset that goes by a name or an address."""
    path = _subset(spec)[1]
    return None if spec.startswith(NAMED) or is_remote(path) else path


def network_address(spec: str) -> str:
    """The same if opening it would use the network, else ""."""
    if spec.startswith("hf:"):
        return "" if Path(spec.removeprefix("hf:")).expanduser().is_dir() else spec
    return spec if is_remote(spec) else ""


def dataset_title(spec: str) -> str:
    """What to call a dataset in names of folders: "photos" for /data/photos and for photos/labels.csv."""
    path = Path(spec.split(":")[-1])
    return (
        path.absolute().parent.name if path.name == LABELS_NAME else path.stem if path.suffix == ".csv" else path.name
    )


def _subset(spec: str) -> tuple[frozenset[str] | None, str]:
    """`subset:LIST:DATA` -> (the list's classes, DATA); anything else -> (None, the same)."""
    if not spec.startswith(SUBSET):
        return None, spec
    class_list, _, data = spec.removeprefix(SUBSET).partition(":")
    if not data or data.startswith(NAMED):
        raise DataError(
            f"{spec}: a subset is subset:LIST:DATA with a file of class names (or {', '.join(CLASS_LISTS)}) and a "
            "folder, an archive or a file list."
        )
    return frozenset(_read_class_list(class_list) or ()), data


def find_split(spec: str, split: str) -> FileTree | None:
    """The files of a split that has a folder, archive or list of its own; None if the dataset has none for it."""
    classes, spec = _subset(spec)
    if classes is not None:
        tree = find_split(spec, split)
        return tree.choose(classes) if tree else None
    if is_remote(spec):
        return _split_of_archives(_find_archives(spec), split)
    path = Path(spec).expanduser()
    if labels := find_labels(path):
        return _labelled_tree(labels, split)
    if is_list(path):
        return _split_of_list(path, split)
    if not path.is_dir():
        return _split_of_archives(_find_archives(spec), split)
    tree = _folder_of_split(FileTree(str(path), path), split)
    if tree and tree.folder is not None:
        archives = _archives_in(tree.folder)
        return _archive_tree(archives) if archives else tree
    archives = _archives_in(path)
    return _split_of_archives(archives, split) if archives else None


def _labelled_tree(file: Path, split: str) -> FileTree | None:
    """The images of a split ("": all) that a labels file names; None if it has none for it."""
    table = read_labels(file)
    splits = {row.split for row in table.rows}
    if split:
        split = next((s for s in dict.fromkeys(_LABEL_SPLITS.get(split, (split,))) if s in splits), "")
        if not split:
            return None
    paths = tuple(row.path for row in table.rows if not split or row.split == split)
    name = f"{file} ({split})" if split else str(file)
    return FileTree(name, file.parent, listed=paths, table=table, split=split)


def is_list(path: Path) -> bool:
    """Whether a path names a list of image files."""
    return path.suffix.lower() in (".txt", ".lst") and path.is_file()


def _split_of_list(path: Path, split: str) -> FileTree | None:
    """The list of a split: this one, or one beside it whose name differs in the split's only."""
    for spelling in SPLITS.get(split, (split,)):
        name = re.sub(r"(?<![a-z])(train(ing)?|val(id(ation)?)?|test(ing)?)(?![a-z])", spelling, path.name)
        if name != path.name or split_folder(re.split(r"[^a-z]", path.stem.lower()), split):
            other = path.with_name(name)
            if other.is_file():
                return _listed_tree(other)
    return None


def _listed_tree(path: Path) -> FileTree:
    """The files of a list: one path per line, relative to the list's folder; what follows a space is a label number.

    The class is the folder above the image. What all paths begin with, above the classes, is no part of the keys.
    """
    text = path.read_text(encoding="utf-8")
    files = [re.sub(r"\s+-?\d+$", "", line.strip()).replace("\\", "/") for line in text.splitlines()]
    files = [file.removeprefix("./") for file in files if file]
    if not files:
        raise DataError(f"{path} lists no files.")
    outside = next((file for file in files if file.startswith("/") or ".." in file.split("/")), None)
    if outside:
        raise DataError(f"{path} lists {outside}; paths in a list are relative to its folder.")
    top = os.path.commonpath([os.path.dirname(os.path.dirname(file)) for file in files])
    inner = tuple(file[len(top) + 1 :] if top else file for file in files)
    return FileTree(str(path), path.parent / top, listed=tuple(file for file in inner if is_image(file)))


def split_folder(folders: Sequence[str], split: str) -> str | None:
    """The one of some folders' names that means a split: "valid" for "val"."""
    for spelling in SPLITS.get(split, (split,)):
        for folder in folders:
            if folder.lower() == spelling:
                return folder
    return None


def list_files(folder: Path, wanted: Callable[[str], bool] = is_image) -> list[str]:
    """Relative paths of all images (or other wanted files) below a folder, without hidden ones.

    Links are followed, but never round in a circle.
    """
    paths: list[str] = []

    def visit(path: str, relative: str, above: frozenset[tuple[int, int]]) -> None:
        status = os.stat(path)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(path) as entries:
            for entry in entries:
                name = relative + entry.name
                if hidden(entry.name):
                    continue
                if entry.is_dir():
                    visit(entry.path, name + "/", above | {here})
                elif wanted(entry.name):  # a dangling link stays in the list and is reported when it is read
                    paths.append(name)

    visit(os.fspath(folder), "", frozenset())
    return paths


def _find_all(spec: str) -> FileTree:
    """The tree that a path, pattern or archive name means, whatever splits it has."""
    classes, spec = _subset(spec)
    if classes is not None:
        return _find_all(spec).choose(classes)
    if is_remote(spec):
        return _archive_tree(_find_archives(spec))
    path = Path(spec).expanduser()
    if labels := find_labels(path):
        tree = _labelled_tree(labels, "")
        assert tree is not None
        return tree
    if is_list(path):
        return _listed_tree(path)
    if path.is_dir():
        archives = _archives_in(path)
        return _archive_tree(archives) if archives else FileTree(str(path), path)
    return _archive_tree(_find_archives(spec))


def _folder_of_split(tree: FileTree, split: str) -> FileTree | None:
    """The folder of a split, directly inside a tree or inside its only folder (data.zip with data/train/...)."""
    folders = tree.folders()
    name = split_folder(folders, split)
    others = [folder for folder in folders if not any(split_folder([folder], other) for other in SPLITS)]
    if name and others and not tree.inside(name).folders():
        return None  # a class that is called "train", next to the classes "bus" and "plane"
    if name:
        return tree.inside(name)
    if len(folders) == 1 and split_folder(tree.inside(folders[0]).folders(), "train"):
        return _folder_of_split(tree.inside(folders[0]), split)
    return None


def _split_of_archives(archives: Sequence[Archive], split: str) -> FileTree | None:
    of_split = _named_after(archives, split)
    if not of_split and any(_named_after(archives, other) for other in SPLITS):
        return None
    tree = _archive_tree(of_split or archives)
    return _folder_of_split(tree, split) or (tree if of_split else None)


def _named_after(archives: Sequence[Archive], split: str) -> list[Archive]:
    """Those whose name starts with the split's (train.zip, train-0001.tar, val_3.tar), by the first spelling used."""
    for spelling in SPLITS.get(split, (split,)):
        matches = [file for file in archives if re.match(rf"{spelling}(?![a-z])", file.name.lower())]
        if matches:
            return matches
    return []


def _archives_in(folder: Path) -> list[Archive]:
    """The archives directly inside a folder; none if there are images, or folders that may hold some, beside them."""
    entries = [entry for entry in os.scandir(folder) if not hidden(entry.name)]
    if any(entry.is_dir() or is_image(entry.name) for entry in entries):
        return []
    return [*sorted(folder / e.name for e in entries if e.is_file() and Path(e.name).suffix.lower() in _ARCHIVES)]


def _archive_tree(files: Sequence[Archive]) -> FileTree:
    name = str(files[0]) if len(files) == 1 else f"{files[0]} to {files[-1].name}"
    return FileTree(name, None, _reader(tuple((file, _mark(file)) for file in files)))


def _mark(file: Archive) -> tuple[int, int]:
    """Changes when a local file does; a remote one says so itself."""
    return (0, 0) if isinstance(file, RemoteFile) else (file.stat().st_mtime_ns, file.stat().st_size)


@lru_cache(maxsize=4)
def _reader(files: tuple[tuple[Archive, tuple[int, int]], ...]) -> ArchiveReader:
    """Index archives once, although several questions are asked about them; anew when a file has changed."""
    return ArchiveReader([file for file, _ in files])


def _find_archives(spec: str) -> list[Archive]:
    """The archives that a path, pattern or address names."""
    if is_remote(spec):
        return list(find_remote(spec, _braces(spec)))
    path = Path(spec).expanduser()
    if path.is_file():
        if not re.search(r"\.(zip|tar|tgz|tbz2?|txz)\b", path.name.lower()):
            raise DataError(f"{path} is a file; give the folder with the images, or a .zip or .tar file.")
        return [path]
    pieces = _braces(os.path.expanduser(spec))
    files = [file for piece in pieces for file in sorted(map(Path, glob.glob(piece))) if file.is_file()]
    if not files:
        near = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise DataError(f"There is no file or folder {path}.{did_you_mean(path.name, near)}")
    return list(files)


def _braces(pattern: str) -> list[str]:
    """A pattern with {a,b} and {000..123} as those without."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span:
        pieces = [str(n).zfill(len(span[1])) for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        pieces = match[1].split(",")
    expanded = (_braces(pattern[: match.start()] + piece + pattern[match.end() :]) for piece in pieces)
    return list(dict.fromkeys(whole for some in expanded for whole in some))  # nested ones come up again and again


# WebDataset ---------------------------------------------------------------------------------------------------------

_MOST_CLASSES = 10_000_000
_LABEL_FIELDS = ("label", "cls", "class")


def _read_shards(tree: FileTree, class_names: list[str] | None = None) -> ReaderSet | None:
    """The dataset of WebDataset shards, or None if the tree is not made of shards.

    The files of one sample share a name: 000123.jpg, 000123.cls. The label is in `.cls` (a number or a class name) or
    in the field "label", "cls" or "class" of `.json`. The shards are indexed and read at random like other archives;
    nothing is streamed, so shuffling is complete and resuming exact.

    Args:
        class_names: the classes (of the training shards, or given); None: taken from the labels.
    """
    reader = tree.reader
    if reader is None:
        return None
    members = tree.members()
    label_files = {_stem(path): i for path, i in members if path.endswith(LABEL_FILES)}
    images = sorted((path, i) for path, i in members if is_image(path))
    if not label_files or not any(_stem(path) in label_files for path, _ in images):
        return None
    values = []
    for number, (path, i) in enumerate(images):
        if number and images[number - 1][0] == path:
            raise DataError(
                f"{tree.name}: two samples have the name {path!r} ({reader.where(images[number - 1][1])} and "
                f"{reader.where(i)}). Names must be unique over all shards, because maps and logs go by them."
            )
        if _stem(path) not in label_files:
            raise DataError(f"{reader.where(i)} has no label: neither .cls nor .json of the same name is there.")
        values.append(_shard_label(reader, label_files[_stem(path)]))
    labels, class_names = _number_labels(tree.name, values, class_names)
    return ReaderSet(tree.name, reader, [i for _, i in images], (p for p, _ in images), labels, class_names)


def _stem(path: str) -> str:
    """WebDataset's sample name: up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


def _shard_label(reader: ArchiveReader, i: int) -> int | str:
    raw = reader.read(i)
    if reader.paths[i].endswith(".json"):
        fields = schema.parse_json(raw, dict[str, Any], reader.where(i))
        name = next((name for name in _LABEL_FIELDS if name in fields), "")
        if not name:
            raise DataError(f"{reader.where(i)} has no field {' or '.join(map(repr, _LABEL_FIELDS))}.")
        return schema.parse(int | str, fields[name], f"{reader.where(i)}, {name}")  # type: ignore[arg-type]
    text = raw.decode("utf-8", "replace").strip()
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _number_labels(name: str, values: list[int | str], class_names: list[str] | None) -> tuple[list[int], list[str]]:
    """Labels as numbers, and the names of the classes."""
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        raise DataError(f"{name}: some labels are numbers and some are names; make them all alike.")
    if kinds == {int}:
        numbers = [int(value) for value in values]
        if max(numbers) >= _MOST_CLASSES:
            raise DataError(f"{name}: the label {max(numbers)} cannot be the number of a class; the first is 0.")
        class_names = class_names or [str(k) for k in range(max(numbers) + 1)]
        wrong = [number for number in numbers if not 0 <= number < len(class_names)]
        if wrong:
            raise DataError(
                f"{name}: the label {wrong[0]} is not one of {len(class_names)} classes (0 to {len(class_names) - 1}), "
                "which are those of the training shards or the list."
            )
        return numbers, class_names
    words = [str(value) for value in values]
    class_names = class_names or sorted(set(words))
    unknown = sorted(set(words) - set(class_names))
    if unknown:
        raise DataError(
            f"{name}: the label {unknown[0]!r} is not one of the {len(class_names)} classes of the training shards or "
            f"the list.{did_you_mean(unknown[0], class_names)}"
        )
    number_of = {name: k for k, name in enumerate(class_names)}
    return [number_of[word] for word in words], class_names


# Images that a user names one by one --------------------------------------------------------------------------------


def gather_images(images: Sequence[str]) -> tuple[Path, list[str]]:
    """A common folder and the paths below it, of files and folders of images."""
    if not images:
        raise DataError("name the images: files, or folders with images in them")
    paths: list[Path] = []
    for name in images:
        path = Path(name).resolve()
        if path.is_dir():
            paths += sorted(p for p in path.rglob("*") if is_image(p.relative_to(path).as_posix()))
        elif path.is_file():
            paths.append(path)
        else:
            raise DataError(f"there is no image or folder {name}")
    if not paths:
        raise DataError(f"{', '.join(images)}: no images there")
    parents = [{p.parent, *p.parent.parents} for p in paths]
    root = max(set.intersection(*parents), key=lambda p: len(p.parts))
    return root, [p.relative_to(root).as_posix() for p in paths]


def result_stems(root: Path, names: Sequence[str], output: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Where the results of images go: to `output`, under the image's name without its ending.

    Images whose names differ in the ending alone keep it: a.jpg and a.png become a.jpg.ENDING and a.png.ENDING. No
    image is ever overwritten.

    Args:
        root, names: of `gather_images`.
        endings: that are added to a stem, such as ".png".
    """
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    while True:  # until no two are the same, also on disks that do not tell a from A
        count = Counter(stem.lower() for stem in stems.values())
        shared = [name for name, stem in stems.items() if count[stem.lower()] > 1 and stem != name]
        if not shared:
            break
        stems |= {name: name for name in shared}
    images = {_file_id(root / name) for name in names}
    for name, stem in stems.items():
        for ending in endings:
            target = output / (stem + ending)
            if target.exists() and _file_id(target) in images:
                raise EverytokenError(
                    f"the result for {name} would overwrite the image {target}; choose another output folder"
                )
    return {name: output / stem for name, stem in stems.items()}


def check_is_no_input(target: Path, images: Sequence[str]) -> None:
    """Refuse to write a result over one of the images that it is about."""
    if target.exists() and target.is_file():
        root, names = gather_images(images)
        if _file_id(target) in {_file_id(root / name) for name in names}:
            raise EverytokenError(f"{target} is one of the images; choose another name for the result")


def _file_id(path: Path) -> tuple[int, int]:
    """The same for all names of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino
