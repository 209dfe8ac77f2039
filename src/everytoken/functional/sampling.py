"""Sampling score maps through placements: what the annotator said about the area that each token sees.

Paper: All Tokens Matter, 4.1: token labels are RoIAlign of the score map on the crop; the image label (ReLabel) is
RoIAlign to 1x1. RoIAlign averages ceil(RoI side / output side) bilinear samples per output cell and axis.
Equation, for a crop with or without flips, per vocabulary class c:  out_c = Wy · M_c · Wxᵀ.  The average is separable,
so one small matrix per axis and image replaces the gather; that equals `torchvision.ops.roi_align(aligned=True)`.
Rotated or sheared placements carry the same sample points through the affine.

Differently from the released code:
- only the vocabulary of each image is sampled, not all K classes;
- x and y are in the right order (the released code swaps them; `legacy_swap=True` does as it did);
- the map's `area` is honoured, so maps of a centre crop or of a letterboxed image are placed right;
- where a token leaves the image or the map's area, the average is over the part that has a label, and `weight` says
  how large that part is. The released code lets zeros in.

Cost: h·w·U·H + H·W·w·U multiply-adds per image: 0.25 M for 18x18 to 14x14 with U = 30, below 0.1 ms on one CPU core.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.functional.maps import MapBatch

# Cells. Below it a ratio such as 14.000001 / 14 still counts as one sample, and a shear as none.
_TOLERANCE = 1e-5
# Side of the grid of points that measures how much of a rotated token has a label.
_PROBES = 4
# Share of the nearest labelled point where no sample of a rotated token is on labelled ground.
_FAINT = 1e-9


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
    if legacy_swap:
        sides = placement.detach().abs().diagonal(dim1=1, dim2=2).double() * w  # crop width, crop height
        rows, columns = _most(sides[:, 0]), _most(sides[:, 1])
        bent = _bent(placement, area, map_size)
        if bool(bent.any()):
            raise EverytokenError(
                "legacy_swap=True repeats the released code on crops and flips only; this batch has rotated or sheared "
                "images. Switch geometric augmentation off, or use legacy_swap=False."
            )
        return SamplingPlan(grid, (-(-rows // H), -(-columns // W)), (rows, columns), True, False)
    cells = _to_cells(placement, area, map_size)
    bent = _bent(placement, area, map_size)
    sides = cells[:, :, :2].norm(dim=1)  # [B, 2] lengths of the crop's sides in cells: x, y
    columns, rows = _most(sides[:, 0] / W), _most(sides[:, 1] / H)
    # A straight crop is cut to the labelled area first, so its image label never needs more points than cells.
    straight = bool((~bent).any())
    if not straight:
        image = (_most(sides[:, 1]), _most(sides[:, 0]))
    else:
        turned = sides * bent[:, None]
        image = (max(h, _most(turned[:, 1])), max(w, _most(turned[:, 0])))
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
        plan: from `plan_sampling`. None, or one for another grid: made here, which on a GPU waits for the placements.
        legacy_swap: as the released code: x runs over (top, top + height) and y over (left, left + width), crops are
            at least one cell wide, the map is taken to cover the whole image, and weights are 1.

    Returns:
        `SampledMaps`, float32.
    """
    if placement.shape != (len(maps), 2, 3):
        raise EverytokenError(
            f"{len(maps)} score maps need a placement of shape [{len(maps)}, 2, 3], got {list(placement.shape)}."
        )
    if plan is not None and plan.grid != grid and grid == (1, 1):
        plan = plan._replace(grid=grid, tokens=plan.image)  # one token is the whole image
    if plan is None or plan.grid != grid:
        plan = plan_sampling(placement, maps.area, maps.size, grid, legacy_swap)
    with torch.autocast(maps.scores.device.type, enabled=False):  # labels stay float32
        dense = spread(maps)
        if legacy_swap:
            return _sample_legacy(dense, placement, grid, plan)
        if not plan.bent:
            return _sample_straight(dense, maps.area, placement, grid, plan)
        if not plan.straight:
            return _sample_bent(dense, maps.area, placement, grid, plan)
        bent = _bent(placement, maps.area, maps.size)
        if dense.device.type == "cpu" and not torch.compiler.is_compiling():
            return _sample_each_kind(dense, maps.area, placement, grid, plan, bent)
        # A device must not wait for row numbers: sample both ways and choose.
        one = _sample_straight(dense, maps.area, placement, grid, plan)
        two = _sample_bent(dense, maps.area, placement, grid, plan)
        picked = [torch.where(bent.view(-1, *(1,) * (a.dim() - 1)), b, a) for a, b in zip(one, two, strict=True)]
        return SampledMaps(*picked)


