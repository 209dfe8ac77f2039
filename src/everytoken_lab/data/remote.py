"""Archives at an address: `s3://bucket/train-{0000..0099}.tar`, `https://...`, `gs://...`, whatever fsspec can open.

An archive is downloaded once into a cache on the local disk and then read like any other. The cache is a folder
(EVERYTOKEN_CACHE, by default ~/.cache/everytoken/archives) of at most EVERYTOKEN_CACHE_GB gigabytes (100): archives
that other datasets used longest ago make room. Those for which there is no room stay where they are: an index is kept,
and each image is one ranged read. So shuffling is complete and resuming exact, however large the dataset is.

A download has a temporary name until it has as many bytes as the server announces and is on the disk; its name in the
cache is a hash of address, size and version (the server's etag or date), so a changed archive is downloaded anew. Of
several processes one downloads and the others wait; the lock of one that is killed is free at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from everytoken import files
from everytoken.errors import DataError
from everytoken.files import BusyError, Lock

CACHE_VARIABLE, LIMIT_VARIABLE = "EVERYTOKEN_CACHE", "EVERYTOKEN_CACHE_GB"
_DEFAULT_CACHE, _DEFAULT_GB = "~/.cache/everytoken/archives", 100.0
_AT_ONCE = 4  # downloads
_TRIES = 3
_PIECE = 8 << 20
_PART = ".part-"
_FOR_EVER = 30 * 24 * 3600.0
_log = logging.getLogger(__name__)
_fetching, _reserving = threading.Lock(), threading.Lock()  # within a process; between processes there are file locks


def is_remote(spec: str) -> bool:
    """Whether a dataset's name is an address rather than a path."""
    return "://" in spec or spec.startswith("pipe:")


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address.

    Attributes:
        url: its address.
        size: its bytes.
        version: changes when its content does.
    """

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rstrip("/").rsplit("/", 1)[-1]

    @property
    def cached(self) -> Path:
        """Where the cache has it, if it does."""
        digest = hashlib.sha256(f"{self.url}\n{self.size}\n{self.version}".encode()).hexdigest()
        return cache_folder() / f"{digest[:32]}.archive"

    @property
    def index(self) -> Path:
        """Where its index is kept."""
        return self.cached.with_suffix(".json")

    @property
    def is_cached(self) -> bool:
        """Whether the whole file is on the local disk."""
        with suppress(OSError):
            return self.cached.stat().st_size == self.size
        return False

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes, from where the file is; fewer only at its end."""
        for left in reversed(range(_TRIES)):
            try:
                with _in_words(self.url):
                    fs, path = _filesystem(self.url)
                    data: bytes = fs.cat_file(path, start=offset, end=min(offset + size, self.size))
                    return data
            except DataError:
                if not left:
                    raise
                time.sleep(1)
        raise AssertionError

    def __str__(self) -> str:
        return self.url


