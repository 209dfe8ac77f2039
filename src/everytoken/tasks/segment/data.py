"""Images with masks, and batches of them. In memory a mask is int16 [H, W]: the class, or -1 where it is ignored.

A `MaskSet` is a `data.DataSet` whose samples also have a mask. Values in mask files become classes by a table; a value
that is neither a class nor ignored, a mask of another size than its image, and a mask that is missing are errors that
name the file (`on_bad_image=skip` leaves the image out instead). How the folders are read is in `layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken import keyed
from everytoken.data.batch import Batch
from everytoken.data.decode import FORMATS, ImageError, Picture
from everytoken.data.pixels import view
from everytoken.data.sampler import Request
from everytoken.data.sources import DataSet, Strings
from everytoken.tasks.segment.augment import SegmentTransform

IGNORED = -1
_UNKNOWN = -2
_VALUES = 65536


class MaskError(ImageError):
    """A mask cannot be used; the message names it and says why."""


class MaskSet(DataSet):
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
        self.root, self.name = root, str(root)
        self.images, self.masks = Strings(images), Strings(masks)
        self.class_names = list(class_names)
        self.labels = np.full(len(images), -1, dtype=np.int64)  # of whole images: none
        self.values, self.ignored, self.segments = dict(values), tuple(ignored), segments
        self.table = np.full(_VALUES, _UNKNOWN, dtype=np.int16)
        for value in ignored:
            self.table[value] = IGNORED
        for value, index in values.items():
            self.table[value] = index

    def key(self, i: int) -> str:
        """The image's path below the root."""
        return self.images[i]

    def where(self, i: int) -> str:
        """The image's path."""
        return f"{self.root}/{self.images[i]}"

    def open_bytes(self, i: int) -> bytes:
        """The image file."""
        return Path(self.where(i)).read_bytes()

    def mask(self, i: int, size: tuple[int, int] | None = None) -> np.ndarray:
        """int16 [H, W] of classes; -1 is ignored.

        Args:
            size: (width, height) of the upright image, which the mask's must equal.
        """
        where = self.root / self.masks[i]
        stored = _read(where)
        if size is not None and stored.shape[1::-1] != size:
            hint = " (the image is turned by its EXIF tag)" if stored.shape[:2] == size else ""
            raise MaskError(
                f"{where}: the mask is {stored.shape[1]} x {stored.shape[0]} pixels and its image {self.where(i)} is "
                f"{size[0]} x {size[1]}{hint}. Both must have the same size; make the mask anew."
            )
        if self.segments is not None:
            return self._panoptic(stored, self.segments[i], where)
        if stored.ndim != 2:
            raise MaskError(
                f"{where}: the mask is a colour picture. A mask has one channel, whose values are classes (an 8-bit "
                "grey, palette or 16-bit PNG)."
            )
        found = self.table[stored if stored.dtype == np.uint8 else stored.clip(0, _VALUES - 1)]
        wrong = (found == _UNKNOWN) if stored.dtype == np.uint8 else (found == _UNKNOWN) | (stored >= _VALUES)
        if wrong.any():
            y, x = (int(v[0]) for v in np.nonzero(wrong))
            known = sorted(self.values)
            raise MaskError(
                f"{where}: value {int(stored[y, x])} (first at x {x}, y {y}; {int(wrong.sum())} pixels are wrong) is "
                f"no class: the {len(known)} classes have values {known[0]} to {known[-1]}, and "
                f"{', '.join(map(str, self.ignored)) or 'nothing'} is ignored. Add it to the class file, or ignore it "
                "with --ignore-index."
            )
        return found

    def _panoptic(self, stored: np.ndarray, segments: Mapping[int, int], where: Path) -> np.ndarray:
        """Of a picture whose colour R + 256 G + 65536 B is a segment's id; ids that are not listed are ignored."""
        if stored.ndim != 3:
            raise MaskError(f"{where}: a panoptic mask is a colour picture, and this has one channel.")
        ids = stored.astype(np.int64) @ np.array([1, 256, 65536])
        seen, inverse = np.unique(ids, return_inverse=True)
        classes = np.full(len(seen), IGNORED, dtype=np.int16)
        for k, segment in enumerate(seen.tolist()):
            if segment in segments:
                value = segments[segment]
                if value not in self.values:
                    raise MaskError(
                        f"{where}: segment {segment} is of category {value}, which is none of the "
                        f"{len(self.values)} categories that are listed"
                    )
                classes[k] = self.values[value]
        return classes[inverse.reshape(ids.shape)]


