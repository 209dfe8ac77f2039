"""Images with masks: ADE20K, COCO panoptic, Pascal VOC, and any pair of folders with a class file; batches of them.

ADE20K       images/{training,validation}  annotations/{training,validation}  objectInfo150.txt; 0 is ignored
COCO         {train2017,val2017}  annotations/panoptic_{train2017,val2017}{.json,/}; or images/, panoptic/ and the
             json files side by side. Semantic masks are made of the panoptic ones; where only semantic/ is there,
             its values are category ids. 0 and segments that are not listed are ignored
Pascal VOC   JPEGImages  SegmentationClass  ImageSets/Segmentation/{train,val}.txt; 255 is ignored
folders      images[/SPLIT]  masks[/SPLIT] (or SPLIT/images, SPLIT/masks) and classes.txt or classes.json

In memory a mask is int16 [H, W]: the class, or -1 where it is ignored. Values in mask files become classes by a table;
a value that is neither a class nor ignored, a mask of another size than its image, and a mask that is missing are
errors that name the file (`on_bad_image=skip` leaves the image out instead).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import TypedDict

from everytoken import keyed
from everytoken_lab import schema
from everytoken_lab.data.datasets import DataError, DataSet, Strings, is_image
from everytoken_lab.data.decode import ImageError, Picture, naming_errors, open_image
from everytoken_lab.data.labels import check_relative
from everytoken_lab.data.loader import BatchReader, Request
from everytoken_lab.dense.common import FileSet, split_by_name, whole_set
from everytoken_lab.dense.segment.augment import SegmentTransform
from everytoken_lab.dense.segment.options import MaskOptions

IGNORED = -1
_UNKNOWN = -2
_VALUES = 65536  # of a mask of 16 bits
_MOST_CLASSES = 32767  # of int16
SPLITS = {
    "train": ("train", "training", "train2017"),
    "val": ("val", "validation", "valid", "val2017"),
    "test": ("test", "testing", "test2017"),
}
VOC_CLASSES = [
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus"),
    *("car", "cat", "chair", "cow", "diningtable", "dog", "horse"),
    *("motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
]


class MaskError(ImageError):
    """A mask cannot be used; the message names it and says why."""


class MaskSet(FileSet):
    """Images of a folder and their masks.

    Args:
        root: the folder; images, masks: paths below it, one of each per sample; no masks: images alone.
        class_names: of the classes.
        values: value in a mask -> class; the values in `ignored` are no class.
        segments: for panoptic masks, of each sample: segment id -> value.
    """

    def __init__(
        self,
        root: Path,
        images: Sequence[str],
        masks: Sequence[str],
        class_names: Sequence[str],
        values: Mapping[int, int],
        ignored: Sequence[int] = (),
        segments: Sequence[Mapping[int, int]] | None = None,
    ) -> None:
        super().__init__(root, images, class_names)
        self.masks = Strings(masks)
        self.values, self.ignored, self.segments = dict(values), tuple(ignored), segments
        for value in (*values, *ignored):
            if not 0 <= value < _VALUES:
                raise DataError(
                    f"{root}: {value} cannot be the value of a class or an ignored value; masks have 0 to {_VALUES - 1}"
                )
        if len(values) > _MOST_CLASSES:
            raise DataError(f"{root} has {len(values)} classes; there can be at most {_MOST_CLASSES}")
        self.table = np.full(_VALUES, _UNKNOWN, dtype=np.int16)
        self.table[list(ignored)] = IGNORED
        for value, index in values.items():
            self.table[value] = index

    def mask(self, i: int, size: tuple[int, int] | None = None) -> np.ndarray:
        """int16 [H, W] of classes; -1 is ignored.

        Args:
            size: (width, height) of the upright image, which the mask's must equal.
        """
        where = self.root / self.masks[i]
        stored = _read_mask(where)
        if size is not None and stored.shape[1::-1] != size:
            hint = " (the image is turned by its EXIF tag)" if stored.shape[:2] == size else ""
            raise MaskError(
                f"{where}: the mask is {stored.shape[1]} x {stored.shape[0]} pixels and its image {self.where(i)} is "
                f"{size[0]} x {size[1]}{hint}. Both must have the same size."
            )
        if self.segments is not None:
            return self._panoptic(stored, self.segments[i], where)
        if stored.ndim != 2:
            raise MaskError(
                f"{where}: the mask is a colour picture. A mask has one channel, whose values are classes (an 8-bit "
                "grey, palette or 16-bit PNG)."
            )
        indices = stored if stored.dtype == np.uint8 else stored.clip(0, _VALUES - 1)
        classes = self.table[indices]
        wrong = (classes == _UNKNOWN) | (stored != indices)
        if wrong.any():
            y, x = (int(v[0]) for v in np.nonzero(wrong))
            values = sorted(self.values)
            raise MaskError(
                f"{where}: value {int(stored[y, x])} (first at x {x}, y {y}; {int(wrong.sum())} pixels are wrong) is "
                f"no class: the {len(values)} classes have values {values[0]} to {values[-1]}, and "
                f"{', '.join(map(str, self.ignored)) or 'nothing'} is ignored. Add it to the class file, or to "
                "ignore_index."
            )
        return classes

    def _panoptic(self, stored: np.ndarray, segments: Mapping[int, int], where: Path) -> np.ndarray:
        """Of a picture whose colour R + 256 G + 65536 B is a segment's id; ids that are not listed are ignored."""
        if stored.ndim != 3:
            raise MaskError(f"{where}: a panoptic mask is a colour picture, and this has one channel.")
        ids = stored.astype(np.int64) @ np.array([1, 256, 65536])
        present, inverse = np.unique(ids, return_inverse=True)
        classes = np.full(len(present), IGNORED, dtype=np.int16)
        for k, segment in enumerate(present.tolist()):
            if segment in segments:
                value = segments[segment]
                if value not in self.values:
                    raise MaskError(
                        f"{where}: segment {segment} is of category {value}, which is none of the "
                        f"{len(self.values)} categories that are listed"
                    )
                classes[k] = self.values[value]
        return classes[inverse.reshape(ids.shape)]


