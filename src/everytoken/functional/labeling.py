"""From score maps to targets in one call, without keeping anything that is not a target.

Paper: All Tokens Matter, 4.1: RoIAlign of the scores, then softmax over all classes, then smoothing. The result equals
`sample_maps` followed by `from_scores`. Differently on the CPU: a few images with vocabularies of similar length at a
time, and the softmax over all K classes as one over U + 1, where the last stands for all absent classes with score
log(K - U). So the peak memory is the targets themselves, and the work stays in a core's cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.functional.maps import MapBatch
from everytoken.functional.sampling import SamplingPlan, sample_bags, sample_maps, spread
from everytoken.functional.targets import CompactTarget, from_scores, smoothing_factors

# Numbers of spread maps worked on at a time (2 MB).
CHUNK = 2**19


class MapTargets(NamedTuple):
    """Targets over the annotator's classes.

    Attributes:
        tokens: shape [B, H, W].
        image: shape [B], the crop's label.
        image_logits: [B, U] averaged scores of the crop, for `map_classes` to the classes of another data set.
    """

    tokens: CompactTarget
    image: CompactTarget
    image_logits: Tensor


def label_tokens(
    maps: MapBatch,
    placement: Tensor,
    grid: tuple[int, int],
    plan: SamplingPlan | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    smoothing: float = 0.0,
    legacy: bool = False,
) -> MapTargets:
    """Targets for every token and for the whole crop.

    Args:
        maps: score maps of B images.
        placement: [B, 2, 3] float, network input to source image, in fractions.
        grid: (H, W), the network's token grid.
        plan: from `plan_sampling`; see `sample_maps`.
        temperature, top_k: see `from_scores`.
        smoothing: label smoothing s.
        legacy: as the released code: swapped crop coordinates and targets that sum to 1 + s/K.
    """
    if len(maps) == 0:
        raise EverytokenError("there are no score maps to sample: the batch is empty.")
    if temperature <= 0:
        raise EverytokenError(f"the temperature must be above 0, got {temperature}.")
    K, how = maps.num_classes, (temperature, top_k, smoothing, legacy)
    here = maps.scores.device.type == "cpu" and not torch.compiler.is_compiling()
    if here and top_k is None and int(_lengths(maps).max()) < K:
        tokens, logits, weight = _in_groups(maps, placement, grid, plan, temperature, smoothing, legacy)
    else:
        sampled = sample_maps(maps, placement, grid, plan, legacy)
        logits, weight = sampled.image, sampled.image_weight
        tokens = from_scores(sampled.tokens, maps.classes, K, sampled.weight, *how)
    return MapTargets(tokens, from_scores(logits, maps.classes, K, weight, *how), logits)


def _lengths(maps: MapBatch) -> Tensor:
    return (maps.classes >= 0).sum(1)


def _in_groups(
    maps: MapBatch,
    placement: Tensor,
    grid: tuple[int, int],
    plan: SamplingPlan | None,
    temperature: float,
    smoothing: float,
    legacy: bool,
) -> tuple[CompactTarget, Tensor, Tensor]:
    """(token target, image logits, image weight) on the CPU, a few images of similar vocabulary at a time."""
    (B, U), (h, w), K = maps.classes.shape, maps.size, maps.num_classes
    on, off = smoothing_factors(smoothing, K, legacy)
    mass, logits = torch.zeros(B, *grid, U), torch.zeros(B, U)
    background, weight, image_weight = torch.empty(B, *grid), torch.empty(B, *grid), torch.empty(B)
    lengths = _lengths(maps)
    for rows, bags in sample_bags(maps, placement, grid, plan, legacy):
        rows = torch.arange(B) if rows is None else rows
        weight[rows], image_weight[rows] = bags.weight, bags.image_weight
        order = lengths[rows].argsort()
        ends = lengths[rows][order].tolist()
        first = 0
        while first < len(order):
            # as many as fit, with the length of the longest
            last = first + 1
            while last < len(order) and (last + 1 - first) * h * w * (ends[last] + 1) <= CHUNK:
                last += 1
            picked, n = order[first:last], ends[last - 1]
            numbers = rows[picked]
            values, image = bags.part(picked).average(spread(maps.apply(lambda t, i=numbers: t[i]), n + 1))  # type: ignore[misc]
            p, floor = _softmax(values, n, K, temperature, on)
            background[numbers], logits[numbers, :n] = floor + off, image[:, :n]
            for j, i in enumerate(numbers.tolist()):
                torch.sub(p[j, ..., :n], floor[j, ..., None], out=mass[i, ..., :n])
            first = last
    return CompactTarget(maps.classes.clamp(min=0), mass, background, weight, K), logits, image_weight


def _softmax(values: Tensor, n: int, K: int, temperature: float, on: float) -> tuple[Tensor, Tensor]:
    """Scores [G, H, W, n + 1], the last free, n < K -> on · softmax over K [G, H, W, n + 1], background [G, H, W].

    A vocabulary shorter than n has scores 0 beyond its end: absent classes, as it should be.
    """
    if temperature != 1:
        values.div_(temperature)
    values[..., n] = math.log(K - n)
    p = torch.softmax(values, -1)
    if on != 1:
        p.mul_(on)
    return p, p[..., n] / (K - n)
