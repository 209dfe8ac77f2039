"""Zip and tar files as they are: indexed once, then read at random, without unpacking.

The index (name, offset, size of each member) is read when the archive is opened. A member is then one positioned read
(`os.pread`), which several processes can do at once on the same open file. Zip members may be stored or deflated and
are checked against their CRC; tar files must be uncompressed, as a compressed tar can only be read from its beginning.
A member that would unpack to more than the largest allowed image takes as plain pixels (4 bytes each) is refused.
Archives at an address are read from the local cache, or where they are (`remote`).

Cost: opening takes about 20 µs for a tar member and 10 µs for a zip member; a read costs what a plain file's does.
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
from typing import IO, Any

import numpy as np

from everytoken import files
from everytoken.errors import DataError
from everytoken_lab import schema
from everytoken_lab.data.decode import LIMIT_VARIABLE, ImageError, pixel_limit
from everytoken_lab.data.remote import RemoteFile, fetch

Archive = Path | RemoteFile
Member = tuple[str, int, int, int, int, int]
"""Name, offset, stored size, zip method or -1 for tar, checksum, unpacked size."""
_FAR = 1 << 62
LABEL_FILES = (".cls", ".json")  # of WebDataset
_SHORT = 4096  # bytes of a label file that is kept in the index of a remote archive
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

    Attributes:
        paths: member names, in the archives' order.
    """

    def __init__(self, archives: Sequence[Archive]) -> None:
        self.files = list(archives)
        self._open: dict[int, int] = {}
        self._labels: dict[int, bytes] = {}  # of remote archives: contents of label files by number
        fetch([file for file in self.files if isinstance(file, RemoteFile)], _remote_index)
        names: list[str] = []
        rows: list[tuple[int, ...]] = []  # archive, offset, stored size, method, checksum, unpacked size
        for number, file in enumerate(self.files):
            length = file.size if isinstance(file, RemoteFile) else file.stat().st_size
            members, labels = _read_index(file) if isinstance(file, RemoteFile) else (_index_file(file), {})
            for place, (name, offset, size, method, checksum, unpacked) in enumerate(members):
                if place in labels:
                    self._labels[len(names)] = labels[place]
                names.append(name.removeprefix("./").lstrip("/"))
                stored = min(size, length)  # whatever the directory says
                rows.append((number, min(offset, _FAR), stored, method, checksum, min(unpacked, _FAR)))
        self.paths = Strings(names)
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), 6)

    def where(self, i: int) -> str:
        """The archive and the member."""
        return f"{self.files[int(self._rows[i, 0])]}!{self.paths[i]}"

    def read(self, i: int) -> bytes:
        """The bytes of member i."""
        if i in self._labels:
            return self._labels[i]
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
                f"{self.where(i)}: unpacks to {unpacked:,} bytes, more than the limit of {limit:,}, 4 for each pixel "
                f"of the largest allowed image. If you trust it, raise that (max_pixels; {LIMIT_VARIABLE})."
            )
        data = self._exactly(number, size, offset + _LOCAL_HEADER.size + name_length + extra_length, i)
        try:
            if method == zipfile.ZIP_DEFLATED:  # at most what the directory says, however much there is
                data = zlib.decompressobj(-15).decompress(data, unpacked + 1)
        except zlib.error as error:
            raise ImageError(f"{self.where(i)}: the archive is damaged ({error}).") from error
        if zlib.crc32(data) != checksum:
            raise ImageError(f"{self.where(i)}: the archive is damaged (the checksum does not match).")
        return data

    def _part(self, number: int, size: int, offset: int) -> bytes:
        """Bytes of an archive, at least one if there are any."""
        file = self.files[number]
        if number not in self._open:
            path = file.cached if isinstance(file, RemoteFile) else file
            try:
                self._open[number] = os.open(
                    path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
                )
            except FileNotFoundError:
                if isinstance(file, RemoteFile):  # there was no room for it, or it had to make room
                    return file.read(offset, size)
                raise
        return _read_at(self._open[number], size, offset)

    def _exactly(self, number: int, size: int, offset: int, i: int) -> bytes:
        data = self._part(number, size, offset)
        while len(data) < size:  # a read may stop early, at 2 GB at the latest
            more = self._part(number, size - len(data), offset + len(data))
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


def _index_file(file: Path) -> list[Member]:
    try:
        with open(file, "rb") as stream:
            return _index(stream, str(file))
    except OSError as error:
        raise DataError(f"{file} cannot be read as a zip or tar archive: {error}") from error


def _index(stream: IO[bytes], name: str) -> list[Member]:
    """The regular members of an archive."""
    try:
        return _index_zip(stream, name) if zipfile.is_zipfile(stream) else _index_tar(stream, name)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{name} cannot be read as a zip or tar archive: {error}") from error


def _index_zip(stream: IO[bytes], name: str) -> list[Member]:
    members = []
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise DataError(f"{name}: member {info.filename!r} is encrypted. Unpack the archive into a folder.")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(
                    f"{name}: member {info.filename!r} is compressed by a method other than deflate. Unpack the "
                    "archive into a folder, or pack it again."
                )
            place = (info.header_offset, info.compress_size, info.compress_type, info.CRC, info.file_size)
            members.append((info.filename, *place))
    return members


def _index_tar(stream: IO[bytes], name: str) -> list[Member]:
    stream.seek(0)
    start = stream.read(6)
    for magic, kind in ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if start.startswith(magic):
            raise DataError(
                f"{name} is compressed with {kind}; single images cannot be read from that. Decompress it to a plain "
                ".tar (images do not get smaller by compression), or unpack it into a folder."
            )
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        members = [m for m in archive if m.isreg() and not m.issparse()]
    return [(m.name, m.offset_data, m.size, -1, 0, m.size) for m in members]


def _remote_index(stream: IO[bytes], url: str) -> dict[str, Any]:
    """What is kept about a remote archive: its members, and the labels, which are read when a dataset is opened."""
    members = _index(stream, url)
    labels = {}
    for place, (name, offset, size, method, *_) in enumerate(members):
        if method < 0 and size <= _SHORT and name.endswith(LABEL_FILES):
            stream.seek(offset)
            labels[str(place)] = stream.read(size).decode("latin-1")
    return {"members": members, "labels": labels}


def _read_index(file: RemoteFile) -> tuple[list[Member], dict[int, bytes]]:
    try:
        content = files.unseal(file.index)
        members = schema.parse(list[Member], content["members"], str(file.index))
        labels = schema.parse(dict[int, str], content["labels"], str(file.index))
        return members, {place: text.encode("latin-1") for place, text in labels.items()}
    except (OSError, files.FileError, schema.SchemaError, LookupError, ValueError) as error:
        file.index.unlink(missing_ok=True)
        raise DataError(
            f"{file.index}, the index of {file}, is damaged and was removed ({error}). Run the same command again."
        ) from error
