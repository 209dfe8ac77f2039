"""Images with masks: ADE20K, and any pair of folders with a class file; batches of them.

ADE20K   images/{training,validation}  annotations/{training,validation}  objectInfo150.txt; 0 is ignored
folders  images[/SPLIT]  masks[/SPLIT] and classes.txt or classes.json

In memory a mask is int16 [H, W]: the class, or -1 where it is ignored. A value that is neither a class nor ignored, a
mask of another size than its image, and a mask that is missing are errors that name the file.

Training crops are those of the papers' set-up, which is Swin's: the short side becomes 512 (the long side at most four
times that), times a random factor in 0.5..2; of ten attempts the first 512 x 512 crop in which no class covers more
than 75 %; what lies outside of the image has the mean colour and is ignored. Pixels and mask are sampled through one
placement. Photometric distortion (Liu et al. 2016, SSD): each with a chance of one half, brightness shifted by up to
32, contrast multiplied by 0.5..1.5 (before or after the others), saturation multiplied by 0.5..1.5, hue turned by up to
36 degrees.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken import keyed
from everytoken.data import placement as pl
from everytoken.data.placement import sample_mask
from everytoken_lab import schema
from everytoken_lab.data.datasets import DataError, Strings
from everytoken_lab.data.decode import ImageError, Picture, naming_errors, open_image
from everytoken_lab.data.labels import read_text
from everytoken_lab.data.loader import BatchReader, Request
from everytoken_lab.data.tree import is_image
from everytoken_lab.data.warp import render
from everytoken_lab.dense.common import SPLITS, TargetSet, resized
from everytoken_lab.dense.segment import MaskOptions, SegmentAugment

_UNKNOWN = -2
_VALUES = 256  # of a mask
ADE20K = "objectInfo150.txt"  # its class file
ATTEMPTS = 10
LONGEST = 4  # the long side of an image, in short sides of the network's


class MaskSet(TargetSet):
    """Images and their masks, of the folders `images` and `masks` below `root`."""

    PER_IMAGE = (*TargetSet.PER_IMAGE, "masks")

    def __init__(self, root: Path, images: Path, masks: Path, options: MaskOptions) -> None:
        names = sorted(p.relative_to(images).as_posix() for p in images.rglob("*") if is_image(p.name) and p.is_file())
        if not names:
            raise DataError(f"{images} has no images")
        by_stem = {p.relative_to(masks).with_suffix(""): p for p in masks.rglob("*") if is_image(p.name)}
        stems = [Path(name).with_suffix("") for name in names]
        missing = [name for name, stem in zip(names, stems, strict=True) if stem not in by_stem]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(names)} images in {images} have no mask, such as {missing[0]}: expected "
                f"{(masks / missing[0]).with_suffix('.png')}. Add the masks, or move these images elsewhere."
            )
        ade20k = (root / ADE20K).is_file() or (root / "annotations" / "training").is_dir()
        reduce = ade20k if options.reduce_zero_label is None else options.reduce_zero_label
        classes = read_classes(_class_file(root, options, int(reduce)), int(reduce))
        self.values, ignored = list(classes), [*options.ignore_index, *((0,) if reduce else ())]
        for value in ignored:
            if not 0 <= value < _VALUES or value in classes:
                what = f"the class {classes[value]!r}" if value in classes else f"not in 0 to {_VALUES - 1}"
                raise DataError(f"the ignored value {value} (ignore_index, reduce_zero_label) is {what}")
        super().__init__(root, [(images / n).relative_to(root).as_posix() for n in names], list(classes.values()))
        self.masks = Strings(by_stem[stem].relative_to(root).as_posix() for stem in stems)
        self.table = np.full(_VALUES, _UNKNOWN, dtype=np.int16)
        self.table[ignored] = -1
        self.table[self.values] = range(len(classes))

    def mask(self, i: int, size: tuple[int, int] | None = None) -> np.ndarray:
        """int16 [H, W] of classes, -1 is ignored; `size`: (width, height) of the upright image, which it must have."""
        where = self.root / self.masks[i]
        with open_image(where, str(where)) as image:
            if image.mode not in ("L", "P", "1"):
                raise ImageError(
                    f"{where}: a mask has one channel of 8 bits, whose values are classes (a grey or palette PNG); "
                    f"this one is of mode {image.mode}."
                )
            if size is not None:
                self.check_size(i, size, image.size, str(where))
            with naming_errors(str(where)):
                stored = np.asarray(image).astype(np.uint8)
        classes = self.table[stored]
        rows, columns = np.nonzero(classes == _UNKNOWN)
        if len(rows):
            y, x = int(rows[0]), int(columns[0])
            raise ImageError(
                f"{where}: value {stored[y, x]} (first at x {x}, y {y}; {len(rows)} pixels are wrong) is no class: "
                f"{self.values[0]} to {self.values[-1]}. Add it to the class file, or to ignore_index."
            )
        return classes


# -- crops -------------------------------------------------------------------------------------------------------------


class SegmentTransform:
    """A random crop of an image and its mask; outside of the image, `fill` and -1."""

    def __init__(self, options: SegmentAugment, fill: tuple[int, int, int] = (124, 116, 104)) -> None:
        self.options, self.fill = options, fill

    def __call__(
        self, picture: Picture, mask: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, pl.Affine]:
        """(pixels uint8 [s, s, 3], mask [s, s], placement [2, 3])."""
        options, side = self.options, self.options.crop_size
        draws = rng.random((ATTEMPTS + 1, 2))
        scale, flip = draws[0].tolist()
        short = (options.resize or side) * (options.scale[0] + (options.scale[1] - options.scale[0]) * scale)
        width, height = resized(picture.size, short, LONGEST * short)
        per_x, per_y = picture.size[0] / width, picture.size[1] / height
        matrix = np.zeros((2, 3))
        for u, v in draws[1:].tolist():
            x0, y0 = int(u * (max(width - side, 0) + 1)), int(v * (max(height - side, 0) + 1))
            matrix = np.array([[per_x, 0.0, x0 * per_x], [0.0, per_y, y0 * per_y]])
            if options.cat_max_ratio >= 1 or self._varied(mask, matrix):
                break
        if flip < options.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, side], [0.0, 1.0, 0.0]]))
        pixels, used = render(picture, matrix, (side, side), bicubic=False, fill=self.fill)
        placement = pl.from_pixels(used, (side, side), picture.size)
        if options.photometric:
            pixels = distort(pixels, rng).copy()
            beyond = sample_mask(np.zeros(mask.shape, np.int8), placement, (side, side), 1)
            pixels[beyond.astype(bool)] = self.fill
        return pixels, sample_mask(mask, placement, (side, side), -1), placement

    def _varied(self, mask: np.ndarray, matrix: pl.Affine) -> bool:
        """Whether a crop shows two classes or more, none of which covers too much of it."""
        side = self.options.crop_size
        placement = pl.from_pixels(matrix, (side, side), mask.shape[::-1])
        crop = sample_mask(mask, placement, (side, side), -1)[::2, ::2]  # a quarter of the pixels will do
        counts = np.bincount(crop[crop >= 0])
        counts = counts[counts > 0]
        return len(counts) > 1 and bool(counts.max() < self.options.cat_max_ratio * counts.sum())


def distort(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Photometric distortion of uint8 [h, w, 3]."""
    u = rng.random(9).tolist()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    levels = np.arange(256)
    if u[0] < 0.5:
        image = _levels(image, levels + (64 * u[1] - 32))
    contrast = levels * (0.5 + u[3])
    if u[2] < 0.5 and u[8] < 0.5:
        image = _levels(image, contrast)
    if u[4] < 0.5 or u[6] < 0.5:
        hue = (levels + round(51.2 * u[7] - 25.6) * (u[6] < 0.5)) % 256  # a full turn is 256 levels
        saturation = levels * (0.5 + u[5] if u[4] < 0.5 else 1)
        table = [*_bytes(hue), *_bytes(saturation), *range(256)]
        image = image.convert("HSV").point(table).convert("RGB")
    if u[2] < 0.5 <= u[8]:
        image = _levels(image, contrast)
    return np.array(image)


