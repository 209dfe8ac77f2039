"""Datasets: numbered samples with a key, a label and the bytes of an image, opened from what the user typed.

`docs/data.md` has the table of what `open_dataset` accepts: class folders, archives of such folders, WebDataset shards,
`labels.csv`, lists of files, archives at an address (`remote`), `subset:LIST:DATA`, and names such as `hf:owner/name`
(`named`).

A key is the image's path relative to the folder of its split, with "/" between the parts. It names the sample
everywhere: in the store of score maps, in random draws, in logs. Classes are the names of the first folders, sorted;
images may lie deeper. Samples are ordered by key. Keys and labels are kept in a few arrays, so that worker processes
share the memory instead of slowly copying it.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken.errors import DataError, EverytokenError, did_you_mean
from everytoken_lab import schema
from everytoken_lab.data.archives import ArchiveReader, Strings
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.labels import NAME as LABELS_NAME
from everytoken_lab.data.labels import Row, check_relative, find_labels, read_labels, read_text, unusable_labels
from everytoken_lab.data.remote import RemoteFile, fetch, find_remote, is_remote

__all__ = ["DataError", "DataSet", "FileSet", "Strings", "open_dataset", "open_splits"]

EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga", ".avif"),
    )
)
UNREAD = frozenset((".heic", ".heif", ".jxl", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf", ".rw2"))
"""Photos that cannot be decoded here; they are counted, and the user is told."""
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing"),
}
DEFAULT_VAL_SPLIT = 0.1
"""Fraction of the images that is held out where a dataset has no validation images and no other fraction was given."""
NAMED = ("torchvision:", "hf:")
"""How names of datasets start that are not paths."""
SUBSET = "subset:"
CLASS_LISTS = {"imagenet100": "imagenet100.txt"}
"""Lists of classes in the package; ImageNet-100 is that of Contrastive Multiview Coding (Tian et al.) and of drloc."""
_ARCHIVES = (".zip", ".tar")
_LABEL_FILES = (".cls", ".json")  # of WebDataset
_log = logging.getLogger(__name__)


def is_image(path: str, endings: frozenset[str] = EXTENSIONS) -> bool:
    """Whether a relative path names an image: by its extension, and no part of it is hidden."""
    return os.path.splitext(path)[1].lower() in endings and not hidden(path)


def _is_photo(path: str) -> bool:
    return is_image(path, EXTENSIONS | UNREAD)


def hidden(path: str) -> bool:
    """Names that start with a dot, and what macOS puts into archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    """Once per process, although a dataset may be opened several times."""
    _log.warning(message)


def _readable(where: str, paths: Iterable[str]) -> list[str]:
    """The images among some files, sorted; says how many photos cannot be read, and how to convert them."""
    files = sorted(set(paths))
    if unread := [path for path in files if is_image(path, UNREAD)]:
        kind = unread[0].rsplit(".", 1)[1]
        _warn(
            f"{where}: {len(unread):,} files such as {unread[0]} are left out, because this format cannot be read. "
            f"Convert them first: magick mogrify -format jpg *.{kind}"
        )
    return list(filter(is_image, files))


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
        try:
            data = self.open_bytes(i)
        except OSError:
            return Picture(where, where)  # raises an error that names the file
        return Picture(data, where)

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
        with open(self.where(i), "rb") as file:
            return file.read()


