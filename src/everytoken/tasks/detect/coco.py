"""COCO json: where it lies, and what is in it.

COCO          {train2017,val2017}/ (or images/{train2017,val2017}/)  annotations/instances_{train2017,val2017}.json
one folder    images/ (or the images themselves) and one json file with "images" and "annotations"
parts         train/ and val/ (or valid/), each like that; annotations may also be train.json and val.json side by side
a json file   images in images/ next to it, next to it, or where --images says

What is wrong is an error that names the file and the annotation: a category that is not listed, an image that is not
listed or not there, run lengths of another size than the image. Objects that are degenerate (no width or height,
outside of the image, polygons with fewer than three corners) are counted and left out, with a note.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everytoken.data.given import gather_images
from everytoken.data.places import DEFAULT_VAL_SPLIT
from everytoken.data.sources import DataError, DataSet, Strings, split_off
from everytoken.tasks.detect.data import Annotations, InstanceSet
from everytoken.tasks.detect.masks import check
from everytoken.tasks.detect.options import CocoOptions

SPLITS = {
    "train": ("train2017", "train", "training"),
    "val": ("val2017", "val", "valid", "validation"),
    "test": ("test2017", "test"),
}


def open_instances(data: str, split: str, options: CocoOptions | None = None) -> DataSet:
    """A part of a data set.

    Args:
        data: its folder, or a json file.
        split: "train", "val", "test" as the files have it, or "all": everything of data without parts. Without a
            validation part, "train" and "val" divide the images by their names (`val_split`).
    """
    options = options or CocoOptions()
    if split in ("train", "val") and not divided(data, options):
        whole = _read(data, "all", options)
        kept, aside = split_off(
            whole, options.val_split or DEFAULT_VAL_SPLIT, seed=0
        )  # by name alone: the same for every --seed
        return whole.subset(kept if split == "train" else aside)
    return _read(data, split, options)


def divided(data: str, options: CocoOptions) -> bool:
    """Whether the data brings a validation part of its own."""
    return bool(options.val_annotations) or (not options.annotations and _find(Path(data), "val") is not None)


def whole_file(data: Path) -> Path:
    """The json file of data without parts, so that a folder and the file in it are seen to be the same data."""
    try:
        return (_find(data, "all") or data).resolve()
    except DataError:  # several: one of them was chosen by name
        return data.resolve()


def _read(data: str, split: str, options: CocoOptions) -> InstanceSet:
    root = Path(data)
    if not root.exists():
        raise DataError(f"there is no folder or file {data}")
    named = options.val_annotations if split == "val" and options.val_annotations else options.annotations
    folder = options.val_images if split == "val" and options.val_images else options.images
    path = Path(named) if named else _find(root, split)
    if path is None:
        part = "" if split == "all" else f" for {split!r}"
        raise DataError(
            f"{data} has no COCO json{part}: put annotations/instances_{SPLITS.get(split, SPLITS['train'])[0]}.json or "
            "one json file next to the images, or name it with --annotations"
        )
    return read_coco(path, _images(root, path, split, folder))


def _find(root: Path, split: str) -> Path | None:
    """The json file of a part of the data; of all of it, the only one there is."""
    if root.is_file():
        return root if split == "all" else None
    for name in SPLITS.get(split, ()):
        for place in (root / "annotations", root):
            for stem in (f"instances_{name}", name):
                if (place / f"{stem}.json").is_file():
                    return place / f"{stem}.json"
        if (root / name).is_dir():
            return _only(root / name)
    return _only(root) if split == "all" else None


def _only(folder: Path) -> Path | None:
    found = sorted(p for p in folder.glob("*.json") if not p.name.startswith("."))
    if len(found) > 1:
        found = [p for p in found if "instances" in p.name or "annotations" in p.name] or found
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise DataError(f"{folder} holds several json files ({names}); choose one with --annotations")
    return found[0] if found else None


def _images(root: Path, path: Path, split: str, folder: str) -> Path:
    """The folder that the names of images in a json file start from."""
    if folder:
        return Path(folder)
    bases = [path.parent, *([root] if root.is_dir() else []), path.parent.parent]
    parts = [n for names in SPLITS.values() for n in names if n in path.stem]
    parts += SPLITS.get(split, ())
    for base in bases:
        own = [place for n in parts for place in (base / n / "images", base / n, base / "images" / n)]
        for place in (*own, base / "images"):
            if place.is_dir():
                return place
    return path.parent


def read_coco(path: Path, images: Path) -> InstanceSet:
    """A COCO json file and its folder of images, checked."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or any(key not in content for key in ("images", "annotations", "categories")):
        raise DataError(f"{path} is no COCO file: it needs the lists images, annotations and categories")
    categories = sorted(content["categories"], key=lambda c: c["id"])
    if not categories:
        raise DataError(f"{path} lists no categories")
    ids = [int(c["id"]) for c in categories]
    listed = sorted(content["images"], key=lambda one: str(one["file_name"]))
    for field in ("id", "file_name"):
        values = [one[field] for one in listed]
        if len(set(values)) < len(values):
            double = next(v for v in values if values.count(v) > 1)
            raise DataError(f"{path}: two images have the {field} {double!r}")
    _all_there(path, images, [str(one["file_name"]) for one in listed])
    sizes = np.array([[one["width"], one["height"]] for one in listed], dtype=np.int64).reshape(-1, 2)
    found, notes = _annotations(path, content["annotations"], listed, sizes, ids)
    names = [str(c.get("name", c["id"])) for c in categories]
    numbers = np.array([one["id"] for one in listed], dtype=np.int64)
    files = [str(one["file_name"]) for one in listed]
    return InstanceSet(images, files, sizes, numbers, ids, names, found, str(path), notes)