def _read_mask(path: Path) -> np.ndarray:
    """A mask file as it is: [H, W] or [H, W, 3]."""
    try:
        with open_image(path, str(path)) as image:
            if image.mode not in ("L", "P", "1", "I", "RGB") and not image.mode.startswith("I;16"):
                raise MaskError(f"{path}: a mask has one channel of whole numbers, and this is of mode {image.mode}.")
            with naming_errors(str(path)):
                pixels = np.asarray(image)
    except MaskError:
        raise
    except ImageError as error:
        raise MaskError(f"the mask cannot be read: {error}") from error
    if pixels.dtype == bool:
        return pixels.astype(np.uint8)
    return pixels if pixels.dtype == np.uint8 else pixels.astype(np.int64)


# -- batches ----------------------------------------------------------------------------------------------------------

MaskView = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pixels uint8 [h, w, 3], mask int16 [h, w], placement [2, 3]."""


class _MaskViews(BatchReader[MaskView]):
    def collate(self, views: list[MaskView]) -> tuple[np.ndarray, np.ndarray, Any]:
        """All views of a batch have one size."""
        if not views:
            return np.empty((0, 3, 1, 1), np.uint8), np.empty((0, 2, 3)), torch.empty((0, 1, 1), dtype=torch.int16)
        images = np.stack([np.ascontiguousarray(pixels.transpose(2, 0, 1)) for pixels, _, _ in views])
        masks = torch.from_numpy(np.stack([mask for _, mask, _ in views]))
        return images, np.stack([placement for _, _, placement in views]), masks


class TrainViews(_MaskViews):
    """Random views, keyed by (seed, epoch, key)."""

    def __init__(self, data: DataSet, transform: SegmentTransform, seed: int, skip: bool = False) -> None:
        super().__init__(data, skip)
        self.transform, self.seed = transform, seed

    def view(self, request: Request, key: str) -> MaskView:
        """A random view of an image and its mask."""
        picture = self.data.picture(request.sample)
        rng = keyed.generator(self.seed, request.epoch, key, "segment")
        return self.transform(picture, mask_of(self.data, request.sample, picture), rng)


class WholeViews(_MaskViews):
    """Whole images at their own size, one per batch, with their masks."""

    def __init__(self, data: DataSet, skip: bool = False, masks: bool = True) -> None:
        super().__init__(data, skip)
        self.masks = masks

    def view(self, request: Request, key: str) -> MaskView:
        """The image as it is."""
        picture = self.data.picture(request.sample)
        mask = mask_of(self.data, request.sample, picture) if self.masks else np.zeros((1, 1), np.int16)
        return np.asarray(picture.upright()), mask, np.array([[1.0, 0, 0], [0, 1, 0]])


def mask_of(data: DataSet, i: int, picture: Picture) -> np.ndarray:
    """The mask of sample i of a `MaskSet` or of a subset of one."""
    masks, i = whole_set(data, i, MaskSet)
    return masks.mask(i, picture.size)


# -- layouts ----------------------------------------------------------------------------------------------------------


def open_masks(data: str, split: str, options: MaskOptions | None = None) -> DataSet:
    """A part of a dataset with masks.

    Args:
        data: its folder.
        split: "train", "val" or "test" as the folders have it; "all": everything, or everything of a folder without
            parts. Without a validation part, "train" and "val" divide the images by their names (`val_split`).
    """
    options = options or MaskOptions()
    root, layout = _layout(data, options)
    if split in ("train", "val") and not divided(data, options):
        # of images for training and testing, those for training; without any parts, all
        whole = _read(root, layout, "train", options) or _read(root, layout, "all", options)
        if whole is not None:
            return split_by_name(whole, split, options.val_split)
    opened = _read(root, layout, split, options)
    if opened is None:
        raise DataError(f"{data} has no {split!r} part; docs/segment.md says how folders are laid out")
    return opened


def _read(root: Path, layout: str, split: str, options: MaskOptions) -> MaskSet | None:
    """A part of the data, None if it is not there; "all" is the folder without parts, or all parts together."""
    read = {"coco": _coco, "voc": _voc}.get(layout, partial(_folders, layout=layout))
    part = read(root, "" if split == "all" else split, options)
    if part is not None or split != "all":
        return part
    parts = [p for name in SPLITS if (p := read(root, name, options)) is not None]
    if not parts and layout != "coco":
        raise DataError(
            f"{root} has no pair of folders images/ and masks/ (or annotations/). Name yours with the "
            "options images and masks; docs/segment.md shows the layouts"
        )
    if not parts:
        return None
    segments = [s for p in parts for s in p.segments or ()]
    first, images, masks = parts[0], [i for p in parts for i in p.images], [m for p in parts for m in p.masks]
    return MaskSet(first.root, images, masks, first.class_names, first.values, first.ignored, segments or None)


def divided(data: str, options: MaskOptions) -> bool:
    """Whether the data has a validation part."""
    root, layout = _layout(data, options)
    if layout == "coco":
        return _coco_json(root, "val") is not None
    if layout == "voc":
        return (root / "ImageSets/Segmentation/val.txt").is_file()
    return _pair(root, "val", options, layout) is not None


def _layout(data: str, options: MaskOptions) -> tuple[Path, str]:
    """The folder in which the layout begins, and the layout."""
    root = Path(data)
    if not root.is_dir():
        raise DataError(f"{data} is not a folder; segmentation wants a folder of images and masks")
    root = next((p for p in (root / "VOCdevkit" / "VOC2012", root / "VOC2012") if p.is_dir()), root)
    if options.layout != "auto":
        return root, options.layout
    if (root / "SegmentationClass").is_dir() and (root / "JPEGImages").is_dir():
        return root, "voc"
    if any(root.glob("panoptic_*.json")) or any(root.glob("annotations/panoptic_*.json")):
        return root, "coco"
    ade20k = any(root.glob("objectInfo150.*")) or (root / "annotations" / "training").is_dir()
    return root, "ade20k" if ade20k and (root / "annotations").is_dir() else "folders"


def _pair(root: Path, split: str, options: MaskOptions, layout: str) -> tuple[Path, Path] | None:
    """(images, masks) of a split; "" is a folder without parts."""
    defaults = ("annotations",) if layout == "ade20k" else ("masks", "annotations", "labels")
    images = options.images or "images"
    for masks in [options.masks] if options.masks else defaults:
        for name in SPLITS.get(split, (split,)):
            for pair in ((f"{images}/{name}", f"{masks}/{name}"), (f"{name}/{images}", f"{name}/{masks}")):
                if all((root / folder).is_dir() for folder in pair):
                    return root / pair[0], root / pair[1]
    return None


def _folders(root: Path, split: str, options: MaskOptions, layout: str) -> MaskSet | None:
    pair = _pair(root, split, options, layout)
    if pair is None:
        return None
    images, masks = pair
    names = sorted(p.relative_to(images).as_posix() for p in images.rglob("*") if is_image(p.name) and p.is_file())
    if not names:
        raise DataError(f"{images} has no images")
    by_stem = {_stem(p.relative_to(masks).as_posix()): p for p in masks.rglob("*") if is_image(p.name)}
    missing = [name for name in names if _stem(name) not in by_stem]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(names)} images in {images} have no mask, such as {missing[0]}: its mask should be "
            f"{masks / (_stem(missing[0]) + '.png')}. Add the masks, or move these images elsewhere."
        )
    reduce = layout == "ade20k" if options.reduce_zero_label is None else options.reduce_zero_label
    return MaskSet(
        root,
        [(images / name).relative_to(root).as_posix() for name in names],
        [by_stem[_stem(name)].relative_to(root).as_posix() for name in names],
        *_numbered(read_classes(_class_file(root, options, layout, int(reduce)), int(reduce)), options, reduce),
    )


def _stem(path: str) -> str:
    return path.rsplit(".", 1)[0]


def _numbered(
    names: dict[int, str], options: MaskOptions, reduce: bool
) -> tuple[list[str], dict[int, int], tuple[int, ...]]:
    """(class names, value -> class, ignored values)."""
    ignored = (*options.ignore_index, *((0,) if reduce else ()))
    for value in ignored:
        if value in names:
            raise DataError(
                f"value {value} is the class {names[value]!r} and is also ignored (ignore_index, "
                "reduce_zero_label); it cannot be both"
            )
    values = sorted(names)
    return [names[v] for v in values], {v: i for i, v in enumerate(values)}, tuple(dict.fromkeys(ignored))


def _class_file(root: Path, options: MaskOptions, layout: str, first: int) -> Path:
    wanted = ("objectInfo150.txt", "objectInfo150.csv") if layout == "ade20k" else ()
    wanted = (*wanted, "classes.txt", "classes.json")
    files = [Path(options.classes)] if options.classes else [root / name for name in wanted]
    path = next((file for file in files if file.is_file()), None)
    if path is None and options.classes:
        raise DataError(f"there is no class file {options.classes}")
    if path is None:
        raise DataError(
            f"{root} has no class file ({', '.join(wanted)}). Write the names of the classes into "
            f"{root / 'classes.txt'}, one per line, value {first} first, or name another file (classes)"
        )
    return path


def read_classes(path: Path, first: int = 0) -> dict[int, str]:
    """Value -> name, of a text file with a name per line, JSON (a list, or {"value": "name"}), or ADE20K's table."""
    pairs: Iterable[tuple[str, str]]
    if path.suffix == ".json":
        content = schema.read_json(path, object)
        if isinstance(content, dict):
            pairs = schema.parse(dict[str, str], content, str(path)).items()
        else:
            pairs = ((str(first + i), n) for i, n in enumerate(schema.parse(list[str], content, str(path))))
    else:
        lines = [line for line in _read_text(path).splitlines() if line.strip()]
        pairs = ((str(first + i), line.strip()) for i, line in enumerate(lines))
        if lines and lines[0].startswith("Idx"):  # ADE20K's objectInfo150
            table = csv.DictReader(lines, delimiter="\t" if "\t" in lines[0] else ",")
            if not {"Idx", "Name"} <= set(table.fieldnames or ()):
                raise DataError(f"{path}: a table of classes has the columns Idx and Name, not {lines[0][:60]!r}")
            pairs = ((row["Idx"], (row["Name"] or "").strip()) for row in table)
    names = {}
    for value, name in pairs:
        if not value.strip().isdecimal() or len(value) > 9 or int(value) >= _VALUES:
            raise DataError(
                f"{path}: {value[:40]!r} is not the value of a class, which are 0 to {_VALUES - 1}; class files look "
                'like {"0": "sky"}'
            )
        names[int(value)] = name
    if not names:
        raise DataError(f"{path} names no classes")
    return names


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _voc(root: Path, split: str, options: MaskOptions) -> MaskSet | None:
    lists = root / "ImageSets" / "Segmentation"
    _first(root, ("JPEGImages",), "images")
    if not split:
        keys = sorted(p.stem for p in (root / "SegmentationClass").glob("*.png"))
    elif (lists / f"{split}.txt").is_file():
        keys = _read_text(lists / f"{split}.txt").split()
    else:
        return None
    files = {p.stem: p.name for p in (root / "JPEGImages").iterdir() if is_image(p.name)}
    for key in keys:
        if key not in files:
            raise DataError(f"{lists / f'{split}.txt'} lists {key}, and there is no image {root}/JPEGImages/{key}.jpg")
        if not (root / "SegmentationClass" / f"{key}.png").is_file():
            raise DataError(f"image {key} has no mask: there is no {root}/SegmentationClass/{key}.png")
    names = read_classes(Path(options.classes)) if options.classes else dict(enumerate(VOC_CLASSES))
    return MaskSet(
        root,
        [f"JPEGImages/{files[key]}" for key in keys],
        [f"SegmentationClass/{key}.png" for key in keys],
        *_numbered(names, options, bool(options.reduce_zero_label)),
    )


