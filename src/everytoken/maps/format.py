"""What is in a store's folder: manifest, key table, shards. Names, layouts, and reading them with all checks.

``manifest.json`` says what the store is. It is written twice: when the job starts (settings, keys, shard size) and
when it ends (checksums of all files, ``complete: true``). It holds no time, host or path: equal stores are equal byte
for byte.

``keys.npy``, ``offsets.npy``, ``index.npy`` are the table of keys, found by hash, opened without reading them. Keys are
kept as their UTF-8 bytes, one after the other, in byte order (names that are not UTF-8 keep their own bytes, Python's
``surrogateescape``). The index has two rows: the CRC-32 of every key, sorted, and the position of that key. A look-up
is a binary search in the first row and an exact comparison of the key; equal hashes stand side by side and are all
compared. Everything is memory-mapped: opening costs the same for ten keys and for ten million.

``shard-00000.npy`` ... hold records of a fixed size (see `score_map`). While a store is being filled, a sealed
``shard-00000.json`` beside each finished shard says that it counts, and what its checksum is.

Cost: the key itself + 12 bytes per image; about 3 µs per look-up.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from everytoken import files
from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.score_map import RESIZE_MODES, record_dtype
from everytoken_lab import schema

MANIFEST, SKIPPED_LIST = "manifest.json", "skipped.csv"
RUNS = "runs.jsonl"  # who wrote when: the only file that differs between equal stores
KEYS, OFFSETS, INDEX = "keys.npy", "offsets.npy", "index.npy"
KEY_FILES = (KEYS, OFFSETS, INDEX)
FORMAT, VERSION = "everytoken-store", 1
RESTORE = "Restore it from a copy, or make the store again."


# The manifest


def class_names_hash(names: Sequence[str]) -> str:
    """SHA-256 of class names in their order: of the names as a JSON array without spaces, in ASCII."""
    return hashlib.sha256(json.dumps(list(names), separators=(",", ":")).encode()).hexdigest()


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
            raise StoreError(
                f"{len(self.class_names)} class names for {self.num_classes} classes; give one name per class."
            )
        if len(self.grid) != 2 or min(self.grid) < 1:
            raise StoreError(f"the grid of a map is (rows, columns), both at least 1; got {self.grid}.")
        self.grid = (int(self.grid[0]), int(self.grid[1]))
        if not 1 <= self.top_k <= self.num_classes < 2**32:
            raise StoreError(
                f"top_k is {self.top_k} with {self.num_classes} classes; it must be 1 .. number of classes."
            )
        if self.resize_mode not in RESIZE_MODES:
            raise StoreError(f"resize mode {self.resize_mode!r} is not one of {', '.join(RESIZE_MODES)}.")
        try:  # as it will be after reading: tuples are lists, keys are text
            self.annotator = json.loads(json.dumps(self.annotator, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StoreError(f"the annotator's settings must be plain JSON values: {error}.") from error

    def differences(self, other: StoreMeta, mine_is: str = "in the store", other_is: str = "now") -> list[str]:
        """What is not equal, in words, this store's value first; the most telling difference comes first.

        Settings that follow from a named difference (another annotator has other weights) are not listed one by one.
        """
        mine, theirs = (_flat({f.name: getattr(meta, f.name) for f in fields(StoreMeta)}) for meta in (self, other))
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if "annotator.name" in names:
            names = [name for name in names if name == "annotator.name" or not name.startswith("annotator.")]
        if "class_names" in names and mine["num_classes"] != theirs["num_classes"]:
            names.remove("class_names")
        names.sort(key=lambda name: (name != "annotator.name", name.startswith("annotator"), "sha256" in name))
        return [_difference(name, mine.get(name), theirs.get(name), mine_is, other_is) for name in names]


class _ShardEntry(TypedDict):
    file: str
    records: int
    sha256: str
    skipped: list[tuple[int, str]]


class _ManifestEntries(TypedDict):
    grid: tuple[int, int]
    top_k: int
    class_names: list[str]
    num_classes: int
    resize_mode: str
    annotator: dict[str, Any]
    total: int
    shard_size: int
    checksums: dict[str, str]
    record_bytes: int
    shards: list[_ShardEntry]
    complete: bool


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard: its checksum, and the records in it that are not maps (place in the shard, reason)."""

    file: str
    records: int
    sha256: str
    skipped: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ShardInfo:
        """From a checked entry of a manifest or sidecar."""
        return cls(entry["file"], entry["records"], entry["sha256"], tuple(map(tuple, entry["skipped"])))

    def fits(self, span: range) -> bool:
        """Whether this can be the shard of these positions."""
        return self.records == len(span) and all(0 <= place < len(span) for place, _ in self.skipped)


