"""Zip and tar files as they are, on this machine or at an address: indexed once, then read at random, not unpacked.

The index (name, offset, size of each member) is read when the archive is opened. A member is then one positioned read
(`os.pread`), which several processes can do at once on the same open file. Zip members may be stored or deflated and
are checked against their CRC; tar files must be uncompressed, as a compressed one can only be read from its beginning.
A member that would unpack to more than the largest allowed image takes as plain pixels (4 bytes each) is refused, and
so are tar headers with which Python's reader would never end.

An archive at an address that fsspec can open (`s3://bucket/train-{0000..0099}.tar`, `https://...`, `gs://...`) is
downloaded once into a cache (EVERYTOKEN_CACHE, by default ~/.cache/everytoken/archives) and is a local file from then
on. It appears there when it has as many bytes as the server announced, did not change meanwhile and is an archive; its
folder is a hash of address, size and version (etag or date), so that a changed archive is downloaded again. Its SHA-256
lies beside it and is checked when a process first opens it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from filelock import FileLock

from everytoken import files
from everytoken.errors import DataError
from everytoken_lab.data.decode import LIMIT_VARIABLE, ImageError, pixel_limit
from everytoken_lab.machine import patiently
from everytoken_lab.schema import without_secrets

CACHE_VARIABLE = "EVERYTOKEN_CACHE"
_AT_ONCE = 4  # downloads
_PIECE = 2 << 20
_TIMEOUT = 30  # seconds for one piece, or for one answer
_VERSION = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime", "created", "updated")
_log = logging.getLogger(__name__)

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
            with files.open_regular(archive) as stream:
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


# At an address ------------------------------------------------------------------------------------------------------


def is_remote(spec: str) -> bool:
    """Whether a dataset's name is an address rather than a path."""
    return "://" in spec or spec.startswith("pipe:")


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address; `version` changes when its content does."""

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of the address, as a file name."""
        name = re.sub(r"[^\w.-]", "_", str(self).rstrip("/").rsplit("/", 1)[-1])
        return name if name.strip(".") else "archive"

    @property
    def cached(self) -> Path:
        """Its path in the cache, whether or not it is there."""
        digest = hashlib.sha256(f"{self.url}\n{self.size}\n{self.version}".encode()).hexdigest()
        return cache_folder() / digest[:32] / self.name

    @property
    def is_cached(self) -> bool:
        """Whether the whole file is on the local disk."""
        path = self.cached
        return path.is_file() and path.stat().st_size == self.size and _is_whole(path, path.stat().st_mtime_ns)

    def __str__(self) -> str:
        return without_secrets(self.url)


@cache
def _is_whole(path: Path, changed: int) -> bool:
    """Whether a file in the cache is what was downloaded; told once in a process, and anew when it has changed."""
    digest = _digest_of(path)
    whole = digest.is_file() and files.read_bytes(digest) == files.sha256_of(path).encode()
    if not whole:
        _log.warning("%s is damaged and is downloaded again", path)
    return whole


def _digest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def cache_folder() -> Path:
    """The folder of the cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/everytoken/archives").expanduser()


@lru_cache(maxsize=8)
def find_remote(addresses: tuple[str, ...]) -> list[RemoteFile]:
    """The archives at some addresses."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(_describe, addresses))


def _describe(address: str) -> RemoteFile:
    if address.startswith("pipe:"):
        raise DataError(f"{address}: commands are not run; give the address itself, such as s3://BUCKET/...")
    if "*" in address:
        raise DataError(f"{without_secrets(address)}: name the archives with braces, such as train-{{0000..0099}}.tar.")
    with _in_words(address):
        fs, path = _filesystem(address)
        info, url = patiently(_TIMEOUT, fs.info, path), fs.unstrip_protocol(path)
    if info.get("type") == "directory" or not isinstance(info.get("size"), int):
        raise DataError(
            f"{without_secrets(url)} is a folder, or the server does not say how large it is, so that a download could "
            "not be checked. Name .tar files."
        )
    return RemoteFile(url, info["size"], " ".join(str(info[mark]) for mark in _VERSION if info.get(mark)))


def _filesystem(url: str) -> Any:
    """fsspec's file system of an address, and the path in it."""
    import fsspec

    return fsspec.core.url_to_fs(url)


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """What can go wrong with an address, as a sentence."""
    url = without_secrets(url)
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        cause = error.__cause__  # which fsspec has, and calls a missing file, for all of a server's errors
        if cause is not None and getattr(cause, "status", None) not in (404, 410):
            raise DataError(f"{url} cannot be read: the server answers {_reason(cause)}.") from error
        raise DataError(f"There is no file {url}.") from error
    except TimeoutError as error:
        raise DataError(f"{url}: no answer for {_TIMEOUT} seconds. Run the same command again.") from error
    except Exception as error:  # every file system has errors of its own; "Install s3fs to access S3"
        raise DataError(f"{url} cannot be read ({_reason(error)}).") from error


def _reason(error: BaseException) -> str:
    """The kind of an error, and the beginning of what it says."""
    return f"{type(error).__name__}: {without_secrets(' '.join(str(error).split()))[:200]}".rstrip(": ")


def fetch(archives: Sequence[Path | RemoteFile]) -> list[Path]:
    """Where archives are on the local disk; what is not there is downloaded."""
    missing = [file for file in dict.fromkeys(archives) if isinstance(file, RemoteFile) and not file.is_cached]
    if missing:
        folder = cache_folder()
        with files.disk_errors(folder, "making the cache"):
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        needed = sum(file.size for file in missing)
        if needed > free:
            raise DataError(
                f"{len(missing)} archives of {needed / 1e9:.1f} GB do not fit on the disk of the cache {folder} "
                f"({free / 1e9:.1f} GB free). Set {CACHE_VARIABLE} to a folder on a larger disk."
            )
        _log.info("downloading %d archives (%.1f GB) to %s", len(missing), needed / 1e9, folder)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(_download, missing))
    return [file.cached if isinstance(file, RemoteFile) else file for file in archives]


def _download(file: RemoteFile) -> None:
    """Bring a whole file into the cache, or raise and leave nothing there."""
    folder = file.cached.parent
    with files.disk_errors(folder, f"caching {file}"), FileLock(folder.with_suffix(".lock")):
        if file.is_cached:
            return
        folder.mkdir(exist_ok=True)
        files.remove_temporary(folder)  # of a process that was killed
        content = hashlib.sha256()
        with files.writing(file.cached) as local:
            for piece in _pieces(file):
                local.write(piece)
                content.update(piece)
            count = local.tell()
            what = f"({count:,} of {file.size:,} bytes). Nothing of it is kept; run the same command again."
            if count < file.size:
                raise DataError(f"{file} could not be downloaded whole {what}")
            if count > file.size or _describe(file.url) != file:
                raise DataError(f"{file} was changed during the download {what}")
            index_of(local, str(file))
            files.write_atomically(_digest_of(file.cached), content.hexdigest().encode())


def _pieces(file: RemoteFile) -> Iterator[bytes]:
    with _in_words(file.url):
        fs, path = _filesystem(file.url)
        with patiently(_TIMEOUT, fs.open, path, "rb", block_size=_PIECE) as remote:
            while piece := patiently(_TIMEOUT, remote.read, _PIECE):
                yield piece
