"""Which class is which, when two lists of classes meet: a model's outputs and a dataset's folders, an annotator's and
the labels. Nothing would fail if class 7 of one were not class 7 of the other, so one set of rules compares them:

- A name is compared as it is, then without regard to case, underscores and hyphens; `n01440764_tench` is its id.
- ImageNet's classes are known by id, by each of their synonyms and by number.
- Folders that are numbers are numbers (ImageNet-V2's "0" to "999" sort as text in another order).
- Outputs without names: a thousand are ImageNet's; others need as many folders, in the same order.
"""

from __future__ import annotations

import csv
import hashlib
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.labels import read_text

if TYPE_CHECKING:
    from torch import Tensor

SAME_ORDER = "order"
SUBSETS = {"a": "ImageNet-A", "r": "ImageNet-R"}
IMAGENET = 1000


# Lists of classes


@dataclass(frozen=True)
class ClassList:
    """The classes of a model, an annotator or a dataset: their names, if known, and synonyms (WordNet ids, words)."""

    count: int
    names: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def _by_spelling(self) -> dict[str, int | None]:
        """Normalised spelling -> class; None where several classes have it."""
        spellings: dict[str, int | None] = {}
        for number, name in enumerate(self.names):
            for spelling in (name, *(self.synonyms[number] if self.synonyms else ())):
                key = normal_name(spelling)
                spellings[key] = number if spellings.get(key, number) == number else None
        return spellings

    def find(self, name: str) -> int | None:
        """The class with this name; None if there is none, or if several have it."""
        return self._by_name.get(name, self._by_spelling.get(normal_name(name)))

    def number(self, text: str) -> int:
        """The class with this name or number; an error says which there are."""
        found = self.find(text)
        if found is None and re.fullmatch("[0-9]{1,9}", text):
            found = int(text)
        if found is None or found >= self.count:
            raise EverytokenError(
                f"the model has no class {text!r}, or several.{self.near(text)} Its {self.count} classes are "
                f"{_some(self.names) or 'not named'}; a number from 0 to {self.count - 1} is accepted, too."
            )
        return found

    def near(self, name: str) -> str:
        """A clause that suggests names like this one."""
        return did_you_mean(normal_name(name), self._by_spelling)

    def or_imagenet(self) -> ClassList:
        """ImageNet's classes for a thousand outputs without names; otherwise the list as it is."""
        return imagenet_classes() if not self.names and self.count == IMAGENET else self

    def find_all(self, folders: Sequence[str]) -> list[int | None]:
        """The class of each folder, by name; folders that are numbers are numbers, unless these are names."""
        numbers = [int(folder) for folder in folders if re.fullmatch(r"[0-9]{1,9}", folder)]
        by_name = not folders or len(numbers) < len(folders) or set(folders) & set(self.names)
        if by_name or (self.names and self.find(wnids()[0]) is None):
            return [self.find(folder) for folder in folders]
        if self.names:  # ImageNet's, perhaps in another order
            return [self.find(wnids()[number]) if number < IMAGENET else None for number in numbers]
        if max(numbers) >= self.count and len(set(numbers)) == self.count:  # such as 1 to 10
            position = {number: i for i, number in enumerate(sorted(numbers))}
            return [position[number] for number in numbers]
        return [number if number < self.count else None for number in numbers]


def normal_name(name: str) -> str:
    """The spelling by which names are compared: 'n01440764_tench' -> 'n01440764', 'Golf_Ball' -> 'golf ball'."""
    wnid = re.match(r"n\d{8}(?!\d)", name)
    return wnid[0] if wnid else " ".join(re.split(r"[\s_\-]+", name.strip().lower()))


# ImageNet


@cache
def imagenet_classes(subset: str = "imagenet-1k") -> ClassList:
    """ImageNet's classes with their WordNet ids and synonyms (timm carries the lists, also of its larger subsets)."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo(subset)
    ids: list[str] = info.label_names()
    full = [info.index_to_description(i) for i in range(len(ids))]
    words = [[word.strip() for word in text.split(",")] for text in full]
    often = Counter(first for first, *_ in words)
    names, synonyms = [], []
    for wnid, text, group in zip(ids, full, words, strict=True):
        names.append(f"{group[0]} ({wnid})" if often[group[0]] > 1 else group[0])
        synonyms.append((wnid, text, *group))
    return ClassList(len(ids), tuple(names), tuple(synonyms))


@cache
def wnids(subset: str = "") -> tuple[str, ...]:
    """WordNet ids in the order of the logits: of ImageNet-1k, or of its subset "a" or "r" (200 classes each)."""
    name = f"imagenet_{subset}_synsets.txt" if subset else "imagenet_synsets.txt"
    text = pkgutil.get_data("timm.data", f"_info/{name}")
    if text is None:
        raise EverytokenError(f"timm's class list {name} is missing; install timm 1.0.31 or newer")
    return tuple(text.decode().split())


def imagenet_numbers(classes: ClassList) -> np.ndarray:
    """ImageNet's class for each class of a model, by name."""
    classes = classes.or_imagenet()
    numbers = [imagenet_classes().find(name) for name in classes.names]
    strange = [name for name, number in zip(classes.names, numbers, strict=True) if number is None]
    if strange or not classes.names:
        what = f"such as {strange[0]!r}" if strange else f"{classes.count} without names"
        raise EverytokenError(f"ReaL labels are for models of ImageNet's classes; this one has others, {what}")
    return np.array(numbers, np.int64)


