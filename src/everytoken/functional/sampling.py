"""Sampling score maps through placements: what the annotator said about the area that each token sees.

Paper: All Tokens Matter, 4.1: token labels are RoIAlign of the score map on the crop; the image label (ReLabel) is
RoIAlign to 1x1. RoIAlign averages ceil(RoI side / output side) bilinear samples per output cell and axis. With a crop
this equals `torchvision.ops.roi_align(aligned=True)`; see `points` for the mathematics.

Differently from the released code:
- only the vocabulary of each image is sampled, not all K classes;
- x and y are in the right order (the released code swaps them; `legacy_swap=True` does as it did);
- the map's `area` is honoured, so maps of a centre crop or of a letterboxed image are placed right;
- where a token leaves the image or the map's area, the average is over the part that has a label, and `weight` says
  how large that part is. The released code lets zeros in.

Cost: h·w·U·H + H·W·w·U multiply-adds per image, 18x18 to 14x14: 0.25 M for U = 30, 1.5 M for U = 190.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.functional import points
from everytoken.functional.maps import MapBatch
from everytoken.functional.points import TOLERANCE, Either, Sampler

# Numbers of spread maps worked on at a time: 1 MB for a core's cache, 256 MB on a GPU.
CPU_CHUNK, DEVICE_CHUNK = 2**18, 2**26


class SamplingPlan(NamedTuple):
    """The numbers that shapes depend on. Made on the host, so that sampling itself never waits for a device.

    Attributes:
        grid: (H, W), the token grid it is for.
        tokens: (rows, columns) of sample points per token, the largest of the batch.
        image: (rows, columns) of sample points over the whole crop.
        straight: some placement keeps the axes (crop, flips).
        bent: some placement rotates or shears.
    """

    grid: tuple[int, int]
    tokens: tuple[int, int]
    image: tuple[int, int]
    straight: bool
    bent: bool


class SampledMaps(NamedTuple):
    """Scores on the network's token grid.

    Attributes:
        tokens: [B, H, W, U] float32, averaged logits of the vocabulary's classes; a class absent from a cell counts 0.
        weight: [B, H, W] float32, the part of each token's area that has a label.
        image: [B, U] float32, logits averaged over the crop.
        image_weight: [B] float32, the part of the crop that has a label.
    """

    tokens: Tensor
    weight: Tensor
    image: Tensor
    image_weight: Tensor


def plan_sampling(
    placement: Tensor, area: Tensor, map_size: tuple[int, int], grid: tuple[int, int], legacy_swap: bool = False
) -> SamplingPlan:
    """Look at the placements of a batch and fix the number of sample points. Call it before they go to the GPU.

    Args:
        placement: [B, 2, 3] network input to source image, in fractions.
        area: [B, 4] what each map covers.
        map_size: (h, w) of the maps.
        grid: (H, W), the network's token grid.
        legacy_swap: plan for the released code's swapped coordinates.
    """
    (h, w), (H, W) = map_size, grid
    bent = points.is_bent(placement, area, map_size)
    if legacy_swap:
        if bool(bent.any()):
            raise EverytokenError(
                "legacy_swap=True repeats the released code on crops and flips only; this batch has rotated or sheared "
                "images. Switch geometric augmentation off, or use legacy_swap=False."
            )
        sides = placement.detach().abs().diagonal(dim1=1, dim2=2).double() * w  # crop width, crop height
        rows, columns = _most(sides[:, 0]), _most(sides[:, 1])
        return SamplingPlan(grid, (-(-rows // H), -(-columns // W)), (rows, columns), True, False)
    sides = points.to_cells(placement, area, map_size)[:, :, :2].norm(dim=1)  # [B, 2] the crop's sides in cells: x, y
    columns, rows = _most(sides[:, 0] / W), _most(sides[:, 1] / H)
    straight = bool((~bent).any())
    turned = sides * bent[:, None]
    image = _most(turned[:, 1]), _most(turned[:, 0])
    if straight:  # cut to the labelled area first, so never more points than cells
        image = max(h, image[0]), max(w, image[1])
    return SamplingPlan(grid, (rows, columns), image, straight, bool(bent.any()))


def sample_maps(
    maps: MapBatch,
    placement: Tensor,
    grid: tuple[int, int],
    plan: SamplingPlan | None = None,
    legacy_swap: bool = False,
) -> SampledMaps:
    """Average every map over the area of every token, and over the whole crop.

    Args:
        maps: score maps of B images.
        placement: [B, 2, 3] float, network input to source image, in fractions.
        grid: (H, W), the network's token grid.
        plan: from `plan_sampling`. None, or one for another grid: made here, which on a GPU waits for the placements
            (with `legacy_swap` always).
        legacy_swap: as the released code: x runs over (top, top + height) and y over (left, left + width), crops are
            at least one cell wide, the map is taken to cover the whole image, and weights are 1.

    Returns:
        `SampledMaps`, float32.
    """
    out: list[Tensor] | None = None
    for where, piece in sample_pieces(maps, placement, grid, plan, legacy_swap):
        if len(piece.weight) == len(maps) and isinstance(where, slice):
            return piece
        if out is None:
            out = [part.new_empty(len(maps), *part.shape[1:]) for part in piece]
        for whole, part in zip(out, piece, strict=True):
            whole[where] = part
    if out is None:
        raise EverytokenError("there are no score maps to sample: the batch is empty.")
    return SampledMaps(*out)


def sample_pieces(
    maps: MapBatch,
    placement: Tensor,
    grid: tuple[int, int],
    plan: SamplingPlan | None = None,
    legacy_swap: bool = False,
) -> Iterator[tuple[Tensor | slice, SampledMaps]]:
    """As `sample_maps`, a part of the batch at a time: (which images, their samples)."""
    for rows, sampler in samplers(maps, placement, grid, plan, legacy_swap):
        count = len(maps) if rows is None else len(rows)
        step = _images_at_a_time(maps, count)
        for i in range(0, count, step):
            part = slice(i, i + step)
            where = part if rows is None else rows[part]
            some, few = maps.apply(lambda t, w=where: t[w]), sampler.part(part)  # type: ignore[misc]
            with torch.autocast(maps.scores.device.type, enabled=False):  # labels stay float32
                tokens, image = few.average(spread(some))
            yield where, SampledMaps(tokens, few.weight, image, few.image_weight)


def spread(maps: MapBatch) -> Tensor:
    """The maps as [B, h, w, U] float32 over their vocabularies; a class that a cell does not name scores 0."""
    empty = maps.scores.new_zeros((*maps.scores.shape[:3], maps.classes.shape[1]), dtype=torch.float32)
    return empty.scatter_(-1, maps.local.long(), maps.scores.float())


def samplers(
    maps: MapBatch, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan | None, legacy_swap: bool
) -> Iterator[tuple[Tensor | None, Sampler]]:
    """(images, sampler) for each kind of placement in the batch; None = all images."""
    if placement.shape != (len(maps), 2, 3):
        raise EverytokenError(
            f"{len(maps)} score maps need a placement of shape [{len(maps)}, 2, 3], got {list(placement.shape)}."
        )
    if legacy_swap:
        plan = None
    if plan is not None and plan.grid != grid and grid == (1, 1):
        plan = plan._replace(grid=grid, tokens=plan.image)  # one token is the whole image
    if plan is None or plan.grid != grid:
        plan = plan_sampling(placement, maps.area, maps.size, grid, legacy_swap)
    how = (maps.size, plan.grid, plan.tokens, plan.image)
    if legacy_swap:
        yield None, points.legacy(placement, *how)
    elif not plan.bent:
        yield None, points.straight(placement, maps.area, *how)
    elif not plan.straight:
        yield None, points.bent(placement, maps.area, *how)
    else:
        bent = points.is_bent(placement, maps.area, maps.size)
        if placement.device.type != "cpu" or torch.compiler.is_compiling():
            one, two = (make(placement, maps.area, *how) for make in (points.straight, points.bent))
            yield None, Either(one, two, bent)  # type: ignore[arg-type]
            return
        rows = (~bent).nonzero()[:, 0]
        yield rows, points.straight(placement[rows], maps.area[rows], *how)
        rows = bent.nonzero()[:, 0]
        yield rows, points.bent(placement[rows], maps.area[rows], *how)


def _images_at_a_time(maps: MapBatch, count: int) -> int:
    if torch.compiler.is_compiling():
        return max(count, 1)
    h, w = maps.size
    budget = CPU_CHUNK if maps.scores.device.type == "cpu" else DEVICE_CHUNK
    return max(1, budget // (h * w * maps.classes.shape[1]))


def _most(side: Tensor) -> int:
    return max(1, math.ceil(float(side.max()) - TOLERANCE)) if side.numel() else 1