def _read(path: Path) -> np.ndarray:
    """A mask file as it is: [H, W] or [H, W, 3]."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.mode not in ("L", "P", "1", "I", "RGB") and not image.mode.startswith("I;16"):
                raise MaskError(f"{path}: a mask has one channel of whole numbers, and this is of mode {image.mode}.")
            pixels = np.asarray(image)
    except FileNotFoundError as error:
        raise MaskError(f"{path}: the mask is not there.") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise MaskError(f"{path}: the mask cannot be read ({error}).") from error
    if pixels.dtype == bool:
        return pixels.astype(np.uint8)
    return pixels if pixels.dtype == np.uint8 else pixels.astype(np.int64)


class TrainSamples:
    """Makes batches of random views; see `Loader(samples=...)`. Views are keyed by (seed, epoch, key)."""

    def __init__(self, data: MaskSet | Any, transform: SegmentTransform, seed: int, skip: bool = False) -> None:
        self.data, self.transform, self.seed, self.skip = data, transform, seed, skip

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, requests: list[Request]) -> Batch:
        made: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for request in requests:
            key = self.data.key(request.sample)
            rng = keyed.generator(self.seed, request.epoch, key, "segment")
            try:
                picture = self.data.picture(request.sample)
                made.append(self.transform(picture, mask_of(self.data, request.sample, picture), rng))
            except ImageError as error:
                if not self.skip:
                    raise
                skipped.append((key, str(error)))
                continue
            kept.append(request.sample)
        side = self.transform.options.crop_size
        images = np.empty((len(made), 3, side, side), dtype=np.uint8)
        masks = np.empty((len(made), side, side), dtype=np.int16)
        placement = np.empty((len(made), 2, 3), dtype=np.float32)
        for k, (pixels, mask, where) in enumerate(made):
            images[k], masks[k], placement[k] = pixels.transpose(2, 0, 1), mask, where
        return _batch(self.data, images, masks, placement, kept, skipped)


class EvalSamples:
    """Makes batches of one whole image at its own size, with its mask."""

    def __init__(self, data: MaskSet | Any, skip: bool = False, masks: bool = True) -> None:
        self.data, self.skip, self.masks = data, skip, masks

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, requests: list[Request]) -> Batch:
        (request,) = requests
        whole = np.array([[[1, 0, 0], [0, 1, 0]]], dtype=np.float32)
        try:
            picture: Picture = self.data.picture(request.sample)
            mask = mask_of(self.data, request.sample, picture) if self.masks else np.zeros((1, 1), np.int16)
            pixels = np.ascontiguousarray(view(picture.upright()).transpose(2, 0, 1))
        except ImageError as error:
            if not self.skip:
                raise
            none = (np.empty((0, 3, 1, 1), np.uint8), np.empty((0, 1, 1), np.int16), whole[:0])
            return _batch(self.data, *none, [], [(self.data.key(request.sample), str(error))])
        return _batch(self.data, pixels[None], mask[None], whole, [request.sample], [])


def mask_of(data: Any, i: int, picture: Picture) -> np.ndarray:
    """The mask of sample i of a `MaskSet` or of a subset of one."""
    while not isinstance(data, MaskSet):
        data, i = data.base, int(data.indices[i])
    return data.mask(i, picture.size)


def _batch(
    data: DataSet,
    images: np.ndarray,
    masks: np.ndarray,
    placement: np.ndarray,
    kept: list[int],
    skipped: list[tuple[str, str]],
) -> Batch:
    return Batch(
        images=torch.from_numpy(images),
        labels=torch.from_numpy(data.labels[kept]),
        placement=torch.from_numpy(placement),
        indices=torch.tensor(kept, dtype=torch.int64),
        keys=tuple(data.key(i) for i in kept),
        targets=torch.from_numpy(masks),
        skipped=tuple(skipped),
    )
