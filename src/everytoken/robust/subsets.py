"""Which class of the model a folder means, and which classes may be answered.

ImageNet's test sets differ in this: V2's folders are numbers (0 to 999, which sort as text in the wrong order), the
others' are WordNet ids; A and R have 200 of the 1,000 classes (not the same 200), and a prediction is the largest of
these 200 logits. The lists are those that timm carries, checked in our tests.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from everytoken.classes import core_of, imagenet_classes
from everytoken.errors import EverytokenError

SUBSETS = {"a": "ImageNet-A", "r": "ImageNet-R"}


@cache
def wnids(subset: str = "") -> tuple[str, ...]:
    """WordNet ids in the order of the logits: of ImageNet-1k, or of its subset "a" or "r"."""
    name = f"imagenet_{subset}_synsets.txt" if subset else "imagenet_synsets.txt"
    text = pkgutil.get_data("timm.data", f"_info/{name}")
    if text is None:
        raise EverytokenError(f"timm's class list {name} is missing; install timm 1.0.30 or newer")
    return tuple(text.decode().split())


@dataclass(frozen=True)
class Match:
    """How the data's classes and the model's answers go together.

    Attributes:
        columns: the model's outputs that may be answered, in order; None: all.
        labels: for each class of the data, its place among these columns (or outputs).
    """

    columns: np.ndarray | None
    labels: np.ndarray


def match(
    names: Sequence[str],
    count: int,
    folders: Sequence[str],
    *,
    subset: str = "",
    restrict: bool = False,
    where: str = "",
) -> Match:
    """Match the folders of a data set with the outputs of a model.

    Args:
        names: of the model's classes; empty if it does not say (with 1,000 outputs, ImageNet's order is assumed).
        count: of its outputs.
        folders: class names of the data.
        subset: "a" or "r": answers are restricted to these 200 classes.
        restrict: answers are restricted to the classes of the data.
        where: what to call the data in messages.
    """
    known = _Known(list(names), count)
    outputs = [known.find(folder) for folder in _unnumbered(folders, known)]
    missing = [folder for folder, output in zip(folders, outputs, strict=True) if output is None]
    if missing:
        if not known.names and not known.is_imagenet and len(folders) == count:
            outputs = list(range(count))  # nothing is known but the number: the order has to be the same
        else:
            raise EverytokenError(_unknown(missing, folders, known, where))
    chosen = np.array(outputs, np.int64)
    double = len(chosen) - len(np.unique(chosen))
    if double:
        raise EverytokenError(f"{where}: {double + 1} folders mean the same class of the model; rename them")
    if subset:
        ids = wnids(subset)
        found = [known.find(wnid) for wnid in ids]
        if any(output is None for output in found):
            raise EverytokenError(
                f"{SUBSETS[subset]} needs a model that knows its 200 classes; this one lacks {found.count(None)}"
            )
        columns = np.array(found, np.int64)
        strange = [folder for folder, output in zip(folders, chosen, strict=True) if output not in columns]
        if strange:
            raise EverytokenError(
                f"{where} has {len(strange)} folders that are not among the 200 classes of {SUBSETS[subset]}: "
                f"{', '.join(strange[:5])}. Is it another data set?"
            )
    elif restrict:
        columns = np.sort(chosen)
    else:
        return Match(None, chosen)
    place = {int(output): i for i, output in enumerate(columns)}
    return Match(columns, np.array([place[int(output)] for output in chosen], np.int64))


class _Known:
    """The model's classes, by any of their names."""

    def __init__(self, names: list[str], count: int) -> None:
        self.names, self.count = names, count
        self.exact = {name: i for i, name in enumerate(names)}
        self.cores = {core_of(name): i for i, name in enumerate(names)}
        self.is_imagenet = not names and count == 1000

    def find(self, folder: str) -> int | None:
        """The output for a folder's name."""
        if self.is_imagenet:
            found = imagenet().find(folder)
            return found if found is not None and found >= 0 else None
        return self.exact.get(folder, self.cores.get(core_of(folder)))


@cache
def imagenet():  # type: ignore[no-untyped-def]
    """ImageNet's classes by id and name (built once; it takes a moment)."""
    return imagenet_classes()


def _unnumbered(folders: Sequence[str], known: _Known) -> list[str]:
    """Folders that are numbers (V2) mean the classes of ImageNet in order, if the model knows those and not numbers."""
    if not all(f.isdigit() and int(f) < 1000 for f in folders) or any(f in known.exact for f in folders):
        return list(folders)
    if known.is_imagenet or wnids()[0] in known.cores:
        return [wnids()[int(f)] for f in folders]
    return list(folders)


def _unknown(missing: Sequence[str], folders: Sequence[str], known: _Known, where: str) -> str:
    few = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    if known.is_imagenet:
        has = "ImageNet's 1,000 (folders: WordNet ids, names, or numbers 0 to 999)"
    elif known.names:
        has = f"{', '.join(known.names[:5])}{' ...' if len(known.names) > 5 else ''}"
    else:
        has = f"{known.count} without names, so the data must have {known.count} folders in the same order"
    return f"{where}: {len(missing)} of {len(folders)} folders are no class of the model: {few}. Its classes are {has}."
