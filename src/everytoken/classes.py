"""Whose classes are they? The annotator's order against the data set's, checked before the first image.

A score map is worthless when class 7 of the annotator is another class than class 7 of the data set, and nothing would
fail. So the two lists are compared by name:
- every class of the data set is known to the annotator: its scores are put into the data set's order (a data set may
  have some of the annotator's classes only);
- otherwise the job stops and names the ways out: a class map, or keeping the annotator's own classes.

Several classes of an annotator may be one class of the data set (all breeds of dogs are "dog"): then its logit is the
log of the sum of their exponentials, which adds up their probabilities.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from everytoken.errors import EverytokenError, did_you_mean

SAME_ORDER = "order"


class ClassError(EverytokenError):
    """The annotator's classes do not fit the data set's; the message names the ways out."""


@dataclass(frozen=True)
class ClassList:
    """The classes of an annotator.

    Attributes:
        count: how many.
        names: one for each, in order, all different; empty if they are not known.
        synonyms: more names for each (WordNet ids, other words), in order.
    """

    count: int
    names: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    _exact: dict[str, int] = field(init=False, repr=False, compare=False)
    _plain: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain: dict[str, int] = {}
        for number, name in enumerate(self.names):
            for spelling in (name, *(self.synonyms[number] if self.synonyms else ())):
                core = core_of(spelling)
                plain[core] = number if plain.get(core, number) == number else -1
        object.__setattr__(self, "_exact", {name: number for number, name in enumerate(self.names)})
        object.__setattr__(self, "_plain", plain)

    def find(self, name: str) -> int | None:
        """The class with this name; None if there is none, -1 if several have it."""
        return self._exact.get(name, self._plain.get(core_of(name)))

    def near(self, name: str) -> str:
        """A clause that suggests names like this one."""
        return did_you_mean(core_of(name), self._plain)


def core_of(name: str) -> str:
    """The core of a name: 'n01440764_tench' -> 'n01440764', 'Golf_Ball' -> 'golf ball'."""
    wnid = re.match(r"n\d{8}(?!\d)", name)
    return wnid[0] if wnid else " ".join(re.split(r"[\s_\-]+", name.strip().lower()))


def imagenet_classes(subset: str = "imagenet-1k") -> ClassList:
    """ImageNet's classes with their WordNet ids and synonyms (timm carries the lists, also of its larger subsets)."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo(subset)
    ids: list[str] = info.label_names()
    full = [info.index_to_description(i) for i in range(len(ids))]
    words = [[part.strip() for part in text.split(",")] for text in full]
    often = Counter(group[0] for group in words)
    names = [
        f"{group[0]} ({wnid})" if often[group[0]] > 1 else group[0] for group, wnid in zip(words, ids, strict=True)
    ]
    synonyms = tuple((wnid, text, *group) for wnid, text, group in zip(ids, full, words, strict=True))
    return ClassList(len(ids), tuple(names), synonyms)


def shown_name(name: str) -> str:
    """A class's name for people: ImageNet's WordNet ids are told in words."""
    number = _words().find(name) if re.fullmatch(r"n\d{8}", name) else None
    return name if number is None or number < 0 else _words().names[number]


def class_finder(names: Sequence[str]) -> Callable[[str], int | None]:
    """A function from a folder's name to its class among `names`, None if it is none of them or not clear which.

    Names are compared as when annotating: other spellings, and for ImageNet's classes WordNet ids and synonyms.
    """
    words = _words()
    numbers = [words.find(name) for name in names]
    more = tuple(() if number is None or number < 0 else words.synonyms[number] for number in numbers)
    known = ClassList(len(names), tuple(names), more)

    def find(name: str) -> int | None:
        number = known.find(name)
        return None if number is None or number < 0 else number

    return find


@lru_cache(maxsize=1)
def _words() -> ClassList:
    return imagenet_classes("imagenet-1k")


