"""Score maps in numbers for people: main class, vocabulary, confidence; of one map and of a store.

Confidence is the probability that training will ask for: the softmax over all K classes of a cell's logits,
where a class that is not among the k best counts as logit 0. The class of the whole image is the one with
the greatest mean probability over the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everytoken.maps import Maps, ScoreMap


@dataclass(frozen=True)
class MapSummary:
    """One map in numbers.

    Attributes:
        top: [h, w] best class of each cell.
        confidence: [h, w] its probability.
        inside: [h, w] whether the cell lies in the image; the rest is about these cells.
        image_class: the class of the whole map; image_confidence: its mean probability.
        vocabulary: number of distinct classes in the map.
    """

    top: NDArray[np.int64]
    confidence: NDArray[np.float32]
    inside: NDArray[np.bool_]
    image_class: int
    image_confidence: float
    vocabulary: int


def probability(scores: NDArray[np.floating], num_classes: int, listed: int) -> NDArray[np.float32]:
    """Softmax along the last axis over ``num_classes``, of which all but ``listed`` have logit 0."""
    scores = scores.astype(np.float32)
    shift = np.maximum(scores.max(axis=-1, keepdims=True), 0)
    powers = np.exp(scores - shift)
    return powers / (powers.sum(axis=-1, keepdims=True) + (num_classes - listed) * np.exp(-shift))


def summarize(score_map: ScoreMap, num_classes: int) -> MapSummary:
    """The numbers of one map; cells whose centres lie outside the image (letterbox) do not count."""
    top = score_map.classes[..., 0].astype(np.int64)
    chance = probability(score_map.scores, num_classes, score_map.scores.shape[-1])
    (h, w), (x0, y0, x1, y1) = top.shape, score_map.area
    x, y = x0 + (np.arange(w) + 0.5) / w * (x1 - x0), y0 + (np.arange(h) + 0.5) / h * (y1 - y0)
    inside = ((y >= 0) & (y <= 1))[:, None] & ((x >= 0) & (x <= 1))[None, :]
    inside = inside if inside.any() else ~inside
    vocabulary, where = np.unique(score_map.classes[inside], return_inverse=True)
    mean = np.bincount(where.ravel(), chance[inside].ravel(), len(vocabulary)) / inside.sum()
    best = int(np.argmax(mean))
    return MapSummary(top, chance[..., 0], inside, int(vocabulary[best]), float(mean[best]), len(vocabulary))


def folder_label(key: str, find: Callable[[str], int | None]) -> int | None:
    """The class that an image's folders name: of the innermost folder that `find` knows. None if it knows none."""
    labels = (find(folder) for folder in reversed(key.split("/")[:-1]))
    return next((label for label in labels if label is not None), None)


def sample_positions(total: int, limit: int) -> list[int]:
    """Up to `limit` positions spread evenly over 0 .. total-1."""
    count = min(total, max(limit, 0))
    return [i * total // count for i in range(count)]


def summarize_some(
    maps: Maps, limit: int, label_of: Callable[[str], int | None] | None = None
) -> Iterator[tuple[str, MapSummary, int | None]]:
    """Key, summary and true class (None if not known) of up to `limit` maps spread over the store.

    `label_of`: key -> class; by default what the image's folder says.
    """
    from everytoken_lab.classes import class_finder

    find = class_finder(maps.class_names)
    for i in sample_positions(len(maps), limit):
        key = maps.key(i)
        label = folder_label(key, find) if label_of is None else label_of(key)
        yield key, summarize(maps.read(i), maps.num_classes), label


@dataclass(frozen=True)
class StoreSummary:
    """Means over the maps that were looked at.

    Attributes:
        vocabulary: classes in a map. confidence: probability of a cell's best class.
        images_agree: fraction of the maps with a known class whose own it is; None if there are none.
        cells_agree: fraction of their cells whose best class it is.
    """

    looked_at: int
    vocabulary: float
    confidence: float
    images_agree: float | None = None
    cells_agree: float | None = None


def summarize_store(maps: Maps, limit: int = 512, label_of: Callable[[str], int | None] | None = None) -> StoreSummary:
    """Look at up to `limit` maps spread over the store; `label_of`: see `summarize_some`."""
    vocabulary, confidence, images, cells = [], [], [], []
    for _, summary, label in summarize_some(maps, limit, label_of):
        vocabulary.append(summary.vocabulary)
        confidence.append(summary.confidence[summary.inside].mean())
        if label is not None:
            images.append(summary.image_class == label)
            cells.append((summary.top[summary.inside] == label).mean())
    agree = [float(np.mean(values)) for values in (images, cells) if values]
    means = [float(np.mean(values or [0.0])) for values in (vocabulary, confidence)]
    return StoreSummary(len(vocabulary), *means, *agree)
