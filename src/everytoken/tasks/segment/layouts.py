"""Folders of images and masks: ADE20K, COCO panoptic, Pascal VOC, and any pair of folders with a class file.

ADE20K       images/{training,validation}  annotations/{training,validation}  objectInfo150.txt; 0 is ignored
COCO         {train2017,val2017}  annotations/panoptic_{train2017,val2017}{.json,/}; or images/, panoptic/ and the
             json files side by side. Semantic masks are made of the panoptic ones; where only semantic/ is there,
             its values are category ids. 0 and segments that are not listed are ignored
Pascal VOC   JPEGImages  SegmentationClass  ImageSets/Segmentation/{train,val}.txt; 255 is ignored
folders      images[/SPLIT]  masks[/SPLIT] (or SPLIT/images, SPLIT/masks) and classes.txt or classes.json
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everytoken.data.places import DEFAULT_VAL_SPLIT
from everytoken.data.sources import DataError, DataSet, is_image, split_off
from everytoken.errors import did_you_mean
from everytoken.tasks.segment.data import MaskSet
from everytoken.tasks.segment.options import MaskOptions

SPLITS = {
    "train": ("train", "training", "train2017"),
    "val": ("val", "validation", "valid", "val2017"),
    "test": ("test", "testing", "test2017"),
}
VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


def open_masks(data: str, split: str, options: MaskOptions | None = None) -> DataSet:
    """A part of a data set with masks.

    Args:
        data: its folder.
        split: "train", "val" or "test" as the folders have it; "all": everything, or everything of a folder without
            parts. Without a validation part, "train" and "val" divide the images by their names (`val_split`).
    """
    options = options or MaskOptions()
    root, layout = _place(data, options)
    reader = {"ade20k": _ade20k, "coco": _coco, "voc": _voc, "folders": _folders}[layout]
    if split in ("train", "val") and not divided(data, options):
        # of images for training and testing, those for training; without any parts, all
        whole = reader(root, "train", options) or reader(root, "all", options)
        if whole is not None:
            kept, aside = split_off(
                whole, options.val_split or DEFAULT_VAL_SPLIT, seed=0
            )  # by name alone: the same for every --seed
            return whole.subset(kept if split == "train" else aside)
    made = reader(root, split, options)
    if made is None:
        raise DataError(f"{data} has no {split!r} part; docs/segment.md says how folders are laid out")
    return made


def divided(data: str, options: MaskOptions) -> bool:
    """Whether the data brings a validation part of its own."""
    root, layout = _place(data, options)
    if layout == "coco":
        return _coco_json(root, "val") is not None
    if layout == "voc":
        return (root / "ImageSets/Segmentation/val.txt").is_file()
    return _pair(root, "val", options, layout) is not None


def _place(data: str, options: MaskOptions) -> tuple[Path, str]:
    """The folder in which the layout begins, and the layout."""
    root = Path(data)
    if not root.is_dir():
        raise DataError(f"{data} is not a folder; segmentation wants a folder of images and masks")
    root = next((p for p in (root / "VOCdevkit" / "VOC2012", root / "VOC2012") if p.is_dir()), root)
    return root, options.layout if options.layout != "auto" else _guess(root)


def _guess(root: Path) -> str:
    if (root / "SegmentationClass").is_dir() and (root / "JPEGImages").is_dir():
        return "voc"
    if any(root.glob("panoptic_*.json")) or any(root.glob("annotations/panoptic_*.json")):
        return "coco"
    if (root / "annotations").is_dir() and (
        any(root.glob("objectInfo150.*")) or (root / "annotations" / "training").is_dir()
    ):
        return "ade20k"
    return "folders"


# -- pairs of folders -------------------------------------------------------------------------------------------------


def _pair(root: Path, split: str, options: MaskOptions, layout: str) -> tuple[Path, Path] | None:
    """(images, masks) of a split; "" is a folder without parts."""
    defaults = ("annotations",) if layout == "ade20k" else ("masks", "annotations", "labels")
    for images in [options.images] if options.images else ["images"]:
        for masks in [options.masks] if options.masks else defaults:
            for name in SPLITS.get(split, (split,)):
                for one, other in ((f"{images}/{name}", f"{masks}/{name}"), (f"{name}/{images}", f"{name}/{masks}")):
                    if (root / one).is_dir() and (root / other).is_dir():
                        return root / one, root / other
    return None


def _folders(root: Path, split: str, options: MaskOptions, layout: str = "folders") -> MaskSet | None:
    pair = _pair(root, "" if split == "all" else split, options, layout)
    if pair is not None:
        return _pairs(root, *pair, options, layout)
    if split != "all":
        return None
    whole = _joined([p for s in SPLITS if (p := _folders(root, s, options, layout)) is not None])
    if whole is None:
        raise DataError(
            f"{root} has no pair of folders images/ and masks/ (or annotations/). Name yours with --images and "
            "--masks; docs/segment.md shows the layouts that are known"
        )
    return whole


def _pairs(root: Path, images: Path, masks: Path, options: MaskOptions, layout: str) -> MaskSet:
    found = sorted(p.relative_to(images).as_posix() for p in images.rglob("*") if is_image(p.name) and p.is_file())
    if not found:
        raise DataError(f"{images} has no images")
    by_stem = {_stem(p.relative_to(masks).as_posix()): p for p in masks.rglob("*") if is_image(p.name)}
    missing = [name for name in found if _stem(name) not in by_stem]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(found)} images in {images} have no mask, such as {missing[0]}: its mask should be "
            f"{masks / (_stem(missing[0]) + '.png')}. Add the masks, or move these images elsewhere."
        )
    names, reduce = _class_names(root, options, layout)
    return MaskSet(
        root,
        [(images / name).relative_to(root).as_posix() for name in found],
        [by_stem[_stem(name)].relative_to(root).as_posix() for name in found],
        *_numbered(names, options, reduce),
    )


def _stem(path: str) -> str:
    return path.rsplit(".", 1)[0]


def _ade20k(root: Path, split: str, options: MaskOptions) -> MaskSet | None:
    return _folders(root, split, options, "ade20k")


def _numbered(
    names: dict[int, str], options: MaskOptions, reduce: bool
) -> tuple[list[str], dict[int, int], tuple[int, ...]]:
    """(class names, value -> class, ignored values)."""
    ignored = (*options.ignore_index, *((0,) if reduce else ()))
    for value in ignored:
        if value in names:
            raise DataError(
                f"value {value} is the class {names[value]!r} and is also ignored (--ignore-index, "
                "--reduce-zero-label); it cannot be both"
            )
    values = sorted(names)
    return [names[v] for v in values], {v: i for i, v in enumerate(values)}, tuple(dict.fromkeys(ignored))


def _class_names(root: Path, options: MaskOptions, layout: str) -> tuple[dict[int, str], bool]:
    """Value in a mask -> name, and whether 0 means nothing."""
    ade = layout == "ade20k"
    reduce = ade if options.reduce_zero_label is None else options.reduce_zero_label
    if options.classes:
        path = Path(options.classes)
        if not path.is_file():
            raise DataError(f"there is no class file {path} (--classes)")
    else:
        wanted = ("objectInfo150.txt", "objectInfo150.csv") if ade else ()
        wanted = (*wanted, "classes.txt", "classes.json")
        path = next((root / name for name in wanted if (root / name).is_file()), root / "-")
        if not path.is_file():
            raise DataError(
                f"{root} has no class file ({', '.join(wanted)}). Write the names of the classes into "
                f"{root / 'classes.txt'}, one per line, that of value {int(reduce)} first, or name one: --classes"
            )
    return read_classes(path, int(reduce)), reduce


def read_classes(path: Path, first: int = 0) -> dict[int, str]:
    """Value -> name, of a text file with a name per line, JSON (a list, or {"value": "name"}), or ADE20K's table."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        content: Any = json.loads(text)
        if isinstance(content, list):
            return {first + i: str(name) for i, name in enumerate(content)}
        try:
            return {int(value): str(name) for value, name in content.items()}
        except (ValueError, AttributeError) as error:
            raise DataError(f'{path}: class files look like {{"0": "sky", "1": "sea"}} or ["sky", "sea"]') from error
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("Idx"):
        rows = list(csv.DictReader(lines, delimiter="\t" if "\t" in lines[0] else ","))
        return {int(row["Idx"]): row["Name"].strip() for row in rows}
    return {first + i: line.strip() for i, line in enumerate(lines)}


