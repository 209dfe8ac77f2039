"""Where the samples of a token lie in a score map: as a few cells per token, each with its share of the average.

RoIAlign averages ceil(RoI side / output side) bilinear samples per output cell and axis. For crops and flips that is
separable, so a token's share of a cell is (share of the row) · (share of the column), and a bin of n samples touches at
most n + 1 cells per axis. Rotated and sheared placements carry the same sample points through the affine;
each point has four neighbours. Either way a token is a weighted bag of map cells, and the whole crop is one weight per
cell; averaging is then a weighted sum of rows, for as few classes as one likes.
Cost: tens of numbers per token, whatever K is.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

# Cells. Below it a ratio such as 14.000001 / 14 still counts as one sample, and a shear as none.
TOLERANCE = 1e-5
# Side of the grid of points that measures how much of a rotated token has a label.
_PROBES = 4
# Share of the nearest labelled point where no sample of a rotated token is on labelled ground.
_FAINT = 1e-9

Pair: TypeAlias = tuple[int, int]


class Bags(NamedTuple):
    """Which cells of its map every token of B images averages, and with which shares (they sum to 1).

    Attributes:
        cells: [B, H·W, m] int32, row · w + column.
        shares: [B, H·W, m] float32.
        image: [B, h·w] float32, the share of every cell in the whole crop.
        weight: [B, H, W] float32, the part of each token that has a label.
        image_weight: [B] float32, the part of the crop that has a label.
    """

    cells: Tensor
    shares: Tensor
    image: Tensor
    weight: Tensor
    image_weight: Tensor

    def part(self, rows: Tensor | slice) -> Bags:
        """For some images of the batch."""
        return Bags(*(t[rows] for t in self))

    def average(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [B, h, w, U] -> tokens [B, H, W, U], image [B, U]."""
        dense = dense.flatten(1, 2)
        B, cells, U = dense.shape
        start = torch.arange(0, B * cells, cells, device=dense.device, dtype=torch.int32)
        index, flat = (self.cells + start[:, None, None]).flatten(0, 1), self.shares.flatten(0, 1)
        with torch.autocast(dense.device.type, enabled=False):  # labels stay float32
            tokens = F.embedding_bag(index, dense.view(-1, U), per_sample_weights=flat, mode="sum")
            return tokens.view(*self.weight.shape, U), torch.bmm(self.image[:, None], dense)[:, 0]


def to_cells(placement: Tensor, area: Tensor, size: Pair) -> Tensor:
    """[B, 2, 3] affine from the network's input (fractions) to map cells, cell centres at whole numbers."""
    # Double where there is: float32 fractions times 18 cells would cost the fifth digit of the labels.
    kind = torch.float32 if placement.device.type == "mps" else torch.float64
    placement, area = placement.detach().to(kind), area.to(kind)
    scale = placement.new_tensor((size[1], size[0])) / (area[:, 2:] - area[:, :2])
    shift = torch.zeros_like(placement)
    shift[:, :, 2] = area[:, :2]
    cells = (placement - shift) * scale[:, :, None]
    cells[:, :, 2] -= 0.5
    return cells


def is_bent(cells: Tensor) -> Tensor:
    """[B] bool: the placement (from `to_cells`) rotates or shears, by more than a rounding error."""
    return (cells[:, 0, 1].abs() > TOLERANCE) | (cells[:, 1, 0].abs() > TOLERANCE)


