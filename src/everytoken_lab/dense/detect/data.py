"""Images with objects: COCO json, where it lies and what is in it; batches of them.

COCO          {train2017,val2017}/ (or images/{train2017,val2017}/)  annotations/instances_{train2017,val2017}.json
one folder    images/ (or the images themselves) and one json file with "images" and "annotations"
parts         train/ and val/ (or valid/), each like that; annotations may also be train.json and val.json side by side
a json file   images in images/ next to it, or next to it

What is wrong is an error that names the file and the annotation; degenerate objects are left out, with a note. Objects
are kept as text in one block of memory, which worker processes share. Images of a batch lie in the top left corner of a
canvas that holds the largest. Crop, short side and flip are keyed by (seed, epoch, key).

A segmentation is a list of polygons [[x0, y0, x1, y1, ...], ...] in continuous pixel coordinates, or run lengths
{"size": [height, width], "counts": ...}: numbers of 0s, 1s, 0s, ... down the columns, as a list or as COCO's string.
Rasterising and run lengths are pycocotools', so that masks are to the pixel what the evaluator thinks they are.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval, Len, MinLen
from torch import Tensor
from typing_extensions import TypedDict

from everytoken import keyed
from everytoken.data import placement as pl
from everytoken.data.placement import sample_mask
from everytoken.errors import need
from everytoken_lab import schema
from everytoken_lab.data.datasets import DataError, Strings
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.data.labels import check_relative
from everytoken_lab.data.loader import BatchReader, Request
from everytoken_lab.data.warp import render
from everytoken_lab.dense.common import SPLITS, TargetSet, resized
from everytoken_lab.dense.detect import CocoOptions, DetectAugment

CROP_RESIZE = (400, 500, 600)  # short sides, one of which an image has before it is cropped
CROP_LONGEST = 1333  # its long side is at most this
CROP_SIZE = (384, 600)  # pixels of each side that a crop keeps
_Id = Annotated[int, Interval(ge=-(2**53), le=2**53)]
_Side = Annotated[float, Interval(ge=1, le=2**20)]


class _Image(TypedDict):
    id: _Id
    file_name: str
    width: _Side
    height: _Side


class _Category(TypedDict):
    id: _Id
    name: NotRequired[str | int]


class _Annotation(TypedDict):
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Len(4, 4)]
    id: NotRequired[_Id]
    iscrowd: NotRequired[bool | int | None]
    area: NotRequired[float | None]
    segmentation: NotRequired[Any]


class _Coco(TypedDict):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], MinLen(1)]


@dataclass(frozen=True)
class Annotation:
    """An object: its id in the file, its box x0, y0, x1, y1 in pixels of the source, its class from 0, whether it is a
    crowd (many objects that are not told apart), its area as in the file, and its mask, if it has one."""

    id: int
    box: list[float]
    label: int
    crowd: bool
    area: float
    segmentation: Segmentation | None


class InstanceSet(TargetSet):
    """The images of a COCO json file, whose names start from a folder, and their objects, checked.

    Attributes:
        sizes: int64 [n, 2], (width, height). image_ids, category_ids: of the images and classes in the file.
        annotations: of each image, JSON of the fields of its objects.
        notes: what was left out, in words.
    """

    PER_IMAGE = (*TargetSet.PER_IMAGE, "sizes", "image_ids", "annotations")

    def __init__(self, path: Path, folder: Path) -> None:
        content = schema.read_json(path, _Coco)
        rows = sorted(content["images"], key=lambda row: row["file_name"])
        files = [check_relative(row["file_name"], f"{path}: image {row['id']}") for row in rows]
        ids, categories = [row["id"] for row in rows], sorted(content["categories"], key=lambda c: c["id"])
        self.category_ids = [c["id"] for c in categories]
        unique: dict[str, list[Any]] = {"images have the file_name": files, "images have the id": ids}
        for what, values in {**unique, "categories have the id": self.category_ids}.items():
            for value, count in Counter[Any](values).most_common(1):
                if count > 1:
                    raise DataError(f"{path}: two {what} {value!r}")
        missing = [file for file in files if not os.path.isfile(folder / file)]  # of any name
        if missing:
            raise DataError(
                f"{path} lists the image {missing[0]!r}, which is not in {folder} ({len(missing)} are not). Add it, or "
                "remove its entry."
            )
        super().__init__(folder, files, [str(c.get("name", c["id"])) for c in categories], str(path))
        self.image_ids = np.array(ids, dtype=np.int64)
        self.sizes = np.array([(int(row["width"]), int(row["height"])) for row in rows], np.int64).reshape(-1, 2)
        sizes = {number: self.size(i) for i, number in enumerate(ids)}
        objects, left_out = _read_objects(path, content["annotations"], sizes, self.category_ids)
        self.annotations = Strings(json.dumps(objects[i]) for i in ids)
        what = "annotations without width, height or area inside their image are left out"
        numbers = ", ".join(map(str, left_out[:5])) + ", ..." * (len(left_out) > 5)
        self.notes = [f"{path}: {len(left_out)} {what} ({numbers})"] if left_out else []

    def size(self, i: int) -> tuple[int, int]:
        """(width, height) of image i, as the annotations say."""
        return int(self.sizes[i][0]), int(self.sizes[i][1])

    def objects(self, i: int) -> list[Annotation]:
        """The objects of image i."""
        return [Annotation(*fields) for fields in json.loads(self.annotations[i])]

    def trained(self, i: int) -> list[Annotation]:
        """Objects of image i that are trained on: no crowds, and at least a pixel wide and high inside the image."""
        return [o for o in self.objects(i) if not o.crowd and min(_inside(o.box, *self.size(i))) >= 1]

    def run_lengths(self, i: int, annotation: Annotation) -> dict[str, Any]:
        """The mask of an object of image i, which is its box if it has no segmentation, as COCO's run lengths."""
        x0, y0, x1, y1 = annotation.box
        return encode(annotation.segmentation or [[x0, y0, x1, y0, x1, y1, x0, y1]], self.size(i))

    def as_coco(self, samples: Sequence[int], masks: bool) -> dict[str, Any]:
        """Truth for the COCO evaluator: images `samples`, with the ids of the file."""
        rows: list[dict[str, Any]] = []
        for i in samples:
            for o in self.objects(i):
                x0, y0, x1, y1 = o.box
                row = {"id": len(rows) + 1, "image_id": int(self.image_ids[i]), "iscrowd": int(o.crowd), "area": o.area}
                box = {"category_id": self.category_ids[o.label], "bbox": [x0, y0, x1 - x0, y1 - y0]}
                rows.append({**row, **box, **({"segmentation": self.run_lengths(i, o)} if masks else {})})
        sizes = ((int(self.image_ids[i]), *self.size(i)) for i in samples)
        images = [{"id": number, "width": width, "height": height} for number, width, height in sizes]
        categories = [{"id": number} for number in self.category_ids]
        return {"info": {}, "images": images, "annotations": rows, "categories": categories}