class _Image(TypedDict):
    id: int
    file_name: str


class _Segment(TypedDict):
    id: int
    category_id: int


class _Annotation(TypedDict):
    image_id: int
    file_name: str
    segments_info: list[_Segment]


class _Category(TypedDict):
    id: int
    name: str


class _Panoptic(TypedDict):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def _coco_json(root: Path, split: str) -> Path | None:
    names = SPLITS.get(split, (split,))
    files = [p for folder in (root, root / "annotations") for p in sorted(folder.glob("panoptic_*.json"))]
    return next((p for p in files if p.stem.removeprefix("panoptic_") in names), None)


def _coco(root: Path, split: str, options: MaskOptions) -> MaskSet | None:
    path = _coco_json(root, split)
    if path is None:
        return None
    name = path.stem.removeprefix("panoptic_")
    content = schema.read_json(path, _Panoptic)
    images = _first(root, (f"images/{name}", name), f"images of {path.name}")
    panoptic = next((p for p in (path.with_suffix(""), root / "panoptic" / name) if p.is_dir()), None)
    masks = panoptic or _first(root, (f"semantic/{name}",), f"masks of {path.name}")
    files = {image["id"]: check_relative(image["file_name"], str(path)) for image in content["images"]}
    present = {p.name for p in images.iterdir()}
    image_paths, mask_paths, segments = [], [], []
    for annotation in sorted(content["annotations"], key=lambda a: a["file_name"]):
        file = files.get(annotation["image_id"])
        if file is None or file not in present:
            raise DataError(
                f"{path} has an annotation for image {annotation['image_id']}, and {images}/{file or ''} is not there"
            )
        mask = masks / check_relative(annotation["file_name"], str(path))
        if not mask.is_file():
            raise DataError(f"image {file} has no mask: {mask} is not there")
        image_paths.append((images / file).relative_to(root).as_posix())
        mask_paths.append(mask.relative_to(root).as_posix())
        segments.append({s["id"]: s["category_id"] for s in annotation["segments_info"]})
    names = {c["id"]: c["name"] for c in content["categories"]}
    ignored = tuple(v for v in dict.fromkeys((0, *options.ignore_index)) if v not in names)
    values = sorted(names)
    return MaskSet(
        root,
        image_paths,
        mask_paths,
        [names[v] for v in values],
        {v: i for i, v in enumerate(values)},
        ignored,
        segments if panoptic is not None else None,
    )


def _first(root: Path, names: Sequence[str], what: str) -> Path:
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise DataError(f"{root}: the {what} should be in {' or '.join(names)}, and there is no such folder")