def shown_name(name: str) -> str:
    """A class's name for people: ImageNet's WordNet ids in words."""
    number = imagenet_classes().find(name) if re.fullmatch(r"n\d{8}", name) else None
    return name if number is None else imagenet_classes().names[number]


def class_finder(names: Sequence[str]) -> Callable[[str], int | None]:
    """A function from a folder's name to its class among `names`, also by other spellings and, for ImageNet's, by
    WordNet ids and synonyms; None if it is none of them or not clear which."""
    by_name = {name: number for number, name in enumerate(names)}

    @cache
    def with_synonyms() -> ClassList:  # imports timm, which takes seconds and is seldom needed
        words = imagenet_classes()
        numbers = [words.find(name) for name in names]
        synonyms = tuple(() if number is None else words.synonyms[number] for number in numbers)
        return ClassList(len(names), tuple(names), synonyms)

    def find(name: str) -> int | None:
        return by_name.get(name) if name in by_name or not names else with_synonyms().find(name)

    return find


# A dataset's folders among a model's outputs


@dataclass(frozen=True)
class ClassMatch:
    """The outputs of a model that may be answered (None: all), and for each class of the data its position in them."""

    columns: np.ndarray | None
    labels: np.ndarray


def match_classes(
    classes: ClassList, folders: Sequence[str], where: str, *, subset: str = "", restrict: bool = False
) -> ClassMatch:
    """Match the folders of a dataset, called `where` in messages, with the outputs of a model; the data may have fewer.

    Args:
        subset: "a" or "r": answers are restricted to the 200 classes of ImageNet-A or ImageNet-R.
        restrict: answers are restricted to the classes of the data.
    """
    model_classes = classes.or_imagenet()
    outputs = model_classes.find_all(folders)
    if None in outputs and not model_classes.names and len(folders) == model_classes.count:
        outputs = list(range(model_classes.count))  # nothing is known but the number: the order has to be the same
    if missing := [folder for folder, output in zip(folders, outputs, strict=True) if output is None]:
        has = _some(classes.names) or f"{classes.count} without names, so the data must have as many, in the same order"
        if model_classes is not classes:
            has = "ImageNet's 1,000 (folders: WordNet ids, names, or numbers 0 to 999)"
        raise EverytokenError(
            f"{where}: {len(missing)} of {len(folders)} classes are no class of the model: {_some(missing)}."
            f"{model_classes.near(missing[0])} Its classes are {has}."
        )
    chosen = np.array(outputs, np.int64)
    if repeated := len(chosen) - len(np.unique(chosen)):
        raise EverytokenError(f"{where}: {repeated + 1} classes mean the same class of the model; rename them")
    if not subset and not restrict:
        return ClassMatch(None, chosen)
    columns = np.sort(chosen)
    if subset:
        known = [model_classes.find(wnid) for wnid in wnids(subset)]
        if None in known:
            lacks = f"this one lacks {known.count(None)}"
            raise EverytokenError(f"{SUBSETS[subset]} needs a model that knows its 200 classes; {lacks}")
        columns = np.array(known, np.int64)
        if strange := [folder for folder, output in zip(folders, chosen, strict=True) if output not in columns]:
            raise EverytokenError(
                f"{where} has {len(strange)} classes that are not among the 200 of {SUBSETS[subset]}: "
                f"{_some(strange)}. Is it another dataset?"
            )
    return ClassMatch(columns, np.array([np.flatnonzero(columns == output)[0] for output in chosen], np.int64))


# An annotator's classes as those of a store


@dataclass(frozen=True)
class ClassPlan:
    """How an annotator's scores become a store's.

    Attributes:
        groups: for each scored class of the store, the annotator's classes it is made of; None: as they are.
        targets: the store's class of each group; classes that are in no group get no scores.
        label_to_class: for each label of the dataset, the store's class, or -1.
        how: "same", "by name", "by map", "by order" or "foreign".
    """

    names: tuple[str, ...]
    count: int
    groups: tuple[tuple[int, ...], ...] | None
    targets: tuple[int, ...] | None
    label_to_class: tuple[int, ...]
    how: str

    @property
    def scored(self) -> int:
        """Classes that can get a score."""
        return self.count if self.groups is None else len(self.groups)

    def describe(self) -> dict[str, Any]:
        """For the store's metadata."""
        if self.groups is None:
            return {"classes": self.how}
        content = json.dumps([self.groups, self.targets])
        return {"classes": self.how, "class_map_sha256": hashlib.sha256(content.encode()).hexdigest()}

    def apply(self, logits: Tensor) -> Tensor:
        """[..., K of the annotator] -> [..., scored classes]."""
        if self.groups is None:
            return logits
        out = logits[..., _numbers([group[0] for group in self.groups], logits)]
        for place, group in enumerate(self.groups):
            if len(group) > 1:
                out[..., place] = logits[..., _numbers(group, logits)].float().logsumexp(-1)
        return out

    def class_ids(self, places: Tensor) -> Tensor:
        """Places in what `apply` returns -> the store's classes."""
        if self.targets is None or self.targets == tuple(range(self.count)):
            return places
        return _numbers(self.targets, places)[places]


