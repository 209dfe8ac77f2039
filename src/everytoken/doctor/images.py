"""Images: what is unreadable, duplicated, in both splits, or out of balance.

Near duplicates are found by a difference hash: the image as 9 x 8 grey cells, one bit for each pair of neighbours that
says which is brighter. Two images are candidates when 3 of 64 bits differ at most (they then agree in one of four bands
of 16 bits, by which they are found), and near duplicates when their 16 x 16 thumbnails also differ by 3 % at most.
Cost: decoding each image; 1 KB of memory per image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from everytoken.data.datasets import DataSet, find_split, open_dataset
from everytoken.data.decode import Picture
from everytoken.doctor.findings import Finding, counted, some
from everytoken.errors import EverytokenError, did_you_mean

TINY = 10  # images of a class below which it can hardly be learned
FEW = 50  # images per class (median) below which training from scratch learns little
IMBALANCE = 10.0  # largest class / smallest class
BANDS = 4
NEAR_BITS = 3
NEAR_PIXELS = 0.03 * 255
_FLAT = 4.0  # grey levels of spread below which an image is too empty to compare
_CROWD = 64  # images in one band beyond which it says too little to compare all pairs


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
    counts = np.bincount(data.labels[data.labels >= 0], minlength=data.num_classes)
    ranked = sorted(zip(counts.tolist(), data.class_names, strict=True))
    named = [f"{name}: {count}" for count, name in ranked if count]  # those of val alone are reported already
    counts = counts[counts > 0]
    findings = []
    tiny = int((counts < TINY).sum())
    if len(counts) < 2:
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
    labels = [images.parts[name].label(index) for name, index in places]

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
    labels: Sequence[int], where: Callable[[int], str], code: str,
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


# -- reading and comparing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFacts:
    """What is known of one image; `trouble` is set when it cannot be read, and the rest is then empty."""

    trouble: str = ""
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    code: int = 0
    thumb: bytes = b""


def read_facts(data: DataSet, index: int) -> ImageFacts:
    """Read and decode one image."""
    try:
        raw = data.open_bytes(index)
        picture = Picture(raw, data.where(index))
        image = picture.upright()
    except EverytokenError as error:
        return ImageFacts(trouble=str(error).splitlines()[0])
    except OSError as error:
        return ImageFacts(trouble=f"{data.where(index)}: {error.strerror or error}")
    code, thumb = fingerprint(image)
    return ImageFacts("", hashlib.blake2b(raw, digest_size=16).digest(), image.size, code, thumb)


def fingerprint(image: Image.Image) -> tuple[int, bytes]:
    """(difference hash, thumbnail); a flat image has hash 0 and no thumbnail."""
    grey = image.convert("L")
    cells = np.asarray(grey.resize((9, 8), Image.Resampling.BOX), np.int16)
    thumb = np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BOX))
    if thumb.std() < _FLAT:
        return 0, b""
    bits = (cells[:, 1:] > cells[:, :-1]).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumb.tobytes()


def read_all(data: DataSet, indices: Sequence[int], workers: int, tell: Callable[[], None]) -> list[ImageFacts]:
    """One `ImageFacts` per index, in order."""
    out = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        # in pieces, so that a million images do not wait in the queue
        for start in range(0, len(indices), 256):
            for image in pool.map(lambda i: read_facts(data, i), indices[start : start + 256]):
                out.append(image)
                tell()
    return out


def equal_groups(facts: Sequence[ImageFacts]) -> list[list[int]]:
    """Positions of images with the same bytes, two or more together."""
    found: dict[bytes, list[int]] = {}
    for position, image in enumerate(facts):
        if image.digest:
            found.setdefault(image.digest, []).append(position)
    return [group for group in found.values() if len(group) > 1]


def near_pairs(facts: Sequence[ImageFacts]) -> list[tuple[int, int]]:
    """Pairs of images that look the same and have other bytes."""
    bands: dict[tuple[int, int], list[int]] = {}
    for position, image in enumerate(facts):
        if image.thumb:
            for band in range(BANDS):
                bands.setdefault((band, image.code >> 16 * band & 0xFFFF), []).append(position)
    pairs = {pair for members in bands.values() for pair in _pairs(members) if _near(facts[pair[0]], facts[pair[1]])}
    return sorted(pairs)


def _pairs(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """All pairs, or in a crowd those of neighbours only."""
    reach = len(members) if len(members) <= _CROWD else 8
    for i, first in enumerate(members):
        for second in members[i + 1 : i + 1 + reach]:
            yield first, second


def _near(first: ImageFacts, second: ImageFacts) -> bool:
    if first.digest == second.digest or (first.code ^ second.code).bit_count() > NEAR_BITS:
        return False
    a, b = (np.frombuffer(image.thumb, np.uint8).astype(np.int16) for image in (first, second))
    return float(np.abs(a - b).mean()) <= NEAR_PIXELS