def _inside(box: Sequence[float], width: int, height: int) -> tuple[float, float]:
    """Width and height of the part of a box x0, y0, x1, y1 that lies inside an image."""
    return min(box[2], width) - max(box[0], 0), min(box[3], height) - max(box[1], 0)


def _read_objects(
    path: Path, rows: Sequence[_Annotation], sizes: Mapping[int, tuple[int, int]], category_ids: Sequence[int]
) -> tuple[dict[int, list[Any]], list[Any]]:
    """The fields of the objects of each image, and the ids of those that were left out."""
    classes = {number: k for k, number in enumerate(category_ids)}
    objects: dict[int, list[Any]] = {number: [] for number in sizes}
    left_out: list[Any] = []
    for row in rows:
        number = row.get("id", "(without id)")
        where = f"{path}: annotation {number}"
        if row["image_id"] not in sizes:
            raise DataError(f"{where} is of image {row['image_id']!r}, which is not among the {len(sizes)} images")
        if row["category_id"] not in classes:
            raise DataError(f"{where} is of category {row['category_id']!r}, none of the {len(classes)} categories")
        size, segmentation = sizes[row["image_id"]], row.get("segmentation")
        usable = check(segmentation, size, where) if segmentation else None
        x, y, width, height = row["bbox"]
        box, area = [x, y, x + width, y + height], row.get("area")
        empty = not np.isfinite(box).all() or min(width, height, *_inside(box, *size)) <= 0
        if empty or (segmentation and usable is None):
            left_out.append(number)
        else:
            fields = (row.get("id", -1), box, classes[row["category_id"]], bool(row.get("iscrowd", 0)))
            objects[row["image_id"]].append((*fields, width * height if area is None else area, usable))
    return objects, left_out


# -- masks -------------------------------------------------------------------------------------------------------------


Segmentation = list[list[float]] | dict[str, Any]
_FARTHEST = 1e5  # pixels from the corner of an image to a polygon's corner; pycocotools allocates by it


