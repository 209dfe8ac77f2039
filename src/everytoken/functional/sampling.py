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

Cost: 4 to 9 multiply-adds per token and class when a map of 18x18 cells becomes 14x14 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.functional import points
from everytoken.functional.maps import MapBatch
from everytoken.functional.points import TOLERANCE, Bags


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
    cells = points.to_cells(placement, area, map_size)
    bent = points.is_bent(cells)
    some_bent, some_straight = bool(bent.any()), bool((~bent).any())
    if legacy_swap:
        if some_bent:
            raise EverytokenError(
                "legacy_swap=True repeats the released code on crops and flips only; this batch has rotated or sheared "
                "images. Switch geometric augmentation off, or use legacy_swap=False."
            )
        sides = placement.detach().abs().diagonal(dim1=1, dim2=2).double() * w  # crop width, crop height
        rows, columns = _most(sides[:, 0]), _most(sides[:, 1])
        return SamplingPlan(grid, (-(-rows // H), -(-columns // W)), (rows, columns), True, False)
    sides = cells[:, :, :2].norm(dim=1)  # [B, 2] the crop's sides in cells: x, y
    tokens = _most(sides[:, 1] / H), _most(sides[:, 0] / W)
    image = (1, 1)
    if some_bent:
        turned = sides * bent[:, None]
        image = _most(turned[:, 1]), _most(turned[:, 0])
    if some_straight:  # cut to the labelled area first, so never more points than cells
        image = max(h, image[0]), max(w, image[1])
    return SamplingPlan(grid, tokens, image, some_straight, some_bent)


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
            at least one cell wide, the map is taken to cover the whole image, and weights are 1 (0 without a map).

    Returns:
        `SampledMaps`, float32.
    """
    if len(maps) == 0:
        raise EverytokenError("there are no score maps to sample: the batch is empty.")
    out: list[Tensor] = []
    for rows, bags in sample_bags(maps, placement, grid, plan, legacy_swap):
        some = maps if rows is None else maps.apply(lambda t, r=rows: t[r])  # type: ignore[misc]
        tokens, image = bags.average(spread(some))
        piece = SampledMaps(tokens, bags.weight, image, bags.image_weight)
        if rows is None:
            return piece
        out = out or [part.new_empty(len(maps), *part.shape[1:]) for part in piece]
        for whole, part in zip(out, piece, strict=True):
            whole[rows] = part
    return SampledMaps(*out)


def spread(maps: MapBatch, width: int | None = None) -> Tensor:
    """The maps as [B, h, w, U] float32 over their vocabularies; a class that a cell does not name scores 0.

    `width` replaces U; the vocabularies must fit.
    """
    shape = (*maps.scores.shape[:3], width or maps.classes.shape[1])
    empty = torch.zeros(shape, device=maps.scores.device)
    return empty.scatter_(-1, maps.local.long(), maps.scores.float())


def sample_bags(
    maps: MapBatch, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan | None, legacy_swap: bool
) -> Iterator[tuple[Tensor | None, Bags]]:
    """(images, their bags of cells) for each kind of placement in the batch; None = all images."""
    if placement.shape != (len(maps), 2, 3):
        raise EverytokenError(
            f"{len(maps)} score maps need a placement of shape [{len(maps)}, 2, 3], got {list(placement.shape)}."
        )
    if legacy_swap:
        plan = None
        if maps.cut:
            raise EverytokenError(
                "legacy_swap=True looks at other cells than the crop's, but these maps were cut to their placements. "
                "Call collate_maps without placements."
            )
    if plan is not None and plan.grid != grid and grid == (1, 1):
        plan = plan._replace(grid=grid, tokens=plan.image)  # one token is the whole image
    if plan is None or plan.grid != grid:
        plan = plan_sampling(placement, maps.area, maps.size, grid, legacy_swap)
    how = (maps.size, grid, plan.tokens, plan.image)
    if legacy_swap:
        bags = points.legacy(placement, *how)
        known = (maps.classes >= 0).any(1).to(bags.weight.dtype)
        yield None, bags._replace(weight=bags.weight * known[:, None, None], image_weight=bags.image_weight * known)
    elif not plan.bent:
        yield None, points.straight(placement, maps.area, *how)
    elif not plan.straight:
        yield None, points.bent(placement, maps.area, *how)
    else:
        bent = points.is_bent(points.to_cells(placement, maps.area, maps.size))
        if placement.device.type == "cpu" and not torch.compiler.is_compiling():
            for rows, make in (((~bent).nonzero()[:, 0], points.straight), (bent.nonzero()[:, 0], points.bent)):
                yield rows, make(placement[rows], maps.area[rows], *how)
        else:  # a device must not wait for row numbers: both ways for every image, and a choice
            one, two = points.straight(placement, maps.area, *how), points.bent(placement, maps.area, *how)
            longest = max(one.cells.shape[2], two.cells.shape[2])
            one, two = _longer(one, longest), _longer(two, longest)
            picked = (torch.where(bent.view(-1, *(1,) * (a.dim() - 1)), b, a) for a, b in zip(one, two, strict=True))
            yield None, Bags(*picked)


def _longer(bags: Bags, cells: int) -> Bags:
    """The same bags, filled up to a number of cells with shares of 0."""
    missing = (0, cells - bags.cells.shape[2])
    return bags._replace(cells=F.pad(bags.cells, missing), shares=F.pad(bags.shares, missing))


def _most(side: Tensor) -> int:
    return max(1, math.ceil(float(side.max()) - TOLERANCE)) if side.numel() else 1
