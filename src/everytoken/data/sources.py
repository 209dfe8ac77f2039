"""A data set: numbered samples with a key, a label and the bytes of an image.

A key is the image's path relative to the data set's root, with "/" between the parts. It names the sample everywhere:
in the store of score maps, in random draws, in logs. Keys and labels of millions of images are kept in a few arrays
rather than in Python objects, so that worker processes share the memory instead of slowly copying it.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from everytoken import keyed
from everytoken.data.decode import Alpha, Picture
from everytoken.errors import EverytokenError

EXTENSIONS = frozenset({
    ".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
    ".jp2", ".tga", ".avif",
})  # fmt: skip


class DataError(EverytokenError):
    """The data set cannot be used as it is; the message says what to change."""


def is_image(path: str) -> bool:
    """Whether a relative path names an image: by its extension, and no part of it is hidden."""
    name = path.rsplit("/", 1)[-1]
    dot = name.rfind(".")
    return dot > 0 and name[dot:].lower() in EXTENSIONS and not hidden(path)


def hidden(path: str) -> bool:
    """Names that start with a dot, and what macOS puts into archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


class Strings(Sequence[str]):
    """A list of strings in two arrays."""

    def __init__(self, texts: Iterable[str]) -> None:
        raw = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._ends = np.cumsum([len(r) for r in raw], dtype=np.int64)
        self._blob = np.frombuffer(b"".join(raw), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no sample {i} of {len(self)}")
        i %= len(self)
        start = int(self._ends[i - 1]) if i else 0
        return self._blob[start : self._ends[i]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class Reader(Protocol):
    """Where the bytes of numbered files are."""

    def read(self, i: int) -> bytes:
        """The bytes of file i."""
        ...

    def where(self, i: int) -> str:
        """What to call file i in messages."""
        ...


class FolderReader:
    """Files of a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root = root
        self.paths = paths if isinstance(paths, Strings) else Strings(paths)

    def read(self, i: int) -> bytes:
        """The bytes of file i."""
        with open(self.where(i), "rb") as file:
            return file.read()

    def where(self, i: int) -> str:
        """Its path."""
        return f"{self.root}/{self.paths[i]}"


class DataSet(ABC):
    """Numbered samples.

    Attributes:
        name: what to call the data set in messages.
        class_names: the name of each label; empty if the samples have no labels.
        labels: int64 [n], -1 where there is none.
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

    def label(self, i: int) -> int:
        """The class of sample i, -1 if it has none."""
        return int(self.labels[i])

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

    def picture(self, i: int, alpha: Alpha = "white") -> Picture:
        """Sample i with its header read and its pixels not."""
        where = self.where(i)
        try:
            data = self.open_bytes(i)
        except OSError:
            return Picture(where, where, alpha=alpha)  # raises, in words
        return Picture(data, where, alpha=alpha)

    def load(self, i: int) -> Image.Image:
        """Sample i as an upright RGB image."""
        return self.picture(i).upright()

    def subset(self, indices: Sequence[int] | np.ndarray) -> DataSet:
        """Some of the samples, with the same keys, labels and classes."""
        return Subset(self, np.asarray(indices, dtype=np.int64))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self):,} images, {self.num_classes} classes)"


class ReaderSet(DataSet):
    """Samples whose bytes come from a reader: a folder, a zip or tar file."""

    def __init__(
        self,
        name: str,
        reader: Reader,
        positions: Sequence[int],
        keys: Iterable[str],
        labels: Sequence[int],
        class_names: Sequence[str],
    ) -> None:
        self.name = name
        self.reader = reader
        self.positions = np.asarray(positions, dtype=np.int64)
        self._keys = Strings(keys)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = list(class_names)

    def key(self, i: int) -> str:
        """The path relative to the data set's root."""
        return self._keys[i]

    def where(self, i: int) -> str:
        """The file, or the archive and the member."""
        return self.reader.where(int(self.positions[i]))

    def open_bytes(self, i: int) -> bytes:
        """The image file of sample i."""
        return self.reader.read(int(self.positions[i]))


class Subset(DataSet):
    """Some samples of another data set."""

    def __init__(self, base: DataSet, indices: np.ndarray) -> None:
        self.base, self.indices = base, indices
        self.name, self.class_names, self.labels = base.name, base.class_names, base.labels[indices]

    def key(self, i: int) -> str:
        """The key in the whole data set."""
        return self.base.key(int(self.indices[i]))

    def where(self, i: int) -> str:
        """What the whole data set calls it."""
        return self.base.where(int(self.indices[i]))

    def open_bytes(self, i: int) -> bytes:
        """The image file."""
        return self.base.open_bytes(int(self.indices[i]))

    def picture(self, i: int, alpha: Alpha = "white") -> Picture:
        """As the whole data set opens it."""
        return self.base.picture(int(self.indices[i]), alpha)


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

    def picture(self, i: int, alpha: Alpha = "white") -> Picture:
        """Sample i, without a detour through a file."""
        return Picture(self.image(i), self.where(i), alpha=alpha)


def split_off(data: DataSet, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation) indices: a share of each class is set aside for validation.

    Every image decides for itself, by a hash of seed and key, so images that are added later move none of the others
    between the two parts (each part's share is `fraction` on average, not exactly). A class of two images or more has
    at least one in both parts: if chance left one part empty, the image nearest to the limit changes sides.
    """
    if not 0 < fraction < 1:
        raise DataError(f"val_split (--val-split) must be between 0 and 1, got {fraction}.")
    draws = np.array([keyed.uniform(seed, "val-split", key) for key in data.keys()])  # noqa: SIM118
    aside = draws < fraction
    for label in np.unique(data.labels):
        members = np.flatnonzero(data.labels == label)
        if len(members) < 2:
            continue
        if not aside[members].any():
            aside[members[np.argmin(draws[members])]] = True
        elif aside[members].all():
            aside[members[np.argmax(draws[members])]] = False
    return np.flatnonzero(~aside), np.flatnonzero(aside)
