"""What a store says about itself: ``manifest.json``.

It is written twice: when the job starts (the plan: settings, keys, shard size) and when it ends (the
checksums of all files, ``complete: true``). It holds no time, host or path, so that equal stores are
equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from everytoken import files
from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.scoremap import RESIZE_MODES, record_dtype

MANIFEST = "manifest.json"
SKIPPED_LIST = "skipped.csv"
FORMAT, VERSION = "everytoken-store", 1


def class_names_hash(names: Sequence[str]) -> str:
    """SHA-256 of class names in their order: of the names as a JSON array without spaces, in ASCII."""
    return hashlib.sha256(json.dumps(list(names), separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class StoreMeta:
    """What the writer of a store decides; a store is only continued with equal values.

    Attributes:
        grid: (h, w) cells of a map.
        top_k: classes kept per cell.
        class_names: in the order of the class ids; may be empty when they are not known.
        num_classes: K; taken from ``class_names`` when 0.
        resize_mode: how the image went into the annotator: "squash", "letterbox" or "center".
        annotator: who made the maps, with every setting that changes them; anything JSON can hold.
    """

    grid: tuple[int, int]
    top_k: int
    class_names: Sequence[str] = ()
    num_classes: int = 0
    resize_mode: str = "squash"
    annotator: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names, grid = [str(name) for name in self.class_names], tuple(int(side) for side in self.grid)
        object.__setattr__(self, "class_names", names)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "num_classes", int(self.num_classes) or len(names))
        object.__setattr__(self, "top_k", int(self.top_k))
        if names and len(names) != self.num_classes:
            raise StoreError(f"{len(names)} class names for {self.num_classes} classes; give one name per class.")
        if len(grid) != 2 or min(grid) < 1:
            raise StoreError(f"the grid of a map is (rows, columns), both at least 1; got {self.grid}.")
        if not 1 <= self.top_k <= self.num_classes < 2**32:
            raise StoreError(
                f"top_k is {self.top_k} with {self.num_classes} classes; it must be 1 .. number of classes."
            )
        if self.resize_mode not in RESIZE_MODES:
            raise StoreError(f"resize mode {self.resize_mode!r} is not one of {', '.join(RESIZE_MODES)}.")
        try:  # as it will be after reading: tuples are lists, keys are text
            plain = json.loads(json.dumps(self.annotator, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StoreError(f"the annotator's settings must be plain JSON values: {error}.") from error
        object.__setattr__(self, "annotator", plain)

    def differences(self, other: StoreMeta) -> list[str]:
        """What is not equal, in words, this one's value first; the most telling difference comes first.

        Settings that follow from a named difference (another annotator has other weights) are not told one by one.
        """
        mine, theirs = (_flat({f.name: getattr(meta, f.name) for f in fields(StoreMeta)}) for meta in (self, other))
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if "annotator.name" in names:
            names = [name for name in names if name == "annotator.name" or not name.startswith("annotator.")]
        if "class_names" in names and mine["num_classes"] != theirs["num_classes"]:
            names.remove("class_names")
        names.sort(key=lambda name: (list(_WORDS).index(name) if name in _WORDS else len(_WORDS), "sha256" in name))
        return [_difference(name, mine.get(name), theirs.get(name)) for name in names]


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard: its checksum, and the records in it that are not maps (place in the shard, reason)."""

    file: str
    records: int
    sha256: str
    skipped: tuple[tuple[int, str], ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardInfo:
        skipped = tuple((int(place), str(reason)) for place, reason in content["skipped"])
        return cls(str(content["file"]), int(content["records"]), str(content["sha256"]), skipped)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "records": self.records, "sha256": self.sha256, "skipped": self.skipped}


