"""The files of a store: shards in the safetensors format, each with the maps of a range of the sorted keys.

``shard-00003-of-00016.safetensors`` holds, for its n maps (all numbers little-endian):

    area         float64 [n, 4]              crc32        uint32 [n]: of key, size, area, classes and scores
    key_offsets  uint64 [n + 1]              classes      uint16 (uint32 from 65,536 classes on) [n, h, w, k]
    size         uint32 [n, 2]               scores       float16 [n, h, w, k]
                                             keys         uint8: the keys' UTF-8 bytes, one after the other

The metadata say what the store is (the same in every shard), which shard this is, which of its images were skipped and
why, and the SHA-256 of the rest of the header. A shard appears by rename, so it is there and whole or not there at all;
a header has exactly one spelling, so that whatever is wrong with it is noticed by writing it again and comparing.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.maps.score_map import RESIZE_MODES, class_dtype

FORMAT, VERSION = "everytoken-maps", "2"
RECORD = ("size", "area", "classes", "scores")  # what a record's CRC covers, after its key
_MAX_HEADER = 1 << 26  # bytes
_DTYPES = {"<f8": "F64", "<u8": "U64", "<u4": "U32", "<u2": "U16", "<f2": "F16", "|u1": "U8"}
BROKEN = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


class StoreError(EverytokenError):
    """A store cannot be written or read."""


class StoreDamagedError(StoreError, files.DamagedError):
    """Bytes on disk are not what was written."""


class StoreUnfinishedError(StoreError):
    """The job that fills the store has not been completed yet."""


class StoreMismatchError(StoreError):
    """The store was begun with other images or other settings."""


class UnknownKeyError(StoreError, KeyError):
    """The store has no map for a key."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


@dataclass
class StoreMeta:
    """What the maps of a store look like and who makes them; a store is only continued with equal values.

    Attributes:
        grid: (h, w) cells of a map.
        top_k: classes kept per cell.
        class_names: in the order of the class ids; may be empty when they are not known.
        num_classes: K; taken from `class_names` when 0.
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
        self.class_names = [str(name) for name in self.class_names]
        self.num_classes = int(self.num_classes) or len(self.class_names)
        self.top_k = int(self.top_k)
        if self.class_names and len(self.class_names) != self.num_classes:
            raise StoreError(f"{len(self.class_names)} class names for {self.num_classes} classes.")
        self.grid = (int(self.grid[0]), int(self.grid[1]))
        if min(self.grid) < 1 or not 1 <= self.top_k <= self.num_classes < 2**32:
            raise StoreError(f"no map has {self.grid} cells and {self.top_k} of {self.num_classes} classes in each.")
        if self.resize_mode not in RESIZE_MODES:
            raise StoreError(f"resize mode {self.resize_mode!r} is not one of {', '.join(RESIZE_MODES)}.")
        try:  # as it will be after reading: tuples are lists, keys are text
            self.annotator = json.loads(json.dumps(self.annotator, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StoreError(f"the annotator's settings must be plain JSON values: {error}.") from error

    def class_name(self, class_id: int) -> str:
        """Name of a class, for people."""
        return self.class_names[class_id] if self.class_names else f"class {class_id}"

    def differences(self, other: StoreMeta) -> list[str]:
        """What is not equal, in words, this store's value first; the most telling difference comes first."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if "annotator.name" in names:  # another annotator has other weights
            names = ["annotator.name", *(name for name in names if not name.startswith("annotator."))]
        shown = [(name.removesuffix(".name"), mine.get(name, "none"), theirs.get(name, "none")) for name in names]
        return [f"{name}: {before!s:.60} in the store, {now!s:.60} now" for name, before, now in shown]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: list(value) if isinstance(value, tuple) else value}


