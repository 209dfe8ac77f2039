"""Score maps: the record, the store (write, read, verify), and import of the released .pt maps.

Names are imported when they are first used; reading a store needs numpy only, not torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everytoken.labels.checks import verify
    from everytoken.labels.legacy import export_legacy, import_legacy
    from everytoken.labels.manifest import Manifest, StoreMeta, class_names_hash
    from everytoken.labels.scoremap import ScoreMap, map_area
    from everytoken.labels.store import Store
    from everytoken.labels.writer import Skipped, StoreWriter

_HOME = {
    "Manifest": "manifest",
    "ScoreMap": "scoremap",
    "Skipped": "writer",
    "Store": "store",
    "StoreMeta": "manifest",
    "StoreWriter": "writer",
    "class_names_hash": "manifest",
    "export_legacy": "legacy",
    "import_legacy": "legacy",
    "map_area": "scoremap",
    "verify": "checks",
}
__all__ = [
    "Manifest",
    "ScoreMap",
    "Skipped",
    "Store",
    "StoreMeta",
    "StoreWriter",
    "class_names_hash",
    "export_legacy",
    "import_legacy",
    "map_area",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'everytoken.labels' has no attribute {name!r}")
    return getattr(importlib.import_module(f"everytoken.labels.{_HOME[name]}"), name)
