"""Images: what is unreadable, duplicated (see `data.duplicates`), in both splits, or out of balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.datasets import NAMED, DataSet, find_split, open_dataset
from everytoken_lab.data.duplicates import ImageFacts, equal_groups, near_pairs, read_all
from everytoken_lab.doctor.findings import Finding, Level
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.schema import counted

TINY = 10  # images of a class below which it can hardly be learned
FEW = 50  # images per class (median) below which training from scratch learns little
IMBALANCE = 10.0  # largest class / smallest class


@dataclass
class Images:
    """A dataset under examination: its splits, and what is known of each image (position -> facts)."""

    spec: str
    splits: dict[str, DataSet] = field(default_factory=dict)
    facts: dict[str, dict[int, ImageFacts]] = field(default_factory=dict)


def open_images(spec: str) -> tuple[Images, list[Finding]]:
    """The splits of a dataset that training would use."""
    images, findings = Images(spec), list[Finding]()
    named = spec.startswith(NAMED)
    try:
        held = None if named else find_split(spec, "val")
        train = None if named else find_split(spec, "train")
        names = None
        if held is not None and train is not None:
            names, findings = _compare_names(train.folders(), held.folders(), train.name, held.name)
        images.splits["train"] = open_dataset(spec, "train", class_list=names)
        if held is not None or named:
            images.splits["val"] = open_dataset(spec, "val", class_list=names)
    except EverytokenError as error:
        todo = "Correct what is named above; docs/data.md lists what is accepted."
        findings.append(Finding("error", "data-unusable", str(error), spec, todo))
    return images, findings


def _compare_names(
    train: Sequence[str], held: Sequence[str], where: str, other: str
) -> tuple[list[str] | None, list[Finding]]:
    """Class folders of the two splits; the names of both, if they differ."""
    if not train or not held:  # shards name their classes inside
        return None, []
    unknown, without = sorted(set(held) - set(train)), sorted(set(train) - set(held))
    findings = []
    if unknown:
        hint = did_you_mean(unknown[0], train)
        what = f"{counted(len(unknown), 'class', 'classes')} of {other} not in {where}.{hint}"
        todo = "Rename or remove these folders: a model cannot know a class that it was not trained on."
        findings.append(Finding("error", "class-only-in-val", what, other, todo, unknown))
    if without:
        what = f"{counted(len(without), 'class', 'classes')} without a folder in {other}"
        todo = "Their accuracy will not be known. Move some of their images there."
        findings.append(Finding("warning", "class-without-val", what, other, todo, without))
    return (sorted({*train, *held}) if unknown else None), findings


def examine(images: Images, sample: int, workers: int, tell: Callable[[int, int], None]) -> list[Finding]:
    """Everything about the images themselves; `sample` > 0: looks at that many of each split only."""
    findings: list[Finding] = []
    chosen = {name: sample_positions(len(data), sample or len(data)) for name, data in images.splits.items()}
    total, done = sum(map(len, chosen.values())), 0

    def one() -> None:
        nonlocal done
        done += 1
        tell(done, total)

    for name, data in images.splits.items():
        facts = read_all(data, chosen[name], workers, one)
        images.facts[name] = dict(zip(chosen[name], facts, strict=True))
        if name == "train" and data.num_classes:
            findings += _classes(data)
        if bad := [image.trouble for image in facts if image.trouble]:
            todo = "Replace or remove them; or train with --on-bad-image skip, which leaves them out and lists them."
            findings.append(Finding("error", "unreadable", counted(len(bad), "unreadable image"), data.name, todo, bad))
        findings += _sizes(data, facts)
    if images.splits:
        findings += _duplicates(images)
        counts = ", ".join(f"{len(data):,} {name}" for name, data in images.splits.items())
        looked = f"; {sample:,} of each split were looked at" if sample else ""
        what = f"{counts} images of {images.splits['train'].num_classes} classes{looked}"
        findings.append(Finding("note", "images", what, images.spec))
    return findings


def _classes(data: DataSet) -> list[Finding]:
    ranked = sorted((count, name) for count, name in zip(data.class_counts().tolist(), data.class_names, strict=True))
    ranked = [(count, name) for count, name in ranked if count]  # those of val alone are reported already
    named, counts = [f"{name}: {count}" for count, name in ranked], [count for count, _ in ranked]
    findings = []
    if len(counts) < 2 and not data.multi_label:
        todo = "Put the images of each class into a folder of its own."
        findings.append(Finding("error", "one-class", "there is one class only", data.name, todo, named))
    if not counts:
        return findings
    tiny, usual, ratio = sum(count < TINY for count in counts), np.median(counts), counts[-1] / counts[0]
    if tiny:
        todo = "Collect more images of them, or leave them out: so few can hardly be learned or judged."
        what = f"{counted(tiny, 'class', 'classes')} with fewer than {TINY} images"
        findings.append(Finding("warning", "tiny-class", what, data.name, todo, named[:tiny]))
    if usual < FEW and tiny < len(counts):
        todo = "From scratch that gives little: begin with pretrained weights (weights registry:efficientnet_lite0)."
        findings.append(Finding("note", "few-images", f"few images per class: {usual:.0f} (median)", data.name, todo))
    if ratio > IMBALANCE:
        what = f"the largest class has {ratio:.0f} times as many images as the smallest"
        todo = "Accuracy will be dominated by the large classes; look at the table of classes of `everytoken eval`."
        findings.append(Finding("warning", "imbalance", what, data.name, todo, (named[-1], named[0])))
    return findings


def _sizes(data: DataSet, facts: Sequence[ImageFacts]) -> list[Finding]:
    sizes = np.array([image.size for image in facts if not image.trouble]).reshape(-1, 2)
    if not len(sizes):
        return []
    short, long = sizes.min(1), sizes.max(1)
    usual, todo = np.median(short), ""
    if usual >= 1000:
        todo = "Loading will be slow: copies with a shorter side of about 512 px train as well."
    elif usual <= 48:
        todo = "Use a model for small images (`everytoken models '*_32'`)."
    what = f"shorter sides {short.min()} to {short.max()} px, median {usual:.0f}"
    findings = [Finding("note", "sizes", what, data.name, todo)]
    if thin := int((long > 4 * short).sum()):
        todo = "Random crops of such images show little; cut them, or leave them out."
        what = f"{counted(thin, 'image')} more than four times as long as wide"
        findings.append(Finding("warning", "long-images", what, data.name, todo, count=thin))
    if small := int((short < 16).sum()):
        what, todo = (
            f"{counted(small, 'image')} with a side of fewer than 16 px",
            "They show next to nothing; leave them out.",
        )
        findings.append(Finding("warning", "small-images", what, data.name, todo, count=small))
    return findings


PAIRS = {
    "-across": ("in train and val", "Remove them from one split: validation must not see training images."),
    "-classes": ("in different classes", "One of the two labels is wrong: keep the image in one class."),
    "": ("of the same class", "Harmless in small numbers; remove one of each, so that it does not count twice."),
}


def _duplicates(images: Images) -> list[Finding]:
    places = [(name, index) for name, facts in images.facts.items() for index in facts]
    facts = [images.facts[name][index] for name, index in places]
    files = [images.splits[name].where(index) for name, index in places]
    labels = [images.splits[name].label_text(index) for name, index in places]
    same_bytes = [(group[0], other) for group in equal_groups(facts) for other in group[1:]]

    def found(pairs: Sequence[tuple[int, int]], code: str, alike: str, leak: Level) -> Iterator[Finding]:
        levels: dict[str, Level] = {"-across": leak, "-classes": "warning", "": "note"}
        kinds: dict[str, list[str]] = {kind: [] for kind in PAIRS}
        for a, b in pairs:
            kind = "-across" if places[a][0] != places[b][0] else "-classes" if labels[a] != labels[b] else ""
            kinds[kind].append(f"{files[a]} = {files[b]}")
        for kind, names in kinds.items():
            what = f"{counted(len(names), 'pair')} of images {PAIRS[kind][0]} with {alike}"
            if names:
                yield Finding(levels[kind], code + kind, what, images.spec, PAIRS[kind][1], names)

    return [
        *found(same_bytes, "duplicate", "the same bytes", "error"),
        *found(near_pairs(facts), "near-duplicate", "nearly the same pixels", "warning"),
    ]