@dataclass(frozen=True)
class Plan:
    """What is fixed when a store is begun; every shard carries it.

    Attributes:
        total: number of images, with and without a map.
        shard_size: images per shard; the last shard may have fewer.
        keys_sha256: of all keys.
    """

    meta: StoreMeta
    total: int
    shard_size: int
    keys_sha256: str

    @property
    def num_shards(self) -> int:
        return -(-self.total // self.shard_size)

    def shard_range(self, number: int) -> range:
        """Positions in the sorted list of keys that a shard holds."""
        return range(number * self.shard_size, min((number + 1) * self.shard_size, self.total))

    def shard_name(self, number: int) -> str:
        return f"shard-{number:05d}-of-{self.num_shards:05d}.safetensors"


# Keys


def stays_inside(key: str) -> bool:
    """Whether a key is a relative path that leads nowhere but into a folder, on any operating system.

    Backslashes are allowed in names (badly made zip files have them), as long as they lead nowhere else on Windows.
    """
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in key:
        return False
    if key[1:3] in (":/", ":\\") and key[0].isascii() and key[0].isalpha():
        return False
    return "\\" not in key or not (key.startswith("\\") or ".." in key.replace("\\", "/").split("/"))


def encode_keys(keys: Iterable[str]) -> list[bytes]:
    """The keys' bytes, sorted; names that are not UTF-8 keep their own bytes."""
    encoded = []
    for key in keys:
        try:
            encoded.append(key.encode("utf-8", "surrogateescape"))
        except (UnicodeEncodeError, AttributeError) as error:
            raise StoreError(f"the key {key!r} is not text in valid Unicode; rename the file.") from error
        if not stays_inside(key):
            raise StoreError(f"{key!r} cannot be a key: keys are paths inside the data folder, with '/', without '..'.")
    encoded.sort()
    for before, after in pairwise(encoded):
        if before == after:
            raise StoreError(f"the key {decode_key(after)!r} occurs twice; every image needs a path of its own.")
    return encoded


def decode_key(raw: bytes) -> str:
    """The key of some bytes."""
    return raw.decode("utf-8", "surrogateescape")


# The safetensors format


def make_header(metadata: Mapping[str, str], layout: Layout) -> bytes:
    """The first bytes of a safetensors file; the SHA-256 of its own content is one of the metadata."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + int(np.dtype(dtype).itemsize) * math.prod(shape)
        content[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    content["__metadata__"]["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def map_file(path: Path) -> tuple[bytes, mmap.mmap]:
    """The header of a safetensors file, and all of its bytes, memory-mapped."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise damaged(path, "it is a link or no file")
        with files.open_regular(path) as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except ValueError as error:
        raise damaged(path, "it is empty") from error
    except OSError as error:
        raise files.FileError(f"{path} cannot be opened ({error.strerror}).") from error
    length = int.from_bytes(buffer[:8], "little")
    if length > min(_MAX_HEADER, len(buffer) - 8):
        raise damaged(path, "it does not begin like a safetensors file")
    return buffer[: 8 + length], buffer


def damaged(path: Path, why: str) -> StoreDamagedError:
    """The error about a bad file."""
    return StoreDamagedError(f"{path} is damaged: {why}. Restore it, or delete it and annotate again: only it is made.")


# Shards


def list_shards(folder: Path) -> list[Path]:
    """The finished shards of a folder, in order."""
    pattern = re.compile(r"shard-\d{5,9}-of-\d{5,9}\.safetensors")
    return sorted(path for path in folder.glob("shard-*") if pattern.fullmatch(path.name))


def shard_layout(plan: Plan, count: int, key_bytes: int = 0) -> Layout:
    """Types and shapes of a shard with `count` maps, whose keys have `key_bytes` bytes together."""
    cells = (count, *plan.meta.grid, plan.meta.top_k)
    return {
        "area": ("<f8", (count, 4)),
        "key_offsets": ("<u8", (count + 1,)),
        "size": ("<u4", (count, 2)),
        "crc32": ("<u4", (count,)),
        "classes": (class_dtype(plan.meta.num_classes).str, cells),
        "scores": ("<f2", cells),
        "keys": ("|u1", (key_bytes,)),
    }


def _metadata(plan: Plan, number: int, skipped: Sequence[tuple[str, str]]) -> dict[str, str]:
    store, reasons = json.dumps(asdict(plan), sort_keys=True), json.dumps(skipped)
    return {"format": FORMAT, "version": VERSION, "store": store, "shard": str(number), "skipped": reasons}


class Shard:
    """A finished shard, checked and memory-mapped; its records are not checked.

    Attributes:
        plan: of the whole store.
        number: 0 .. plan.num_shards - 1.
        count: number of maps.
        skipped: [(key, reason)] of the images without a map.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, buffer = map_file(path)
        try:
            content = json.loads(header[8:])
            metadata = content["__metadata__"]
            if metadata["format"] == FORMAT and metadata["version"] != VERSION:
                version = f"{metadata['version']!s:.20}"
                raise files.FileError(f"{path} has format version {version}; this everytoken reads {VERSION}.")
            plan = json.loads(metadata["store"])
            self.plan = Plan(**plan | {"meta": StoreMeta(**plan["meta"])})
            self.number = int(metadata["shard"])
            self.skipped = [(key + "", reason + "") for key, reason in json.loads(metadata["skipped"])]
            self.count, key_bytes = content["crc32"]["shape"][0], content["keys"]["shape"][0]
            layout = shard_layout(self.plan, self.count, key_bytes)
            good = make_header(_metadata(self.plan, self.number, self.skipped), layout) == header
            good &= path.name == self.plan.shard_name(self.number)
            good &= self.count >= 0 and self.count + len(self.skipped) == len(self.plan.shard_range(self.number))
            arrays, at = {}, len(header)
            for name, (dtype, shape) in layout.items():
                size = math.prod(shape)
                arrays[name] = np.frombuffer(buffer, dtype, size, at if size else 0).reshape(shape)
                at += arrays[name].nbytes
            good &= at == len(buffer)
            offsets = arrays["key_offsets"]
            good &= bool(offsets[0] == 0 and offsets[-1] == key_bytes and (offsets[1:] >= offsets[:-1]).all())
        except (*BROKEN, StoreError) as error:
            raise damaged(path, "it is not a shard of score maps as everytoken writes it") from error
        if not good:
            raise damaged(path, "its header does not match its own checksum, its name or its content")
        parts = [arrays[name] for name in RECORD]
        self._parts = [(part.reshape(-1).view(np.uint8).data, part.nbytes // max(1, self.count)) for part in parts]
        self._crc32, self._offsets, self._keys = (arrays[name].data for name in ("crc32", "key_offsets", "keys"))

    def raw_key(self, row: int) -> bytes:
        """The bytes of one key."""
        return bytes(self._keys[self._offsets[row] : self._offsets[row + 1]])

    def raw_keys(self) -> Iterator[bytes]:
        """The bytes of all keys."""
        blob = bytes(self._keys)
        return (blob[start:end] for start, end in pairwise(self._offsets.tolist()))

    def record(self, row: int) -> bytearray:
        """A copy of the bytes of one map: size, area, classes, scores."""
        return bytearray().join([data[row * size : (row + 1) * size] for data, size in self._parts])

    def intact(self, row: int, raw_key: bytes, record: bytearray) -> bool:
        """Whether a record is what was written under this key."""
        return zlib.crc32(record, zlib.crc32(raw_key)) == self._crc32[row]


def write_shard(
    folder: Path,
    plan: Plan,
    number: int,
    raw_keys: Sequence[bytes],
    arrays: Mapping[str, NDArray[Any]],
    skipped: Sequence[tuple[str, str]],
    rank: int = 0,
) -> None:
    """Write a shard of checked maps, which appears whole or not at all.

    `arrays` has size, area, classes and scores, in the types of the shard and in the order of the sorted keys.
    """
    keys, offsets = np.frombuffer(b"".join(raw_keys), np.uint8), np.cumsum([0, *map(len, raw_keys)])
    crc = [zlib.crc32(key) for key in raw_keys]
    for name in RECORD:
        crc = [zlib.crc32(row.data, before) for row, before in zip(arrays[name], crc, strict=True)]
    content = {**arrays, "keys": keys, "key_offsets": offsets, "crc32": np.array(crc)}
    layout = shard_layout(plan, len(raw_keys), len(keys))
    with files.writing(folder / plan.shard_name(number), rank) as file:
        files.write_all(file.fileno(), make_header(_metadata(plan, number, skipped), layout))
        for name, (dtype, _) in layout.items():
            if content[name].size:
                files.write_all(file.fileno(), content[name].astype(dtype, copy=False).data)


def find_plan(folder: Path) -> Plan | None:
    """What the store in `folder` was begun with; None if it has no whole shard."""
    for path in list_shards(folder):
        try:
            return Shard(path).plan
        except StoreDamagedError:
            continue
    return None