class ArchiveSet(FileSet):
    """Image files of zip or tar files; `numbers`: those of the reader."""

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
        class_list: class names in the order of the labels, or a text file with one per line, when the folders' sorted
            names will not do. It may name classes without images.
        labelled: False: folders are not classes, every image has label -1.
    """
    spec = os.fspath(spec)
    if val_split and split in ("train", "val"):
        whole = open_dataset(spec, "undivided", class_list=class_list, labelled=labelled)
        return hold_out(whole, spec, val_split, seed)[split == "val"]
    chosen, data = _subset(spec)
    if chosen:
        return _choose(open_dataset(data, split, class_list=class_list), chosen, labelled)
    class_names = None if class_list is None else _read_class_list(class_list)
    if not spec.startswith(NAMED):
        return _open_files(spec, split, class_names, labelled)
    if class_names is not None:
        raise DataError(f"{spec}: class_list is for folders and archives; this dataset has its own class names.")
    from everytoken_lab.data.named import open_named

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
    if split == "all":
        if labelled and (train or val):
            names = " and ".join(tree.name for tree in (train, val) if tree)
            raise DataError(f"{spec} is divided into splits: choose one of {names}.")
        tree = find_split(spec, "")
    elif split in ("train", "undivided"):
        if split == "undivided" and train and val:
            raise DataError(
                f"{spec} has validation images of its own ({val.name}): leave val_split out, or give only the training "
                f"images ({train.name})."
            )
        if split == "train" and val and not train:
            raise DataError(f"{spec} has {val.name} but no train/ folder next to it.")
        tree = train or find_split(spec, "")
    else:
        tree = val if split == "val" else find_split(spec, split)
        if tree and train and labelled and class_names is None:  # the training images number the classes
            class_names, names_from = _class_names(train), train.name
    if tree is None:
        raise DataError(
            f"{spec} has no images for {split}. Make a folder {split}/ next to train/, or hold some of the images out "
            "with val_split, such as 0.1."
        )
    return _read_tree(tree, class_names, labelled, names_from)


def _class_names(tree: FileTree) -> list[str]:
    """The classes of a tree, found without a walk over its images unless it is made of shards."""
    return (tree.reader and _shard_labels(tree, tree.images())[1]) or tree.folders()


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
        return tree.dataset(images)
    texts, class_names = _shard_labels(tree, images, class_names)
    if tree.rows:
        texts = [row.labels for row in tree.rows]
    elif not texts:
        in_folders = [path for path in images if "/" in path]
        if not in_folders:
            why = unusable_labels(tree.folder) if tree.folder is not None else ""
            raise NoClassFoldersError(
                f"{tree.name} holds {len(images)} images but no class folders. Put the images of each class into a "
                f"folder with the class's name, or write {LABELS_NAME} with path and label.{why and f' ({why})'}"
            )
        if left := len(images) - len(in_folders):
            _warn(f"{tree.name}: left out {schema.counted(left, 'image')} outside the class folders")
        images, texts = in_folders, [(path.split("/", 1)[0],) for path in in_folders]
    used = {text for labels in texts for text in labels}
    if class_names is None:
        class_names = sorted(used)
        if empty := sorted(set(tree.folders()) - used):
            others = f" ({len(empty)} such folders)" if len(empty) > 1 else ""
            raise DataError(
                f"{tree.name}: the folder {empty[0]!r} holds no images{others}. Remove it, or put images into it. "
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
    return tree.dataset(images, list(printable), labels)


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
        prefix: the path inside the archives that is meant: "", or ending with "/".
        rows: the only files that count, of a labels file or a list, sorted by path, with their labels.
        multi_label: whether the labels file is.
    """

    name: str
    folder: Path | None
    reader: ArchiveReader | None = None
    prefix: str = ""
    rows: tuple[Row, ...] = ()
    multi_label: bool = False

    def folders(self) -> list[str]:
        """Names of the folders directly inside, sorted, without hidden ones; of rows, their labels."""
        if self.rows:
            return sorted({label for row in self.rows for label in row.labels})
        if self.folder is not None:
            names = {entry.name for entry in os.scandir(self.folder) if entry.is_dir()}
        else:
            names = {path.split("/", 1)[0] for path, _ in self.members if "/" in path}
        return sorted(name for name in names if not hidden(name))

    def inside(self, name: str) -> FileTree:
        """The tree below one of its folders."""
        if self.folder is not None:
            return FileTree(f"{self.name}/{name}", self.folder / name)
        return FileTree(f"{self.name}!{self.prefix}{name}", None, self.reader, f"{self.prefix}{name}/")

    @cached_property
    def members(self) -> list[tuple[str, int]]:
        """(path relative to this tree, number in the reader) of each file in the archives."""
        paths = self.reader.paths if self.reader is not None else ()
        return [(path[len(self.prefix) :], i) for i, path in enumerate(paths) if path.startswith(self.prefix)]

    def images(self) -> list[str]:
        """Paths of the images relative to this tree, sorted."""
        if self.rows:
            return [row.path for row in self.rows]
        if self.folder is not None:
            return _readable(self.name, list_files(self.folder, _is_photo))
        return _readable(self.name, (path for path, _ in self.members))

    def dataset(self, images: Sequence[str], class_names: Sequence[str] = (), labels: Any = None) -> DataSet:
        """Some of the images."""
        about = (self.folder or Path(), images, class_names, self.name, labels)
        if self.reader is None:
            return FileSet(*about)
        numbers = dict(self.members)
        return ArchiveSet(self.reader, [numbers[path] for path in images], *about)


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
    if path.name == LABELS_NAME:
        return path.absolute().parent.name
    return path.stem if path.suffix == ".csv" else path.name