class _RunLengths(TypedDict):
    size: list[int]
    counts: str | list[int]


def tool() -> Any:
    """pycocotools' mask functions."""
    return need("pycocotools.mask", "detect", "everytoken detect")


def check(segmentation: Any, size: tuple[int, int], where: str) -> Segmentation | None:
    """A segmentation that can be used, or None if nothing is in it (polygons with fewer than three corners).

    `size` is (width, height) of the image; `where` names file and annotation in messages.
    """
    if isinstance(segmentation, dict):
        runs = schema.parse(_RunLengths, segmentation, f"{where}: segmentation")
        if runs["size"] != [size[1], size[0]]:
            raise ImageError(
                f"{where}: its mask is {' x '.join(map(str, runs['size'][::-1]))} pixels and its image is {size[0]} x "
                f"{size[1]}. Both must have the same size."
            )
        counts = runs["counts"]
        lengths = _unpack(counts, where) if isinstance(counts, str) else np.array(counts, dtype=np.float64)
        if (lengths < 0).any() or lengths.sum() != size[0] * size[1]:
            raise ImageError(
                f"{where}: its run lengths add up to {lengths.sum():.0f} pixels and its image has {size[0] * size[1]}."
            )
        return {"size": runs["size"], "counts": counts}
    if not isinstance(segmentation, list):
        raise ImageError(f"{where}: a segmentation is a list of polygons or run lengths, not {segmentation!r:.60}")
    polygons = schema.parse(list[list[float]], segmentation, f"{where}: segmentation")
    for polygon in polygons:
        if len(polygon) % 2 or not (np.abs(polygon) < _FARTHEST).all():
            raise ImageError(
                f"{where}: a polygon is a list of x, y, x, y, ... in pixels; this one has {len(polygon)} numbers, from "
                f"{min(polygon)} to {max(polygon)}"
            )
    return [polygon for polygon in polygons if len(polygon) >= 6] or None


def _unpack(text: str, where: str) -> np.ndarray:
    """Lengths of COCO's compressed run lengths: 5 bits per character, least first, differences from the third on.

    pycocotools trusts such text: it decodes an empty one to whatever is in memory.
    """
    lengths: list[int] = []
    value = shift = 0
    for code in text.encode("ascii", "replace"):
        code -= 48
        if not 0 <= code <= 63 or shift > 30:  # more than 2 ** 34 pixels
            break
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the number ends here; bit 4 is its sign
            value -= (code & 16) << (shift - 4)
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    else:
        if lengths and not shift:
            return np.array(lengths)
    raise ImageError(f"{where}: its run lengths are damaged ({text[:20]!r})")


def encode(segmentation: Segmentation, size: tuple[int, int]) -> dict[str, Any]:
    """COCO's compressed run lengths of a checked segmentation of an image of (width, height)."""
    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], str):
        return segmentation
    runs: Any = tool().frPyObjects(segmentation, size[1], size[0])
    return tool().merge(runs) if isinstance(segmentation, list) else runs


def decode(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
    """uint8 [height, width] of 0 and 1."""
    out: np.ndarray = tool().decode(encode(segmentation, size))
    return out


def compress(mask: np.ndarray) -> dict[str, Any]:
    """A binary mask [height, width] as compressed run lengths that JSON can hold."""
    runs = tool().encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [int(v) for v in runs["size"]], "counts": runs["counts"].decode()}


def through(segmentation: Segmentation, size: tuple[int, int], matrix: pl.Affine, out: tuple[int, int]) -> np.ndarray:
    """A mask as a crop shows it: uint8 [height, width]. Polygons are moved and drawn, run lengths sampled.

    Args:
        size: (width, height) of the source. out: (height, width) of the crop.
        matrix: [2, 3], pixel of the crop -> pixel of the source.
    """
    if isinstance(segmentation, list):
        back = pl.invert(matrix)
        moved = [pl.apply(back, np.reshape(polygon, (-1, 2))).reshape(-1).tolist() for polygon in segmentation]
        return decode(moved, (out[1], out[0]))
    placement = pl.from_pixels(matrix, (out[1], out[0]), size)
    return sample_mask(decode(segmentation, size), placement, out, 0)


# -- where it lies ----------------------------------------------------------------------------------------------------


