"""Score maps in numbers for people: main class, vocabulary, confidence; of one map and of a store.

Confidence is the probability that training will ask for: the softmax over all K classes of a cell's logits,
where a class that is not among the k best counts as logit 0. The class of the whole image is the one with
the greatest mean probability over the cells. (The greatest mean logit is a worse guide when only k logits
are kept: with EfficientNet-Lite0 on 125 photos, 77 % against 82 % right.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken.maps.score_map import ScoreMap
from everytoken.maps.store import Maps


@dataclass(frozen=True)
class MapSummary:
    """One map in numbers.

    Attributes:
        top: [h, w] best class of each cell.
        confidence: [h, w] its probability.
        inside: [h, w] whether the cell lies in the image; the rest is about these cells.
        shares: (class, part of the cells where it is the best), by cells times confidence, greatest first.
        image_class: the class of the whole map, and
        image_confidence: its mean probability.
        vocabulary: number of distinct classes in the map.
        entropy: of ``shares``, in nats; 0 when one class rules all cells.
    """

    top: NDArray[np.int64]
    confidence: NDArray[np.float32]
    inside: NDArray[np.bool_]
    shares: Sequence[tuple[int, float]]
    image_class: int
    image_confidence: float
    vocabulary: int
    entropy: float


def probability(scores: NDArray[np.floating], num_classes: int, listed: int) -> NDArray[np.float32]:
    """Softmax along the last axis over ``num_classes``, of which all but ``listed`` have logit 0."""
    scores = scores.astype(np.float32)
    shift = np.maximum(scores.max(axis=-1, keepdims=True), 0)
    powers = np.exp(scores - shift)
    rest = (num_classes - listed) * np.exp(-shift)
    return powers / (powers.sum(axis=-1, keepdims=True) + rest)


def summarize(score_map: ScoreMap, num_classes: int) -> MapSummary:
    """The numbers of one map; cells that lie outside the image (letterbox) do not count."""
    top = score_map.classes[..., 0].astype(np.int64)
    chance = probability(score_map.scores, num_classes, score_map.scores.shape[-1])
    inside = cells_inside(score_map)
    vocabulary, where = np.unique(score_map.classes[inside], return_inverse=True)
    mean = np.bincount(where.ravel(), chance[inside].ravel(), len(vocabulary)) / inside.sum()
    best = int(np.argmax(mean))
    classes, where = np.unique(top[inside], return_inverse=True)
    part = np.bincount(where.ravel()) / inside.sum()
    weight = np.bincount(where.ravel(), chance[..., 0][inside])
    order = np.argsort(-weight, kind="stable")
    return MapSummary(
        top,
        chance[..., 0],
        inside,
        [(int(classes[i]), float(part[i])) for i in order],
        int(vocabulary[best]),
        float(mean[best]),
        len(vocabulary),
        float(-(part * np.log(part)).sum()),
    )


def cells_inside(score_map: ScoreMap) -> NDArray[np.bool_]:
    """[h, w] whether a cell's centre lies in the image."""
    (h, w), (x0, y0, x1, y1) = score_map.scores.shape[:2], score_map.area
    x = x0 + (np.arange(w) + 0.5) / w * (x1 - x0)
    y = y0 + (np.arange(h) + 0.5) / h * (y1 - y0)
    inside = ((y >= 0) & (y <= 1))[:, None] & ((x >= 0) & (x <= 1))[None, :]
    return inside if inside.any() else ~inside


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

    Args:
        maps: the store.
        limit: maps to look at.
        label_of: key -> class; by default what the image's folder says.
    """
    from everytoken_lab.classes import class_finder

    find = class_finder(maps.class_names)
    for i in sample_positions(len(maps), limit):
        key = maps.key(i)
        label = folder_label(key, find) if label_of is None else label_of(key)
        yield key, summarize(maps.read(i), maps.num_classes), label


@dataclass(frozen=True)
class StoreSummary:
    """A store in numbers.

    Attributes:
        maps, skipped: counts of the store.
        skipped_examples: (key, reason) of the first few.
        bytes_per_image: on disk, all files of the store, trained annotators left out.
        looked_at: maps that the means below are over.
        labelled: those of them whose true class is known.
        images_agree: part of the labelled maps whose class is the true one; None without labels.
        cells_agree: part of their cells whose best class is the true one.
        vocabulary: mean number of classes in a map.
        confidence: mean probability of a cell's best class.
    """

    maps: int
    skipped: int
    skipped_examples: tuple[tuple[str, str], ...]
    bytes_per_image: float
    looked_at: int
    labelled: int
    images_agree: float | None
    cells_agree: float | None
    vocabulary: float
    confidence: float


def summarize_store(maps: Maps, limit: int = 512, label_of: Callable[[str], int | None] | None = None) -> StoreSummary:
    """Count, and look at up to `limit` maps spread over the store; `label_of`: see `summarize_some`."""
    vocabulary, confidence, images, cells = [], [], [], []
    for _, summary, label in summarize_some(maps, limit, label_of):
        vocabulary.append(summary.vocabulary)
        confidence.append(float(summary.confidence[summary.inside].mean()))
        if label is not None:
            images.append(summary.image_class == label)
            cells.append(float((summary.top[summary.inside] == label).mean()))
    skipped = maps.skipped
    size = sum(path.stat().st_size for path in maps.path.iterdir() if path.is_file())
    return StoreSummary(
        maps=len(maps),
        skipped=len(skipped),
        skipped_examples=tuple(list(skipped.items())[:5]),
        bytes_per_image=size / max(1, maps.manifest.total),
        looked_at=len(vocabulary),
        labelled=len(images),
        images_agree=float(np.mean(images)) if images else None,
        cells_agree=float(np.mean(cells)) if cells else None,
        vocabulary=float(np.mean(vocabulary)) if vocabulary else 0.0,
        confidence=float(np.mean(confidence)) if confidence else 0.0,
    )


def describe(maps: Maps, sample: int = 512) -> dict[str, Any]:
    """What is in a store, for people: settings, counts, size, and what up to `sample` of its maps are like."""
    manifest, names, summary = maps.manifest, maps.class_names, summarize_store(maps, sample)
    facts: dict[str, Any] = {
        "state": "complete" if manifest.complete else "not finished: the same command continues it",
        "maps": len(maps),
        "skipped images": summary.skipped,
        "images": manifest.total,
        "grid": f"{maps.grid[0]} x {maps.grid[1]}",
        "classes per cell": maps.top_k,
        "classes": maps.num_classes,
        "class names": f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "not known",
        "class names' hash": manifest.class_names_sha256[:16],
        "image to annotator": manifest.resize_mode,
        "annotator": manifest.annotator or "not known",
        "shards": f"{manifest.num_shards} of {manifest.shard_size:,} images",
        "size": f"{summary.bytes_per_image * manifest.total / 1e6:,.1f} MB",
        "bytes per image": round(summary.bytes_per_image),
    }
    if summary.skipped:
        facts["skipped, for example"] = "; ".join(f"{key}: {why}" for key, why in summary.skipped_examples[:3])
    if summary.looked_at:
        facts["looked at"] = f"{summary.looked_at:,} maps"
        facts["classes in a map, mean"] = f"{summary.vocabulary:.1f}"
        facts["confidence of a cell, mean"] = f"{summary.confidence:.1%}"
        agree = summary.images_agree
        facts["map's class = folder's"] = "folder names are no class names" if agree is None else f"{agree:.1%}"
    return facts


WRONG, MANY, OTHERS = "map and folder disagree", "many classes in one image", "others"


def pick(maps: Maps, count: int, scan: int = 5000) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Images to look at first, of up to `scan` spread over the store: wrong, then mixed, then others.

    Wrong ones (the map's class is not the folder's) come surest first and take up to half of the places; then
    those with the most mixed maps, up to a quarter; then ordinary ones, evenly spread, for a fair impression.

    Returns:
        (key, reason) of the picks, and how many of the scanned images fall under each reason.
    """
    wrong: list[tuple[float, str]] = []
    fine: list[tuple[float, str]] = []
    for key, summary, label in summarize_some(maps, scan):
        if label is not None and label != summary.image_class:
            wrong.append((-summary.image_confidence, key))
        else:
            fine.append((-summary.entropy, key))
    wrong.sort()
    shown = min(len(wrong), count // 2)
    mixed = sorted(fine)[: min(max(1, count // 4), max(0, count - shown))]
    ordinary = [entry for entry in fine if entry not in set(mixed)]
    places = count - shown - len(mixed)
    shown += max(0, places - len(ordinary))  # nothing ordinary left: more of the wrong ones
    groups = {
        WRONG: wrong[:shown],
        MANY: mixed,
        OTHERS: [ordinary[i] for i in sample_positions(len(ordinary), places)],
    }
    picks = [(key, reason) for reason, entries in groups.items() for _, key in entries]
    return picks[:count], {WRONG: len(wrong), MANY: len(mixed), OTHERS: len(fine) - len(mixed)}