def _levels(image: Image.Image, table: np.ndarray) -> Image.Image:
    return image.point(_bytes(table) * 3)


def _bytes(table: np.ndarray) -> list[int]:
    return table.round().clip(0, 255).astype(int).tolist()


# -- batches ----------------------------------------------------------------------------------------------------------

MaskSample = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pixels uint8 [h, w, 3], mask int16 [h, w], placement [2, 3]."""


class MaskReader(BatchReader[MaskSample]):
    """Images and, of a `MaskSet`, their masks.

    Args:
        transform: random crops, keyed by (seed, epoch, key); None: whole images at their own size, one per batch.
    """

    def __init__(
        self, data: TargetSet, transform: SegmentTransform | None = None, seed: int = 0, skip: bool = False
    ) -> None:
        super().__init__(data, skip)
        self.transform, self.seed = transform, seed

    def view(self, request: Request, key: str) -> MaskSample:
        picture = self.data.picture(request.sample)
        mask = np.zeros((1, 1), np.int16)
        if isinstance(self.data, MaskSet):
            mask = self.data.mask(request.sample, picture.size)
        if self.transform is None:
            return np.asarray(picture.upright()), mask, np.array([[1.0, 0, 0], [0, 1, 0]])
        return self.transform(picture, mask, keyed.generator(self.seed, request.epoch, key, "segment"))

    def collate(self, views: list[MaskSample]) -> tuple[np.ndarray, np.ndarray, Any]:
        if not views:
            return np.empty((0, 3, 1, 1), np.uint8), np.empty((0, 2, 3)), torch.empty((0, 1, 1), dtype=torch.int16)
        images = np.stack([np.ascontiguousarray(pixels.transpose(2, 0, 1)) for pixels, _, _ in views])
        masks = torch.from_numpy(np.stack([mask for _, mask, _ in views]))
        return images, np.stack([placement for _, _, placement in views]), masks


# -- layouts ----------------------------------------------------------------------------------------------------------


def open_masks(data: str, split: str, options: MaskOptions | None = None) -> MaskSet:
    """A part of a dataset with masks.

    Args:
        split: "train", "val", "test", or "all": everything. Without a validation part, "train" and "val" divide the
            images by their names (`val_split`).
    """
    root, options = Path(data), options or MaskOptions()
    if not root.is_dir():
        raise DataError(f"{data} is not a folder; segmentation needs a folder of images and masks")
    divide = split in ("train", "val") and not divided(data)
    # of images for training and testing, those for training; without any parts, all
    pair = _pair(root, "train") or _pair(root, "all") if divide else _pair(root, split)
    if pair is None:
        what = f"{split!r} part" if _pair(root, "all") else "folders images/ and masks/ (or annotations/)"
        raise DataError(f"{data} has no {what}; docs/segment.md says how folders are laid out")
    opened = MaskSet(root, *pair, options)
    return opened.part(split, options.val_split) if divide else opened


def divided(data: str) -> bool:
    """Whether the data has a validation part."""
    return _pair(Path(data), "val") is not None


def _pair(root: Path, split: str) -> tuple[Path, Path] | None:
    """The folders of a split's images and masks."""
    for masks in ("masks", "annotations", "labels"):
        for name in SPLITS.get(split, ("",)):
            pair = root / "images" / name, root / masks / name
            if pair[0].is_dir() and pair[1].is_dir():
                return pair
    return None