# -- Pascal VOC -------------------------------------------------------------------------------------------------------


def _voc(root: Path, split: str, options: MaskOptions) -> MaskSet | None:
    lists = root / "ImageSets" / "Segmentation"
    if split == "all":
        keys = sorted(p.stem for p in (root / "SegmentationClass").glob("*.png"))
    elif (lists / f"{split}.txt").is_file():
        keys = (lists / f"{split}.txt").read_text().split()
    else:
        return None
    have = {p.stem: p.name for p in (root / "JPEGImages").iterdir() if is_image(p.name)}
    for key in keys:
        if key not in have:
            raise DataError(f"{lists / f'{split}.txt'} lists {key}, and there is no image {root}/JPEGImages/{key}.jpg")
        if not (root / "SegmentationClass" / f"{key}.png").is_file():
            raise DataError(f"image {key} has no mask: there is no {root}/SegmentationClass/{key}.png")
    names = read_classes(Path(options.classes)) if options.classes else dict(enumerate(VOC_CLASSES))
    return MaskSet(
        root,
        [f"JPEGImages/{have[key]}" for key in keys],
        [f"SegmentationClass/{key}.png" for key in keys],
        *_numbered(names, options, bool(options.reduce_zero_label)),
    )


# -- COCO -------------------------------------------------------------------------------------------------------------


