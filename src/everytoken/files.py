"""Small files that are either there, whole and on the disk, or not there at all.

Everything is written under a temporary name, flushed to the disk and then renamed, so that a process
that dies at any moment leaves no torn file under a final name. JSON files are *sealed*: they carry a
SHA-256 of their own content and have exactly one spelling, so that any changed bit is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everytoken.maps.errors import StoreDamagedError, StoreError, StoreFullError

TEMPORARY = ".tmp-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def temporary_name(path: Path, rank: int) -> Path:
    """Where ``path`` is written before it is complete; each process (rank) has its own."""
    return path.with_name(f"{TEMPORARY}{rank}-{path.name}")


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte at ``offset``. (Not through a memory map: there a full disk kills the process.)"""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def write_atomically(path: Path, data: bytes | memoryview, rank: int = 0) -> None:
    """Put ``data`` at ``path``: afterwards the file is complete and on the disk, or unchanged."""
    temporary = temporary_name(path, rank)
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def disk_trouble(store: Path, doing: str) -> Iterator[None]:
    """Turn the operating system's errors into sentences. ``doing`` completes 'while ...'."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"no space left on the disk (or quota used up) while {doing} in {store}.\n"
                "Nothing is lost: all finished shards are kept and no torn file is left. "
                "Free some space and run the same command again; it goes on where it stopped."
            ) from error
        raise StoreError(
            f"{error.strerror or error} while {doing} in {store}"
            + (f" (file {error.filename})" if error.filename else "")
            + ".\nCheck the folder's permissions and the disk; finished shards are kept, and the same command goes on."
        ) from error


def seal(content: Mapping[str, Any]) -> bytes:
    """The one spelling of a JSON object, with the SHA-256 of the rest as its last member ``seal``."""
    body = {name: value for name, value in content.items() if name != "seal"}
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-2]},\n "seal": "{digest}"\n}}\n'.encode()


def unseal(path: Path) -> dict[str, Any]:
    """Read a sealed JSON file, or say that it was changed."""
    raw = path.read_bytes()
    try:
        content = json.loads(raw)
        same = isinstance(content, dict) and seal(content) == raw
    except ValueError:
        same = False
    if not same:
        raise StoreDamagedError(
            f"{path} is damaged or was edited by hand: it does not match its own checksum.\n"
            "Restore it from a copy, or delete the store and make it again."
        )
    return dict(content)