@dataclass
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total < 0 or self.shard_size < 1:
            raise StoreError(f"{self.total} images in shards of {self.shard_size} are not possible.")
        if extra := set(self.checksums) - {*KEY_FILES, SKIPPED_LIST}:
            raise StoreError(f"a store has no file {sorted(extra)[0]!r}.")

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
        return hashlib.sha256(files.seal(self._plan())).hexdigest()

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
                "shards": [vars(shard) for shard in self.shards],
                "complete": self.complete,
            }
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the store in `folder`."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError(f"there is no store at {folder}: no such folder. `everytoken annotate` makes one.")
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a store of score maps: it has no {MANIFEST}. `everytoken annotate` makes one; "
                "`everytoken maps import` makes one of a folder of released .pt maps."
            )
        try:
            content = files.unseal(path)
        except files.DamagedError as error:
            raise StoreDamagedError(str(error)) from error
        if content.get("format") != FORMAT:
            raise StoreError(f"{path} belongs to something else ({content.get('format')!r}), not to a store.")
        if content.get("version") != VERSION:
            raise StoreError(
                f"{path} has format version {content.get('version')}; this everytoken reads version {VERSION}. "
                "Update everytoken, or make the store again."
            )
        try:
            schema.parse(_ManifestEntries, content, str(path))
            names = {f.name for f in fields(cls)} - {"shards"}
            shards = tuple(map(ShardInfo.of, content["shards"]))
            manifest = cls(**{name: content[name] for name in names}, shards=shards)
            spans = map(manifest.shard_range, range(manifest.num_shards))
            if manifest.complete and not all(map(ShardInfo.fits, shards, spans)):
                raise StoreError("the shards do not fit the number of images.")
            if manifest.complete and len(shards) != manifest.num_shards:
                raise StoreError(f"{len(shards)} of {manifest.num_shards} shards are listed.")
            if missing := set(KEY_FILES) - set(manifest.checksums):
                raise StoreError(f"the checksum of {sorted(missing)[0]} is missing.")
            if manifest.record.itemsize != content["record_bytes"]:
                raise StoreError(f"a record of {content['record_bytes']} bytes does not hold a map.")
        except (StoreError, schema.SchemaError, ValueError, OverflowError, MemoryError) as error:
            words = str(error).removeprefix(f"{path}: ")
            raise StoreDamagedError(f"{path} is not what a store has there: {words} {RESTORE}") from error
        return manifest


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: list(value) if isinstance(value, tuple) else value}
    result: dict[str, Any] = {}
    for key, inner in value.items():
        result |= _flat(inner, f"{name}.{key}" if name else str(key))
    return result


