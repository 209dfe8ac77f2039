"""What the tokens say: a class for every cell and how sure it is; and where an annotator says something else.

A model with a token head is asked there. One without is asked with its own classifier at every cell
(`TokenModel.cell_logits`), which it was not trained for unless its head reads the mean of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everytoken.maps import Maps
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.draw import cells_of
from everytoken_lab.explanation.model import Area
from everytoken_lab.explanation.saliency import evaluating
from everytoken_lab.maps.summary import MapSummary, summarize

FOREIGN = 1_000_000  # added to the classes of a map that the model does not know


@torch.no_grad()
def token_probabilities(model: TokenModel, images: Tensor) -> tuple[Tensor, bool]:
    """(probabilities [B, h, w, C] of every cell, whether they are the token head's)."""
    with evaluating(model):
        logits = model(images).token_logits
        if logits is not None:
            return logits.float().softmax(-1), True
        return model.cell_logits(images).float().softmax(-1), False


def summarize_cells(probabilities: Tensor) -> MapSummary:
    """The numbers of one image's cells [h, w, C], as those of a score map."""
    sure, best = probabilities.max(-1)
    top, confidence = best.cpu().numpy().astype(np.int64), sure.cpu().numpy().astype(np.float32)
    mean = probabilities.mean((0, 1))
    shares = _shares(top, confidence, np.ones(top.shape, bool))
    p = np.array([fraction for _, fraction in shares])
    entropy = float(-(p * np.log(p)).sum())
    every = np.ones(top.shape, bool)
    return MapSummary(top, confidence, every, shares, int(mean.argmax()), float(mean.max()), len(shares), entropy)


def _shares(
    top: NDArray[np.int64], confidence: NDArray[np.float32], inside: NDArray[np.bool_]
) -> list[tuple[int, float]]:
    """(class, fraction of the cells), by cells times confidence, greatest first."""
    classes, where = np.unique(top[inside], return_inverse=True)
    part = np.bincount(where.ravel()) / max(inside.sum(), 1)
    order = np.argsort(-np.bincount(where.ravel(), confidence[inside]), kind="stable")
    return [(int(classes[i]), float(part[i])) for i in order]


@dataclass(frozen=True)
class AnnotatorMap:
    """An annotator's map of what the model sees, in the model's classes.

    Attributes:
        summary: of the map; classes that the model does not know are numbered from FOREIGN, with their `names`.
        area: (x0, y0, x1, y1) of the model's input, in fractions, that the map's grid covers.
        same: [h, w] on the model's token grid, whether both name the same class; inside: whether the map covers it.
        agreement: fraction of the covered tokens where both name the same class; None where there is no telling.
    """

    key: str
    summary: MapSummary
    area: Area
    same: NDArray[np.bool_]
    inside: NDArray[np.bool_]
    agreement: float | None
    names: dict[int, str]


def translation(store: Maps, classes: ClassList) -> NDArray[np.int64]:
    """[classes of the store] -> the model's class by name; -1 where it has none.

    Where one of them has no names, equal numbers of classes are taken to be the same classes.
    """
    names, count = store.manifest.class_names, store.manifest.num_classes
    if names and classes.names:
        return np.array([-1 if (number := classes.find(name)) is None else number for name in names], np.int64)
    return np.arange(count) if count == classes.count else np.full(count, -1, np.int64)


def find_key(store: Maps, path: str | Path) -> str | None:
    """The key of an image file: the longest end of its path that the store has."""
    parts = Path(path).resolve().parts
    ends = ("/".join(parts[i:]) for i in range(1, len(parts)))
    return next((end for end in ends if end in store), None)


def compare_with_map(store: Maps, key: str, tokens: MapSummary, seen: Area, table: NDArray[np.int64]) -> AnnotatorMap:
    """The map of an image against what the tokens say of it. `seen`: by the model, of the source image; `table`: see
    `translation`."""
    score_map = store[key]
    summary = summarize(score_map, store.manifest.num_classes)
    top = np.where(table[summary.top] >= 0, table[summary.top], FOREIGN + summary.top)
    names = {FOREIGN + int(c): store.manifest.class_name(int(c)) for c in np.unique(summary.top) if table[c] < 0}
    area = relative(score_map.area, seen)
    rows, columns = tokens.top.shape
    cells, inside = cells_of((columns, rows), (top.shape[0], top.shape[1]), area)
    same = (top.ravel()[cells] == tokens.top) & inside
    shown, _ = cells_of((64, 64), (top.shape[0], top.shape[1]), area)  # cells of the map that the model sees
    visible = np.isin(np.arange(top.size), shown).reshape(top.shape)
    summary = replace(summary, top=top, shares=_shares(top, summary.confidence, visible & summary.inside))
    comparable = bool((table >= 0).any()) and bool(inside.any())
    return AnnotatorMap(key, summary, area, same, inside, float(same[inside].mean()) if comparable else None, names)


def relative(area: Area, seen: Area) -> Area:
    """An area of the source image in fractions of another one."""
    x0, y0, x1, y1 = seen
    across, down = x1 - x0, y1 - y0
    return (area[0] - x0) / across, (area[1] - y0) / down, (area[2] - x0) / across, (area[3] - y0) / down
