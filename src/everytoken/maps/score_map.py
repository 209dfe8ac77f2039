"""`ScoreMap`, and the record that holds it on disk.

A record has a fixed size (little-endian): CRC-32, state, source size, area, class ids, scores, padding to
a multiple of 8 bytes. The CRC covers the key and all bytes of the record after the CRC itself, so a flipped
bit, a map under the wrong key and a record that was never written are all noticed.

Cost for 18x18x5: 6,480 bytes of scores and ids + 48 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from everytoken.maps.errors import StoreError

HEAD = struct.Struct("<II2I4d")  # crc32, state, width, height, x0, y0, x1, y1
MAP, SKIPPED = 1, 2  # states; 0 is a record that was never written
RESIZE_MODES = ("squash", "letterbox", "center")


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMap:
    """An annotator's class scores for each cell of one image: the k best classes and their logits.

    Attributes:
        scores: float16 [h, w, k], logits, descending along k.
        classes: uint16 or uint32 [h, w, k], the class of each score; distinct within a cell.
        size: (width, height) of the upright source image in pixels; (0, 0) if not known.
        area: (x0, y0, x1, y1), the rectangle of the image, in fractions, that the whole grid covers. The whole
            image is (0, 0, 1, 1); a centre crop lies inside; a letterboxed image's area reaches outside.

    Example:
        >>> score_map = ScoreMap.from_logits(np.random.randn(14, 14, 1000), top_k=5, size=(500, 375))
        >>> score_map.scores.shape
        (14, 14, 5)
    """

    scores: NDArray[np.float16]
    classes: NDArray[np.uint16] | NDArray[np.uint32]
    size: tuple[int, int] = (0, 0)
    area: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    @classmethod
    def from_logits(
        cls,
        logits: ArrayLike,
        top_k: int = 5,
        size: tuple[int, int] = (0, 0),
        area: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
    ) -> ScoreMap:
        """Keep the `top_k` best classes of each cell.

        Args:
            logits: [h, w, K], a NumPy array or a tensor on the CPU. A network's [K, h, w] is `.permute(1, 2, 0)` first.
            top_k: classes to keep, at most K.
            size: (width, height) of the upright image, pixels.
            area: the part of the image that the grid covers; `map_area` computes it for usual ways of resizing.
        """
        dense = np.asarray(logits, np.float32)
        if dense.ndim != 3 or not 1 <= top_k <= dense.shape[-1]:
            raise StoreError(
                f"logits have shape {list(dense.shape)}, not [h, w, K] with K of at least top_k ({top_k})."
            )
        classes = np.argsort(-dense, axis=-1, kind="stable")[..., :top_k]
        scores = np.take_along_axis(dense, classes, -1)
        with np.errstate(over="ignore"):  # what does not fit is refused by name when it is written
            return cls(scores.astype(np.float16), classes.astype(class_dtype(dense.shape[-1])), size, area)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScoreMap):
            return NotImplemented
        return (
            self.size == other.size
            and self.area == other.area
            and np.array_equal(self.classes, other.classes)
            and np.array_equal(self.scores, other.scores)
        )

    __hash__ = None  # type: ignore[assignment]


def map_area(
    resize_mode: str, size: tuple[int, int], aspect: float = 1.0, crop: float = 1.0
) -> tuple[float, float, float, float]:
    """The area that a network's input covers of an image of ``size`` (width, height), in fractions of it.

    Args:
        resize_mode: ``squash`` resizes the whole image; ``letterbox`` keeps its aspect and pads; ``center``
            keeps its aspect and cuts off what sticks out.
        size: of the upright image, pixels.
        aspect: width / height of the network's input.
        crop: for ``center``, the part of the side that is kept (timm's crop_pct).
    """
    if resize_mode == "squash":
        return (0.0, 0.0, 1.0, 1.0)
    if resize_mode not in RESIZE_MODES:
        raise StoreError(f"resize mode {resize_mode!r} is not one of {', '.join(RESIZE_MODES)}.")
    width, height = size
    if min(width, height) < 1:
        raise StoreError(f"resize mode {resize_mode!r} needs the image's size, got {size}.")
    ratio = aspect * height / width  # < 1: the image is wider than the input
    if resize_mode == "letterbox":
        across, down = max(1.0, ratio), max(1.0, 1 / ratio)
    else:
        across, down = crop * min(1.0, ratio), crop * min(1.0, 1 / ratio)
    return ((1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2)


def class_dtype(num_classes: int) -> np.dtype[np.unsignedinteger]:
    """The type of class ids on disk: 16 bits while they suffice."""
    return np.dtype("<u2") if num_classes <= 65535 else np.dtype("<u4")


def record_dtype(grid: tuple[int, int], top_k: int, num_classes: int) -> np.dtype[np.void]:
    """One record as a numpy structured type, the type of a shard's ``.npy`` file."""
    shape = (*grid, top_k)
    fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = [
        ("crc32", "<u4"),
        ("state", "<u4"),
        ("size", "<u4", (2,)),
        ("area", "<f8", (4,)),
        ("classes", class_dtype(num_classes).str, shape),
        ("scores", "<f2", shape),
    ]
    padding = -np.dtype(fields).itemsize % 8
    if padding:
        fields.append(("padding", "|u1", (padding,)))
    return np.dtype(fields)


def checksum(raw_key: bytes, record: memoryview) -> int:
    """CRC-32 of a key followed by its record without the record's first four bytes."""
    return zlib.crc32(record[4:], zlib.crc32(raw_key))


def pack(
    dtype: np.dtype[np.void],
    num_classes: int,
    raw_keys: Sequence[bytes],
    scores: ArrayLike,
    classes: ArrayLike,
    sizes: ArrayLike,
    areas: ArrayLike,
) -> NDArray[np.void]:
    """Checked records of a batch: scores and classes [n, h, w, k], sizes [n, 2], areas [n, 4]."""
    n, shape = len(raw_keys), dtype["scores"].shape
    try:
        scores, classes = np.asarray(scores), np.asarray(classes)
        sizes, areas = np.asarray(sizes), np.asarray(areas, np.float64)
    except ValueError as error:
        raise StoreError(f"the maps of a batch have different shapes; this store's are {list(shape)}.") from error
    for name, array, wanted in (
        ("scores", scores, (n, *shape)),
        ("classes", classes, (n, *shape)),
        ("sizes", sizes, (n, 2)),
        ("areas", areas, (n, 4)),
    ):
        if array.shape != wanted:
            raise StoreError(f"{name} have shape {list(array.shape)}; this store's are {list(wanted)} (n, h, w, k).")
    if classes.dtype.kind not in "iu" or sizes.dtype.kind not in "iu":
        raise StoreError(f"class ids and sizes must be integers, got {classes.dtype} and {sizes.dtype}.")
    with np.errstate(over="ignore"):  # an overflow becomes inf, which is refused below with the image's name
        half = scores.astype("<f2")
    problems = (
        ("its scores are not finite in float16", ~np.isfinite(half)),
        ("its scores are not in descending order", half[..., 1:] > half[..., :-1]),
        (f"a class id is outside 0..{num_classes - 1}", (classes < 0) | (classes >= num_classes)),
        ("a class occurs twice in one cell", np.diff(np.sort(classes, axis=-1), axis=-1) == 0),
        (
            "its area is not x0 < x1, y0 < y1",
            ~((areas[:, 2:] > areas[:, :2]) & np.isfinite(areas[:, 2:] - areas[:, :2])),
        ),
        ("its size is negative or too large", (sizes < 0) | (sizes >= 2**32)),
    )
    for what, wrong in problems:
        if wrong.any():
            first = int(np.argmax(wrong.reshape(n, -1).any(axis=1)))
            key = raw_keys[first].decode("utf-8", "surrogateescape")
            raise StoreError(f"the map of {key!r} cannot be stored: {what}. Look at the annotator's output.")
    records = np.zeros(n, dtype)
    records["state"], records["size"], records["area"] = MAP, sizes, areas
    records["classes"], records["scores"] = classes, half
    return _with_checksums(records, raw_keys)


def pack_skipped(dtype: np.dtype[np.void], raw_key: bytes) -> NDArray[np.void]:
    """The record of an image that could not be annotated."""
    records = np.zeros(1, dtype)
    records["state"] = SKIPPED
    return _with_checksums(records, [raw_key])


def _with_checksums(records: NDArray[np.void], raw_keys: Sequence[bytes]) -> NDArray[np.void]:
    rows = records.view(np.uint8).reshape(len(records), -1)
    records["crc32"] = [checksum(key, row.data) for key, row in zip(raw_keys, rows, strict=True)]
    return records