def _all_there(path: Path, images: Path, names: Sequence[str]) -> None:
    """Every image that is listed has a file; folders are read once instead of asking for each."""
    seen: dict[str, set[str]] = {}
    missing = []
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder not in seen:
            place = images / folder
            seen[folder] = set(os.listdir(place)) if place.is_dir() else set()
        if file not in seen[folder]:
            missing.append(name)
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{path} lists the image {missing[0]!r}{more}, which is not in {images}. Add it, name the right folder "
            "with --images, or take it out of the file."
        )


def _annotations(
    path: Path, rows: Sequence[dict[str, Any]], listed: Sequence[dict[str, Any]], sizes: np.ndarray, ids: Sequence[int]
) -> tuple[Annotations, list[str]]:
    """The objects, sorted by image, and what was left out."""
    place = {one["id"]: i for i, one in enumerate(listed)}
    classes = {number: k for k, number in enumerate(ids)}
    owner: list[int] = []
    good: list[dict[str, Any]] = []
    texts: list[str] = []
    left_out: list[Any] = []
    for row in rows:
        where = f"{path}: annotation {row.get('id', '(without id)')}"
        if row.get("image_id") not in place:
            raise DataError(
                f"{where} is of image {row.get('image_id')!r}, which is not among the {len(place)} images of the file"
            )
        if row.get("category_id") not in classes:
            raise DataError(
                f"{where} is of category {row.get('category_id')!r}, which is none of the {len(classes)} categories "
                f"({ids[0]} to {ids[-1]})"
            )
        i = place[row["image_id"]]
        size = (int(sizes[i][0]), int(sizes[i][1]))
        box = row.get("bbox")
        if not isinstance(box, list) or len(box) != 4:
            raise DataError(f"{where}: bbox is [x, y, width, height], not {box!r}")
        segmentation = row.get("segmentation")
        kept = check(segmentation, size, where) if segmentation else None
        if not _real(box, size) or (segmentation and kept is None):
            left_out.append(row.get("id"))
            continue
        owner.append(i)
        good.append(row)
        texts.append(json.dumps(kept) if kept else "")
    order = np.argsort(owner, kind="stable")
    corners = np.array([row["bbox"] for row in good], dtype=np.float64).reshape(-1, 4)[order]
    corners[:, 2:] += corners[:, :2]
    counts = np.bincount(owner, minlength=len(listed)) if owner else np.zeros(len(listed), np.int64)
    rows_in_order = [good[j] for j in order.tolist()]
    found = Annotations(
        first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=np.array([row.get("id", -1) for row in rows_in_order], dtype=np.int64),
        boxes=corners,
        labels=np.array([classes[row["category_id"]] for row in rows_in_order], dtype=np.int64),
        crowd=np.array([bool(row.get("iscrowd", 0)) for row in rows_in_order], dtype=bool),
        area=np.array([row.get("area", row["bbox"][2] * row["bbox"][3]) for row in rows_in_order], dtype=np.float64),
        segments=Strings([texts[j] for j in order.tolist()]),
    )
    notes = []
    if left_out:
        shown = ", ".join(str(number) for number in left_out[:5])
        notes.append(
            f"{path}: {len(left_out)} annotations without width, height or area inside their image are left out "
            f"({shown}{', ...' if len(left_out) > 5 else ''})"
        )
    return found, notes


def _real(box: Sequence[Any], size: tuple[int, int]) -> bool:
    """Whether a box x, y, width, height has an area inside the image."""
    try:
        x, y, width, height = (float(v) for v in box)
    except (TypeError, ValueError):
        return False
    if not np.isfinite([x, y, width, height]).all() or width <= 0 or height <= 0:
        return False
    return x < size[0] and y < size[1] and x + width > 0 and y + height > 0


def only_images(paths: Sequence[str]) -> InstanceSet:
    """Image files and folders as a data set without objects, for predictions."""
    root, names = gather_images(paths)
    return InstanceSet(root, names, np.zeros((len(names), 2), np.int64), np.arange(len(names)), [], [])
