"""Score maps: the record, the store (read, write, verify), and import of the released .pt maps.

Names are imported when they are first used; reading a store needs numpy only, not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.maps.check import verify
    from everytoken.maps.format import Manifest, StoreMeta, class_names_hash
    from everytoken.maps.merge import merge_maps
    from everytoken.maps.score_map import ScoreMap, map_area
    from everytoken.maps.store import Maps
    from everytoken.maps.writer import MapWriter, Skipped

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.maps.format": ["Manifest", "StoreMeta", "class_names_hash"],
        "everytoken.maps.merge": ["merge_maps"],
        "everytoken.maps.score_map": ["ScoreMap", "map_area"],
        "everytoken.maps.store": ["Maps"],
        "everytoken.maps.check": ["verify"],
        "everytoken.maps.writer": ["MapWriter", "Skipped"],
    },
)
__all__ = [
    "Manifest",
    "MapWriter",
    "Maps",
    "ScoreMap",
    "Skipped",
    "StoreMeta",
    "class_names_hash",
    "map_area",
    "merge_maps",
    "verify",
]
