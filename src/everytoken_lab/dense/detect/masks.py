"""Masks of objects: COCO's polygons and run lengths, at the source's size or through a crop of it.

A segmentation is a list of polygons [[x0, y0, x1, y1, ...], ...] in continuous pixel coordinates, or run lengths
{"size": [height, width], "counts": ...}: numbers of 0s, 1s, 0s, ... down the columns, as a list or as COCO's string.
Rasterising and run lengths are pycocotools', so that masks are to the pixel what the evaluator thinks they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import TypedDict

from everytoken.data import placement as pl
from everytoken.data.placement import sample_mask
from everytoken.errors import need
from everytoken_lab import schema
from everytoken_lab.data.decode import ImageError

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


def boxes_through(boxes: np.ndarray, matrix: pl.Affine) -> np.ndarray:
    """Boxes [n, 4] (x0, y0, x1, y1) of the source as a crop shows them; see `through`."""
    corners: np.ndarray = pl.apply(pl.invert(matrix), boxes.reshape(-1, 2, 2))
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)