def spread(maps: MapBatch) -> Tensor:
    """The maps as [B, h, w, U] float32 over their vocabularies; a class that a cell does not name scores 0."""
    empty = maps.scores.new_zeros((*maps.scores.shape[:3], maps.classes.shape[1]), dtype=torch.float32)
    return empty.scatter_(-1, maps.local.long(), maps.scores.float())


def _to_cells(placement: Tensor, area: Tensor, size: tuple[int, int]) -> Tensor:
    """[B, 2, 3] affine from the network's input (fractions) to map cells, cell centres at whole numbers."""
    # Double where there is: float32 fractions times 18 cells would cost the fifth digit of the labels.
    kind = torch.float32 if placement.device.type == "mps" else torch.float64
    placement, area = placement.detach().to(kind), area.to(kind)
    extent = area[:, 2:] - area[:, :2]
    scale = placement.new_tensor((size[1], size[0])) / extent
    moved = torch.cat((placement[:, :, :2], (placement[:, :, 2] - area[:, :2])[:, :, None]), dim=2)
    cells = moved * scale[:, :, None]
    return torch.cat((cells[:, :, :2], cells[:, :, 2:] - 0.5), dim=2)


def _labelled(area: Tensor, size: tuple[int, int], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Corners [B, 2] (x, y), in cells, of what is inside the image and inside the map's area."""
    area = area.to(kind)
    start, extent = area[:, :2], area[:, 2:] - area[:, :2]
    cells = area.new_tensor((size[1], size[0]))
    low = (area[:, :2].clamp(min=0) - start) / extent * cells - 0.5
    high = (area[:, 2:].clamp(max=1) - start) / extent * cells - 0.5
    return low, high


def _bent(placement: Tensor, area: Tensor, size: tuple[int, int]) -> Tensor:
    """[B] bool: the placement rotates or shears, by more than a rounding error."""
    cells = _to_cells(placement, area, size)
    return (cells[:, 0, 1].abs() > _TOLERANCE) | (cells[:, 1, 0].abs() > _TOLERANCE)


def _count(side: Tensor) -> Tensor:
    """RoIAlign's adaptive number of samples for a bin of this many cells."""
    return (side - _TOLERANCE).ceil().clamp(min=1)


def _most(side: Tensor) -> int:
    return max(1, math.ceil(float(side.max()) - _TOLERANCE)) if side.numel() else 1


def _points(count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Places [B, most] in 0..1 of `count` [B] samples in a bin, and [B, most] 1/count for the real ones, else 0."""
    count = count.clamp(max=most)[:, None]
    steps = torch.arange(most, device=count.device, dtype=count.dtype)
    return (steps + 0.5) / count, (steps < count).to(count.dtype) / count


def _hat(position: Tensor, share: Tensor, size: int) -> Tensor:
    """Matrix [B, n, size] of bilinear weights of samples at `position` [B, n, s], each counting `share`."""
    cell = torch.arange(size, device=position.device, dtype=position.dtype)
    near = (1 - (position.clamp(0, size - 1)[..., None] - cell).abs()).clamp(min=0)
    return (near * share[..., None]).sum(2).float()


def _axis(
    start: Tensor, side: Tensor, low: Tensor, high: Tensor, size: int, n: int, most: int
) -> tuple[Tensor, Tensor]:
    """One axis of a straight crop: averaging matrix [B, n, size] and labelled part of each bin [B, n].

    All of [B], in cells: the crop runs from `start` to `start + side` (negative when flipped); labels from `low` to
    `high`. A bin is cut to the labelled part, then sampled; inside the image that is RoIAlign.
    """
    width = side / n
    edges = start[:, None] + torch.arange(n + 1, device=start.device, dtype=start.dtype) * width[:, None]
    edges = torch.minimum(torch.maximum(edges, low[:, None]), high[:, None])
    first, last = edges[:, :-1], edges[:, 1:]
    part = ((last - first).abs() / width.abs().clamp(min=1e-12)[:, None]).clamp(max=1)
    # A bin that was cut needs no more samples than cells; with one bin (image label) this bounds them by the map.
    longest = (last - first).abs().amax(1) if n == 1 else width.abs()
    place, share = _points(_count(longest), most)
    position = first[:, :, None] + (last - first)[:, :, None] * place[:, None, :]
    return _hat(position, share[:, None, :], size), part.float()


def _average(dense: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows [B, H, h] · dense [B, h, w, U] · columnsᵀ [B, w, W] as [B, H, W, U]."""
    B, h, w, U = dense.shape
    half = torch.bmm(rows, dense.view(B, h, w * U)).view(B, -1, w, U)
    return torch.matmul(columns[:, None], half)


def _sample_straight(
    dense: Tensor, area: Tensor, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan
) -> SampledMaps:
    h, w = size = dense.shape[1], dense.shape[2]
    cells = _to_cells(placement, area, size)
    low, high = _labelled(area, size, cells.dtype)
    x = (cells[:, 0, 2], cells[:, 0, 0], low[:, 0], high[:, 0], w)
    y = (cells[:, 1, 2], cells[:, 1, 1], low[:, 1], high[:, 1], h)
    columns, part_x = _axis(*x, grid[1], plan.tokens[1])
    rows, part_y = _axis(*y, grid[0], plan.tokens[0])
    column, whole_x = _axis(*x, 1, plan.image[1])
    row, whole_y = _axis(*y, 1, plan.image[0])
    return SampledMaps(
        _average(dense, rows, columns),
        part_y[:, :, None] * part_x[:, None, :],
        _average(dense, row, column)[:, 0, 0],
        (whole_x * whole_y)[:, 0],
    )


def _sample_bent(
    dense: Tensor, area: Tensor, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan
) -> SampledMaps:
    size = dense.shape[1], dense.shape[2]
    cells = _to_cells(placement, area, size)
    box = _labelled(area, size, cells.dtype)
    return SampledMaps(
        *_gather(dense, cells, box, grid, plan.tokens),
        *(part.flatten(1, 2).squeeze(1) for part in _gather(dense, cells, box, (1, 1), plan.image)),
    )


def _gather(
    dense: Tensor, cells: Tensor, box: tuple[Tensor, Tensor], grid: tuple[int, int], most: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Averages [B, H, W, U] and labelled parts [B, H, W] through a general affine."""
    (B, h, w, U), (H, W) = dense.shape, grid
    sides = cells[:, :, :2].norm(dim=1)
    u, share_u = _points(_count(sides[:, 0] / W), most[1])
    v, share_v = _points(_count(sides[:, 1] / H), most[0])
    x, y, inside = _carry(cells, box, grid, u, v)  # [B, H, W, rows, columns]
    share = share_v[:, None, None, :, None] * share_u[:, None, None, None, :] * inside.clamp(min=_FAINT)
    share = share / share.sum((3, 4), keepdim=True)
    # Four neighbours of each sample, as one weighted bag of map cells per token.
    x, y = x.clamp(0, w - 1), y.clamp(0, h - 1)
    left, top = x.floor().clamp(max=max(w - 2, 0)), y.floor().clamp(max=max(h - 2, 0))
    fx, fy = x - left, y - top
    corner = (top * w + left).long() + torch.arange(B, device=x.device).view(B, 1, 1, 1, 1) * (h * w)
    right, down = min(1, w - 1), w * min(1, h - 1)
    index = torch.stack((corner, corner + right, corner + down, corner + down + right), dim=-1)
    near = torch.stack(((1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy), dim=-1) * share[..., None]
    bags = B * H * W
    out = F.embedding_bag(
        index.view(bags, -1), dense.view(B * h * w, U), per_sample_weights=near.view(bags, -1).float(), mode="sum"
    )
    if H * W == 1:
        part = (share_v[:, None, None, :, None] * share_u[:, None, None, None, :] * inside).sum((3, 4))
    else:  # a token has few samples: measure its labelled part with more points
        probes = ((torch.arange(_PROBES, device=u.device, dtype=u.dtype) + 0.5) / _PROBES).expand(B, _PROBES)
        part = _carry(cells, box, grid, probes, probes)[2].mean((3, 4))
    return out.view(B, H, W, U), part.float()


def _carry(
    cells: Tensor, box: tuple[Tensor, Tensor], grid: tuple[int, int], u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples at (u [B, columns], v [B, rows]) of every token, in map cells: x, y (pushed into the box) and whether
    they were in it; each [B, H, W, rows, columns]."""
    H, W = grid
    px = (torch.arange(W, device=u.device, dtype=u.dtype)[:, None] + u[:, None, :]) / W  # [B, W, columns]
    py = (torch.arange(H, device=v.device, dtype=v.dtype)[:, None] + v[:, None, :]) / H  # [B, H, rows]
    px, py = px[:, None, :, None, :], py[:, :, None, :, None]
    a = [[cells[:, i, j].view(-1, 1, 1, 1, 1) for j in range(3)] for i in range(2)]
    x = a[0][0] * px + a[0][1] * py + a[0][2]
    y = a[1][0] * px + a[1][1] * py + a[1][2]
    low, high = (corner[:, :, None, None, None, None] for corner in box)
    nx = torch.minimum(torch.maximum(x, low[:, 0]), high[:, 0])
    ny = torch.minimum(torch.maximum(y, low[:, 1]), high[:, 1])
    return nx, ny, ((nx == x) & (ny == y)).to(x.dtype)


def _sample_each_kind(
    dense: Tensor, area: Tensor, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan, bent: Tensor
) -> SampledMaps:
    """On the CPU row numbers are free: each image is sampled one way only."""
    out: list[Tensor] | None = None
    for kind, sample in ((~bent, _sample_straight), (bent, _sample_bent)):
        rows = kind.nonzero()[:, 0]
        got = sample(dense[rows], area[rows], placement[rows], grid, plan)
        if out is None:
            out = [part.new_empty(len(bent), *part.shape[1:]) for part in got]
        for whole, part in zip(out, got, strict=True):
            whole[rows] = part
    return SampledMaps(*(out or ()))


def _sample_legacy(dense: Tensor, placement: Tensor, grid: tuple[int, int], plan: SamplingPlan) -> SampledMaps:
    """RoIAlign(aligned=False) with x and y swapped, as the released label pipeline calls it."""
    B, h, w, _ = dense.shape
    side, at = placement.detach().double().diagonal(dim1=1, dim2=2), placement.detach().double()[:, :, 2]
    # The released code flips the map first and stores the crop in the flipped image: its near edge is 1 - at there.
    flipped = side < 0
    near, extent = torch.where(flipped, 1 - at, at), side.abs()
    # Swapped, and both scaled by the map's width: the released maps are square.
    start, length = near.flip(1) * w - 0.5, (extent.flip(1) * w).clamp(min=1)

    def axis(k: int, n: int, size: int, most: int) -> Tensor:
        width = length[:, k] / n
        place, share = _points(_count(width), most)
        bins = torch.arange(n, device=start.device, dtype=start.dtype)
        position = start[:, k, None, None] + (bins[:, None] + place[:, None, :]) * width[:, None, None]
        matrix = _hat(position, share[:, None, :] * ((position >= -1) & (position <= size)), size)
        return torch.where(flipped[:, k, None, None], matrix.flip(2), matrix)

    tokens = _average(dense, axis(1, grid[0], h, plan.tokens[0]), axis(0, grid[1], w, plan.tokens[1]))
    image = _average(dense, axis(1, 1, h, plan.image[0]), axis(0, 1, w, plan.image[1]))
    return SampledMaps(tokens, tokens.new_ones((B, *grid)), image[:, 0, 0], tokens.new_ones(B))
