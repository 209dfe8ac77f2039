"""Score maps: whole, finished, of these images, and in the data's order of classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, verify
from everytoken.maps.format import list_shards
from everytoken_lab.classes import class_finder
from everytoken_lab.data.datasets import DataSet, split_off
from everytoken_lab.doctor.findings import Finding, some
from everytoken_lab.doctor.images import Images


def examine_maps(path: Path, tell: Callable[[int, int], None]) -> tuple[Maps | None, list[Finding]]:
    """The store by itself: every byte, and whether it is finished."""
    where, again = str(path), "Run the `everytoken annotate` command of this store again."
    try:
        verdict = verify(path, tell)
        store = Maps(path, partial=True)
    except EverytokenError as error:
        return None, [Finding("error", "maps-unusable", str(error).splitlines()[0], where, again)]
    findings = []
    if verdict.problems:
        todo = "Restore the files from a copy, or delete the damaged shards and annotate again."
        damaged = [str(problem) for problem in verdict.problems]
        what = f"{len(damaged)} files of the store are damaged"
        findings.append(Finding("error", "maps-damaged", what, where, todo, some(damaged), len(damaged)))
    if not verdict.complete:
        what = f"the store is not finished: {verdict.maps:,} of {verdict.images:,} images have a map"
        findings.append(Finding("error", "maps-unfinished", what, where, f"{again} It resumes where it stopped."))
    if verdict.skipped:
        reasons = [f"{key}: {why}" for key, why in store.skipped.items()]
        todo = "Replace these images and annotate again with --retry-skipped; training stops at an image without a map."
        what = f"{verdict.skipped} images were skipped by the annotator"
        findings.append(Finding("warning", "maps-skipped", what, where, todo, some(reasons), verdict.skipped))
    findings.append(Finding("note", "maps", f"{verdict.maps:,} maps, {verdict.bytes / 1e6:,.1f} MB, all read", where))
    return store, findings


def compare(store: Maps, images: Images) -> list[Finding]:
    """A store with the images that will be trained on."""
    data = images.splits.get("train")
    if data is None:
        return []
    return [*_class_order(store, data), *_missing(store, data), *_stale(store, data, images)]


def _class_order(store: Maps, data: DataSet) -> list[Finding]:
    mine, theirs = list(data.class_names), list(store.meta.class_names)
    where = str(store.path)
    if not theirs:
        what = f"the maps do not name their {store.meta.num_classes} classes"
        todo = "Their order cannot be checked; give names when importing (`everytoken maps import --help`)."
        return [Finding("warning", "classes-unnamed", what, where, todo)]
    if mine == theirs:
        return []
    if sorted(mine) == sorted(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        moved = [f"{i}: {a} in the data, {b} in the maps" for i, (a, b) in pairs if a != b]
        todo = "Annotate again without --class-list (training sorts class names), into a new store."
        what = f"the maps have the data's classes in another order ({len(moved)} numbers differ)"
        return [Finding("error", "class-order", what, where, todo, some(moved), len(moved))]
    both = set(mine) & set(theirs)
    if both:
        odd = [f"only in the data: {n}" for n in mine if n not in both]
        odd += [f"only in the maps: {n}" for n in theirs if n not in both]
        todo = "If classes were added or renamed, annotate again; else tokens learn the maps' classes as foreign ones."
        what = f"the maps share {len(both)} of the data's {len(mine)} classes"
        return [Finding("warning", "classes-differ", what, where, todo, some(odd), len(odd))]
    find = class_finder(theirs)
    known = sum(find(name) is not None for name in mine)
    among = f"; {known} of the data's {len(mine)} are among them by another name" if known else ""
    what = f"the maps speak {len(theirs)} classes of their own (such as {theirs[0]!r}){among}"
    todo = "That is fine: tokens learn the maps' classes, the class token the data's."
    return [Finding("note", "classes-foreign", what, where, todo)]


def _missing(store: Maps, data: DataSet) -> list[Finding]:
    skipped, keys = store.skipped, set[str]()
    lacking = []
    for key in data.keys():  # noqa: SIM118
        keys.add(key)
        if key not in store and key not in skipped:
            lacking.append(key)
    findings = []
    share = _held_out(data, set(lacking)) if lacking else 0.0
    if share:
        what = f"{len(lacking):,} images have no map: those that --val-split {share:g} holds out for validation"
        todo = f"Train with --val-split {share:g}, too."
        findings.append(Finding("note", "maps-held-out", what, str(store.path), todo))
    elif lacking:
        todo = "Annotate all images into a new store (`everytoken annotate ... --out NEW --reuse OLD` does only these)."
        what = f"{len(lacking):,} of {len(data):,} training images have no map"
        findings.append(Finding("error", "maps-missing", what, str(store.path), todo, some(lacking), len(lacking)))
    left = [key for key in store if key not in keys]
    if left:
        what = f"{len(left):,} maps belong to no training image of {data.name}"
        todo = "Harmless: images held out for validation, or removed since."
        findings.append(Finding("note", "maps-left-over", what, str(store.path), todo, some(left), len(left)))
    return findings


def _held_out(data: DataSet, keys: set[str]) -> float:
    """The --val-split that holds out exactly these images; 0 if none of the usual ones does."""
    about = round(len(keys) / len(data), 2)
    for share in dict.fromkeys((0.1, 0.2, 0.05, 0.15, 0.25, 0.3, about)):
        if 0 < share < 1 and {data.key(i) for i in split_off(data, share, 0)[1].tolist()} == keys:
            return share
    return 0.0


def _stale(store: Maps, data: DataSet, images: Images) -> list[Finding]:
    """Images that have another size than when they were annotated, or were written after that."""
    resized, newer = [], []
    made = max(path.stat().st_mtime for path in list_shards(store.path))
    for index, image in images.facts.get("train", {}).items():
        key = data.key(index)
        if image.trouble or key not in store:
            continue
        try:
            size = tuple(store[key].size)
        except EverytokenError:
            continue  # damaged, and reported as such
        if size != (0, 0) and size != image.size:
            resized.append(f"{key}: {size[0]}x{size[1]} when annotated, {image.size[0]}x{image.size[1]} now")
        else:
            file = data.where(index)
            if os.path.isfile(file) and os.stat(file).st_mtime > made + 1:
                newer.append(key)
    todo = "Annotate them again into a new store: a map must show the very image that is trained on."
    findings = []
    if resized:
        what = f"{len(resized)} images have another size than when they were annotated"
        findings.append(Finding("error", "maps-stale", what, str(store.path), todo, some(resized), len(resized)))
    if newer:
        what = f"{len(newer)} image files were written after their maps"
        doubt = f"If their content has changed: {todo[0].lower()}{todo[1:]}"
        findings.append(Finding("warning", "maps-older", what, str(store.path), doubt, some(newer), len(newer)))
    return findings