@dataclass(frozen=True)
class ClassPlan:
    """How an annotator's scores become a store's.

    Attributes:
        names: of the store's classes; empty if they are not known.
        count: number of the store's classes.
        groups: for each scored class of the store, the annotator's classes it is made of; None: as they are.
        targets: the store's class of each group; classes that are in no group get no scores.
        label_to_class: for each label of the data set, the store's class, or -1.
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
        """For the manifest."""
        if self.groups is None:
            return {"classes": self.how}
        content = json.dumps([self.groups, self.targets])
        return {"classes": self.how, "class_map_sha256": hashlib.sha256(content.encode()).hexdigest()}

    def apply(self, logits: Tensor) -> Tensor:
        """[..., K of the annotator] -> [..., scored classes]."""
        if self.groups is None:
            return logits
        out = logits[..., torch.tensor([group[0] for group in self.groups], device=logits.device)]
        for place, group in enumerate(self.groups):
            if len(group) > 1:
                out[..., place] = logits[..., torch.tensor(group, device=logits.device)].float().logsumexp(-1)
        return out

    def class_ids(self, places: Tensor) -> Tensor:
        """Places in what `apply` returns -> the store's classes."""
        if self.targets is None or self.targets == tuple(range(self.count)):
            return places
        return torch.tensor(self.targets, device=places.device)[places]


def plan_classes(
    annotator: str, known: ClassList, data: str, names: Sequence[str], class_map: str = "", foreign: bool = False
) -> ClassPlan:
    """Decide which class of the store each of the annotator's classes is.

    Args:
        annotator, data: what to call them in messages.
        known: the annotator's classes.
        names: the data set's classes; empty if its images have no labels.
        class_map: a file, or "order" to trust that both have the same order.
        foreign: keep the annotator's classes.
    """
    found = [known.find(name) for name in names]
    if foreign and class_map:
        raise ClassError("--class-map and --foreign-classes exclude each other: choose whose classes the store has.")
    if foreign or not names:
        labels = tuple(-1 if number is None else number for number in found)
        return ClassPlan(known.names, known.count, None, None, labels, "foreign")
    same = tuple(range(len(names)))
    if class_map == SAME_ORDER:
        if known.count != len(names):
            raise ClassError(
                f"--class-map {SAME_ORDER} needs as many classes on both sides; {annotator} has {known.count}, "
                f"{data} has {len(names)}."
            )
        return ClassPlan(tuple(names), known.count, None, None, same, "by order")
    if class_map:
        groups = read_class_map(Path(class_map), known, names)
        scored = [(group, target) for target, group in enumerate(groups) if group]
        return ClassPlan(
            tuple(names), len(names), tuple(g for g, _ in scored), tuple(t for _, t in scored), same, "by map"
        )
    numbers = [number for number in found if number is not None and number >= 0]
    if len(numbers) < len(names) or len(set(numbers)) < len(names):
        raise ClassError(_explain(annotator, known, data, names, found))
    if numbers == list(range(known.count)):
        return ClassPlan(tuple(names), known.count, None, None, same, "same")
    return ClassPlan(tuple(names), len(names), tuple((n,) for n in numbers), same, same, "by name")


def _explain(annotator: str, known: ClassList, data: str, names: Sequence[str], found: Sequence[int | None]) -> str:
    lines = [f"{annotator} and {data} do not speak of the same classes, so scores would land on wrong ones."]
    if not known.names:
        lines.append(f"  {annotator} has {known.count} classes without names, {data} has {len(names)}: {_some(names)}.")
        if known.count == len(names):
            lines.append(
                f"If both have the same order, say so with --class-map {SAME_ORDER}. Otherwise, one of these helps:"
            )
        else:
            lines.append("One of these helps:")
    else:
        unknown = [name for name, number in zip(names, found, strict=True) if number is None]
        unclear = [name for name, number in zip(names, found, strict=True) if number == -1]
        lines.append(f"  {annotator} has {known.count} classes: {_some(known.names)}.")
        lines.append(f"  {data} has {len(names)}: {_some(names)}.")
        if unknown:
            lines.append(
                f"  {len(unknown)} of these are not known to the annotator: {_some(unknown)}.{known.near(unknown[0])}"
            )
        if unclear:
            lines.append(f"  {len(unclear)} are the name of several of its classes: {_some(unclear)}.")
        if not unknown and not unclear:
            lines.append("  Several of these have the same name in the annotator.")
        lines.append("One of these helps:")
    example = difflib.get_close_matches(names[0], known.names, n=1, cutoff=0)[0] if known.names else 0
    lines += [
        "  --class-map FILE    a csv, json or yaml file that says for each class of the data set which of the",
        f"                      annotator's classes it is, by name or number: {names[0]},{example}",
        "  --foreign-classes   keep the annotator's own classes; the token head then speaks those",
        "  --annotator fit     train an annotator on the data set's own classes first",
    ]
    return "\n".join(lines)