def _subset(spec: str) -> tuple[str, str]:
    """`subset:LIST:DATA` -> (LIST, DATA); anything else -> ("", the same)."""
    if not spec.startswith(SUBSET):
        return "", spec
    class_list, _, data = spec.removeprefix(SUBSET).partition(":")
    if not class_list or not data or data.startswith(NAMED):
        raise DataError(
            f"{spec}: a subset is subset:LIST:DATA with a file of class names (or {', '.join(CLASS_LISTS)}) and a "
            "folder, an archive or a file list."
        )
    return class_list, data


def find_split(spec: str, split: str) -> FileTree | None:
    """The files of a split that has a folder, archive or list of its own; None if the dataset has none for it.

    With the split "" all files, whatever splits there are; of a subset, those of all classes.
    """
    spec = _subset(spec)[1]
    path = Path(spec).expanduser()
    if is_remote(spec) or not path.exists():
        return _split_of_archives(_find_archives(spec), split)
    if labels := find_labels(path):
        return _labelled_tree(labels, split)
    if path.is_file():
        return _split_of_list(path, split) if path.suffix == ".txt" else _split_of_archives(_find_archives(spec), split)
    if archives := _archives_in(path):
        return _split_of_archives(archives, split)
    tree = FileTree(str(path), path)
    found = _folder_of_split(tree, split) if split else tree
    inner = _archives_in(found.folder) if found and found.folder else []
    return _archive_tree(inner) if inner else found


def _labelled_tree(file: Path, split: str) -> FileTree | None:
    """The images of a split that a labels file names; None if it has none for it."""
    rows = read_labels(file)
    multi_label = any(row.several for row in rows)
    if split:
        splits = {row.split for row in rows}
        if split == "val" and split not in splits:
            split = "test"  # as with folders: test images validate where there are no others
        rows = tuple(row for row in rows if row.split == split)
    name = f"{file} ({split})" if split else str(file)
    return FileTree(name, file.parent, rows=rows, multi_label=multi_label) if rows else None


def _split_of_list(path: Path, split: str) -> FileTree | None:
    """The list of a split: this one, or one beside it whose name differs in the split's only."""
    if not split:
        return _listed_tree(path)
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
    lines = [re.sub(r"\s+-?\d+$", "", line.strip()) for line in read_text(path).splitlines()]
    files = {check_relative(text, str(path)): line for line, text in enumerate(lines, 1) if text}
    if not files:
        raise DataError(f"{path} lists no files.")
    top = os.path.commonpath([os.path.dirname(os.path.dirname(file)) for file in files])
    rows = []
    for file in sorted(files):
        key = file.removeprefix(f"{top}/")
        if "/" not in key:
            raise DataError(f"{path}, line {files[file]}: {file} lies in no class folder.")
        rows.append(Row(files[file], key, (key.split("/", 1)[0],)))
    return FileTree(str(path), path.parent / top, rows=tuple(rows))