def cache_folder() -> Path:
    """The folder of the cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or _DEFAULT_CACHE).expanduser()


def _limit() -> float:
    """Bytes that the cache may have."""
    text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise DataError(f"{LIMIT_VARIABLE} is {text!r}; give a number of gigabytes, such as {_DEFAULT_GB:g}.")
    return gigabytes * 1e9


# Finding ------------------------------------------------------------------------------------------------------------


def find_remote(spec: str, patterns: Sequence[str]) -> list[RemoteFile]:
    """The archives that an address names.

    Args:
        spec: what the user typed, for messages.
        patterns: its braces, expanded; each may have * and ?, or be a folder of .tar files.
    """
    if spec.startswith("pipe:"):
        raise DataError(f"{spec} is a command, and none is run here; give the address itself, such as s3://BUCKET/...")
    return list(_find(tuple(patterns), int(time.time()) // 60))  # splits are looked for one after the other


@lru_cache(maxsize=8)
def _find(patterns: tuple[str, ...], _minute: int) -> tuple[RemoteFile, ...]:
    with ThreadPoolExecutor(16) as pool:
        return tuple(file for some in pool.map(_matches, patterns) for file in some)


def _matches(pattern: str) -> list[RemoteFile]:
    with _in_words(pattern):
        fs, path = _filesystem(pattern)
        if any(letter in path for letter in "*?["):
            paths = sorted(fs.glob(path))
        elif not path.endswith((".tar", ".zip")) and fs.isdir(path):
            paths = sorted(fs.glob(path.rstrip("/") + "/*.tar"))
        else:
            paths = [path]
        if not paths:
            raise DataError(f"{pattern}: no archives are there.")
        return [_describe(fs, path) for path in paths]


def _describe(fs: Any, path: str) -> RemoteFile:
    info, url = fs.info(path), fs.unstrip_protocol(path)
    if info.get("type") == "directory":
        raise DataError(f"{url} is a folder without .tar files.")
    if not isinstance(info.get("size"), int):
        raise DataError(f"{url}: the server does not say how large it is, so a download could not be checked.")
    marks = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime", "created", "updated")
    return RemoteFile(url, info["size"], " ".join(str(info[mark]) for mark in marks if info.get(mark)))


def _filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it; asked each time, as they do not survive a fork."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(url)
    return fs, path


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """What can go wrong with an address, as a sentence."""
    try:
        yield
    except DataError:
        raise
    except ImportError as error:  # "Install s3fs to access S3"
        raise DataError(f"{url} cannot be opened: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"There is no file {url}.") from error
    except Exception as error:  # every file system has errors of its own
        raise DataError(f"{url} cannot be read ({type(error).__name__}: {error}).") from error


# The cache ----------------------------------------------------------------------------------------------------------


def fetch(wanted: Sequence[RemoteFile], make_index: Callable[[IO[bytes], str], dict[str, Any]]) -> None:
    """Bring archives into the cache as far as there is room, and make the index of each.

    Args:
        make_index: (an open archive, its address) -> what to keep about it, as JSON.
    """
    missing = [file for file in dict.fromkeys(wanted) if not (file.is_cached and file.index.is_file())]
    for file in wanted:
        with suppress(OSError):
            os.utime(file.cached)  # used now
    if not missing:
        return
    folder = cache_folder()
    with files.disk_errors(folder, "making the cache"):
        folder.mkdir(parents=True, exist_ok=True)
    gigabytes = sum(file.size for file in missing) / 1e9
    _log.info("%d of %d archives (%.1f GB) are not in the cache %s yet", len(missing), len(wanted), gigabytes, folder)
    names = frozenset(file.cached.name for file in wanted)
    with _fetching, ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda file: _fetch_one(file, names, make_index), missing):
            pass


def _fetch_one(
    file: RemoteFile, wanted: frozenset[str], make_index: Callable[[IO[bytes], str], dict[str, Any]]
) -> None:
    folder, path = cache_folder(), file.cached
    with Lock(folder, path.stem, patience=_FOR_EVER), files.disk_errors(folder, f"caching {file.url}"):
        if not file.is_cached and _reserve(file, wanted):
            _download(file)
        if file.index.is_file():
            return
        if file.is_cached:
            with path.open("rb") as local:
                content = make_index(local, file.url)
        else:
            _log.info("%s stays where it is: the cache is full (%s)", file.url, LIMIT_VARIABLE)
            with _in_words(file.url):
                fs, remote_path = _filesystem(file.url)
                with fs.open(remote_path, "rb") as remote:
                    content = make_index(remote, file.url)
        files.write_atomically(file.index, files.seal({"url": file.url, **content}), sync=False)


def _reserve(file: RemoteFile, wanted: frozenset[str]) -> bool:
    """Whether there is room; if so, a file of the full size holds it until the download is done."""
    folder = cache_folder()
    part = folder / f"{_PART}{file.cached.stem}"
    with _reserving, Lock(folder, "room", patience=_FOR_EVER):
        part.unlink(missing_ok=True)  # of a download that was killed: this process has its lock
        entries = {}
        for pattern in (f"{_PART}*", "*.archive"):  # in the order in which a file has these names
            for path in folder.glob(pattern):
                with suppress(FileNotFoundError):  # another process has just finished downloading it
                    entries[path] = path.stat()
        room = min(_limit() - sum(s.st_size for s in entries.values()), shutil.disk_usage(folder).free)
        for path, status in sorted(entries.items(), key=lambda entry: entry[1].st_mtime):
            if room >= file.size:
                break
            if path.name not in wanted and _remove(path):
                room += status.st_size
        if room < file.size:
            return False
        fd = files.open_new(part)
        try:
            os.truncate(fd, file.size)
        finally:
            os.close(fd)
        return True


def _remove(path: Path) -> bool:
    """Remove an archive, or the part of one that was killed; not what another process is downloading."""
    if path.name.startswith(_PART):
        try:
            with Lock(path.parent, path.name.removeprefix(_PART), patience=0):
                path.unlink(missing_ok=True)
        except BusyError:
            return False
    else:
        path.unlink(missing_ok=True)  # who has it open can still read it
        path.with_suffix(".json").unlink(missing_ok=True)
    return True


def _pieces(file: RemoteFile) -> Iterator[bytes]:
    with _in_words(file.url):
        fs, path = _filesystem(file.url)
        with fs.open(path, "rb") as remote:
            while piece := remote.read(_PIECE):
                yield piece


def _download(file: RemoteFile) -> None:
    """The whole file, under its name in the cache; what is not whole never gets that name."""
    part = cache_folder() / f"{_PART}{file.cached.stem}"
    count = 0
    try:
        for _ in range(_TRIES):
            count = 0
            with part.open("r+b") as local:
                for piece in _pieces(file):
                    local.write(piece)
                    count += len(piece)
                local.flush()
                os.fsync(local.fileno())
            if count == file.size:
                break
            _log.warning("%s: the download ended after %d of %d bytes; once more", file.url, count, file.size)
        if count != file.size or _describe(*_filesystem(file.url)) != file:
            raise DataError(
                f"{file.url} was changed, or could not be downloaded whole ({count:,} of {file.size:,} bytes). Nothing "
                "of it is kept; run the same command again."
            )
        os.replace(part, file.cached)
        files.sync_folder(part.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
