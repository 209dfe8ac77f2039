"""Images that a user names: files and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everytoken.data.sources import DataError, is_image


def gather_images(images: Sequence[str]) -> tuple[Path, list[str]]:
    """A common folder and the paths below it, of files and folders of images."""
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
