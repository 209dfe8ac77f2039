"""Places: trees of image files, in a folder or inside archives, and the parts (train, val, test) that they have."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from everytoken.data.archives import ArchiveReader
from everytoken.data.sources import DataError, FolderReader, Reader, hidden, is_image
from everytoken.errors import did_you_mean

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing"),
}
DEFAULT_VAL_SPLIT = 0.1
"""Part of the images that is held out where data has no validation images of its own and nothing else was said."""
_ARCHIVES = (".zip", ".tar")


@dataclass(frozen=True)
class Place:
    """A tree of files.

    Attributes:
        name: what to call it.
        folder: its path, for a folder.
        reader: for the inside of archives.
        prefix: the part of the archives that is meant: "" or a path that ends with "/".
    """

    name: str
    folder: Path | None = None
    reader: ArchiveReader | None = None
    prefix: str = ""

    def folders(self) -> list[str]:
        """Names of the folders directly inside, sorted, without hidden ones."""
        if self.reader is None:
            found = {entry.name for entry in os.scandir(self._folder) if entry.is_dir()}
        else:
            inside = (p[len(self.prefix) :] for p in self.reader.paths if p.startswith(self.prefix))
            found = {p.split("/", 1)[0] for p in inside if "/" in p}
        return sorted(name for name in found if not hidden(name))

    def inside(self, name: str) -> Place:
        """The tree below one of its folders."""
        if self.reader is None:
            return Place(f"{self.name}/{name}", self._folder / name)
        return Place(f"{self.name}!{self.prefix}{name}", None, self.reader, f"{self.prefix}{name}/")

    def images(self) -> tuple[Reader, list[tuple[str, int]]]:
        """A reader, and (path relative to this place, number in the reader) of each image, sorted by path."""
        if self.reader is None:
            paths = sorted(walk(self._folder))
            return FolderReader(self._folder, paths), [(path, i) for i, path in enumerate(paths)]
        cut = len(self.prefix)
        found = [(p[cut:], i) for i, p in enumerate(self.reader.paths) if p.startswith(self.prefix) and is_image(p)]
        return self.reader, sorted(found)

    @property
    def _folder(self) -> Path:
        return self.folder or Path(self.name)


def whole(spec: str) -> Place:
    """The tree that a path, pattern or archive name means, parts not regarded."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = _archives_in(path)
        return _inside_archives(files) if files and not has_images(path) else Place(str(path), path)
    return _inside_archives(_files(spec))


def part(spec: str, split: str) -> Place | None:
    """The tree of a split that has a place of its own; None if the data has none for it."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return _part_of_folder(path, split)
    return _part_of_archives(_files(spec), split)


def _part_of_archives(files: Sequence[Path], split: str) -> Place | None:
    own = _of_split(files, split)
    if not own and any(_of_split(files, other) for other in SPLITS):
        return None
    place = _inside_archives(own or files)
    return part_inside(place, split) or (place if own else None)


def part_inside(place: Place, split: str) -> Place | None:
    """The folder of a split, directly inside a place or inside its only folder (data.zip with data/train/...)."""
    folders = place.folders()
    name = named(folders, split)
    others = [folder for folder in folders if not any(named([folder], known) for known in SPLITS)]
    if name and others and not place.inside(name).folders():
        return None  # a class that is called "train", next to the classes "bus" and "plane"
    if name:
        return place.inside(name)
    if len(folders) == 1 and named(place.inside(folders[0]).folders(), "train"):
        return part_inside(place.inside(folders[0]), split)
    return None


def _part_of_folder(folder: Path, split: str) -> Place | None:
    place = Place(str(folder), folder)
    found = part_inside(place, split)
    if found:
        files = _archives_in(found._folder)
        return _inside_archives(files) if files and not has_images(found._folder) else found
    files = _archives_in(folder)
    return _part_of_archives(files, split) if files and not has_images(folder) else None


def named(folders: Sequence[str], split: str) -> str | None:
    """The folder that holds a split."""
    for wanted in SPLITS.get(split, (split,)):
        for folder in folders:
            if folder.lower() == wanted:
                return folder
    return None


def has_images(folder: Path) -> bool:
    """Whether there are images, or folders that may hold some, directly inside."""
    return any(is_image(e.name) or (e.is_dir() and not hidden(e.name)) for e in os.scandir(folder))


def walk(folder: Path, wanted: Callable[[str], bool] = is_image) -> list[str]:
    """Relative paths of all images (or other wanted files) below a folder, without hidden ones.

    Links are followed, but never round in a circle.
    """
    found: list[str] = []

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
                    found.append(name)

    visit(os.fspath(folder), "", frozenset())
    return found


def _archives_in(folder: Path) -> list[Path]:
    return sorted(
        folder / e.name
        for e in os.scandir(folder)
        if e.is_file() and Path(e.name).suffix.lower() in _ARCHIVES and not hidden(e.name)
    )


def _inside_archives(files: Sequence[Path]) -> Place:
    name = str(files[0]) if len(files) == 1 else f"{files[0]} to {files[-1].name}"
    return Place(name, None, _reader(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)))


@lru_cache(maxsize=4)
def _reader(files: tuple[tuple[Path, int, int], ...]) -> ArchiveReader:
    """Index archives once, although several questions are asked about them; anew when a file has changed."""
    return ArchiveReader([file for file, _, _ in files])


def _of_split(files: Sequence[Path], split: str) -> list[Path]:
    """Those whose name starts with the split's (train.zip, train-0001.tar, val_3.tar), by the first spelling found."""
    for spelling in SPLITS.get(split, (split,)):
        found = [file for file in files if re.match(rf"{spelling}(?![a-z])", file.name.lower())]
        if found:
            return found
    return []


def _files(spec: str) -> list[Path]:
    """The archives that a path or pattern names."""
    path = Path(spec).expanduser()
    if path.is_file():
        if not re.search(r"\.(zip|tar|tgz|tbz2?|txz)\b", path.name.lower()):
            raise DataError(f"{path} is a file; give the folder with the images, or a .zip or .tar file.")
        return [path]
    files = _expand(os.path.expanduser(spec))
    if not files:
        near = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise DataError(f"There is no file or folder {path}.{did_you_mean(path.name, near)}")
    return files


def _expand(pattern: str) -> list[Path]:
    """Files that match a pattern with {a,b}, {000..123}, * and ?."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return sorted(Path(p) for p in glob.glob(pattern) if os.path.isfile(p))
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span:
        parts = [str(n).zfill(len(span[1])) for n in range(int(span[1]), int(span[2]) + 1)]
    else:
        parts = match[1].split(",")
    return [file for piece in parts for file in _expand(pattern[: match.start()] + piece + pattern[match.end() :])]
