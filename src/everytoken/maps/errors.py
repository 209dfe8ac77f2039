"""What can go wrong with a store of score maps. (Full disks and second writers: see `everytoken.files`.)"""

from __future__ import annotations

from everytoken.errors import EverytokenError
from everytoken.files import DamagedError


class StoreError(EverytokenError):
    """A store cannot be written or read."""


class StoreDamagedError(StoreError, DamagedError):
    """Bytes on disk are not what was written."""


class StoreUnfinishedError(StoreError):
    """The job that fills the store has not been completed yet."""


class StoreMismatchError(StoreError):
    """The store was begun with other images or other settings."""


class UnknownKeyError(StoreError, KeyError):
    """The store has no map for a key."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])
