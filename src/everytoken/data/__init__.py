"""Data: find, decode, augment with a placement, batch; seeded per sample.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everytoken.data.augment import AugmentConfig, TrainTransform, View
    from everytoken.data.batch import Batch, Prefetcher, normalise, to_device
    from everytoken.data.decode import ImageError, Picture
    from everytoken.data.evaluation import EvalTransform
    from everytoken.data.find import open_dataset
    from everytoken.data.keyed import generator, torch_generator
    from everytoken.data.loader import BadImages, Loader
    from everytoken.data.sampler import BatchSampler
    from everytoken.data.sources import DataError, DataSet

_HOME = {
    "AugmentConfig": "augment",
    "BadImages": "loader",
    "Batch": "batch",
    "BatchSampler": "sampler",
    "DataError": "sources",
    "DataSet": "sources",
    "EvalTransform": "evaluation",
    "ImageError": "decode",
    "Loader": "loader",
    "Picture": "decode",
    "Prefetcher": "batch",
    "TrainTransform": "augment",
    "View": "augment",
    "generator": "keyed",
    "normalise": "batch",
    "open_dataset": "find",
    "to_device": "batch",
    "torch_generator": "keyed",
}
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
    "generator",
    "normalise",
    "open_dataset",
    "to_device",
    "torch_generator",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'everytoken.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"everytoken.data.{_HOME[name]}"), name)