def straight(placement: Tensor, area: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Bags:
    """Crops and flips, with at most `most` (rows, columns) samples per token and `image_most` over the crop."""
    cells = to_cells(placement, area, size)
    low, high = _labelled(area, size, cells.dtype)
    start, side = cells[:, :, 2], cells[:, :, :2].diagonal(dim1=1, dim2=2)
    x = start[:, 0], side[:, 0], low[:, 0], high[:, 0]
    y = start[:, 1], side[:, 1], low[:, 1], high[:, 1]
    if size[0] == size[1] and grid[0] == grid[1]:  # both axes at once: half as many small operations
        a, b, c, d = (torch.cat(both) for both in zip(x, y, strict=True))
        (column, row), (share_x, share_y), (part_x, part_y) = (
            t.chunk(2) for t in _axis(a, b, c, d, size[0], grid[0], max(most))
        )
        (image_x, image_y), (whole_x, whole_y) = (t.chunk(2) for t in _image_axis(a, b, c, d, size[0], max(image_most)))
    else:
        column, share_x, part_x = _axis(*x, size[1], grid[1], most[1])
        row, share_y, part_y = _axis(*y, size[0], grid[0], most[0])
        image_x, whole_x = _image_axis(*x, size[1], image_most[1])
        image_y, whole_y = _image_axis(*y, size[0], image_most[0])
    weight = part_y[:, :, None] * part_x[:, None, :]
    return Bags(*_crossed(row, share_y, column, share_x, size[1]), _outer(image_y, image_x), weight, whole_x * whole_y)


def bent(placement: Tensor, area: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Bags:
    """Any affine."""
    cells = to_cells(placement, area, size)
    box = _labelled(area, size, cells.dtype)
    index, share, weight = _carried(cells, box, size, grid, most)
    image_index, image_share, image_weight = _carried(cells, box, size, (1, 1), image_most)
    image = torch.zeros((len(cells), size[0] * size[1]), device=cells.device)
    image.scatter_add_(1, image_index[:, 0].long(), image_share[:, 0])
    return Bags(index, share, image, weight, image_weight[:, 0, 0])


def legacy(placement: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Bags:
    """RoIAlign(aligned=False) with x and y swapped, as the released label pipeline calls it; weights are 1."""
    h, w = size
    side, at = placement.detach().double().diagonal(dim1=1, dim2=2), placement.detach().double()[:, :, 2]
    # The released code flips the map first and stores the crop in the flipped image: its near edge is 1 - at there.
    flipped = side < 0
    near, extent = torch.where(flipped, 1 - at, at), side.abs()
    # Swapped, and both scaled by the map's width: the released maps are square.
    start, length = near.flip(1) * w - 0.5, (extent.flip(1) * w).clamp(min=1)

    def samples(k: int, n: int, most: int, size: int) -> tuple[Tensor, Tensor]:
        width = length[:, k] / n
        place, share = _points(_count(width), most)
        bins = torch.arange(n, device=start.device, dtype=start.dtype)
        position = start[:, k, None, None] + (bins[:, None] + place[:, None, :]) * width[:, None, None]
        share = share[:, None, :] * ((position >= -1) & (position <= size))
        return torch.where(flipped[:, k, None, None], size - 1 - position, position), share

    row, share_y = _near(*samples(1, grid[0], most[0], h), h, most[0] + 1)
    column, share_x = _near(*samples(0, grid[1], most[1], w), w, most[1] + 1)
    image = _outer(_hat(*samples(1, 1, image_most[0], h), h), _hat(*samples(0, 1, image_most[1], w), w))
    ones = image.new_ones((len(image), *grid))
    return Bags(*_crossed(row, share_y, column, share_x, w), image, ones, ones[:, 0, 0])


def _labelled(area: Tensor, size: Pair, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Corners [B, 2] (x, y), in cells, of what is inside the image and inside the map's area."""
    area = area.to(kind)
    start, scale = area[:, :2], area.new_tensor((size[1], size[0])) / (area[:, 2:] - area[:, :2])
    return (start.clamp(min=0) - start) * scale - 0.5, (area[:, 2:].clamp(max=1) - start) * scale - 0.5


def _count(side: Tensor) -> Tensor:
    """RoIAlign's adaptive number of samples for a bin of this many cells."""
    return (side - TOLERANCE).ceil().clamp(min=1)


def _points(count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Places [B, most] in 0..1 of `count` [B] samples in a bin, and [B, most] 1/count for the real ones, else 0."""
    count = count.clamp(max=most)[:, None]
    steps = torch.arange(most, device=count.device, dtype=count.dtype)
    return torch.minimum(steps + 0.5, count) / count, (steps < count).to(count.dtype) / count


def _clipped(start: Tensor, side: Tensor, low: Tensor, high: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last edge [B, n] of every bin, cut to the labelled part, and the part that is left [B, n]."""
    width = side / n
    edges = start[:, None] + torch.arange(n + 1, device=start.device, dtype=start.dtype) * width[:, None]
    edges = torch.minimum(torch.maximum(edges, low[:, None]), high[:, None])
    length = edges[:, 1:] - edges[:, :-1]
    return edges[:, :-1], length, (length.abs() / width.abs().clamp(min=1e-12)[:, None]).clamp(max=1).float()


def _axis(
    start: Tensor, side: Tensor, low: Tensor, high: Tensor, size: int, n: int, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One axis of a straight crop: cells [B, n, c], their shares [B, n, c], and the labelled part of each bin [B, n].

    All of [B], in cells: the crop runs from `start` to `start + side` (negative when flipped); labels from `low` to
    `high`. A bin is cut to the labelled part, then sampled; inside the image that is RoIAlign.
    """
    first, length, part = _clipped(start, side, low, high, n)
    place, share = _points(_count(side.abs() / n), most)
    position = first[:, :, None] + length[:, :, None] * place[:, None, :]
    return *_near(position, share[:, None, :], size, most + 1), part


def _image_axis(start: Tensor, side: Tensor, low: Tensor, high: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """The same for the whole crop: share [B, size] of every cell, and the labelled part [B]."""
    first, length, part = _clipped(start, side, low, high, 1)
    # What was cut to the labelled part needs no more samples than the map has cells.
    place, share = _points(_count(length.abs().amax(1)), most)
    return _hat(first[:, :, None] + length[:, :, None] * place[:, None, :], share[:, None, :], size), part[:, 0]


def _near(position: Tensor, share: Tensor, size: int, c: int) -> tuple[Tensor, Tensor]:
    """Samples at `position` [B, n, s], each counting `share`, as c neighbouring cells and their shares [B, n, c]."""
    c = min(c, size)
    position = position.clamp(0, size - 1)
    base = position.amin(2).floor().clamp(max=size - c)
    cell = base[:, :, None] + torch.arange(c, device=base.device, dtype=base.dtype)
    near = (1 - (position[:, :, :, None] - cell[:, :, None, :]).abs()).clamp(min=0)
    return cell.int(), (near * share[..., None]).sum(2).float()


def _hat(position: Tensor, share: Tensor, size: int) -> Tensor:
    """Samples at `position` [B, 1, s], each counting `share`, as shares [B, size] of all cells."""
    cell = torch.arange(size, device=position.device, dtype=position.dtype)
    near = (1 - (position[:, 0].clamp(0, size - 1)[..., None] - cell).abs()).clamp(min=0)
    return (near * share[:, 0, :, None]).sum(1).float()


def _outer(y: Tensor, x: Tensor) -> Tensor:
    """Shares [B, h] of rows and [B, w] of columns as [B, h·w] of cells."""
    return (y[:, :, None] * x[:, None, :]).flatten(1)


def _crossed(row: Tensor, share_y: Tensor, column: Tensor, share_x: Tensor, w: int) -> tuple[Tensor, Tensor]:
    """Rows [B, H, c] and columns [B, W, d] with shares as cells [B, H·W, c·d] with shares."""
    cells = (row * w)[:, :, None, :, None] + column[:, None, :, None, :]
    shares = share_y[:, :, None, :, None] * share_x[:, None, :, None, :]
    return cells.flatten(3).flatten(1, 2), shares.flatten(3).flatten(1, 2)


def _carried(
    cells: Tensor, box: tuple[Tensor, Tensor], size: Pair, grid: Pair, most: Pair
) -> tuple[Tensor, Tensor, Tensor]:
    """Cells [B, H·W, m], shares [B, H·W, m] and labelled parts [B, H, W] of tokens through a general affine."""
    (h, w), (H, W), B = size, grid, len(cells)
    sides = cells[:, :, :2].norm(dim=1)
    u, share_u = _points(_count(sides[:, 0] / W), most[1])
    v, share_v = _points(_count(sides[:, 1] / H), most[0])
    x, y, inside = _carry(cells, box, grid, u, v)  # [B, H, W, rows, columns]
    even = share_v[:, None, None, :, None] * share_u[:, None, None, None, :]
    share = even * inside.clamp(min=_FAINT)
    share = share / share.sum((3, 4), keepdim=True)
    x, y = x.clamp(0, w - 1), y.clamp(0, h - 1)
    left, top = x.floor().clamp(max=max(w - 2, 0)), y.floor().clamp(max=max(h - 2, 0))
    fx, fy = x - left, y - top
    corner = (top * w + left).int()
    right, down = min(1, w - 1), w * min(1, h - 1)
    index = torch.stack((corner, corner + right, corner + down, corner + down + right), dim=-1)
    near = torch.stack(((1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy), dim=-1) * share[..., None]
    if H * W == 1:
        part = (even * inside).sum((3, 4))
    else:  # a token has few samples: measure its labelled part with more points
        probes = ((torch.arange(_PROBES, device=u.device, dtype=u.dtype) + 0.5) / _PROBES).expand(B, _PROBES)
        part = _carry(cells, box, grid, probes, probes)[2].mean((3, 4))
    return index.view(B, H * W, -1), near.float().view(B, H * W, -1), part.float()


def _carry(
    cells: Tensor, box: tuple[Tensor, Tensor], grid: Pair, u: Tensor, v: Tensor
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
