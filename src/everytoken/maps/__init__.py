"""Score maps: the record, the store (write, read, verify), and import of the released .pt maps.

Names are imported when they are first used; reading a store needs numpy only, not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.maps.checks import verify
    from everytoken.maps.legacy import export_legacy, import_legacy
    from everytoken.maps.manifest import Manifest, StoreMeta, class_names_hash
    from everytoken.maps.scoremap import ScoreMap, map_area
    from everytoken.maps.store import Maps
    from everytoken.maps.writer import MapWriter, Skipped

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.maps.checks": ["verify"],
        "everytoken.maps.legacy": ["export_legacy", "import_legacy"],
        "everytoken.maps.manifest": ["Manifest", "StoreMeta", "class_names_hash"],
        "everytoken.maps.scoremap": ["ScoreMap", "map_area"],
        "everytoken.maps.store": ["Maps"],
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
    "export_legacy",
    "import_legacy",
    "map_area",
    "verify",
]