def _difference(name: str, old: Any, new: Any, old_is: str, new_is: str) -> str:
    if "sha256" in name:
        return f"{name.replace('_sha256', '')}: not the same"
    if name == "class_names" and old and new:
        place = next(i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        name, old, new = f"class_names[{place}]", old[place], new[place]
    return f"{name.removesuffix('.name')}: {_short(old)} {old_is}, {_short(new)} {new_is}"


def _short(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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


def encode_key(key: str) -> bytes:
    """The bytes of a key, or an error that says what is wrong with it."""
    if not isinstance(key, str):
        raise StoreError(f"a key is a relative path as text, not {type(key).__name__} ({key!r}); use path.as_posix().")
    if not stays_inside(key):
        raise StoreError(
            f"{key!r} cannot be a key: keys are paths relative to the data folder with '/' between the parts, "
            "without a leading '/', '.', '..' or empty parts."
        )
    try:
        return key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise StoreError(f"the key {key!r} is not valid Unicode; rename the file.") from error


def decode_key(raw: bytes) -> str:
    """The key of some bytes; the opposite of `encode_key`, without its checks."""
    return raw.decode("utf-8", "surrogateescape")


def encode_keys(keys: Iterable[str]) -> list[bytes]:
    """Encoded keys in the store's order. Two equal keys are an error."""
    encoded = sorted(map(encode_key, keys))
    for before, after in pairwise(encoded):
        if before == after:
            raise StoreError(f"the key {decode_key(after)!r} occurs twice; every image needs a path of its own.")
    return encoded


def key_files(encoded: list[bytes]) -> dict[str, bytes]:
    """The contents of the files of a key table, by name."""
    ends = np.cumsum(np.fromiter(map(len, encoded), np.uint64, len(encoded)), dtype=np.uint64)
    offsets = np.concatenate([np.zeros(1, np.uint64), ends])
    hashes = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
    order = np.argsort(hashes, kind="stable")
    return {
        KEYS: _npy_bytes(np.frombuffer(b"".join(encoded), np.uint8)),
        OFFSETS: _npy_bytes(offsets.astype("<u4" if offsets[-1] < 2**32 else "<u8")),
        INDEX: _npy_bytes(np.stack([hashes[order], order.astype(np.uint32)]).astype("<u4")),
    }


def _npy_bytes(array: NDArray[np.generic]) -> bytes:
    """What `numpy.save` would write, without pickle."""
    buffer = BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


class KeyTable:
    """The keys of the store in `folder`, memory-mapped. Positions are 0 .. len-1, in byte order of the keys."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder = folder
        self._blob, self._offsets, index = (_load_npy(folder / name, RESTORE) for name in KEY_FILES)
        kinds = {array.dtype.kind for array in (self._blob, self._offsets, index)}
        shapes = self._blob.ndim == 1 and self._offsets.shape == (total + 1,) and index.shape == (2, total)
        if not shapes or kinds != {"u"} or self._offsets[0] != 0 or self._offsets[-1] != len(self._blob):
            raise StoreDamagedError(
                f"{folder}: {KEYS}, {OFFSETS} and {INDEX} do not hold the {total} keys that the manifest promises. "
                "Restore them from a copy, or make the store again."
            )
        self._hashes, self._order = index
        self._total = total

    def __len__(self) -> int:
        return self._total

    def raw(self, position: int) -> bytes:
        """The bytes of one key."""
        return self._blob[self._offsets[position] : self._offsets[position + 1]].tobytes()

    def key(self, position: int) -> str:
        """One key."""
        return self._checked(decode_key(self.raw(position)))

    def find(self, key: str) -> int:
        """Position of a key, or -1."""
        try:
            raw = key.encode("utf-8", "surrogateescape")
        except (UnicodeEncodeError, AttributeError):
            return -1
        hashed = np.uint32(zlib.crc32(raw))
        at = int(self._hashes.searchsorted(hashed))
        while at < self._total and self._hashes[at] == hashed:
            position = int(self._order[at])
            if position >= self._total:
                where = f"position {position} of {self._total}"
                raise StoreDamagedError(f"{self.folder / INDEX} is damaged: {key!r} is at {where}. {RESTORE}")
            if self.raw(position) == raw:
                return position
            at += 1
        return -1

    def iterate(self, start: int = 0, stop: int | None = None, check: bool = True) -> Iterator[str]:
        """Keys from `start` to `stop`, reading a block at a time."""
        stop = self._total if stop is None else stop
        for first in range(start, stop, 4096):
            ends = self._offsets[first : min(first + 4096, stop) + 1].tolist()
            block = self._blob[ends[0] : ends[-1]].tobytes()
            for a, b in pairwise(ends):
                key = decode_key(block[a - ends[0] : b - ends[0]])
                yield self._checked(key) if check else key

    def _checked(self, key: str) -> str:
        if not stays_inside(key):
            raise StoreDamagedError(
                f"{self.folder} has the key {key!r}, which is not a path inside a folder. Do not use this store: it is "
                "damaged, or somebody wants files to be written elsewhere."
            )
        return key

    def near(self, key: str, limit: int = 3) -> list[str]:
        """Keys that were perhaps meant: other spellings of the same path, then neighbours in the order of keys."""
        parts = key.replace("\\", "/").split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]  # an absolute path instead of a relative one
        spellings = [unicodedata.normalize(form, tail) for tail in tails for form in ("NFC", "NFD")]
        matches = [s for s in dict.fromkeys(tails + spellings) if s and self.find(s) >= 0]
        if not matches and self._total:
            at = self._bisect(key.encode("utf-8", "surrogatepass"))
            around = list(self.iterate(max(0, at - 16), min(self._total, at + 16)))
            matches = difflib.get_close_matches(key, around, n=limit, cutoff=0.8)  # further off is no help
        return matches[:limit]

    def _bisect(self, raw: bytes) -> int:
        low, high = 0, self._total
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.raw(middle) < raw else (low, middle)
        return low

    def damaged(self) -> list[str]:
        """Keys whose bytes do not fit the hash that was made of them (as far as they can be read)."""
        wrong = []
        for hashed, position in zip(self._hashes.tolist(), self._order.tolist(), strict=True):
            if position >= self._total:
                wrong.append(f"position {position}")
            elif zlib.crc32(self.raw(position)) != hashed:
                wrong.append(decode_key(self.raw(position)))
        return sorted(wrong)


# Shards


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.npy"


def shard_header(dtype: np.dtype[np.void], records: int) -> bytes:
    """The head of a shard's file: numpy's own, for a 1-D array of records."""
    buffer = BytesIO()
    content = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (records,)}
    np.lib.format.write_array_header_1_0(buffer, content)
    return buffer.getvalue()


def shard_bytes(manifest: Manifest, index: int) -> int:
    """Size of a shard's file."""
    records = len(manifest.shard_range(index))
    return len(shard_header(manifest.record, records)) + records * manifest.record.itemsize


def open_shard(folder: Path, manifest: Manifest, index: int) -> NDArray[np.uint8]:
    """The records of a shard as bytes [records, record_bytes], memory-mapped, read-only."""
    path, records = folder / shard_name(index), len(manifest.shard_range(index))
    array = _load_npy(path, how_to_restore(path), shard_bytes(manifest, index))
    if array.dtype != manifest.record or array.shape != (records,):
        raise StoreDamagedError(f"{path} is damaged: its header does not fit the manifest.\n{how_to_restore(path)}")
    return array.view(np.uint8).reshape(records, manifest.record.itemsize)


def how_to_restore(path: Path) -> str:
    """What to do about a bad shard."""
    return (
        f"Restore {path.name} from a copy, or delete it and run the command that made the store once more: "
        "it makes only this shard again."
    )


def sidecar(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.json"


def write_sidecar(folder: Path, manifest: Manifest, index: int, info: ShardInfo, rank: int = 0) -> None:
    """Say that a shard is done."""
    content = vars(info) | {"plan": manifest.plan_id()}
    files.write_atomically(sidecar(folder, index), files.seal(content), rank)


def read_sidecar(folder: Path, manifest: Manifest, index: int, plan_id: str | None = None) -> ShardInfo | None:
    """What is known about a finished shard; None when it is not finished (or belongs to another plan)."""
    path = sidecar(folder, index)
    try:
        content = files.unseal(path)
        if content.get("plan") != (plan_id or manifest.plan_id()):
            return None
        schema.parse(_ShardEntry, content, str(path))
        info = ShardInfo.of(content)
        whole = (folder / shard_name(index)).stat().st_size == shard_bytes(manifest, index)
        return info if whole and info.fits(manifest.shard_range(index)) else None
    except (FileNotFoundError, files.DamagedError, schema.SchemaError):
        return None


def _load_npy(path: Path, advice: str, size: int | None = None) -> NDArray[Any]:
    """An array, memory-mapped unless it is small; `size`: the bytes that the file must have."""
    try:
        stored = path.stat().st_size
        if size not in (None, stored):
            raise ValueError(f"it has {stored:,} bytes instead of {size:,}")
        # numpy cannot map an empty array; and the plain view is faster to index than numpy's memmap class
        return np.asarray(np.load(path, mmap_mode="r" if stored > 4096 else None, allow_pickle=False))
    except FileNotFoundError as error:
        raise StoreDamagedError(f"{path} is missing.\n{advice}") from error
    except Exception as error:  # numpy raises whatever its parser meets in a damaged header
        if isinstance(error, OSError) and error.errno is not None:  # no damage: too many open files, no permission
            raise files.FileError(f"{path} cannot be opened ({error.strerror}).") from error
        raise StoreDamagedError(f"{path} is damaged: {error}.\n{advice}") from error