def _class_file(root: Path, options: MaskOptions, first: int) -> Path:
    if options.classes:
        return Path(options.classes)
    for name in (ADE20K, "classes.txt", "classes.json"):
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"{root} has no class file (classes.txt, classes.json). Write the names of the classes into "
        f"{root / 'classes.txt'}, one per line, value {first} first, or name another file (classes)"
    )


def read_classes(path: Path, first: int = 0) -> dict[int, str]:
    """Value -> name, of a text file with a name per line, JSON ({"value": "name"}), or ADE20K's table."""
    if path.suffix == ".json":
        content = schema.read_json(path, dict[str, str])
    else:
        lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
        content = {str(value): name for value, name in enumerate(lines, first)}
        if lines and lines[0].startswith("Idx"):  # ADE20K's
            table = csv.DictReader(lines, delimiter="\t" if "\t" in lines[0] else ",")
            content = {row.get("Idx") or "": (row.get("Name") or "").strip() for row in table}
    if not content:
        raise DataError(f"{path} names no classes")
    names = {}
    for value, name in content.items():
        if not re.fullmatch(r" *[0-9]{1,3} *", value) or int(value) >= _VALUES or not name:
            raise DataError(
                f"{path}: {value[:40]!r}: {name!r} is no class; values are 0 to {_VALUES - 1}, and class files "
                'look like {"0": "sky"}'
            )
        names[int(value)] = name
    return dict(sorted(names.items()))
