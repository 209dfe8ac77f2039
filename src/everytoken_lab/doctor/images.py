"""Images: what is unreadable, duplicated, in both splits, or out of balance.

Duplicates: see `data.duplicates`. Cost: decoding each image; 1 KB of memory per image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.datasets import DataSet, find_split, open_dataset
from everytoken_lab.data.duplicates import ImageFacts, equal_groups, near_pairs, read_all
from everytoken_lab.doctor.findings import Finding, counted, some

TINY = 10  # images of a class below which it can hardly be learned
FEW = 50  # images per class (median) below which training from scratch learns little
IMBALANCE = 10.0  # largest class / smallest class


@dataclass
class Images:
    """A data set under examination: its parts, and what is known of each image (position -> facts)."""

    spec: str
    parts: dict[str, DataSet] = field(default_factory=dict)
    facts: dict[str, dict[int, ImageFacts]] = field(default_factory=dict)


def open_images(spec: str) -> tuple[Images, list[Finding]]:
    """The parts of a data set that training would use."""
    images, findings = Images(spec), list[Finding]()
    named = spec.startswith(("torchvision:", "hf:"))
    try:
        held = None if named else find_split(spec, "val")
        train = None if named else find_split(spec, "train")
        names = None
        if held is not None and train is not None:
            names, more = _compare_names(train.folders(), held.folders(), train.name, held.name)
            findings += more
        images.parts["train"] = open_dataset(spec, "train", class_list=names)
        if held is not None or named:
            images.parts["val"] = open_dataset(spec, "val", class_list=names)
    except EverytokenError as error:
        todo = "Mend what is named above; docs/data.md lists what is accepted."
        findings.append(Finding("error", "data-unusable", str(error), spec, todo))
    return images, findings


def _compare_names(
    train: Sequence[str], held: Sequence[str], where: str, other: str
) -> tuple[list[str] | None, list[Finding]]:
    """Class folders of the two parts; the names of both, if they differ."""
    if not train or not held:  # shards name their classes inside
        return None, []
    unknown, without = sorted(set(held) - set(train)), sorted(set(train) - set(held))
    findings = []
    if unknown:
        hint = did_you_mean(unknown[0], train)
        findings.append(
            Finding(
                "error", "class-only-in-val", f"{_number_of(unknown)} of {other} not in {where}.{hint}", other,
                "Rename or remove these folders: a model cannot know a class that it was not trained on.",
                some(unknown), len(unknown),
            )
        )  # fmt: skip
    if without:
        findings.append(
            Finding(
                "warning", "class-without-val", f"{_number_of(without)} without a folder in {other}", other,
                "Their accuracy will not be known. Move some of their images there.", some(without), len(without),
            )
        )  # fmt: skip
    return (sorted({*train, *held}) if unknown else None), findings


def _number_of(names: Sequence[str]) -> str:
    return counted(len(names), "class", "classes")


def total_images(images: Images, sample: int) -> int:
    """How many images `examine` will look at."""
    return sum(len(_chosen(data, sample)) for data in images.parts.values())


def _chosen(data: DataSet, sample: int) -> list[int]:
    count = min(len(data), sample) if sample else len(data)
    return [i * len(data) // count for i in range(count)] if count else []


def examine(images: Images, sample: int, workers: int, tell: Callable[[], None]) -> list[Finding]:
    """Everything about the images themselves; `sample` > 0 facts at that many of each part only."""
    findings: list[Finding] = []
    for name, data in images.parts.items():
        chosen = _chosen(data, sample)
        facts = read_all(data, chosen, workers, tell)
        images.facts[name] = dict(zip(chosen, facts, strict=True))
        findings += _classes(data, name)
        findings += _unreadable(data, images.facts[name])
        findings += _sizes(data, facts)
    findings += _doubles(images)
    counts = ", ".join(f"{len(d):,} {name}" for name, d in images.parts.items())
    if images.parts:
        classes = images.parts["train"].num_classes
        looked = f"; {sample:,} of each part were looked at" if sample else ""
        findings.append(Finding("note", "images", f"{counts} images of {classes} classes{looked}", images.spec))
    return findings


def _unreadable(data: DataSet, facts: dict[int, ImageFacts]) -> list[Finding]:
    bad = [image.trouble for image in facts.values() if image.trouble]
    if not bad:
        return []
    todo = "Replace or remove them; or train with --on-bad-image skip, which leaves them out and lists them."
    return [
        Finding("error", "unreadable", f"{counted(len(bad), 'unreadable image')}", data.name, todo, some(bad), len(bad))
    ]


def _classes(data: DataSet, part_name: str) -> list[Finding]:
    if part_name != "train" or not data.num_classes:
        return []
    counts = data.class_counts()
    ranked = sorted(zip(counts.tolist(), data.class_names, strict=True))
    named = [f"{name}: {count}" for count, name in ranked if count]  # those of val alone are reported already
    counts = counts[counts > 0]
    findings = []
    tiny = int((counts < TINY).sum())
    if len(counts) < 2 and not data.multi_label:
        todo = "Put the images of each class into a folder of its own."
        findings.append(Finding("error", "one-class", "there is one class only", data.name, todo, some(named)))
    if tiny:
        todo = "Collect more images of them, or leave them out: so few can hardly be learned or judged."
        what = f"{counted(tiny, 'class', 'classes')} with fewer than {TINY} images"
        findings.append(Finding("warning", "tiny-class", what, data.name, todo, some(named[:tiny]), tiny))
    usual = float(np.median(counts)) if len(counts) else 0.0
    if 0 < usual < FEW and tiny < len(counts):
        todo = "From scratch that gives little: begin with pretrained weights (weights registry:efficientnet_lite0)."
        what = f"few images per class: {usual:.0f} (median)"
        findings.append(Finding("note", "few-images", what, data.name, todo))
    smallest = max(1, int(counts.min()))
    if counts.max() / smallest > IMBALANCE:
        what = f"the largest class has {counts.max() / smallest:.0f} times as many images as the smallest"
        todo = "Accuracy will be dominated by the large classes; look at the table of classes of `everytoken eval`."
        findings.append(Finding("warning", "imbalance", what, data.name, todo, (named[-1], named[0])))
    return findings


def _sizes(data: DataSet, facts: Sequence[ImageFacts]) -> list[Finding]:
    sizes = np.array([image.size for image in facts if not image.trouble]).reshape(-1, 2)
    if not len(sizes):
        return []
    short, long = sizes.min(1), sizes.max(1)
    findings = []
    what = f"shorter sides {short.min()} to {short.max()} px, median {np.median(short):.0f}"
    todo = ""
    if np.median(short) >= 1000:
        todo = "Loading will be slow: copies with a shorter side of about 512 px train as well."
    elif np.median(short) <= 48:
        todo = "Use a model for small images (`everytoken models '*_32'`)."
    findings.append(Finding("note", "sizes", what, data.name, todo))
    thin = int((long > 4 * short).sum())
    if thin:
        todo = "Random crops of such images show little; cut them, or leave them out."
        what = f"{counted(thin, 'image')} more than four times as long as wide"
        findings.append(Finding("warning", "long-images", what, data.name, todo, (), thin))
    small = int((short < 16).sum())
    if small:
        todo = "They show next to nothing; leave them out."
        what = f"{counted(small, 'image')} with a side of fewer than 16 px"
        findings.append(Finding("warning", "small-images", what, data.name, todo, (), small))
    return findings


def _doubles(images: Images) -> list[Finding]:
    places = [(name, index) for name, facts in images.facts.items() for index in facts]
    facts = [images.facts[name][index] for name, index in places]
    labels = [images.parts[name].label_text(index) for name, index in places]

    def where(position: int) -> str:
        name, index = places[position]
        return images.parts[name].where(index)

    exact = [(group[0], other) for group in equal_groups(facts) for other in group[1:]]
    findings = _double_findings(images.spec, "the same bytes", "error", exact, places, labels, where, "duplicate")
    near = near_pairs(facts)
    findings += _double_findings(
        images.spec, "nearly the same pixels", "warning", near, places, labels, where, "near-duplicate"
    )
    return findings


def _double_findings(
    spec: str, alike: str, leak_level: str, pairs: Sequence[tuple[int, int]], places: Sequence[tuple[str, int]],
    labels: Sequence[str], where: Callable[[int], str], code: str,
) -> list[Finding]:  # fmt: skip
    leaks = [(a, b) for a, b in pairs if places[a][0] != places[b][0]]
    inside = [(a, b) for a, b in pairs if places[a][0] == places[b][0]]
    torn = [(a, b) for a, b in inside if labels[a] != labels[b]]
    same = [(a, b) for a, b in inside if labels[a] == labels[b]]

    def named(found: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        return some([f"{where(a)} = {where(b)}" for a, b in found])

    findings = []
    if leaks:
        todo = "Remove them from one part: what was learned by heart facts like skill in validation."
        what = f"{counted(len(leaks), 'pair')} of images in train and val with {alike}"
        level = "error" if leak_level == "error" else "warning"
        findings.append(Finding(level, f"{code}-across", what, spec, todo, named(leaks), len(leaks)))  # type: ignore[arg-type]
    if torn:
        todo = "One of the two labels is wrong: keep the image in one class."
        what = f"{counted(len(torn), 'pair')} of images in different classes with {alike}"
        findings.append(Finding("warning", f"{code}-classes", what, spec, todo, named(torn), len(torn)))
    if same:
        todo = "Harmless in small numbers; remove one of each, so that it does not count twice."
        what = f"{counted(len(same), 'pair')} of images of the same class with {alike}"
        findings.append(Finding("note", code, what, spec, todo, named(same), len(same)))
    return findings
