"""From score maps to token targets: what the annotator says about the area that each token sees.

Paper: All Tokens Matter, 4.1: token labels are RoIAlign of the score map on the crop, the image label (ReLabel) is
RoIAlign to 1x1; then a softmax over all K classes. RoIAlign averages ceil(RoI side / output side) bilinear samples per
output cell and axis, so a token is a weighted sum of a few map cells (`CellWeights`). Three cases, a function each:
- `_crop_weights`: crops and flips. RoIAlign is separable: one small matrix of weights per axis, tokens = R · map · Cᵀ.
  Equals `torchvision.ops.roi_align(aligned=True)`.
- `_affine_weights`: rotated and sheared placements. The same sample points, carried through the affine.
- `_released_weights`: crops as the released code reads them, with x and y exchanged (`released=True`); maps of rotated
  and sheared images are warped to the nearest cell before (`_released_warp`).

Differently from the released code:
- only the vocabulary of each image is sampled, not all K classes;
- x and y are in the right order;
- the map's `area` is honoured, so maps of a centre crop or of a letterboxed image are placed right;
- where a token leaves the image or the map's area, the average is over the part that has a label, and `weight` says
  how large that part is. The released code lets zeros in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.functional.maps import MapBatch
from everytoken.functional.targets import CompactTarget, from_scores

Size = tuple[int, int]  # rows, columns
Rows = Tensor | slice  # some images of a batch

# In cells: a ratio such as 14.000001 / 14 still counts as one sample, and a smaller shear as none.
TOLERANCE = 1e-5
# The part of a rotated token that has a label is measured with this many points per axis.
_PROBES = 4
# Weight of the nearest labelled point where no sample of a rotated token has a label.
_FAINT = 1e-9
# Numbers of spread maps that a CPU works on at a time: 2 MB stay in a core's cache.
CPU_CHUNK = 2**19


class SamplingPlan(NamedTuple):
    """The numbers that shapes depend on. Made on the host, so that sampling itself never waits for a device.

    Attributes:
        grid: (H, W), the token grid it is for.
        tokens: (rows, columns) of sample points per token, the largest of the batch.
        image: (rows, columns) of sample points over the whole crop.
        crops: some placement keeps the axes (crop, flips).
        affine: some placement rotates or shears.
    """

    grid: Size
    tokens: Size
    image: Size
    crops: bool
    affine: bool


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


class CellWeights(NamedTuple):
    """Which cells of its map every token of B images averages; weights of a token sum to 1.

    Attributes:
        cells: [B, H·W, c] int32, row · w + column.
        weights: [B, H·W, c] float32.
        image: [B, h·w] float32, the weight of every cell in the whole crop.
        labelled: [B, H, W] float32, the part of each token that has a label.
        image_labelled: [B] float32, the part of the crop that has a label.
    """

    cells: Tensor
    weights: Tensor
    image: Tensor
    labelled: Tensor
    image_labelled: Tensor


class MapTargets(NamedTuple):
    """Targets over the annotator's classes.

    Attributes:
        tokens: shape [B, H, W].
        image: shape [B], the crop's label.
        image_logits: [B, U] averaged scores of the crop, for `map_classes` to the classes of another dataset.
    """

    tokens: CompactTarget
    image: CompactTarget
    image_logits: Tensor


def label_tokens(
    maps: MapBatch,
    placement: Tensor,
    grid: Size,
    plan: SamplingPlan | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    smoothing: float = 0.0,
    released: bool = False,
) -> MapTargets:
    """Targets for every token and for the whole crop: `sample_maps`, then `from_scores`.

    Args:
        maps, placement, grid, plan: see `sample_maps`.
        temperature, top_k, smoothing: see `from_scores`.
        released: as the released code: exchanged crop coordinates and targets that sum to 1 + s/K.
    """
    how = (temperature, top_k, smoothing, released)
    K, classes = maps.num_classes, maps.classes

    def targets(rows: Rows, sampled: SampledMaps) -> tuple[Tensor, ...]:
        tokens = from_scores(sampled.tokens, classes[rows], K, sampled.weight, *how)
        return tokens.mass, tokens.background, tokens.weight, sampled.image, sampled.image_weight

    parts = ((rows, targets(rows, sampled)) for rows, sampled in _sample(maps, placement, grid, plan, released))
    mass, background, weight, image, image_weight = _joined(parts, len(maps))
    tokens = CompactTarget(classes.clamp(min=0), mass, background, weight, K)
    return MapTargets(tokens, from_scores(image, classes, K, image_weight, *how), image)


def plan_sampling(placement: Tensor, area: Tensor, map_size: Size, grid: Size, released: bool = False) -> SamplingPlan:
    """Look at the placements of a batch and fix the number of sample points. Call it before they go to the GPU.

    Args:
        placement, area: [B, 2, 3] network input to source image, and [B, 4] what each map covers, in fractions.
        map_size, grid: (h, w) of the maps and (H, W) of the network's tokens.
        released: plan for the released code's exchanged coordinates.
    """
    (h, w), (H, W) = map_size, grid
    cells = _to_cells(placement, area, map_size)
    turned = _is_turned(cells)
    some_turned, some_straight = bool(turned.any()), bool((~turned).any())
    if released:
        sides = placement.detach().abs().diagonal(dim1=1, dim2=2).double() * w  # crop width, crop height
        rows, columns = _largest_count(sides[:, 0]), _largest_count(sides[:, 1])
        return SamplingPlan(grid, (-(-rows // H), -(-columns // W)), (rows, columns), some_straight, some_turned)
    sides = cells[:, :, :2].norm(dim=1)  # [B, 2] the crop's sides in cells: x, y
    tokens = _largest_count(sides[:, 1] / H), _largest_count(sides[:, 0] / W)
    rows, columns = _largest_count(sides[turned, 1]), _largest_count(sides[turned, 0])
    if some_straight:  # cut to the labelled area first, so never more points than cells
        rows, columns = max(h, rows), max(w, columns)
    return SamplingPlan(grid, tokens, (rows, columns), some_straight, some_turned)


def sample_maps(
    maps: MapBatch, placement: Tensor, grid: Size, plan: SamplingPlan | None = None, released: bool = False
) -> SampledMaps:
    """Average every map over the area of every token, and over the whole crop.

    Args:
        maps: score maps of B images.
        placement: [B, 2, 3] float, network input to source image, in fractions.
        grid: (H, W), the network's token grid.
        plan: from `plan_sampling`. None, or one for another grid: made here, which on a GPU waits for the placements
            (with `released` always).
        released: as the released code: x runs over (top, top + height) and y over (left, left + width), crops are
            at least one cell wide, the map is taken to cover the whole image, maps follow rotation and shear to the
            nearest cell, and weights are 1 (0 without a map).

    Returns:
        `SampledMaps`, float32.
    """
    return SampledMaps(*_joined(_sample(maps, placement, grid, plan, released), len(maps)))


def sample_features(features: Tensor, grid: Size, placement: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Average features over the area of every token, by the code that samples score maps: channels are its classes.

    Args:
        features: [B, h, w, D] float, of whole images.
        grid: (H, W), the network's token grid.
        placement: [B, 2, 3], network input to image, in fractions; None: the network sees the image as it is.

    Returns:
        ([B, H, W, D] float32, [B, H, W] the part of each token inside the image).
    """
    B, h, w, D = features.shape
    if placement is None:
        if (h, w) == grid:
            return features.float(), features.new_ones((B, h, w), dtype=torch.float32)
        placement = torch.eye(2, 3, device=features.device).expand(B, 2, 3)
    channels = torch.arange(D, device=features.device)
    area = _numbers((0.0, 0.0, 1.0, 1.0), features.float()).expand(B, 4)
    maps = MapBatch(features, channels.to(torch.int16).expand(B, h, w, D), channels.expand(B, D), area, D)
    return sample_maps(maps, placement, grid)[:2]


