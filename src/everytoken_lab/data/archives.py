"""Tar files as they are: indexed once, then read at random, without unpacking.

The index (name, offset, size of each member) is read when the archive is opened. Tar files must be uncompressed, as a
compressed one can only be read from its beginning. Headers with which Python's reader would never end are refused.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Self

import numpy as np

from everytoken.errors import DataError
from everytoken.files import open_regular
from everytoken_lab.data.decode import ImageError

_FAR = 1 << 62
_LONGEST_NAME = 1 << 14  # bytes of a tar header that belongs to another one, for long names
_ABOUT_OTHERS = (b"x", b"g", b"X", b"L", b"K")  # pax headers, of one member or all; GNU's long names and links


class Strings(Sequence[str]):
    """A list of strings in two arrays."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        self._blob = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no sample {i} of {len(self)}")
        i %= len(self)
        start = int(self._ends[i - 1]) if i else 0
        return self._blob[start : self._ends[i]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class ArchiveReader:
    """Members of one or several tar files.

    Args:
        archives: files on the local disk.
        names: what to call each in messages, such as its address.
    """

    def __init__(self, archives: Sequence[Path], names: Sequence[str] = ()) -> None:
        self.archives, self.names = list(archives), list(names) or list(map(str, archives))
        paths: list[str] = []
        rows: list[tuple[int, int, int]] = []  # archive, offset, size
        for number, archive in enumerate(self.archives):
            length = archive.stat().st_size
            with open_regular(archive) as stream:
                members = index_of(stream, self.names[number])
            for path, offset, size in members:
                paths.append(path.removeprefix("./").lstrip("/"))
                rows.append((number, min(offset, _FAR), min(size, length)))  # whatever the header says
        self.paths = Strings(paths)
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), 3)

    def where(self, i: int) -> str:
        """The archive and the member."""
        return f"{self.names[int(self._rows[i, 0])]}!{self.paths[i]}"

    def read(self, i: int) -> bytes:
        """The bytes of member i."""
        number, offset, size = self._rows[i].tolist()
        with open_regular(self.archives[number]) as stream:
            stream.seek(offset)
            data = stream.read(size)
        if len(data) < size:
            raise ImageError(f"{self.where(i)}: the archive is truncated.")
        return data


def index_of(stream: IO[bytes], name: str) -> list[tuple[str, int, int]]:
    """(name, offset, size) of the regular members of an archive; a DataError if it is none."""
    stream.seek(0)
    if stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):  # gzip, bzip2, xz, zstd
        raise DataError(f"{name} is compressed: single images cannot be read from it. Decompress it to a plain .tar.")
    stream.seek(0)
    members = []
    try:
        with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Header) as archive:
            for m in archive:
                if not 0 <= m.size < _FAR:  # as a pax header may say
                    raise tarfile.ReadError(f"a member of {m.size} bytes")
                if m.isreg() and not m.issparse():
                    members.append((m.name, m.offset_data, m.size))
    except (OSError, tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{name} cannot be read as a tar archive: {error}") from error
    return members


class _Header(tarfile.TarInfo):
    """A header whose numbers are checked before anything is read by them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]  # counted as the archive's end
            raise tarfile.ReadError(str(error)) from error
        if not 0 <= header.size < (_LONGEST_NAME if header.type in _ABOUT_OTHERS else _FAR):
            raise tarfile.ReadError(f"a header of {header.size} bytes")
        return header
