"""What came out, in numbers that tell whether to trust the maps: agreement with the folders, vocabulary, bytes.

Read from the store itself (up to 5,000 maps spread over it), so they cover earlier runs of the same job too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everytoken.data.datasets import DataSet
from everytoken.maps import Maps
from everytoken.maps.summary import sample_positions, summarize


@dataclass(frozen=True)
class Summary:
    """
    Attributes:
        maps, skipped: counts of the store.
        skipped_examples: (key, reason) of the first few.
        bytes_per_image: on disk, all files of the store, trained annotators left out.
        looked_at: maps that the means below are over.
        labelled: those of them whose folder's class has scores.
        images_agree: part of the labelled maps whose class is the folder's; None without labels.
        cells_agree: part of their cells whose best class is the folder's.
        vocabulary: mean number of classes in a map.
        confidence: mean probability of a cell's best class.
    """

    maps: int
    skipped: int
    skipped_examples: tuple[tuple[str, str], ...]
    bytes_per_image: float
    looked_at: int
    labelled: int
    images_agree: float | None
    cells_agree: float | None
    vocabulary: float
    confidence: float


def summarise(path: Path, data: DataSet, label_to_class: Sequence[int], limit: int = 5000) -> Summary:
    """Look at a finished store of `data`; `label_to_class` gives the store's class of each label, or -1."""
    store = Maps(path)
    vocabulary, confidence, images, cells = [], [], [], []
    chosen = {store.key(i): i for i in sample_positions(len(store), limit)}
    indices = {key: index for index, key in enumerate(data.keys()) if key in chosen}
    for key, i in chosen.items():
        one = summarize(store.read(i), store.manifest.num_classes)
        vocabulary.append(one.vocabulary)
        confidence.append(float(one.confidence[one.inside].mean()))
        label = data.label(indices[key])
        wanted = label_to_class[label] if 0 <= label < len(label_to_class) else -1
        if wanted >= 0:
            images.append(one.image_class == wanted)
            cells.append(float((one.top[one.inside] == wanted).mean()))
    used = sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
    skipped = store.skipped
    return Summary(
        maps=len(store),
        skipped=len(skipped),
        skipped_examples=tuple(list(skipped.items())[:5]),
        bytes_per_image=used / max(1, store.manifest.total),
        looked_at=len(vocabulary),
        labelled=len(images),
        images_agree=float(np.mean(images)) if images else None,
        cells_agree=float(np.mean(cells)) if cells else None,
        vocabulary=float(np.mean(vocabulary)) if vocabulary else 0.0,
        confidence=float(np.mean(confidence)) if confidence else 0.0,
    )