def _coco_json(root: Path, split: str) -> Path | None:
    names = SPLITS.get(split, (split,))
    found = [p for folder in (root, root / "annotations") for p in sorted(folder.glob("panoptic_*.json"))]
    return next((p for p in found if p.stem.removeprefix("panoptic_") in names), None)


def _coco(root: Path, split: str, options: MaskOptions) -> MaskSet | None:
    if split == "all":
        return _joined([p for s in SPLITS if (p := _coco(root, s, options)) is not None])
    path = _coco_json(root, split)
    if path is None:
        return None
    name = path.stem.removeprefix("panoptic_")
    content = json.loads(path.read_text())
    images = _first(root, (f"images/{name}", name), f"images of {path.name}")
    panoptic = next((p for p in (path.with_suffix(""), root / "panoptic" / name) if p.is_dir()), None)
    masks = panoptic or _first(root, (f"semantic/{name}",), f"masks of {path.name}")
    files = {image["id"]: image["file_name"] for image in content["images"]}
    have = {p.name for p in images.iterdir()}
    pairs, segments = [], []
    for note in sorted(content["annotations"], key=lambda a: str(a["file_name"])):
        file = files.get(note["image_id"])
        if file is None or file not in have:
            raise DataError(
                f"{path} has an annotation for image {note['image_id']}, and {images}/{file or ''} is not there"
            )
        if not (masks / note["file_name"]).is_file():
            raise DataError(f"image {file} has no mask: {masks / note['file_name']} is not there")
        pairs.append(((images / file).relative_to(root).as_posix(), (masks / note["file_name"]).relative_to(root)))
        segments.append({int(s["id"]): int(s["category_id"]) for s in note["segments_info"]})
    names = {int(c["id"]): str(c["name"]) for c in content["categories"]}
    ignored = tuple(v for v in dict.fromkeys((0, *options.ignore_index)) if v not in names)
    values = sorted(names)
    return MaskSet(
        root,
        [image for image, _ in pairs],
        [mask.as_posix() for _, mask in pairs],
        [names[v] for v in values],
        {v: i for i, v in enumerate(values)},
        ignored,
        segments if panoptic is not None else None,
    )


def _joined(parts: Sequence[MaskSet]) -> MaskSet | None:
    if not parts:
        return None
    segments = [s for p in parts for s in p.segments or ()]
    return MaskSet(
        parts[0].root, [i for p in parts for i in p.images], [m for p in parts for m in p.masks],
        parts[0].class_names, parts[0].values, parts[0].ignored, segments or None,
    )  # fmt: skip


def _first(root: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise DataError(f"{root}: the {what} should be in {' or '.join(names)}, and there is no such folder")


def class_lookup(have: Sequence[str], want: Sequence[str], where: str) -> np.ndarray:
    """Class of the data -> class of the model, by name; every class of the data must be known."""
    index = {name: i for i, name in enumerate(want)}
    unknown = [name for name in have if name not in index]
    if unknown:
        raise DataError(
            f"{where} has classes that the segmenter was not trained on: {', '.join(unknown[:5])}."
            f"{did_you_mean(unknown[0], want)}"
        )
    return np.array([index[name] for name in have], dtype=np.int64)