def _sample(
    maps: MapBatch, placement: Tensor, grid: Size, plan: SamplingPlan | None, released: bool
) -> Iterator[tuple[Rows, SampledMaps]]:
    """Images of the batch and what was sampled for them: on a CPU a few at a time, elsewhere all at once."""
    B = len(maps)
    if B == 0:
        raise ValueError("there are no score maps to sample: the batch is empty")
    if placement.shape != (B, 2, 3):
        raise ValueError(f"{B} score maps need a placement of shape [{B}, 2, 3], got {list(placement.shape)}")
    if plan is not None and plan.grid != grid and grid == (1, 1):
        plan = plan._replace(grid=grid, tokens=plan.image)  # one token is the whole image
    if released:
        if bool(_is_turned(_to_cells(placement, maps.area, maps.size)).any()):
            maps, placement = _released_warp(maps, placement)
        plan = plan_sampling(placement, maps.area, maps.size, grid, released)
        methods = [_released_weights]
    else:
        if plan is None or plan.grid != grid:
            plan = plan_sampling(placement, maps.area, maps.size, grid)
        methods = [_crop_weights] * plan.crops + [_affine_weights] * plan.affine
    if placement.device.type != "cpu" or torch.compiler.is_compiling():
        sampled = [_average(maps, method(maps, placement, plan)) for method in methods]
        if len(sampled) == 2:  # a device must not wait for row numbers: both ways for every image, and a choice
            turned = _is_turned(_to_cells(placement, maps.area, maps.size))
            both = zip(*sampled, strict=True)
            sampled = [SampledMaps(*(torch.where(turned.view(-1, *(1,) * (a.dim() - 1)), b, a) for a, b in both))]
        yield slice(None), sampled[0]
        return
    groups: list[Rows] = [slice(None)]
    if len(methods) == 2:
        turned = _is_turned(_to_cells(placement, maps.area, maps.size))
        groups = [(~turned).nonzero()[:, 0], turned.nonzero()[:, 0]]
    at_once = max(1, CPU_CHUNK // (maps.size[0] * maps.size[1] * maps.classes.shape[1]))
    numbers = torch.arange(B)
    for method, group in zip(methods, groups, strict=True):
        weights = method(maps.apply(lambda t, rows=group: t[rows]), placement[group], plan)  # type: ignore[misc]
        for i in range(0, len(weights.cells), at_once):
            rows = numbers[group][i : i + at_once]
            few = CellWeights(*(t[i : i + at_once] for t in weights))
            yield rows, _average(maps.apply(lambda t, rows=rows: t[rows]), few)  # type: ignore[misc]


def _joined(parts: Iterable[tuple[Rows, tuple[Tensor, ...]]], size: int) -> Sequence[Tensor]:
    """The tensors of all images, from those of some images at a time."""
    result: list[Tensor] = []
    for rows, tensors in parts:
        if len(tensors[0]) == size:
            return tensors
        result = result or [t.new_empty(size, *t.shape[1:]) for t in tensors]
        for whole, part in zip(result, tensors, strict=True):
            whole[rows] = part
    return result


def _average(maps: MapBatch, weights: CellWeights) -> SampledMaps:
    """The weighted sums of the maps' cells."""
    scores = spread(maps).flatten(1, 2)
    B, cells, U = scores.shape
    first = torch.arange(0, B * cells, cells, device=scores.device, dtype=torch.int32)
    index = (weights.cells + first[:, None, None]).flatten(0, 1)
    with torch.autocast(scores.device.type, enabled=False):  # labels stay float32
        tokens = F.embedding_bag(
            index, scores.view(-1, U), per_sample_weights=weights.weights.flatten(0, 1), mode="sum"
        )
        image = torch.bmm(weights.image[:, None], scores)[:, 0]
    return SampledMaps(tokens.view(*weights.labelled.shape, U), weights.labelled, image, weights.image_labelled)


def spread(maps: MapBatch) -> Tensor:
    """The maps as [B, h, w, U] float32 over their vocabularies; a class that a cell does not name scores 0."""
    empty = torch.zeros((*maps.scores.shape[:3], maps.classes.shape[1]), device=maps.scores.device)
    return empty.scatter_(-1, maps.local.long(), maps.scores.float())


def _crop_weights(maps: MapBatch, placement: Tensor, plan: SamplingPlan) -> CellWeights:
    """Crops and flips: every bin is cut to the labelled part, then sampled; inside the image that is RoIAlign."""
    affine = _to_cells(placement, maps.area, maps.size)
    low, high = _labelled(maps, affine.dtype)

    def weights(axis: int, cells: int, samples: int, bins: int | None = None) -> tuple[Tensor, Tensor]:
        """Along x (0) or y (1): weights [B, bins, cells], labelled part [B, bins] of each bin. None: the whole crop."""
        whole, bins = bins is None, bins or 1
        start, width = affine[:, axis, 2, None], affine[:, axis, axis, None] / bins
        edges = start + torch.arange(bins + 1, device=start.device, dtype=start.dtype) * width
        edges = torch.minimum(torch.maximum(edges, low[:, axis, None]), high[:, axis, None])
        first, length = edges[:, :-1], edges.diff()
        labelled = (length.abs() / width.abs().clamp(min=1e-12)).clamp(max=1)
        place, share = _sample_points((length if whole else width)[:, 0].abs(), samples)
        return _interpolation(first[..., None] + length[..., None] * place[:, None], share[:, None], cells), labelled

    (h, w), (H, W) = maps.size, plan.grid
    columns, labelled_x = weights(0, w, plan.tokens[1], W)
    rows, labelled_y = weights(1, h, plan.tokens[0], H)
    image_columns, image_x = weights(0, w, plan.image[1])
    image_rows, image_y = weights(1, h, plan.image[0])
    return CellWeights(
        *_crossed(rows, plan.tokens[0], columns, plan.tokens[1]),
        (image_rows[:, 0, :, None] * image_columns).flatten(1).float(),
        (labelled_y[:, :, None] * labelled_x[:, None]).float(),
        (image_y * image_x)[:, 0].float(),
    )


def _released_weights(maps: MapBatch, placement: Tensor, plan: SamplingPlan) -> CellWeights:
    """RoIAlign(aligned=False) with x and y exchanged, as the released label pipeline calls it; labelled parts are 1."""
    (h, w), (H, W) = maps.size, plan.grid
    placement = placement.detach().double()
    side, at = placement.diagonal(dim1=1, dim2=2), placement[:, :, 2]
    # The released code flips the map first and stores the crop in the flipped image: its near edge is 1 - at there.
    flipped = side < 0
    near = torch.where(flipped, 1 - at, at)
    # Exchanged, and both scaled by the map's width: the released maps are square.
    start, length = near.flip(1) * w - 0.5, (side.abs().flip(1) * w).clamp(min=1)

    def weights(axis: int, cells: int, bins: int, samples: int) -> Tensor:
        width = length[:, axis] / bins
        place, share = _sample_points(width, samples)
        numbers = torch.arange(bins, device=start.device, dtype=start.dtype)
        position = start[:, axis, None, None] + (numbers[:, None] + place[:, None]) * width[:, None, None]
        share = share[:, None] * ((position >= -1) & (position <= cells))
        mirrored = torch.where(flipped[:, axis, None, None], cells - 1 - position, position)
        return _interpolation(mirrored, share, cells)

    rows, columns = weights(1, h, H, plan.tokens[0]), weights(0, w, W, plan.tokens[1])
    image = weights(1, h, 1, plan.image[0])[:, 0, :, None] * weights(0, w, 1, plan.image[1])
    has_map = (maps.classes >= 0).any(1).float()
    crossed = _crossed(rows, plan.tokens[0], columns, plan.tokens[1])
    return CellWeights(*crossed, image.flatten(1).float(), has_map[:, None, None].expand(-1, H, W), has_map)


def _released_warp(maps: MapBatch, placement: Tensor) -> tuple[MapBatch, Tensor]:
    """Maps that were flipped, rotated and sheared cell by cell, as the released code does it, and the crops of them.

    A placement is taken apart into a crop, then a rotation or shear about the middle, then a flip. Cells turn about the
    corner (h/2, w/2) of the index grid, half a cell off; scores from outside are 0. Differently: one warp for all of
    RandAugment's steps, and on images that are not square the map follows the image's proportions.
    """
    (h, w), affine = maps.size, placement.detach().double()
    sides = affine[:, :, :2].norm(dim=1)
    flip = torch.where(affine[:, :, :2].diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).double()
    turn = flip[:, :, None] * affine[:, :, :2] / sides[:, None]
    start = torch.linalg.solve(turn, flip * (affine[:, :, 2] - 0.5)) + 0.5
    crops = torch.cat((torch.diag_embed(sides), start[:, :, None]), dim=2).to(placement.dtype)
    middle = _numbers((w / 2, h / 2), affine)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    cells = torch.stack((columns, rows), dim=-1).to(affine) - middle  # [h, w, 2]: x, y
    ratio = _numbers((w, h), affine)  # placements are in fractions, cells in cells
    source = torch.einsum("bij,hwj->bhwi", turn * ratio[:, None] / ratio, cells) + middle
    source = (source + 0.5).floor()
    x, y = torch.where(flip[:, None, None] < 0, ratio - 1 - source, source).unbind(-1)
    inside = (x >= 0) & (x < w) & (y >= 0) & (y < h)
    index = (y.clamp(0, h - 1) * w + x.clamp(0, w - 1)).long().flatten(1)[..., None].expand(-1, -1, maps.local.shape[3])
    scores = maps.scores.flatten(1, 2).gather(1, index).view_as(maps.scores) * inside[..., None]
    local = maps.local.flatten(1, 2).gather(1, index).view_as(maps.local)
    return replace(maps, scores=scores, local=local), crops


def _affine_weights(maps: MapBatch, placement: Tensor, plan: SamplingPlan) -> CellWeights:
    """Any affine: a token is the average of its sample points that have a label, four neighbouring cells each."""
    affine = _to_cells(placement, maps.area, maps.size)
    low, high = _labelled(maps, affine.dtype)
    sides = affine[:, :, :2].norm(dim=1)
    B, h, w = len(maps), *maps.size

    def carried(grid: Size, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points (u [B, columns], v [B, rows]) of every token in map cells: x, y, moved to the labelled part, and
        whether they were in it; each [B, H, W, rows, columns]."""
        across = (torch.arange(grid[1], device=u.device)[:, None] + u[:, None]) / grid[1]
        down = (torch.arange(grid[0], device=v.device)[:, None] + v[:, None]) / grid[0]
        across, down = across[:, None, :, None, :], down[:, :, None, :, None]
        (a, b, c), (d, e, f) = (row.view(-1, 3, 1, 1, 1, 1).unbind(1) for row in affine.unbind(1))
        x, y = a * across + b * down + c, d * across + e * down + f
        x0, y0, x1, y1 = (t.view(-1, 1, 1, 1, 1) for t in (*low.unbind(1), *high.unbind(1)))
        inner_x, inner_y = torch.minimum(torch.maximum(x, x0), x1), torch.minimum(torch.maximum(y, y0), y1)
        return inner_x, inner_y, ((x == inner_x) & (y == inner_y)).to(x.dtype)

    def weights(grid: Size, samples: Size) -> tuple[Tensor, Tensor, Tensor]:
        """Cells [B, H·W, c], their weights [B, H·W, c], and the labelled part [B, H, W] of each token."""
        u, share_u = _sample_points(sides[:, 0] / grid[1], samples[1])
        v, share_v = _sample_points(sides[:, 1] / grid[0], samples[0])
        x, y, inside = carried(grid, u, v)
        even = share_v[:, None, None, :, None] * share_u[:, None, None, None, :]
        share = even * inside.clamp(min=_FAINT)
        share = share / share.sum((3, 4), keepdim=True)
        labelled = (even * inside).sum((3, 4))
        if grid != (1, 1):  # a token has few samples: measure its labelled part with more points
            probes = ((torch.arange(_PROBES, device=u.device, dtype=u.dtype) + 0.5) / _PROBES).expand(B, _PROBES)
            labelled = carried(grid, probes, probes)[2].mean((3, 4))
        x, y = x.clamp(0, w - 1), y.clamp(0, h - 1)
        left, top = x.floor().clamp(max=max(w - 2, 0)), y.floor().clamp(max=max(h - 2, 0))
        fx, fy = x - left, y - top
        corner = (top * w + left).int()
        right, down = min(1, w - 1), w * min(1, h - 1)
        cells = torch.stack((corner, corner + right, corner + down, corner + down + right), dim=-1)
        near = torch.stack(((1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy), dim=-1) * share[..., None]
        return cells.view(B, grid[0] * grid[1], -1), near.float().view(B, grid[0] * grid[1], -1), labelled.float()

    cells, token_weights, labelled = weights(plan.grid, plan.tokens)
    image_cells, image_weights, image_labelled = weights((1, 1), plan.image)
    image = torch.zeros((B, h * w), device=affine.device)
    image.scatter_add_(1, image_cells[:, 0].long(), image_weights[:, 0])
    return CellWeights(cells, token_weights, image, labelled, image_labelled[:, 0, 0])


def _to_cells(placement: Tensor, area: Tensor, size: Size) -> Tensor:
    """[B, 2, 3] affine from the network's input (fractions) to map cells, cell centres at whole numbers."""
    # Double where there is: float32 fractions times 18 cells would cost the fifth digit of the labels.
    dtype = torch.float32 if placement.device.type == "mps" else torch.float64
    placement, area = placement.detach().to(dtype), area.to(dtype)
    scale = _numbers((size[1], size[0]), placement) / (area[:, 2:] - area[:, :2])
    cells = placement * scale[:, :, None]
    cells[:, :, 2] -= area[:, :2] * scale + 0.5
    return cells


def _numbers(values: tuple[float, ...], like: Tensor) -> Tensor:
    """`like.new_tensor(values)` without waiting for the GPU."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def _is_turned(cells: Tensor) -> Tensor:
    """[B] bool: the placement (from `_to_cells`) rotates or shears, by more than a rounding error."""
    return (cells[:, 0, 1].abs() > TOLERANCE) | (cells[:, 1, 0].abs() > TOLERANCE)


def _labelled(maps: MapBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Corners [B, 2] (x, y), in cells, of what is inside the image and inside the map's area."""
    area = maps.area.to(dtype)
    start, scale = area[:, :2], _numbers((maps.size[1], maps.size[0]), area) / (area[:, 2:] - area[:, :2])
    return (start.clamp(min=0) - start) * scale - 0.5, (area[:, 2:].clamp(max=1) - start) * scale - 0.5


def _sample_points(side: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """RoIAlign's samples in bins of `side` [B] cells: places [B, most] in 0..1, and 1/count for real ones, else 0."""
    count = (side - TOLERANCE).ceil().clamp(1, most)[:, None]
    steps = torch.arange(most, device=count.device, dtype=count.dtype)
    return (steps + 0.5) / count, (steps < count).to(count.dtype) / count


def _largest_count(side: Tensor) -> int:
    return max(1, math.ceil(float(side.max()) - TOLERANCE)) if side.numel() else 1


def _interpolation(position: Tensor, share: Tensor, cells: int) -> Tensor:
    """Linear interpolation as a matrix: samples at `position` [B, bins, s], counting `share` -> [B, bins, cells]."""
    cell = torch.arange(cells, device=position.device, dtype=position.dtype)
    hats = (1 - (position.clamp(0, cells - 1)[..., None] - cell).abs()).clamp(min=0)
    return (hats * share[..., None]).sum(2)


def _crossed(rows: Tensor, row_samples: int, columns: Tensor, column_samples: int) -> tuple[Tensor, Tensor]:
    """Matrices of weights for rows [B, H, h] and columns [B, W, w] as cells and weights [B, H·W, c].

    A bin of s samples touches at most s + 1 neighbouring cells, so few of a row's weights are not 0.
    """
    near = []
    for matrix, samples in ((rows, row_samples), (columns, column_samples)):
        size = matrix.shape[2]
        count = min(samples + 1, size)
        first = (matrix > 0).int().argmax(2).clamp(max=size - count)
        index = first[..., None] + torch.arange(count, device=matrix.device)
        near.append((index, matrix.gather(2, index)))
    (row, row_weight), (column, column_weight) = near
    cells = (row * columns.shape[2])[:, :, None, :, None] + column[:, None, :, None, :]
    weights = row_weight[:, :, None, :, None] * column_weight[:, None, :, None, :]
    return cells.int().flatten(3).flatten(1, 2), weights.float().flatten(3).flatten(1, 2)
