"""Zip and tar files as they are: indexed once, then read at random, without unpacking.

The index (name, offset, size of each member) is read when the archive is opened. A member is then one positioned read
(`os.pread`), which several processes can do at once on the same open file. Zip members may be stored or deflated and
are checked against their CRC; tar files must be uncompressed, as a compressed tar can only be read from its beginning.
A member that would unpack to more than the largest allowed image takes as plain pixels (4 bytes each) is refused, and
so are tar headers with which Python's reader would never end.
"""

from __future__ import annotations

import os
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from everytoken.errors import DataError
from everytoken.files import open_regular
from everytoken_lab.data.decode import LIMIT_VARIABLE, ImageError, pixel_limit

_Member = tuple[str, int, int, int, int, int]  # name, offset, stored size, zip method or -1, checksum, unpacked size
_FAR = 1 << 62
_LONGEST_NAME = 1 << 14  # bytes of a tar header that belongs to another one, for long names
_ABOUT_OTHERS = (b"x", b"g", b"X", b"L", b"K")  # pax headers, of one member or all; GNU's long names and links
_DAMAGED = (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)
_seeking = threading.Lock()
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, ..., length of name, length of extra field


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
    """Members of one or several archives, all zip or all tar.

    Args:
        archives: files on the local disk.
        names: what to call each in messages, such as its address.
    """

    def __init__(self, archives: Sequence[Path], names: Sequence[str] = ()) -> None:
        self.archives, self.names = list(archives), list(names) or list(map(str, archives))
        self._open: dict[int, int] = {}
        paths: list[str] = []
        rows: list[tuple[int, ...]] = []  # archive, offset, stored size, method, checksum, unpacked size
        for number, archive in enumerate(self.archives):
            length = archive.stat().st_size
            with open_regular(archive) as stream:
                members = index_of(stream, self.names[number])
            for path, offset, size, method, checksum, unpacked in members:
                paths.append(path.removeprefix("./").lstrip("/"))
                stored = min(size, length)  # whatever the directory says
                rows.append((number, min(offset, _FAR), stored, method, checksum, min(unpacked, _FAR)))
        self.paths = Strings(paths)
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), 6)

    def where(self, i: int) -> str:
        """The archive and the member."""
        return f"{self.names[int(self._rows[i, 0])]}!{self.paths[i]}"

    def read(self, i: int) -> bytes:
        """The bytes of member i."""
        number, offset, size, method, checksum, unpacked = self._rows[i].tolist()
        if method < 0:  # tar
            return self._exactly(number, size, offset, i)
        head = self._exactly(number, _LOCAL_HEADER.size, offset, i)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(head)
        if signature != b"PK\x03\x04":
            raise ImageError(f"{self.where(i)}: the archive is damaged (no member starts here).")
        limit = 4 * pixel_limit()
        if unpacked > limit:
            raise ImageError(
                f"{self.where(i)}: unpacks to {unpacked:,} bytes, more than the limit of {limit:,}. If you trust it, "
                f"raise that ({LIMIT_VARIABLE})."
            )
        data = self._exactly(number, size, offset + _LOCAL_HEADER.size + name_length + extra_length, i)
        try:
            if method == zipfile.ZIP_DEFLATED:  # at most what the directory says, however much there is
                data = zlib.decompressobj(-15).decompress(data, unpacked + 1)
            if zlib.crc32(data) != checksum:
                raise zlib.error("the checksum does not match")
        except zlib.error as error:
            raise ImageError(f"{self.where(i)}: the archive is damaged ({error}).") from error
        return data

    def _exactly(self, number: int, size: int, offset: int, i: int) -> bytes:
        if number not in self._open:
            flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            self._open[number] = os.open(self.archives[number], flags)
        data = b""
        while len(data) < size:  # a read may stop early, at 2 GB at the latest
            more = _read_at(self._open[number], size - len(data), offset + len(data))
            if not more:
                raise ImageError(f"{self.where(i)}: the archive is truncated.")
            data += more
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            os.close(file)


def _read_at(file: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(file, size, offset)
    with _seeking:  # Windows
        os.lseek(file, offset, os.SEEK_SET)
        return os.read(file, size)


def index_of(stream: IO[bytes], name: str) -> list[_Member]:
    """The regular members of an archive; a DataError if it is none."""
    try:
        return _index_zip(stream, name) if zipfile.is_zipfile(stream) else _index_tar(stream, name)
    except _DAMAGED as error:
        raise DataError(f"{name} cannot be read as a zip or tar archive: {error}") from error


def _index_zip(stream: IO[bytes], name: str) -> list[_Member]:
    members = []
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                what = f"{name}: member {info.filename!r} is encrypted, or compressed by a method other than deflate."
                raise DataError(f"{what} Unpack the archive into a folder.")
            sizes = (info.compress_size, info.compress_type, info.CRC, info.file_size)
            members.append((info.filename, info.header_offset, *sizes))
    return members


def _index_tar(stream: IO[bytes], name: str) -> list[_Member]:
    stream.seek(0)
    if stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):  # gzip, bzip2, xz, zstd
        raise DataError(f"{name} is compressed: single images cannot be read from it. Decompress it to a plain .tar.")
    stream.seek(0)
    members: list[_Member] = []
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Header) as archive:
        for m in archive:
            if not 0 <= m.size < _FAR:  # as a pax header may say
                raise tarfile.ReadError(f"a member of {m.size} bytes")
            if m.isreg() and not m.issparse():
                members.append((m.name, m.offset_data, m.size, -1, 0, m.size))
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
