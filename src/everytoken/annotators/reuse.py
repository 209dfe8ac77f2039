"""Maps that another store has already are copied, so that only new images are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, StoreMeta

_SOME = 64  # maps in memory at a time


def open_known(source: Path, out: Path, meta: StoreMeta) -> Maps:
    """The store `source`, if its maps can stand beside those that `meta` describes.

    Raises:
        EverytokenError: they were made in another way, or `source` is the store to be written.
    """
    if source.resolve() == out.resolve():
        raise EverytokenError(f"--reuse {source} is the store that shall be written; give --out another folder.")
    store = Maps(source, check=True)
    differences = store.manifest.differences(meta)
    if differences:
        raise EverytokenError(
            f"--reuse {source}: its maps were made in another way, so they cannot stand beside new ones:\n  "
            + "\n  ".join(differences[:3])
            + "\nRepeat the settings of that store, or leave out --reuse to annotate all images."
        )
    return store


def copy_known(writer: MapWriter, shards: Sequence[int], store: Maps) -> frozenset[int]:
    """Put the maps of `store` into the shards to be written; the positions that are done."""
    done: list[int] = []
    for shard in shards:
        at = [position for position in writer.shard_range(shard) if writer.key(position) in store]
        for start in range(0, len(at), _SOME):
            keys = map(writer.key, at[start : start + _SOME])
            writer.write({key: store[key] for key in keys})
        done += at
    return frozenset(done)