def _some(names: Sequence[str], count: int = 4) -> str:
    shown = ", ".join(map(repr, names[:count]))
    return f"{shown} and {len(names) - count} more" if len(names) > count else shown


def read_class_map(path: Path, known: ClassList, names: Sequence[str]) -> list[tuple[int, ...]]:
    """For each class of the data set, the annotator's classes: from csv lines `class,annotator class` (several lines
    for several), or a json or yaml object `class: annotator class or list of them`. Empty: the class gets no scores."""
    rows = _read_rows(path)
    groups: dict[str, list[int]] = {}
    for name, value in rows:
        if name not in names:
            raise ClassError(
                f"{path}: the data set has no class {name!r}.{did_you_mean(name, names)} The first column (or key) is "
                "the data set's class, the second the annotator's."
            )
        group = groups.setdefault(name, [])
        if value is None or value == "":
            continue
        number = _class_number(path, known, value)
        if number not in group:
            group.append(number)
    missing = [name for name in names if name not in groups]
    if missing:
        raise ClassError(
            f"{path} says nothing about {len(missing)} of the data set's {len(names)} classes: {_some(missing)}. "
            "Add them; with an empty value a class gets no scores."
        )
    if not any(groups.values()):
        raise ClassError(f"{path} gives no class of the data set any class of the annotator.")
    return [tuple(groups[name]) for name in names]


def _class_number(path: Path, known: ClassList, value: Any) -> int:
    found = known.find(str(value))
    if found is not None and found >= 0:
        return found
    if found == -1:
        raise ClassError(f"{path}: {value!r} is the name of several of the annotator's classes; use its WordNet id.")
    if isinstance(value, int) or str(value).isdigit():
        if 0 <= int(value) < known.count:
            return int(value)
        raise ClassError(
            f"{path}: the annotator has {known.count} classes, 0 to {known.count - 1}; there is no {value}."
        )
    raise ClassError(f"{path}: the annotator has no class {value!r}.{known.near(str(value))}")


def _read_rows(path: Path) -> list[tuple[str, Any]]:
    if not path.is_file():
        raise ClassError(f"--class-map: there is no file {path}.")
    text = path.read_text(encoding="utf-8-sig")
    kind = path.suffix.lower()
    if kind == ".csv":
        rows = [row for row in csv.reader(text.splitlines()) if row and any(cell.strip() for cell in row)]
        wrong = next((row for row in rows if len(row) != 2), None)
        if wrong is not None:
            raise ClassError(f"{path}: a line has two cells, class and annotator class; got {','.join(wrong)!r}.")
        return [(row[0].strip(), row[1].strip()) for row in rows]
    if kind not in (".json", ".yaml", ".yml"):
        raise ClassError(f"--class-map {path}: the name must end in .csv, .json or .yaml.")
    try:
        content = json.loads(text) if kind == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ClassError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ClassError(f"{path} must hold one object: each class of the data set and the annotator's class for it.")
    pairs: list[tuple[str, Any]] = []
    for name, value in content.items():
        values = value if isinstance(value, list) and value else [None if value == [] else value]
        pairs += [(str(name), one) for one in values]
    return pairs


def read_class_names(path: Path | None) -> list[str]:
    """Class names from a text file, one per line; none without a file."""
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClassError(f"{path} cannot be read ({error}). Class names are a text file, one name per line.") from error
