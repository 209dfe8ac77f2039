"""What objectives read: a batch with its placements, from our loader or from anybody's torchvision pipeline.

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everytoken._lazy import lazy

if TYPE_CHECKING:
    from everytoken.data.adapter import PipelineError, RandAugment, collate, with_maps
    from everytoken.data.batch import Batch, Prefetcher, normalise, to_device

__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.data.adapter": ["PipelineError", "RandAugment", "collate", "with_maps"],
        "everytoken.data.batch": ["Batch", "Prefetcher", "normalise", "to_device"],
    },
)
__all__ = ["Batch", "PipelineError", "Prefetcher", "RandAugment", "collate", "normalise", "to_device", "with_maps"]