@dataclass(frozen=True)
class Manifest(StoreMeta):
    """The manifest of a store.

    Attributes (besides those of StoreMeta):
        total: images of the plan: maps + skipped (+ those still to be made).
        shard_size: records per shard; the last shard may have fewer.
        checksums: SHA-256 of the files that are not shards, by name.
        shards: finished shards; filled when the store is complete.
        complete: every image of the plan was annotated or skipped.
    """

    total: int = 0
    shard_size: int = 1
    checksums: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[ShardInfo, ...] = ()
    complete: bool = False

    @property
    def num_shards(self) -> int:
        return -(-self.total // self.shard_size)

    @property
    def skipped(self) -> int:
        """Images without a map in the finished shards."""
        return sum(len(shard.skipped) for shard in self.shards)

    @property
    def class_names_sha256(self) -> str:
        return class_names_hash(self.class_names) if self.class_names else ""

    @property
    def record(self) -> np.dtype[np.void]:
        """The type of one record."""
        return record_dtype(self.grid, self.top_k, self.num_classes)

    def class_name(self, class_id: int) -> str:
        """Name of a class, for people."""
        return self.class_names[class_id] if self.class_names else f"class {class_id}"

    def shard_range(self, index: int) -> range:
        """Positions of the plan that a shard holds."""
        return range(index * self.shard_size, min((index + 1) * self.shard_size, self.total))

    def plan_id(self) -> str:
        """A name for everything that was fixed when the store was begun."""
        content = self._plan()
        return hashlib.sha256(files.seal(content)).hexdigest()

    def _plan(self) -> dict[str, Any]:
        names = [f.name for f in fields(StoreMeta)] + ["total", "shard_size"]
        checksums = {name: digest for name, digest in self.checksums.items() if name != SKIPPED_LIST}
        return {name: getattr(self, name) for name in names} | {"checksums": checksums}

    def to_bytes(self) -> bytes:
        return files.seal(
            self._plan()
            | {
                "format": FORMAT,
                "version": VERSION,
                "class_names_sha256": self.class_names_sha256,
                "record_bytes": self.record.itemsize,
                "maps": self.total - self.skipped if self.complete else 0,
                "skipped": self.skipped,
                "checksums": dict(self.checksums),
                "shards": [shard.to_json() for shard in self.shards],
                "complete": self.complete,
            }
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the store in ``folder``."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError(f"there is no store at {folder}: no such folder. Make one with `everytoken annotate`.")
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a store of score maps: it has no {MANIFEST}. Make one with `everytoken annotate`; "
                "a folder of released .pt maps becomes one with `everytoken labels import`."
            )
        content = files.unseal(path)
        if content.get("format") != FORMAT:
            raise StoreError(f"{path} belongs to something else ({content.get('format')!r}), not to a store.")
        if content.get("version") != VERSION:
            raise StoreError(
                f"{path} has format version {content.get('version')}; this everytoken reads version {VERSION}. "
                "Update everytoken, or make the store again."
            )
        try:
            known = {f.name for f in fields(cls)} - {"shards"}
            shards = tuple(map(ShardInfo.from_json, content["shards"]))
            return cls(**{name: content[name] for name in known}, shards=shards)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreDamagedError(f"{path} lacks or mixes up entries ({error}). Restore it from a copy.") from error


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: list(value) if isinstance(value, tuple) else value}
    result: dict[str, Any] = {}
    for key, inner in value.items():
        result |= _flat(inner, f"{name}.{key}" if name else str(key))
    return result


_WORDS = {  # the most telling first
    "annotator.name": "annotator",
    "num_classes": "number of classes",
    "class_names": "classes",
    "annotator.input.size": "size of the annotator's input",
    "grid": "cells of a map",
    "top_k": "classes kept per cell",
    "resize_mode": "how images are resized",
    "annotator.fit.folds": "folds",
    "annotator.amp": "mixed precision",
}


def _difference(name: str, old: Any, new: Any) -> str:
    word = _WORDS.get(name, name.removeprefix("annotator.").replace(".", " ").replace("_", " "))
    if "sha256" in name:
        return f"{word.replace(' sha256', '')}: not the same"
    if name == "class_names" and old and new:
        place = next(i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        return f"{word}: number {place} is {_short(old[place])} in the store, {_short(new[place])} now"
    return f"{word}: {_short(old)} in the store, {_short(new)} now"


def _short(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return f"{value[0]} x {value[1]}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