def _numbers(values: Sequence[int], like: Tensor) -> Tensor:
    """As a tensor on the device of another one, for which a host that drives a GPU does not wait."""
    import torch

    return torch.tensor(values).to(like.device, non_blocking=True)


def plan_classes(
    annotator: str, classes: ClassList, data: str, names: Sequence[str], class_map: str = "", foreign: bool = False
) -> ClassPlan:
    """Which class of the store each of the annotator's classes is.

    Args:
        names: the dataset's classes; empty if its images have no labels.
        class_map: a file, or "order" to trust that both have the same order.
        foreign: keep the annotator's classes.
    """
    numbers = classes.find_all(names) if classes.names else [classes.find(name) for name in names]
    if foreign and class_map:
        raise EverytokenError("a class map and foreign classes exclude each other: choose whose classes the store has.")
    if foreign or not names:
        labels = tuple(-1 if number is None else number for number in numbers)
        return ClassPlan(classes.names, classes.count, None, None, labels, "foreign")
    same = tuple(range(len(names)))
    if class_map and class_map != SAME_ORDER:
        by_class = read_class_map(Path(class_map), classes, names)
        targets = tuple(target for target, group in enumerate(by_class) if group)
        return ClassPlan(tuple(names), len(names), tuple(filter(None, by_class)), targets, same, "by map")
    if class_map:
        if classes.count != len(names):
            sizes = f"{annotator} has {classes.count}, {data} has {len(names)}"
            raise EverytokenError(f"the class map {SAME_ORDER!r} needs as many classes on both sides; {sizes}.")
        numbers = ClassList(classes.count).find_all(names)  # folders that are numbers are in the order of the numbers
        numbers = list(same) if None in numbers else numbers
    matched = [number for number in numbers if number is not None]
    if len(set(matched)) < len(names):
        raise EverytokenError(_explain(annotator, classes, data, names, numbers))
    if matched == list(range(classes.count)):
        return ClassPlan(tuple(names), classes.count, None, None, same, "by order" if class_map else "same")
    groups = tuple((n,) for n in matched)
    return ClassPlan(tuple(names), len(names), groups, same, same, "by order" if class_map else "by name")


def _explain(annotator: str, classes: ClassList, data: str, names: Sequence[str], numbers: Sequence[int | None]) -> str:
    unclear = [name for name, number in zip(names, numbers, strict=True) if number is None]
    why = f"If both have the same order, say so with the class map {SAME_ORDER!r}."
    if classes.names:
        why = "Several of these have the same name in the annotator."
    if classes.names and unclear:
        why = f"{_some(unclear)}: the name of none or several of the annotator's classes.{classes.near(unclear[0])}"
    return (
        f"{annotator} ({classes.count} classes: {_some(classes.names) or 'without names'}) and {data} ({len(names)}: "
        f"{_some(names)}) do not have the same classes. {why}\nOne of these helps:\n"
        "  class_map          a csv file: class of the dataset, class of the annotator (name or number)\n"
        "  foreign_classes    keep the annotator's own classes; the token head then has those\n"
        "  the annotator fit  train an annotator on the dataset's own classes first"
    )


def _some(names: Sequence[str], count: int = 4) -> str:
    shown = ", ".join(map(repr, names[:count]))
    return f"{shown} and {len(names) - count} more" if len(names) > count else shown


def read_class_map(path: Path, classes: ClassList, names: Sequence[str]) -> list[tuple[int, ...]]:
    """For each class of the dataset, the annotator's classes, of a csv file with a pair in each line.

    All classes must be named; one with an empty value gets no scores.
    """
    groups: dict[str, list[int]] = {}
    try:
        rows = list(csv.reader(read_text(path).splitlines()))
    except csv.Error as error:
        raise EverytokenError(f"{path} cannot be read as CSV ({error}).") from error
    for row in rows:
        name, *values = (cell.strip() for cell in row or [""])
        if not any((name, *values)):
            continue
        if len(values) != 1:
            raise EverytokenError(f"{path}: a line has two cells, class and model's class; got {','.join(row)!r}.")
        if name not in names:
            raise EverytokenError(f"{path}: the dataset has no class {name!r}.{did_you_mean(name, names)}")
        groups.setdefault(name, []).extend(classes.number(value) for value in values if value)
    if missing := [name for name in names if name not in groups]:
        raise EverytokenError(
            f"{path} says nothing about {len(missing)} of the dataset's {len(names)} classes: {_some(missing)}. "
            "Add them; with an empty value a class gets no scores."
        )
    return [tuple(dict.fromkeys(groups[name])) for name in names]
