"""Where the samples of a token lie in a score map, as matrices and index lists that average a map.

Equation, for a crop with or without flips, per class c:  out_c = Wy · M_c · Wxᵀ  (RoIAlign's average is separable).
Rotated or sheared placements carry RoIAlign's sample points through the affine: out = Σ over points of bilinear shares.
Each sampler is a tuple of tensors with the batch in front, so that a part of the batch is a part of each tensor.
Cost: some thousand numbers per image; the averaging itself is matrix products or weighted bags.
"""

from __future__ import annotations

from collections.abc import Callable
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
Window: TypeAlias = tuple[int, int, int, int]  # first row, last row + 1, first column, last column + 1


class Straight(NamedTuple):
    """Averages through crops and flips: rows [B, H, h], columns [B, W, w], and the same for the whole crop."""

    rows: Tensor
    columns: Tensor
    row: Tensor
    column: Tensor
    weight: Tensor
    image_weight: Tensor

    def part(self, rows: Tensor | slice) -> Straight:
        """For some images of the batch."""
        return Straight(*(t[rows] for t in self))

    def average(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """dense [B, h, w, U] -> tokens [B, H, W, U], image [B, U]."""
        return _average(dense, self.rows, self.columns), _average(dense, self.row, self.column)[:, 0, 0]

    def windows(self) -> list[Window]:
        """The cells that each image's crop touches. On the CPU only."""
        top, bottom = _spans(self.rows, self.row)
        left, right = _spans(self.columns, self.column)
        return list(zip(top, bottom, left, right, strict=True))

    def one_by_one(self) -> Callable[[int, Window, Tensor], tuple[Tensor, Tensor]]:
        """average(i, window, dense) of image i alone: dense [rows, columns, U] -> tokens [H, W, U], image [U]."""
        # The whole crop is one more row, so that one product serves both.
        rows, columns = torch.cat((self.rows, self.row), dim=1).unbind(0), self.columns.unbind(0)
        column, H = self.column.unbind(0), self.rows.shape[1]

        def average(i: int, window: Window, dense: Tensor) -> tuple[Tensor, Tensor]:
            top, bottom, left, right = window
            _, across, U = dense.shape
            half = torch.mm(rows[i][:, top:bottom], dense.view(-1, across * U)).view(-1, across, U)
            tokens = torch.bmm(columns[i][:, left:right].expand(H, -1, -1), half[:H])
            return tokens, torch.mm(column[i][:, left:right], half[H])[0]

        return average


class Bent(NamedTuple):
    """Averages through any affine: cells [B, H·W, n] of a map and their shares, and the same for the whole crop."""

    cells: Tensor
    share: Tensor
    image_cells: Tensor
    image_share: Tensor
    weight: Tensor
    image_weight: Tensor
    width: int  # columns of the map

    def part(self, rows: Tensor | slice) -> Bent:
        """For some images of the batch."""
        return Bent(
            self.cells[rows],
            self.share[rows],
            self.image_cells[rows],
            self.image_share[rows],
            self.weight[rows],
            self.image_weight[rows],
            self.width,
        )

    def average(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """dense [B, h, w, U] -> tokens [B, H, W, U], image [B, U]."""
        tokens = _bags(dense, self.cells, self.share)
        return tokens.view(*self.weight.shape, -1), _bags(dense, self.image_cells, self.image_share)

    def windows(self) -> list[Window]:
        """The cells that each image's view may touch: whole rows. On the CPU only."""
        rows = torch.cat((self.cells.flatten(1), self.image_cells.flatten(1)), dim=1).div(
            self.width, rounding_mode="floor"
        )
        low, high = rows.amin(1).tolist(), rows.amax(1).tolist()
        return [(top, bottom + 1, 0, self.width) for top, bottom in zip(low, high, strict=True)]

    def one_by_one(self) -> Callable[[int, Window, Tensor], tuple[Tensor, Tensor]]:
        """average(i, window, dense) of image i alone: dense [rows, columns, U] -> tokens [H, W, U], image [U]."""

        def average(i: int, window: Window, dense: Tensor) -> tuple[Tensor, Tensor]:
            whole, before = dense[None], window[0] * self.width
            tokens = _bags(whole, self.cells[i : i + 1] - before, self.share[i : i + 1])
            image = _bags(whole, self.image_cells[i : i + 1] - before, self.image_share[i : i + 1])
            return tokens.view(*self.weight.shape[1:], -1), image[0]

        return average


class Either(NamedTuple):
    """Both ways for every image and a choice, for devices that must not wait for row numbers."""

    straight: Straight
    bent: Bent
    choice: Tensor

    def part(self, rows: Tensor | slice) -> Either:
        """For some images of the batch."""
        return Either(self.straight.part(rows), self.bent.part(rows), self.choice[rows])

    @property
    def weight(self) -> Tensor:
        """[B, H, W]"""
        return torch.where(self.choice[:, None, None], self.bent.weight, self.straight.weight)

    @property
    def image_weight(self) -> Tensor:
        """[B]"""
        return torch.where(self.choice, self.bent.image_weight, self.straight.image_weight)

    def average(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """dense [B, h, w, U] -> tokens [B, H, W, U], image [B, U]."""
        one, two = self.straight.average(dense), self.bent.average(dense)
        tokens = torch.where(self.choice[:, None, None, None], two[0], one[0])
        return tokens, torch.where(self.choice[:, None], two[1], one[1])


Sampler: TypeAlias = Straight | Bent | Either


def to_cells(placement: Tensor, area: Tensor, size: Pair) -> Tensor:
    """[B, 2, 3] affine from the network's input (fractions) to map cells, cell centres at whole numbers."""
    # Double where there is: float32 fractions times 18 cells would cost the fifth digit of the labels.
    kind = torch.float32 if placement.device.type == "mps" else torch.float64
    placement, area = placement.detach().to(kind), area.to(kind)
    extent = area[:, 2:] - area[:, :2]
    scale = placement.new_tensor((size[1], size[0])) / extent
    moved = torch.cat((placement[:, :, :2], (placement[:, :, 2] - area[:, :2])[:, :, None]), dim=2)
    cells = moved * scale[:, :, None]
    return torch.cat((cells[:, :, :2], cells[:, :, 2:] - 0.5), dim=2)


def is_bent(placement: Tensor, area: Tensor, size: Pair) -> Tensor:
    """[B] bool: the placement rotates or shears, by more than a rounding error."""
    cells = to_cells(placement, area, size)
    return (cells[:, 0, 1].abs() > TOLERANCE) | (cells[:, 1, 0].abs() > TOLERANCE)


def straight(placement: Tensor, area: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Straight:
    """The sampler of crops and flips, with at most `most` (rows, columns) samples per token."""
    B, square = len(placement), size[0] == size[1] and grid[0] == grid[1]
    cells = to_cells(placement, area, size)
    low, high = _labelled(area, size, cells.dtype)
    start, side = cells[:, :, 2], cells[:, :, :2].diagonal(dim1=1, dim2=2)
    if square:  # both axes in one go: many small operations less
        a, b, c, d = (t.T.reshape(-1) for t in (start, side, low, high))
        made, parts = _axis(a, b, c, d, size[0], grid[0], max(most))
        whole, wholes = _axis(a, b, c, d, size[0], 1, max(image_most))
        columns, rows, part_x, part_y = made[:B], made[B:], parts[:B], parts[B:]
        column, row, whole_x, whole_y = whole[:B], whole[B:], wholes[:B], wholes[B:]
    else:
        x = start[:, 0], side[:, 0], low[:, 0], high[:, 0], size[1]
        y = start[:, 1], side[:, 1], low[:, 1], high[:, 1], size[0]
        columns, part_x = _axis(*x, grid[1], most[1])
        rows, part_y = _axis(*y, grid[0], most[0])
        column, whole_x = _axis(*x, 1, image_most[1])
        row, whole_y = _axis(*y, 1, image_most[0])
    weight = part_y[:, :, None] * part_x[:, None, :]
    return Straight(rows, columns, row, column, weight, (whole_x * whole_y)[:, 0])


def bent(placement: Tensor, area: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Bent:
    """The sampler of any affine."""
    cells = to_cells(placement, area, size)
    box = _labelled(area, size, cells.dtype)
    index, share, weight = _carried(cells, box, size, grid, most)
    image_index, image_share, image_weight = _carried(cells, box, size, (1, 1), image_most)
    return Bent(index, share, image_index, image_share, weight, image_weight[:, 0, 0], size[1])


def legacy(placement: Tensor, size: Pair, grid: Pair, most: Pair, image_most: Pair) -> Straight:
    """RoIAlign(aligned=False) with x and y swapped, as the released label pipeline calls it; weights are 1."""
    h, w = size
    side, at = placement.detach().double().diagonal(dim1=1, dim2=2), placement.detach().double()[:, :, 2]
    # The released code flips the map first and stores the crop in the flipped image: its near edge is 1 - at there.
    flipped = side < 0
    near, extent = torch.where(flipped, 1 - at, at), side.abs()
    # Swapped, and both scaled by the map's width: the released maps are square.
    start, length = near.flip(1) * w - 0.5, (extent.flip(1) * w).clamp(min=1)

    def axis(k: int, n: int, cells: int, most: int) -> Tensor:
        width = length[:, k] / n
        place, share = _points(_count(width), most)
        bins = torch.arange(n, device=start.device, dtype=start.dtype)
        position = start[:, k, None, None] + (bins[:, None] + place[:, None, :]) * width[:, None, None]
        matrix = _hat(position, share[:, None, :] * ((position >= -1) & (position <= cells)), cells)
        return torch.where(flipped[:, k, None, None], matrix.flip(2), matrix)

    rows, columns = axis(1, grid[0], h, most[0]), axis(0, grid[1], w, most[1])
    row, column = axis(1, 1, h, image_most[0]), axis(0, 1, w, image_most[1])
    return Straight(rows, columns, row, column, rows.new_ones((len(rows), *grid)), rows.new_ones(len(rows)))


def _labelled(area: Tensor, size: Pair, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Corners [B, 2] (x, y), in cells, of what is inside the image and inside the map's area."""
    area = area.to(kind)
    start, extent = area[:, :2], area[:, 2:] - area[:, :2]
    cells = area.new_tensor((size[1], size[0]))
    low = (area[:, :2].clamp(min=0) - start) / extent * cells - 0.5
    high = (area[:, 2:].clamp(max=1) - start) / extent * cells - 0.5
    return low, high


def _count(side: Tensor) -> Tensor:
    """RoIAlign's adaptive number of samples for a bin of this many cells."""
    return (side - TOLERANCE).ceil().clamp(min=1)


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


def _spans(tokens: Tensor, image: Tensor) -> tuple[list[int], list[int]]:
    """First and last + 1 cell that matrices [B, n, size] use, for each image."""
    used = (tokens != 0).any(1) | (image != 0).any(1)
    last = used.shape[1] - used.int().flip(1).argmax(1)
    return used.int().argmax(1).tolist(), last.tolist()


def _average(dense: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows [B, H, h] · dense [B, h, w, U] · columnsᵀ [B, w, W] as [B, H, W, U]."""
    B, h, w, U = dense.shape
    half = torch.bmm(rows, dense.view(B, h, w * U)).view(B, -1, w, U)
    return torch.matmul(columns[:, None], half)


def _carried(
    cells: Tensor, box: tuple[Tensor, Tensor], size: Pair, grid: Pair, most: Pair
) -> tuple[Tensor, Tensor, Tensor]:
    """Cells [B, H·W, n], shares [B, H·W, n] and labelled parts [B, H, W] of tokens through a general affine."""
    (h, w), (H, W), B = size, grid, len(cells)
    sides = cells[:, :, :2].norm(dim=1)
    u, share_u = _points(_count(sides[:, 0] / W), most[1])
    v, share_v = _points(_count(sides[:, 1] / H), most[0])
    x, y, inside = _carry(cells, box, grid, u, v)  # [B, H, W, rows, columns]
    even = share_v[:, None, None, :, None] * share_u[:, None, None, None, :]
    share = even * inside.clamp(min=_FAINT)
    share = share / share.sum((3, 4), keepdim=True)
    # Four neighbours of each sample, as one weighted bag of map cells per token.
    x, y = x.clamp(0, w - 1), y.clamp(0, h - 1)
    left, top = x.floor().clamp(max=max(w - 2, 0)), y.floor().clamp(max=max(h - 2, 0))
    fx, fy = x - left, y - top
    corner = (top * w + left).long()
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


def _bags(dense: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Weighted sums of map cells: dense [B, h, w, U], index and share [B, N, n] -> [B·N, U]."""
    B, h, w, U = dense.shape
    cells = index + torch.arange(B, device=index.device)[:, None, None] * (h * w)
    flat = share.reshape(-1, share.shape[2])
    return F.embedding_bag(cells.view(flat.shape), dense.view(-1, U), per_sample_weights=flat, mode="sum")
