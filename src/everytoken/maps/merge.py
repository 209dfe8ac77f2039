"""One store of several: of the parts that machines with a disk each have annotated, or of stores of different images.

    everytoken maps merge a/maps b/maps --out maps

The stores must come from the same annotator with the same settings and classes. They may be unfinished and may overlap:
of an image that several of them have, the maps must be equal; one that was skipped in one store and has a map in
another gets that map. Parts of one job give the store that one machine would have made, byte for byte.

Cost: every map is read and written once; the memory of the keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from everytoken.maps.errors import StoreError, StoreMismatchError, StoreUnfinishedError
from everytoken.maps.format import StoreMeta
from everytoken.maps.score_map import ScoreMap
from everytoken.maps.store import Maps
from everytoken.maps.writer import MapWriter, Skipped

_AT_ONCE = 64  # maps in memory


def merge_maps(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
) -> Maps:
    """Copy the maps of several stores into one; calling it again continues a merge that was interrupted.

    Args:
        sources: folders of at least two stores. They are only read.
        out: folder of the new store.
        progress: called with (images done, images in all).
    """
    stores = [Maps(source, check=True, partial=True) for source in sources]
    _check(stores, Path(out))
    first = stores[0].manifest
    meta = StoreMeta(**{field.name: getattr(first, field.name) for field in fields(StoreMeta)})
    reasons = [store.skipped for store in stores]
    owners = _owners(stores, reasons)
    plans = {store.manifest.plan_id() for store in stores}
    size = first.shard_size if len(plans) == 1 else None
    with MapWriter(out, owners, meta, shard_size=size) as writer:
        shards = writer.pending_shards()
        total = writer.manifest.total
        done = total - sum(len(writer.shard_range(shard)) for shard in shards)
        for shard in shards:
            keys = writer.shard_keys(shard)
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                writer.write({key: _record(stores, reasons, owners[key], key) for key in some})
                done += len(some)
                if progress:
                    progress(done, total)
        writer.finalize()
    return Maps(out)


def _check(stores: Sequence[Maps], out: Path) -> None:
    """Refuse what cannot be one store, before anything is written."""
    if len(stores) < 2:
        raise StoreError(f"a merge takes two stores or more, and this names {len(stores)}.")
    first = stores[0]
    for number, store in enumerate(stores):
        if store.path.resolve() in (other.path.resolve() for other in stores[:number]):
            raise StoreError(f"{store.path} is named twice.")
        if store.path.resolve() == out.resolve():
            raise StoreError(f"{out} is one of the stores to be merged; give a new folder for the result.")
        differences = first.manifest.differences(store.manifest, f"in {first.path}", f"in {store.path}")
        if differences:
            raise StoreMismatchError(
                f"{store.path} cannot be merged with {first.path}, as its maps were made in another way:\n  "
                + "\n  ".join(differences[:3])
            )


def _owners(stores: Sequence[Maps], reasons: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """The number of the store that each image is taken from; of those that all skipped, the last one that did."""
    owners: dict[str, int] = {}
    skipped: dict[str, int] = {}
    for number, store in enumerate(stores):
        for key in store:
            if key in owners and not _equal(stores[owners[key]][key], store[key]):
                raise StoreMismatchError(
                    f"{stores[owners[key]].path} and {store.path} have different maps of {key!r}: the image was "
                    "changed, or they were computed on other devices or in batches of another size. Annotate it once."
                )
            owners.setdefault(key, number)
        skipped |= dict.fromkeys(reasons[number], number)
    owners |= {key: number for key, number in skipped.items() if key not in owners}
    missing = list(dict.fromkeys(_unfinished(stores, owners)))
    if missing:
        raise StoreUnfinishedError(
            f"{len(missing):,} images are annotated in none of the stores (for example {missing[0]!r}). Finish them by "
            "the command that made them, or name the store that has the rest."
        )
    return owners


def _unfinished(stores: Sequence[Maps], owners: dict[str, int]) -> Iterator[str]:
    """Images that some store plans and none has."""
    for store in stores:
        if not store.manifest.complete:
            yield from (key for key in store.planned() if key not in owners)


def _record(stores: Sequence[Maps], reasons: Sequence[Mapping[str, str]], number: int, key: str) -> ScoreMap | Skipped:
    reason = reasons[number].get(key)
    return stores[number][key] if reason is None else Skipped(reason)


def _equal(one: ScoreMap, two: ScoreMap) -> bool:
    return (
        (one.size, one.area) == (two.size, two.area)
        and np.array_equal(one.classes, two.classes)
        and np.array_equal(one.scores.view(np.uint16), two.scores.view(np.uint16))
    )
