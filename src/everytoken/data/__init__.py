"""Data: open a dataset, decode, augment with a placement, batch; seeded per sample.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.data.adapter import PipelineError, RandAugment, collate, with_maps
    from everytoken.data.augment import AugmentOptions, EvalTransform, TrainTransform
    from everytoken.data.batch import Batch, Prefetcher, normalise, to_device
    from everytoken.data.datasets import DataSet, open_dataset, open_splits
    from everytoken.data.decode import ImageError, Picture
    from everytoken.data.loader import BadImages, BatchReader, Loader
    from everytoken.errors import DataError

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.data.adapter": ["PipelineError", "RandAugment", "collate", "with_maps"],
        "everytoken.data.augment": ["AugmentOptions", "EvalTransform", "TrainTransform"],
        "everytoken.data.batch": ["Batch", "Prefetcher", "normalise", "to_device"],
        "everytoken.data.datasets": ["DataSet", "open_dataset", "open_splits"],
        "everytoken.data.decode": ["ImageError", "Picture"],
        "everytoken.data.loader": ["BadImages", "BatchReader", "Loader"],
        "everytoken.errors": ["DataError"],
    },
)
__all__ = [
    "AugmentOptions",
    "BadImages",
    "Batch",
    "BatchReader",
    "DataError",
    "DataSet",
    "EvalTransform",
    "ImageError",
    "Loader",
    "Picture",
    "PipelineError",
    "Prefetcher",
    "RandAugment",
    "TrainTransform",
    "collate",
    "normalise",
    "open_dataset",
    "open_splits",
    "to_device",
    "with_maps",
]
