"""everytoken: train vision transformers on every token.

    import everytoken as et

The names below are the public API: they keep their meaning within a major version. Everything else, though importable,
may change. Importing this package makes its models known to timm and does nothing else; torch and timm are imported
when a name that needs them is first used.
"""

from typing import TYPE_CHECKING

from everytoken._lazy import lazy
from everytoken._register import register_with_timm
from everytoken._version import version as _version
from everytoken.errors import EverytokenError

if TYPE_CHECKING:
    from everytoken.data.adapter import collate, with_maps
    from everytoken.data.batch import Batch
    from everytoken.maps import Maps, MapWriter, ScoreMap
    from everytoken.mixing import CutMix, Mix, MixToken, MixUp
    from everytoken.models import TokenModel, TokenView
    from everytoken.objectives import (
        Distillation,
        Drloc,
        HardLabels,
        OnlineTokenLabeling,
        ReLabel,
        TLAlign,
        TokenLabeling,
        TransMix,
        aligned,
    )
    from everytoken.step import TokenStep
    from everytoken.timm_task import TokenTask

register_with_timm()

__version__ = _version()
__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.data.adapter": ["collate", "with_maps"],
        "everytoken.data.batch": ["Batch"],
        "everytoken.maps": ["MapWriter", "Maps", "ScoreMap"],
        "everytoken.mixing": ["CutMix", "Mix", "MixToken", "MixUp"],
        "everytoken.models": ["TokenModel", "TokenView"],
        "everytoken.objectives": [
            "Distillation",
            "Drloc",
            "HardLabels",
            "OnlineTokenLabeling",
            "ReLabel",
            "TLAlign",
            "TokenLabeling",
            "TransMix",
            "aligned",
        ],
        "everytoken.step": ["TokenStep"],
        "everytoken.timm_task": ["TokenTask"],
    },
)
__all__ = [
    "Batch",
    "CutMix",
    "Distillation",
    "Drloc",
    "EverytokenError",
    "HardLabels",
    "MapWriter",
    "Maps",
    "Mix",
    "MixToken",
    "MixUp",
    "OnlineTokenLabeling",
    "ReLabel",
    "ScoreMap",
    "TLAlign",
    "TokenLabeling",
    "TokenModel",
    "TokenStep",
    "TokenTask",
    "TokenView",
    "TransMix",
    "__version__",
    "aligned",
    "collate",
    "with_maps",
]
