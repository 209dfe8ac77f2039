"""What can go wrong with a store, as errors for a person."""

from __future__ import annotations

from everytoken.errors import EverytokenError


class StoreError(EverytokenError):
    """A store cannot be written or read."""


class StoreDamagedError(StoreError):
    """Bytes on disk are not what was written."""


class StoreUnfinishedError(StoreError):
    """The job that fills the store has not come to its end yet."""


class StoreBusyError(StoreError):
    """Another run is writing to the store."""


class StoreMismatchError(StoreError):
    """The store exists and was started with other images or other settings."""


class StoreFullError(StoreError):
    """No space left on the disk."""


class UnknownKeyError(StoreError, KeyError):
    """The store has no map for a key."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])