def open_instances(data: str, split: str, options: CocoOptions | None = None) -> InstanceSet:
    """A part of a dataset, which is a folder or a json file.

    Args:
        split: "train", "val", "test" as the files have it, or "all": everything of undivided data. Without a
            validation part, "train" and "val" divide the images by their names (`val_split`).
    """
    options = options or CocoOptions()
    if split in ("train", "val") and not divided(data, options):
        return _read(data, "all", options).part(split, options.val_split)
    return _read(data, split, options)


def divided(data: str, options: CocoOptions) -> bool:
    """Whether the data has a validation part."""
    return bool(options.val_annotations) or (not options.annotations and _find(Path(data), "val") is not None)


def whole_file(data: Path) -> Path:
    """The json file of undivided data, so that a folder and the file in it are seen to be the same data."""
    try:
        return (_find(data, "all") or data).resolve()
    except DataError:  # several: one of them was chosen by name
        return data.resolve()


def _read(data: str, split: str, options: CocoOptions) -> InstanceSet:
    root = Path(data)
    if not root.exists():
        raise DataError(f"there is no folder or file {data}")
    given = options.val_annotations if split == "val" and options.val_annotations else options.annotations
    path = Path(given) if given else _find(root, split)
    if path is None:
        raise DataError(
            f"{data} has no COCO json for {split!r}: put annotations/instances_{SPLITS.get(split, ('all',))[-1]}.json "
            "or one json file next to the images, or name it with the option annotations"
        )
    return InstanceSet(path, _images(root, path, split) or (root if given and root.is_dir() else path.parent))


def _find(root: Path, split: str) -> Path | None:
    """The json file of a part of the data; of all of it, the only one there is."""
    if root.is_file():
        return root if split == "all" else None
    for name in SPLITS.get(split, ()):
        for stem in (f"annotations/instances_{name}", f"annotations/{name}", f"instances_{name}", name):
            if (root / f"{stem}.json").is_file():
                return root / f"{stem}.json"
        if (root / name).is_dir():
            return _only(root / name)
    return _only(root) if split == "all" else None


def _only(folder: Path) -> Path | None:
    files = sorted(p for p in folder.glob("*.json") if not p.name.startswith("."))
    if len(files) > 1:
        files = [p for p in files if "instances" in p.name or "annotations" in p.name] or files
    if len(files) > 1:
        names = ", ".join(p.name for p in files)
        raise DataError(f"{folder} holds several json files ({names}); choose one with the option annotations")
    return files[0] if files else None


def _images(root: Path, path: Path, split: str) -> Path | None:
    """The folder that the names of images in a json file start from, if it has one of the usual names."""
    parts = [n for names in SPLITS.values() for n in names if n in path.stem] + list(SPLITS.get(split, ()))
    names = [*(name for n in parts for name in (f"{n}/images", n, f"images/{n}")), "images"]
    folders = [base / name for base in (path.parent, root, path.parent.parent) for name in names]
    return next((folder for folder in folders if folder.is_dir()), None)


# -- batches ----------------------------------------------------------------------------------------------------------


