"""What came out, in numbers that tell whether to trust the maps: agreement with the folders, vocabulary, bytes.

Read from the store itself (up to 5,000 maps spread over it), so they cover earlier runs of the same job too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everytoken.data.datasets import DataSet
from everytoken.maps import Maps
from everytoken.maps.summary import StoreSummary, sample_positions, summarize_store


def summarise(path: Path, data: DataSet, label_to_class: Sequence[int], limit: int = 5000) -> StoreSummary:
    """Look at a finished store of `data`; `label_to_class` gives the store's class of each label, or -1."""
    maps = Maps(path)
    keys = {maps.key(i) for i in sample_positions(len(maps), limit)}
    labels = {key: data.label(index) for index, key in enumerate(data.keys()) if key in keys}

    def class_of(key: str) -> int | None:
        label = labels[key]
        number = label_to_class[label] if 0 <= label < len(label_to_class) else -1
        return number if number >= 0 else None

    return summarize_store(maps, limit, class_of)
