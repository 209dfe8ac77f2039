"""The keys of a store: exact relative paths, found by hash, opened without reading them.

Keys are kept as their UTF-8 bytes, one after the other, in byte order (``keys.npy`` and ``offsets.npy``).
File names that are not UTF-8 keep their own bytes (Python's ``surrogateescape``). ``index.npy`` has two
rows: the CRC-32 of every key, sorted, and the position of that key. A look-up is one binary search in
the first row and an exact comparison of the key; equal hashes stand side by side and are all compared.
Everything is memory-mapped: opening costs the same for ten keys and for ten million.

Cost: the key itself + 4 bytes (offset) + 8 bytes (index) per image; about 3 µs per look-up.
"""

from __future__ import annotations

import difflib
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everytoken.maps.errors import StoreDamagedError, StoreError

KEYS, OFFSETS, INDEX = "keys.npy", "offsets.npy", "index.npy"
FILES = (KEYS, OFFSETS, INDEX)


def encode(key: str) -> bytes:
    """The bytes of a key, or an error that says what is wrong with it."""
    if not isinstance(key, str):
        raise StoreError(f"a key is a relative path as text, not {type(key).__name__} ({key!r}); use path.as_posix().")
    try:
        raw = key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise StoreError(f"the key {key!r} is not valid Unicode; rename the file.") from error
    parts = key.split("/")
    if "\0" in key or "" in parts or "." in parts or ".." in parts:
        raise StoreError(
            f"{key!r} cannot be a key: keys are paths relative to the data folder with '/' between the parts, "
            "without a leading '/', '.', '..' or empty parts."
        )
    return raw


def decode(raw: bytes) -> str:
    """The key of some bytes; the opposite of ``encode``."""
    return raw.decode("utf-8", "surrogateescape")


def plan(keys: Iterable[str]) -> list[bytes]:
    """Encoded keys in the store's order. Two equal keys are an error."""
    encoded = sorted(map(encode, keys))
    for before, after in pairwise(encoded):
        if before == after:
            raise StoreError(f"the key {decode(after)!r} occurs twice; every image needs a path of its own.")
    return encoded


def npy_bytes(array: NDArray[np.generic]) -> bytes:
    """What ``numpy.save`` would write, without pickle."""
    from io import BytesIO

    buffer = BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def arrays(encoded: list[bytes]) -> dict[str, NDArray[np.generic]]:
    """The three arrays of a plan, by file name."""
    ends = np.cumsum(np.fromiter(map(len, encoded), np.uint64, len(encoded)), dtype=np.uint64)
    offsets = np.concatenate([np.zeros(1, np.uint64), ends])
    hashes = np.fromiter(map(zlib.crc32, encoded), np.uint32, len(encoded))
    order = np.argsort(hashes, kind="stable")
    return {
        KEYS: np.frombuffer(b"".join(encoded), np.uint8),
        OFFSETS: offsets.astype("<u4" if offsets[-1] < 2**32 else "<u8"),
        INDEX: np.stack([hashes[order], order.astype(np.uint32)]).astype("<u4"),
    }


def npy_files(encoded: list[bytes]) -> dict[str, bytes]:
    """The contents of the plan's files, by name."""
    return {name: npy_bytes(array) for name, array in arrays(encoded).items()}


class KeyTable:
    """The keys of the store in ``folder``, memory-mapped. Positions are 0 .. len-1, in byte order of the keys."""

    def __init__(self, folder: Path, total: int) -> None:
        self._blob = _open(folder / KEYS, 1)
        self._offsets = _open(folder / OFFSETS, 1)
        index = _open(folder / INDEX, 2)
        if self._offsets.shape != (total + 1,) or index.shape != (2, total):
            raise StoreDamagedError(
                f"{folder}: {OFFSETS} and {INDEX} do not hold the {total} keys that the manifest promises. "
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
        return decode(self.raw(position))

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
            if self.raw(position) == raw:
                return position
            at += 1
        return -1

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """Keys from ``start`` to ``stop``, reading a block at a time."""
        stop = self._total if stop is None else stop
        for first in range(start, stop, 4096):
            ends = self._offsets[first : min(first + 4096, stop) + 1].tolist()
            block = self._blob[ends[0] : ends[-1]].tobytes()
            for a, b in pairwise(ends):
                yield decode(block[a - ends[0] : b - ends[0]])

    def near(self, key: str, limit: int = 3) -> list[str]:
        """Keys that were perhaps meant: other spellings of the same path, then neighbours in the order of keys."""
        parts = str(key).replace("\\", "/").split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]  # an absolute path instead of a relative one
        spellings = [unicodedata.normalize(form, tail) for tail in tails for form in ("NFC", "NFD")]
        found = [s for s in dict.fromkeys(tails + spellings) if s and self.find(s) >= 0]
        if not found and self._total:
            at = self._bisect(str(key).encode("utf-8", "surrogatepass"))
            around = list(self.iterate(max(0, at - 16), min(self._total, at + 16)))
            found = difflib.get_close_matches(str(key), around, n=limit, cutoff=0.8)  # further off is no help
        return found[:limit]

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
            if not 0 <= position < self._total or zlib.crc32(self.raw(position)) != hashed:
                wrong.append(self.key(position) if 0 <= position < self._total else f"position {position}")
        return sorted(wrong)


def _open(path: Path, ndim: int) -> NDArray[np.generic]:
    try:
        # numpy cannot map an empty array; and the plain view is faster to index than numpy's memmap class
        array = np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise StoreDamagedError(f"{path} is missing. Restore it from a copy, or make the store again.") from error
    except Exception as error:  # numpy raises whatever its parser meets in a damaged header
        raise StoreDamagedError(
            f"{path} is damaged ({error}). Restore it from a copy, or make the store again."
        ) from error
    if array.ndim != ndim or array.dtype.kind != "u":
        raise StoreDamagedError(f"{path} does not hold what a store has there ({array.dtype}, {array.shape}).")
    return np.asarray(array)