class DetectTransform:
    """An image at the size for the network; a random crop, size and flip if it gets a generator."""

    def __init__(self, options: DetectAugment, fill: tuple[int, int, int] = (124, 116, 104)) -> None:
        self.options, self.fill = options, fill

    def __call__(self, picture: Picture, rng: np.random.Generator | None = None) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], matrix [2, 3]: pixel of the result -> pixel of the upright source)."""
        options = self.options
        which, flip, crop, *draws = rng.random(8).tolist() if rng is not None else (0.0, 1.0, 1.0)
        left, top, width, height = (0.0, 0.0, *map(float, picture.size))
        if crop < options.crop:
            left, top, width, height = random_crop(picture.size, *draws)
        short = options.sizes[int(which * len(options.sizes))]
        columns, rows = resized((width, height), short, options.longest)
        matrix = np.array([[width / columns, 0.0, left], [0.0, height / rows, top]])
        if flip < options.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, columns], [0.0, 1.0, 0.0]]))
        return render(picture, matrix, (rows, columns), bicubic=False, fill=self.fill)


def random_crop(size: tuple[int, int], first: float, *draws: float) -> tuple[float, ...]:
    """(left, top, width, height) of a crop, in pixels of an image of (width, height); draws in 0..1."""
    whole = resized(size, CROP_RESIZE[int(first * len(CROP_RESIZE))], CROP_LONGEST)
    low, high = (tuple(min(side, limit) for side in whole) for limit in CROP_SIZE)
    sides = tuple(int(a + u * (b - a + 1)) for a, b, u in zip(low, high, draws[:2], strict=True))
    starts = tuple(int(u * (a - b + 1)) for a, b, u in zip(whole, sides, draws[2:], strict=True))
    return tuple(value * n / m for value, n, m in zip((*starts, *sides), size * 2, whole * 2, strict=True))


@dataclass(frozen=True)
class Objects:
    """The objects of one image."""

    boxes: Tensor  # float32 [n, 4] in pixels of the canvas
    labels: Tensor  # int64 [n], classes from 1 (0 is none of them)
    masks: Tensor | None  # uint8 [n, H, W] on the canvas
    size: tuple[int, int]  # (height, width) of the image on the canvas
    matrix: np.ndarray  # float64 [2, 3], pixel of the canvas -> pixel of the source
    source: tuple[int, int]  # (height, width) of the source

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Objects:
        """The same with each tensor changed."""
        masks = None if self.masks is None else change(self.masks)
        return replace(self, boxes=change(self.boxes), labels=change(self.labels), masks=masks)


class BatchObjects(tuple[Objects, ...]):
    """Those of each image of a batch."""

    def to(self, device: Any, non_blocking: bool = False) -> BatchObjects:
        """The same on another device."""
        return BatchObjects(o.with_tensors(lambda t: t.to(device, non_blocking=non_blocking)) for o in self)

    def pin_memory(self) -> BatchObjects:
        """The same in page-locked memory."""
        return BatchObjects(o.with_tensors(Tensor.pin_memory) for o in self)


class ObjectReader(BatchReader[tuple[np.ndarray, Objects]]):
    """Images and, of an `InstanceSet`, their objects.

    Args:
        seed: None: no randomness. masks: with masks of the objects.
    """

    def __init__(
        self, data: TargetSet, transform: DetectTransform, seed: int | None, masks: bool = False, skip: bool = False
    ) -> None:
        super().__init__(data, skip)
        self.transform, self.seed, self.masks = transform, seed, masks

    def view(self, request: Request, key: str) -> tuple[np.ndarray, Objects]:
        """Pixels of one image; boxes that have an area in it, and their masks."""
        rng = None if self.seed is None else keyed.generator(self.seed, request.epoch, key, "detect")
        picture, data = self.data.picture(request.sample), self.data
        pixels, matrix = self.transform(picture, rng)
        objects: list[Annotation] = []
        if isinstance(data, InstanceSet):
            data.check_size(request.sample, picture.size, data.size(request.sample), data.name)
            objects = data.trained(request.sample)
        height, width = pixels.shape[:2]
        corners = pl.apply(pl.invert(matrix), np.array([o.box for o in objects]).reshape(-1, 2, 2))
        boxes = np.concatenate([corners.min(1), corners.max(1)], 1).clip(0, [width, height] * 2)
        inside = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        objects = [o for o, has_area in zip(objects, inside.tolist(), strict=True) if has_area]
        masks = np.zeros((len(objects) if self.masks else 0, height, width), np.uint8)
        for mask, o in zip(masks, objects, strict=False):
            if o.segmentation is None:
                raise ImageError(
                    f"{data.name}: annotation {o.id} has no segmentation. With masks off, boxes alone are trained on."
                )
            mask[:] = through(o.segmentation, picture.size, matrix, (height, width))
        return pixels, Objects(
            torch.from_numpy(boxes[inside].astype(np.float32)),
            torch.tensor([o.label + 1 for o in objects], dtype=torch.int64),
            torch.from_numpy(masks) if self.masks else None,
            (height, width),
            matrix,
            picture.size[::-1],
        )

    def collate(self, views: list[tuple[np.ndarray, Objects]]) -> tuple[np.ndarray, np.ndarray, BatchObjects]:
        """All on one canvas; placements are of the images, not of the canvas."""
        height, width = (max((o.size[axis] for _, o in views), default=1) for axis in (0, 1))
        images = np.empty((len(views), 3, height, width), dtype=np.uint8)
        images[:] = np.array(self.transform.fill, dtype=np.uint8)[:, None, None]
        objects = []
        for canvas, (pixels, o) in zip(images, views, strict=True):
            h, w = o.size
            canvas[:, :h, :w] = pixels.transpose(2, 0, 1)
            objects.append(o if o.masks is None else replace(o, masks=F.pad(o.masks, (0, width - w, 0, height - h))))
        placement = [pl.from_pixels(o.matrix, o.size[::-1], o.source[::-1]) for o in objects]
        return images, np.array(placement), BatchObjects(objects)