def split_folder(folders: Sequence[str], split: str) -> str | None:
    """The one of some folders' names that means a split: "valid" for "val"."""
    spellings = SPLITS.get(split, (split,))
    return next((folder for spelling in spellings for folder in folders if folder.lower() == spelling), None)


def list_files(folder: Path, wanted: Callable[[str], bool] = is_image) -> list[str]:
    """Relative paths of all images (or other wanted files) below a folder, without hidden ones.

    Links are followed, but never round in a circle.
    """
    paths: list[str] = []

    def visit(path: str, relative: str, above: frozenset[tuple[int, int]]) -> None:
        here = _file_id(path)
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


def _split_of_archives(archives: Sequence[Path | RemoteFile], split: str) -> FileTree | None:
    if not split:
        return _archive_tree(archives)
    of_split = _named_after(archives, split)
    if not of_split and any(_named_after(archives, other) for other in SPLITS):
        return None
    tree = _archive_tree(of_split or archives)
    return _folder_of_split(tree, split) or (tree if of_split else None)


def _named_after(archives: Sequence[Path | RemoteFile], split: str) -> list[Path | RemoteFile]:
    """Those whose name starts with the split's (train.zip, train-0001.tar, val_3.tar), by the first spelling used."""
    spellings = SPLITS.get(split, (split,))
    found = ([file for file in archives if re.match(rf"{name}(?![a-z])", file.name.lower())] for name in spellings)
    return next(filter(None, found), [])


def _archives_in(folder: Path) -> list[Path | RemoteFile]:
    """The archives directly inside a folder; none if there are images, or folders that may hold some, beside them."""
    entries = [entry for entry in os.scandir(folder) if not hidden(entry.name)]
    if any(entry.is_dir() or is_image(entry.name) for entry in entries):
        return []
    return [*sorted(folder / e.name for e in entries if e.is_file() and Path(e.name).suffix.lower() in _ARCHIVES)]


def _archive_tree(archives: Sequence[Path | RemoteFile]) -> FileTree:
    name = str(archives[0]) if len(archives) == 1 else f"{archives[0]} to {archives[-1].name}"
    local = ((file, file.stat().st_mtime_ns, file.stat().st_size) for file in fetch(archives))
    return FileTree(name, None, _reader(tuple(local), tuple(map(str, archives))))


@lru_cache(maxsize=4)
def _reader(files: tuple[tuple[Path, int, int], ...], names: tuple[str, ...]) -> ArchiveReader:
    """Index archives once, although several questions are asked about them; anew when a file has changed."""
    return ArchiveReader([file for file, *_ in files], names)


def _find_archives(spec: str) -> list[Path | RemoteFile]:
    """The archives that a path, pattern or address names."""
    if is_remote(spec):
        return list(find_remote(tuple(_braces(spec))))
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
    pieces = match[1].split(",")
    if span:
        pieces = [str(n).zfill(len(span[1])) for n in range(int(span[1]), int(span[2]) + 1)]
    expanded = (_braces(pattern[: match.start()] + piece + pattern[match.end() :]) for piece in pieces)
    return list(dict.fromkeys(whole for some in expanded for whole in some))  # nested ones come up again and again


# WebDataset ---------------------------------------------------------------------------------------------------------

_MOST_CLASSES = 10_000_000
_LABEL_FIELDS = ("label", "cls", "class")


