"""Files in folders and archives: the images of a split, wherever they lie.

A `FileTree` is what lies below a folder or inside archives, or what a labels file or a list of files names.
`find_split` finds that of a split: `train/` of a folder or zip, `train-*.tar`, rows of `labels.csv`, a list of files.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

from everytoken.errors import DataError, EverytokenError, did_you_mean, install_command
from everytoken_lab.data.archives import ArchiveReader, RemoteFile, fetch, find_remote, is_remote
from everytoken_lab.data.decode import HEIF
from everytoken_lab.data.labels import NAME as LABELS_NAME
from everytoken_lab.data.labels import Row, check_relative, find_labels, read_labels, read_text

EXTENSIONS = frozenset(
    (
        *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga", ".avif"),
        *((".heic", ".heif") if HEIF else ()),
    )
)
UNREAD = (
    frozenset((".heic", ".heif", ".jxl", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf", ".rw2")) - EXTENSIONS
)
"""Photos that cannot be decoded here; they are counted, and the user is told."""
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "testing"),
    "test": ("test", "testing"),
}
NAMED = "torchvision:"
"""How names of datasets start that are not paths."""
SUBSET = "subset:"
CLASS_LISTS = {"imagenet100": "imagenet100.txt"}
"""Lists of classes in the package; ImageNet-100 is that of Contrastive Multiview Coding (Tian et al.) and of drloc."""
_ARCHIVES = (".zip", ".tar")
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
def warn_once(message: str) -> None:
    """Although a dataset may be opened several times."""
    _log.warning(message)


def _readable(where: str, paths: Iterable[str]) -> list[str]:
    """The images among some files, sorted; says how many photos cannot be read, and how to convert them."""
    files = sorted(set(paths))
    if unread := [path for path in files if is_image(path, UNREAD)]:
        kind = unread[0].rsplit(".", 1)[1]
        heif = f"; or read HEIC: {install_command('heif')}" if kind.lower() in ("heic", "heif") else ""
        warn_once(
            f"{where}: {len(unread):,} files such as {unread[0]} are left out, because this format cannot be read. "
            f"Convert them first: magick mogrify -format jpg *.{kind}{heif}"
        )
    return list(filter(is_image, files))


@dataclass(frozen=True)
class FileTree:
    """The files below a folder, or below a path inside archives.

    Attributes:
        name: what to call it.
        folder: its path; None for archives, which have a `reader`.
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


# What the user typed -------------------------------------------------------------------------------------------------


def dataset_path(spec: str) -> str | None:
    """The path or pattern in what the user typed; None for a dataset that goes by a name or an address."""
    path = parse_subset(spec)[1]
    return None if spec.startswith(NAMED) or is_remote(path) else path


def network_address(spec: str) -> str:
    """The same if opening it would use the network, else ""."""
    return spec if is_remote(spec) else ""


def dataset_title(spec: str) -> str:
    """What to call a dataset in names of folders: "photos" for /data/photos and for photos/labels.csv."""
    path = Path(spec.split(":")[-1])
    if path.name == LABELS_NAME:
        return path.absolute().parent.name
    return path.stem if path.suffix == ".csv" else path.name


def parse_subset(spec: str) -> tuple[str, str]:
    """`subset:LIST:DATA` -> (LIST, DATA); anything else -> ("", the same)."""
    if not spec.startswith(SUBSET):
        return "", spec
    class_list, _, data = spec.removeprefix(SUBSET).partition(":")
    if not class_list or not data or data.startswith(NAMED):
        raise DataError(
            f"{spec}: a subset is subset:LIST:DATA, with a file of class names or {', '.join(CLASS_LISTS)}."
        )
    return class_list, data


def find_split(spec: str, split: str) -> FileTree | None:
    """The files of a split that has a folder, archive or list of its own; None if the dataset has none for it.

    With the split "" all files, whatever splits there are; of a subset, those of all classes.
    """
    spec = parse_subset(spec)[1]
    path = Path(spec).expanduser()
    if labels := find_labels(path):
        return _labelled_tree(labels, split)
    if path.is_file() and path.suffix == ".txt":
        return _split_of_list(path, split)
    if not path.is_dir():  # an archive, a pattern, an address
        return _split_of_archives(_find_archives(spec), split)
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
    if split == "val" and all(row.split != "val" for row in rows):
        split = "test"  # as with folders: test images validate where there are no others
    if split:
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
    """Relative paths of all images (or other wanted files) below a folder; links are followed, but never in circles."""
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
    """Where the results of images (of `gather_images`) go: to `output`, under the image's name without its ending.

    Images whose names differ in the ending alone keep it: a.jpg and a.png become a.jpg.png and a.png.png. `endings` are
    what the caller adds to a stem: no image is overwritten.
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
            raise EverytokenError(f"the output {target} would overwrite one of the images; choose another one")


def _file_id(path: str | Path) -> tuple[int, int]:
    """The same for all names of a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
