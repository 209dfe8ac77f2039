"""One writer per place: a lock that dies with its process.

A POSIX record lock (``fcntl.lockf``) belongs to the process, not to the file handle: kill -9 frees it at
once, and forked data-loading workers that live a little longer do not keep it. What is written in the
lock file (process, host, time) is only for the message that the second run prints.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everytoken.maps.errors import StoreBusyError, StoreError

LOCK = ".lock-"
# A second lock of the same file in the same process would succeed, and closing it would free both.
_held: set[tuple[int, str]] = set()


class Lock:
    """Exclusive lock on ``folder/.lock-<name>``; raises StoreBusyError when another process has it.

    Args:
        folder: an existing folder.
        name: what is locked.
        patience: seconds to keep trying. A process that was just killed may need a moment to go away.
    """

    def __init__(self, folder: Path, name: str, patience: float = 3.0) -> None:
        try:
            import fcntl
        except ImportError as error:
            raise StoreError(
                "writing a store needs file locks, which this operating system does not offer to Python. "
                "Use Linux, macOS or WSL; reading works everywhere."
            ) from error
        self._fcntl = fcntl
        self.path = Path(os.path.realpath(folder)) / f"{LOCK}{name}"
        self._me = (os.getpid(), str(self.path))
        self._fd: int | None = None
        if self._me in _held:  # do not look into the file: closing it here would free the lock
            raise self._busy(folder, "this very process")
        until = time.monotonic() + patience
        while not self._try():
            if time.monotonic() >= until:
                note = _read(self.path)
                who = f"process {note['pid']} on {note['host']}, since {note['since']}" if note else "another process"
                raise self._busy(folder, who)
            time.sleep(0.05)
        _held.add(self._me)

    def _try(self) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._fcntl.lockf(fd, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
            # The file may have been removed by its last owner between our open and our lock.
            if not self.path.exists() or os.fstat(fd).st_ino != self.path.stat().st_ino:
                os.close(fd)
                return False
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                return False
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(fd)
                raise
            warnings.warn(
                f"the file system of {self.path.parent} has no file locks: make sure that only one run writes there.",
                stacklevel=5,
            )
        self._fd = fd
        note = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with suppress(OSError):  # on a full disk the lock holds without its note
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(note).encode(), 0)
        return True

    @staticmethod
    def _busy(folder: Path, who: str) -> StoreBusyError:
        return StoreBusyError(
            f"{folder} is being written by another run ({who}).\n"
            "Let it finish, or stop it and run this again: what it has done is kept. "
            "(The lock goes away with its process; there is no file to delete.)"
        )

    def release(self) -> None:
        """Give the lock back and remove its file. Only the process that took it can."""
        if self._fd is None or self._me[0] != os.getpid():
            return
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None
        _held.discard(self._me)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_bytes())
        return note if {"pid", "host", "since"} <= set(note) else None
    except (OSError, ValueError, TypeError):
        return None
