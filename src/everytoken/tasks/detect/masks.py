"""Masks of objects: COCO's polygons and run lengths, at the source's size or through a view of it.

A segmentation is a list of polygons [[x0, y0, x1, y1, ...], ...] in continuous pixel coordinates, or run lengths
{"size": [height, width], "counts": ...}: numbers of 0s, 1s, 0s, ... down the columns, as a list or as COCO's string.
Rasterising and run lengths are pycocotools', so that masks are to the pixel what the evaluator thinks they are.

In a view, polygons are moved and then drawn at the view's size; run lengths are decoded and sampled by the nearest
neighbour. The view is the same matrix that the pixels went through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from everytoken.data import placement as pl
from everytoken.data.decode import ImageError
from everytoken.data.masks import sample_mask
from everytoken.errors import need

Segmentation = list[list[float]] | dict[str, Any]


class AnnotationError(ImageError):
    """An annotation cannot be used; the message names file and annotation and says why."""


def tool() -> Any:
    """pycocotools' mask functions."""
    return need("pycocotools.mask", "detect", "everytoken detect")


def check(segmentation: Any, size: tuple[int, int], where: str) -> Segmentation | None:
    """A segmentation that can be used, or None if nothing is in it (polygons with fewer than three corners).

    Args:
        size: (width, height) of the image.
        where: file and annotation, for messages.
    """
    if isinstance(segmentation, dict):
        stored, counts = segmentation.get("size"), segmentation.get("counts")
        if stored is None or counts is None:
            raise AnnotationError(f'{where}: run lengths look like {{"size": [height, width], "counts": ...}}')
        if [int(v) for v in stored] != [size[1], size[0]]:
            raise AnnotationError(
                f"{where}: its mask is {stored[1]} x {stored[0]} pixels and its image is {size[0]} x {size[1]}. Both "
                "must have the same size; make the annotation anew."
            )
        if isinstance(counts, list) and sum(counts) != size[0] * size[1]:
            raise AnnotationError(
                f"{where}: its run lengths add up to {sum(counts)} pixels and its image has {size[0] * size[1]}."
            )
        return segmentation
    if not isinstance(segmentation, list) or any(not isinstance(part, list) for part in segmentation):
        raise AnnotationError(f"{where}: a segmentation is a list of polygons or run lengths, not {segmentation!r:.60}")
    for part in segmentation:
        if len(part) % 2 or not np.isfinite(np.asarray(part, dtype=np.float64)).all():
            raise AnnotationError(f"{where}: a polygon is a list of x, y, x, y, ...; this one has {len(part)} numbers")
    kept = [part for part in segmentation if len(part) >= 6]
    return kept or None


def encode(segmentation: Segmentation, size: tuple[int, int], where: str) -> dict[str, Any]:
    """COCO's compressed run lengths of a checked segmentation of an image of (width, height)."""
    coco = tool()
    try:
        if isinstance(segmentation, list):
            made: dict[str, Any] = coco.merge(coco.frPyObjects(segmentation, size[1], size[0]))
        elif isinstance(segmentation["counts"], list):
            made = coco.frPyObjects(segmentation, size[1], size[0])
        else:
            made = {"size": [size[1], size[0]], "counts": segmentation["counts"]}
            coco.area(made)
    except (ValueError, TypeError) as error:
        raise AnnotationError(f"{where}: its segmentation cannot be read ({error})") from error
    return made


def decode(segmentation: Segmentation, size: tuple[int, int], where: str) -> np.ndarray:
    """uint8 [height, width] of 0 and 1."""
    made = encode(segmentation, size, where)
    try:
        out: np.ndarray = tool().decode(made)
    except ValueError as error:
        raise AnnotationError(f"{where}: its run lengths cannot be read ({error})") from error
    return out


def through(
    segmentation: Segmentation, size: tuple[int, int], matrix: pl.Affine, out: tuple[int, int], where: str
) -> np.ndarray:
    """A mask as a view shows it: uint8 [height, width].

    Args:
        size: (width, height) of the source. out: (height, width) of the view.
        matrix: [2, 3], pixel of the view -> pixel of the source.
    """
    if isinstance(segmentation, list):
        back = pl.invert(matrix)
        moved = [pl.apply(back, np.reshape(part, (-1, 2))).reshape(-1).tolist() for part in segmentation]
        return decode(moved, (out[1], out[0]), where)
    placement = pl.from_pixels(matrix, (out[1], out[0]), size)
    return sample_mask(decode(segmentation, size, where), placement, out, 0)


def boxes_through(boxes: np.ndarray, matrix: pl.Affine) -> np.ndarray:
    """Boxes [n, 4] (x0, y0, x1, y1) of the source as a view shows them; see `through`."""
    corners: np.ndarray = pl.apply(pl.invert(matrix), boxes.reshape(-1, 2, 2))
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)


def run_lengths(masks: Sequence[np.ndarray] | np.ndarray) -> list[dict[str, Any]]:
    """Binary masks [n, height, width] as compressed run lengths that JSON can hold."""
    coco, out = tool(), []
    for mask in masks:
        made = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
        out.append({"size": [int(v) for v in made["size"]], "counts": made["counts"].decode()})
    return out
