"""Score maps: whole, finished, of these images, and in the data's order of classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, verify
from everytoken_lab.classes import class_finder
from everytoken_lab.data.datasets import DataSet, split_off
from everytoken_lab.doctor import Finding
from everytoken_lab.doctor.images import Images


def examine_maps(path: Path, tell: Callable[[int, int], None]) -> Iterator[Finding]:
    """The store by itself: every byte, and whether it is finished."""
    where, again = str(path), "Run the `everytoken annotate` command of this store again."
    try:
        verdict = verify(path, tell)
        skipped = Maps(path, partial=True).skipped
    except EverytokenError as error:
        yield Finding("error", "maps-unusable", str(error).splitlines()[0], where, again)
        return
    if verdict.problems:
        todo = "Restore the files from a copy, or delete the damaged shards and annotate again."
        what = f"{len(verdict.problems)} files of the store are damaged"
        yield Finding("error", "maps-damaged", what, where, todo, [str(problem) for problem in verdict.problems])
    if not verdict.complete:
        what = f"the store is not finished: {verdict.maps:,} of {verdict.images:,} images have a map"
        yield Finding("error", "maps-unfinished", what, where, f"{again} It resumes where it stopped.")
    if verdict.skipped:
        todo = "Replace these images and annotate again with --retry-skipped; training stops at an image without a map."
        what = f"{verdict.skipped} images were skipped by the annotator"
        reasons = [f"{key}: {why}" for key, why in skipped.items()]
        yield Finding("warning", "maps-skipped", what, where, todo, reasons)
    yield Finding("note", "maps", f"{verdict.maps:,} maps, {verdict.bytes / 1e6:,.1f} MB, all read", where)


def compare(path: Path, images: Images) -> Iterator[Finding]:
    """A store with the images that will be trained on."""
    try:
        store = Maps(path, partial=True)
    except EverytokenError:
        return  # reported already
    if data := images.splits.get("train"):
        yield from _class_order(store, data)
        yield from _missing(store, data)
        yield from _stale(store, data, images)


def _class_order(store: Maps, data: DataSet) -> Iterator[Finding]:
    mine, theirs, where = list(data.class_names), list(store.meta.class_names), str(store.path)
    both = set(mine) & set(theirs)
    if not theirs:
        what = f"the maps do not name their {store.meta.num_classes} classes"
        todo = "Their order cannot be checked; give names when importing (`everytoken maps import --help`)."
        yield Finding("warning", "classes-unnamed", what, where, todo)
    elif sorted(mine) == sorted(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        if moved := [f"{i}: {a} in the data, {b} in the maps" for i, (a, b) in pairs if a != b]:
            todo = "Annotate again without --class-list (training sorts class names), into a new store."
            what = f"the maps have the data's classes in another order ({len(moved)} numbers differ)"
            yield Finding("error", "class-order", what, where, todo, moved)
    elif both:
        odd = [f"only in the data: {n}" for n in mine if n not in both]
        odd += [f"only in the maps: {n}" for n in theirs if n not in both]
        todo = "If classes were added or renamed, annotate again; else tokens learn the maps' classes as foreign ones."
        what = f"the maps have {len(both)} of the data's {len(mine)} classes"
        yield Finding("warning", "classes-differ", what, where, todo, odd)
    else:
        find = class_finder(theirs)
        known = sum(find(name) is not None for name in mine)
        among = f"; {known} of the data's {len(mine)} are among them by another name" if known else ""
        what = f"the maps have {len(theirs)} classes of their own (such as {theirs[0]!r}){among}"
        todo = "That is fine: tokens learn the maps' classes, the class token the data's."
        yield Finding("note", "classes-foreign", what, where, todo)


def _missing(store: Maps, data: DataSet) -> Iterator[Finding]:
    keys, skipped, where = dict.fromkeys(data.keys()), store.skipped, str(store.path)
    lacking = [key for key in keys if key not in store and key not in skipped]
    if lacking and (fraction := _held_out(data, set(lacking))):
        what = f"{len(lacking):,} images have no map: those that --val-split {fraction:g} holds out for validation"
        yield Finding("note", "maps-held-out", what, where, f"Train with --val-split {fraction:g}, too.")
    elif lacking:
        todo = "Annotate all images into a new store."
        what = f"{len(lacking):,} of {len(data):,} training images have no map"
        yield Finding("error", "maps-missing", what, where, todo, lacking)
    if left := [key for key in store if key not in keys]:
        what = f"{len(left):,} maps belong to no training image of {data.name}"
        todo = "Harmless: images held out for validation, or removed since."
        yield Finding("note", "maps-left-over", what, where, todo, left)


def _held_out(data: DataSet, keys: set[str]) -> float:
    """The --val-split that holds out exactly these images; 0 if none of the usual ones does."""
    for fraction in (0.1, 0.2, 0.05, 0.15, 0.25, 0.3, round(len(keys) / len(data), 2)):
        if 0 < fraction < 1 and {data.key(i) for i in split_off(data, fraction, 0)[1].tolist()} == keys:
            return fraction
    return 0.0


def _stale(store: Maps, data: DataSet, images: Images) -> Iterator[Finding]:
    """Images that have another size than when they were annotated."""
    resized = []
    for index, image in images.facts.get("train", {}).items():
        key = data.key(index)
        if image.trouble or key not in store:
            continue
        with contextlib.suppress(EverytokenError):  # damaged, and reported as such
            size = tuple(store[key].size)
            if size not in ((0, 0), image.size):
                resized.append(f"{key}: {size[0]}x{size[1]} when annotated, {image.size[0]}x{image.size[1]} now")
    if resized:
        what = f"{len(resized)} images have another size than when they were annotated"
        todo = "Annotate them again into a new store: a map must show the very image that is trained on."
        yield Finding("error", "maps-stale", what, str(store.path), todo, resized)