def _shard_labels(
    tree: FileTree, images: Sequence[str], class_names: list[str] | None = None
) -> tuple[list[tuple[str, ...]], list[str] | None]:
    """The label of each image in WebDataset shards, and the classes; no labels if the tree is not made of shards.

    The files of one sample share a name: 000123.jpg, 000123.cls. The label is in `.cls` or in the field "label", "cls"
    or "class" of `.json`: a class name, or its number. The shards are indexed and read at random like other archives;
    nothing is streamed, so shuffling is complete and resuming exact.
    """
    reader, wanted, found = tree.reader, set(images), dict[str, int]()
    files = {_stem(path): i for path, i in tree.members if path.endswith(_LABEL_FILES)}
    if reader is None or not any(_stem(path) in files for path in images):
        return [], class_names
    for path, i in tree.members:
        if path in found:
            raise DataError(
                f"{tree.name}: two samples have the name {path!r} ({reader.where(i)} and {reader.where(found[path])}). "
                "Names must be unique over all shards: maps and logs go by them."
            )
        if path in wanted:
            found[path] = i
            if _stem(path) not in files:
                raise DataError(f"{reader.where(i)} has no label: neither .cls nor .json of the same name is there.")
    texts = [_shard_label(reader, files[_stem(path)]) for path in images]
    values = [int(text) for text in texts if re.fullmatch(r"-?[0-9]{1,19}", text)]
    if not values:
        return [(text,) for text in texts], class_names or sorted(set(texts))
    if len(values) < len(texts):
        raise DataError(f"{tree.name}: some labels are numbers and some are names; make them all alike.")
    largest = max(values)
    if not class_names and largest >= _MOST_CLASSES:
        raise DataError(f"{tree.name}: the label {largest} cannot be the number of a class; the first is 0.")
    class_names = class_names or [str(k) for k in range(largest + 1)]
    known = dict(enumerate(class_names))
    return [(known.get(value, f"number {value}"),) for value in values], class_names


def _stem(path: str) -> str:
    """WebDataset's sample name: up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


def _shard_label(reader: ArchiveReader, i: int) -> str:
    raw = reader.read(i)
    if not reader.paths[i].endswith(".json"):
        return raw.decode("utf-8", "replace").strip()
    fields = schema.parse_json(raw, dict[str, Any], reader.where(i))
    name = next((name for name in _LABEL_FIELDS if name in fields), "")
    if not name:
        raise DataError(f"{reader.where(i)} has no field {' or '.join(map(repr, _LABEL_FIELDS))}.")
    label = schema.parse(int | str, fields[name], f"{reader.where(i)}, {name}")  # type: ignore[arg-type]
    return str(label)


# Images that a user names one by one --------------------------------------------------------------------------------


def gather_images(images: Sequence[str]) -> tuple[Path, list[str]]:
    """A common folder and the paths below it, of files and folders of images."""
    if not images:
        raise DataError("name the images: files, or folders with images in them")
    paths: list[Path] = []
    for name in images:
        path = Path(name).resolve()
        if path.is_dir():
            paths += [path / inner for inner in _readable(name, list_files(path, _is_photo))]
        elif path.is_file():
            paths.append(path)
        else:
            raise DataError(f"there is no image or folder {name}")
    if not paths:
        raise DataError(f"{', '.join(images)}: no images there")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return root, [path.relative_to(root).as_posix() for path in paths]


def result_stems(root: Path, names: Sequence[str], output: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Where the results of images go: to `output`, under the image's name without its ending.

    Images whose names differ in the ending alone keep it: a.jpg and a.png become a.jpg.ENDING and a.png.ENDING. No
    image is ever overwritten.

    Args:
        root, names: of `gather_images`.
        endings: that are added to a stem, such as ".png".
    """
    short = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    taken = Counter(text.lower() for text in (*short.values(), *names))  # some disks do not tell a from A
    stems = {name: output / (stem if taken[stem.lower()] == 1 else name) for name, stem in short.items()}
    targets = [Path(f"{stem}{ending}") for stem in stems.values() for ending in endings]
    check_is_no_input(targets, [root / name for name in names])
    return stems


def check_is_no_input(targets: Iterable[Path], images: Iterable[Path]) -> None:
    """Refuse to write results over images that they are about."""
    inputs = {_file_id(image) for image in images}
    for target in targets:
        if target.exists() and _file_id(target) in inputs:
            raise EverytokenError(
                f"the output would overwrite the image {target}, which is one of the images; choose another one"
            )


def _file_id(path: str | Path) -> tuple[int, int]:
    """The same for all names of a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
