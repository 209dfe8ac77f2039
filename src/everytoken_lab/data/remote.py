"""Archives at an address: `s3://bucket/train-{0000..0099}.tar`, `https://...`, `gs://...`, whatever fsspec can open.

An archive is downloaded once into a cache (EVERYTOKEN_CACHE, by default ~/.cache/everytoken/archives) and is a local
file from then on. It appears there when it has as many bytes as the server announced, did not change meanwhile and is
an archive; its folder is a hash of address, size and version (etag or date), so that a changed archive is downloaded
again. Its SHA-256 lies beside it and is checked when a process first opens it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from everytoken import files
from everytoken.errors import DataError
from everytoken_lab.data.archives import index_of
from everytoken_lab.machine import patiently
from everytoken_lab.schema import without_secrets

CACHE_VARIABLE = "EVERYTOKEN_CACHE"
_AT_ONCE = 4  # downloads
_PIECE = 2 << 20
_TIMEOUT = 30  # seconds for one piece, or for one answer
_VERSION = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime", "created", "updated")
_log = logging.getLogger(__name__)


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
    if any(letter in address for letter in "*["):
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
