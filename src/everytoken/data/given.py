"""Images that a user names, files and folders, and the files that are written for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from everytoken.data.sources import DataError, is_image
from everytoken.errors import EverytokenError


def gather_images(images: Sequence[str]) -> tuple[Path, list[str]]:
    """A common folder and the paths below it, of files and folders of images."""
    if not images:
        raise DataError("name the images: files, or folders with images in them")
    found: list[Path] = []
    for name in images:
        path = Path(name).resolve()
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if is_image(p.relative_to(path).as_posix()))
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no image or folder {name}")
    if not found:
        raise DataError(f"{', '.join(images)}: no images there")
    parents = [{p.parent, *p.parent.parents} for p in found]
    root = max(set.intersection(*parents), key=lambda p: len(p.parts))
    return root, [p.relative_to(root).as_posix() for p in found]


def result_stems(root: Path, names: Sequence[str], output: Path, endings: Sequence[str]) -> dict[str, Path]:
    """Where the results of images go: to `output`, under the image's name without its ending.

    Images whose names differ in the ending alone keep it: a.jpg and a.png become a.jpg.ENDING and a.png.ENDING. No
    image is ever overwritten.

    Args:
        root, names: of `gather_images`.
        endings: that are added to a stem, such as ".png".
    """
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    while True:  # until no two are the same, on disks that do not tell a from A too
        count = Counter(stem.lower() for stem in stems.values())
        shared = [name for name, stem in stems.items() if count[stem.lower()] > 1 and stem != name]
        if not shared:
            break
        stems |= {name: name for name in shared}
    images = {_identity(root / name): name for name in names}
    for name, stem in stems.items():
        for ending in endings:
            target = output / (stem + ending)
            if target.exists() and _identity(target) in images:
                raise EverytokenError(
                    f"the result for {name} would overwrite the image {target}; choose another folder as --output"
                )
    return {name: output / stem for name, stem in stems.items()}


def check_is_no_input(target: Path, images: Sequence[str]) -> None:
    """Refuse to write a result over one of the images that it is about."""
    if target.exists() and target.is_file():
        root, names = gather_images(images)
        if _identity(target) in {_identity(root / name) for name in names}:
            raise EverytokenError(f"--out {target} is one of the images; choose another name for the result")


def _identity(path: Path) -> tuple[int, int]:
    """The same for all names of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino
