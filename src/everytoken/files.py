"""Files that are either there, whole and on the disk, or not there at all; and locks that die with their process.

Everything is written under a temporary name, flushed to the disk and then renamed. Temporary names cannot be guessed
and are only ever created, so a planted link is not followed, and of two writers of one file the last one wins. A link
in place of a file is replaced; to append to one, or to write into a folder that is one, is an error. Only regular
files, or links to them, are read or appended to: a pipe or a device might never end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from everytoken.errors import EverytokenError

log = logging.getLogger(__name__)

TEMPORARY, LOCK = ".tmp-", ".lock-"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}
NEVER_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class FileError(EverytokenError):
    """A file or folder cannot be read or written."""


class NotAFileError(OSError):
    """A pipe, a device or a folder stands where a file should be."""


class DamagedError(FileError):
    """Bytes on disk are not what was written."""


class DiskFullError(FileError):
    """No space left on the disk."""


class BusyError(FileError):
    """Another process is writing there."""


@contextmanager
def disk_errors(path: Path, doing: str, advice: str = "") -> Iterator[None]:
    """Turn the operating system's errors into sentences: "... while `doing` in `path`", and `advice`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, f" while {doing} in {path}", advice, path) from error


def disk_error(error: OSError, doing: str = "", advice: str = "", path: Path | None = None) -> FileError:
    """An operating system's error as a sentence; a file that is not `path`, which `doing` names, is added."""
    name = f" (file {error.filename})" if error.filename and str(error.filename) != str(path) else ""
    if error.errno in _DISK_FULL:
        what = f"no space left on the disk (or quota used up){doing}{name}."
        return DiskFullError(f"{what}\nFree some space and run the same command again. {advice}".rstrip())
    todo = "Check permissions and the disk."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        todo = "This process may not open more files: raise the limit (ulimit -n 4096) or use fewer workers."
    return FileError(f"{error.strerror or error}{doing}{name}.\n{todo} {advice}".rstrip())


def temporary_name(path: Path, rank: int = 0) -> Path:
    """Where `path` is written before it is complete: a new name at each call; `rank` tells processes apart that share
    a folder, so that each can remove what it left behind."""
    return path.with_name(f"{TEMPORARY}{rank}-{os.getpid()}-{secrets.token_hex(4)}-{path.name[-48:]}")


def open_new(path: Path) -> int:
    """A descriptor of a new file, readable and writable; an error if something is there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NEVER_FOLLOW, 0o666)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte. (Not through a memory map: there a full disk kills the process.)"""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(fd, view) :]


@contextmanager
def writing(path: Path, rank: int = 0, sync: bool = True) -> Iterator[BinaryIO]:
    """A new binary file that takes the place of `path` when the block ends, and vanishes when the block fails.

        with writing(Path("weights.pt")) as file:
            torch.save(state, file)

    Without `sync` it is not forced onto the disk: for many small files that could be made again.
    """
    temporary = temporary_name(path, rank)
    try:
        with os.fdopen(open_new(temporary), "w+b") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if sync:
            sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # the name that people know
        raise


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Put `data` at `path`: afterwards the file is complete and on the disk, or unchanged."""
    with writing(path) as file:
        write_all(file.fileno(), data)


def write_picture(path: Path, picture: Any, **settings: Any) -> None:
    """Put a Pillow image at `path`, in the format that the name's ending stands for."""
    from PIL import Image

    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise FileError(f"cannot write {path}: the name of a picture ends in .png or .jpg.")
    with writing(path, sync=False) as file:
        picture.save(file, kind, **settings)


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of a file, which is made if it is not there."""
    refuse_link(path)
    if path.exists():
        check_regular(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NEVER_FOLLOW, 0o666)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def check_regular(path: str | Path) -> None:
    """Raise if there is something other than a file."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file"
        raise NotAFileError(errno.EINVAL, what, str(path))


def open_regular(path: str | Path) -> BufferedReader:
    """A file to read bytes from."""
    check_regular(path)
    return open(path, "rb")


def read_bytes(path: str | Path) -> bytes:
    """All of a file."""
    with open_regular(path) as file:
        return file.read()


def make_inside(root: Path, inner: str | PurePath) -> Path:
    """Make the folder root/inner. `root`, which the user named, may be a link; what is below it may not."""
    root.mkdir(parents=True, exist_ok=True)
    for name in PurePath(inner).parts:
        root = root / name
        refuse_link(root)
        root.mkdir(exist_ok=True)
    return root


def refuse_link(path: Path) -> None:
    """Raise if a file or folder inside an output folder is a link: what is written might land anywhere."""
    if path.is_symlink():
        raise FileError(f"{path} is a link, and nothing is written through links in output folders. Remove it.")


def remove_temporary(folder: Path, rank: int | None = None, world: int = 1) -> None:
    """Remove what killed writers left in a folder. Only for the process that holds the folder's lock.

    Args:
        folder: where to look; not in folders inside it.
        rank: files of this rank only, for rank 0 also of ranks that are no more (`world` and up); None: all.
        world: number of processes that share the folder.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        owner = path.name.removeprefix(TEMPORARY).split("-")[0]
        if rank is None or owner == str(rank) or (rank == 0 and owner.isdigit() and int(owner) >= world):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the system can."""
    if sys.platform == "win32":
        return  # folders cannot be opened there
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot sync a folder
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, in constant memory."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_json(value: Any, indent: int | None = 1) -> str:
    """Like `json.dumps`, but with null instead of NaN and Infinity, which are no JSON."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lock:
    """Exclusive lock on ``folder/.lock-<name>``; raises `BusyError` when somebody else has it. A context manager.

    The lock dies with its process: after kill -9 there is nothing to clean up. Its file stays: removing it would let
    two processes lock two files of the same name.

    Args:
        folder: an existing folder.
        name: what is locked.
        patience: seconds to keep trying. Loader workers of a process that was killed live up to five seconds longer.
    """

    def __init__(self, folder: Path, name: str, patience: float = 8.0) -> None:
        self.path = Path(folder) / f"{LOCK}{name}"
        if self.path.is_symlink() or (self.path.exists() and self.path.stat().st_nlink > 1):
            raise FileError(f"{self.path} is a link, which a lock must not be. Remove it.")
        self._lock = FileLock(self.path, thread_local=False)
        try:
            self._lock.acquire(timeout=patience if math.isfinite(patience) else -1)
        except Timeout as error:
            raise BusyError(f"{folder} is being written by another run. Let it finish, or stop it.") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(f"the file system of {folder} has no file locks: make sure that only one run writes there")

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
