"""Images: what is unreadable, duplicated (see `data.duplicates`), in both splits, or out of balance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.datasets import DataSet, open_dataset
from everytoken_lab.data.duplicates import ImageFacts, equal_pairs, near_pairs, read_all
from everytoken_lab.data.tree import NAMED, find_split
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.schema import counted

TINY = 10  # images of a class below which it can hardly be learned
FEW = 50  # images per class (median) below which training from scratch learns little
IMBALANCE = 10.0  # largest class / smallest class
Splits = dict[str, DataSet]
Level = Literal["error", "warning", "note"]
SHOWN = 5  # examples


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: error: training would stop or be wrong; warning: results would be worse; note: good to know.
        code: a short fixed name, for scripts.
        what: what was found; where: the file, folder or part of the machine; todo: what to do about it.
        examples: all images or files, of which the first few are shown.
    """

    level: Level
    code: str
    what: str
    where: str
    todo: str = ""
    examples: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return {**asdict(self), "examples": list(self.examples[:SHOWN]), "count": len(self.examples)}


def open_splits(spec: str) -> tuple[Splits, list[Finding]]:
    """The splits that training would use, by name, and what is wrong with their class folders."""
    splits, findings, named = Splits(), list[Finding](), spec.startswith(NAMED)
    try:
        train, held = (None if named else find_split(spec, name) for name in ("train", "val"))
        names = None
        known, validated = (set(tree.folders() if tree is not None else ()) for tree in (train, held))
        if train is not None and held is not None and known and validated:  # shards name their classes inside
            if unknown := sorted(validated - known):
                hint = did_you_mean(unknown[0], known)
                what = f"{counted(len(unknown), 'class', 'classes')} of {held.name} not in {train.name}.{hint}"
                todo = "Rename or remove these folders: a model cannot know a class that it was not trained on."
                findings.append(Finding("error", "class-only-in-val", what, held.name, todo, unknown))
                names = sorted(known | validated)
            if lacking := sorted(known - validated):
                what = f"{counted(len(lacking), 'class', 'classes')} without a folder in {held.name}"
                todo = "Their accuracy will not be known. Move some of their images there."
                findings.append(Finding("warning", "class-without-val", what, held.name, todo, lacking))
        for name in ("train", "val") if held is not None or named else ("train",):
            splits[name] = open_dataset(spec, name, class_list=names)
    except EverytokenError as error:
        todo = "Correct what is named above; docs/data.md lists what is accepted."
        findings.append(Finding("error", "data-unusable", str(error), spec, todo))
    return splits, findings


def examine_images(
    spec: str, splits: Splits, sample: int, workers: int, tell: Callable[[int, int], None]
) -> Iterator[Finding]:
    """Look at all images, or at `sample` of each split."""
    chosen = {name: sample_positions(len(data), sample or len(data)) for name, data in splits.items()}
    total, done = sum(map(len, chosen.values())), itertools.count(1)
    facts: dict[str, dict[int, ImageFacts]] = {}
    for name, data in splits.items():
        seen = read_all(data, chosen[name], workers, lambda: tell(next(done), total))
        facts[name] = dict(zip(chosen[name], seen, strict=True))
        if name == "train" and data.num_classes:
            yield from _classes(data)
        if bad := [image.trouble for image in seen if image.trouble]:
            todo = "Replace or remove them; or train with --on-bad-image skip, which leaves them out and lists them."
            yield Finding("error", "unreadable", counted(len(bad), "unreadable image"), data.name, todo, bad)
        yield from _sizes(data, seen)
    yield from _duplicates(spec, splits, facts)
    counts = ", ".join(f"{len(data):,} {name}" for name, data in splits.items())
    looked = f"; {sample:,} of each split were looked at" if sample else ""
    yield Finding("note", "images", f"{counts} images of {splits['train'].num_classes} classes{looked}", spec)


def _classes(data: DataSet) -> Iterator[Finding]:
    ranked = sorted((count, name) for count, name in zip(data.class_counts().tolist(), data.class_names, strict=True))
    ranked = [(count, name) for count, name in ranked if count]  # those of val alone are reported already
    named, counts = [f"{name}: {count}" for count, name in ranked], [count for count, _ in ranked]
    if len(counts) < 2 and not data.multi_label:
        todo = "Put the images of each class into a folder of its own."
        yield Finding("error", "one-class", "there is one class only", data.name, todo, named)
    if not counts:
        return
    tiny, usual, ratio = sum(count < TINY for count in counts), np.median(counts), counts[-1] / counts[0]
    if tiny:
        todo = "Collect more images of them, or leave them out: so few can hardly be learned or judged."
        what = f"{counted(tiny, 'class', 'classes')} with fewer than {TINY} images"
        yield Finding("warning", "tiny-class", what, data.name, todo, named[:tiny])
    if usual < FEW and tiny < len(counts):
        todo = "From scratch that gives little: begin with pretrained weights (weights registry:efficientnet_lite0)."
        yield Finding("note", "few-images", f"few images per class: {usual:.0f} (median)", data.name, todo)
    if ratio > IMBALANCE:
        what = f"the largest class has {ratio:.0f} times as many images as the smallest"
        todo = "Accuracy will be dominated by the large classes; look at the table of classes of `everytoken eval`."
        yield Finding("warning", "imbalance", what, data.name, todo, (named[-1], named[0]))


def _sizes(data: DataSet, facts: Sequence[ImageFacts]) -> Iterator[Finding]:
    if short := [min(image.size) for image in facts if not image.trouble]:
        usual, todo = np.median(short), ""
        if usual >= 1000:
            todo = "Loading will be slow: copies with a shorter side of about 512 px train as well."
        elif usual <= 48:
            todo = "Use a model for small images (`everytoken models '*_32'`)."
        what = f"shorter sides {min(short)} to {max(short)} px, median {usual:.0f}"
        yield Finding("note", "sizes", what, data.name, todo)


PAIRS = {
    "-across": ("in train and val", "Remove them from one split: validation must not see training images."),
    "-classes": ("in different classes", "One of the two labels is wrong: keep the image in one class."),
    "": ("of the same class", "Harmless in small numbers; remove one of each, so that it does not count twice."),
}


def _duplicates(spec: str, splits: Splits, seen: dict[str, dict[int, ImageFacts]]) -> Iterator[Finding]:
    places = [(name, index) for name, facts in seen.items() for index in facts]
    facts = [seen[name][index] for name, index in places]
    files = [splits[name].where(index) for name, index in places]
    labels = [splits[name].label_text(index) for name, index in places]
    alike: tuple[tuple[str, str, Level, Sequence[tuple[int, int]]], ...] = (
        ("duplicate", "the same bytes", "error", equal_pairs(facts)),
        ("near-duplicate", "nearly the same pixels", "warning", near_pairs(facts)),
    )
    for code, same, leak, pairs in alike:
        levels: dict[str, Level] = {"-across": leak, "-classes": "warning", "": "note"}
        kinds: dict[str, list[str]] = {kind: [] for kind in PAIRS}
        for a, b in pairs:
            kind = "-across" if places[a][0] != places[b][0] else "-classes" if labels[a] != labels[b] else ""
            kinds[kind].append(f"{files[a]} = {files[b]}")
        for kind, names in kinds.items():
            what = f"{counted(len(names), 'pair')} of images {PAIRS[kind][0]} with {same}"
            if names:
                yield Finding(levels[kind], code + kind, what, spec, PAIRS[kind][1], names)
