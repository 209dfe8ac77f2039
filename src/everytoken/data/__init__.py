"""Data: find, decode, augment with a placement, batch; seeded per sample.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.data.augment import AugmentConfig, TrainTransform, View
    from everytoken.data.batch import Batch, Prefetcher, normalise, to_device
    from everytoken.data.decode import ImageError, Picture
    from everytoken.data.evaluation import EvalTransform
    from everytoken.data.find import open_dataset
    from everytoken.data.loader import BadImages, Loader
    from everytoken.data.sampler import BatchSampler
    from everytoken.data.sources import DataError, DataSet

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.data.augment": ["AugmentConfig", "TrainTransform", "View"],
        "everytoken.data.batch": ["Batch", "Prefetcher", "normalise", "to_device"],
        "everytoken.data.decode": ["ImageError", "Picture"],
        "everytoken.data.evaluation": ["EvalTransform"],
        "everytoken.data.find": ["open_dataset"],
        "everytoken.data.loader": ["BadImages", "Loader"],
        "everytoken.data.sampler": ["BatchSampler"],
        "everytoken.data.sources": ["DataError", "DataSet"],
    },
)
__all__ = [
    "AugmentConfig",
    "BadImages",
    "Batch",
    "BatchSampler",
    "DataError",
    "DataSet",
    "EvalTransform",
    "ImageError",
    "Loader",
    "Picture",
    "Prefetcher",
    "TrainTransform",
    "View",
    "normalise",
    "open_dataset",
    "to_device",
]
