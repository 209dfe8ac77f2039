"""everytoken: train vision transformers on every token.

    import everytoken as et

The names below are the public API: they keep their meaning within a major version. Everything else, though importable,
may change. Importing this package makes its models known to timm and does nothing else; torch and timm are imported
when a name that needs them is first used.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from everytoken._lazy import lazy, register_with_timm
from everytoken.errors import EverytokenError

if TYPE_CHECKING:
    from everytoken.data.adapter import collate, with_maps
    from everytoken.data.batch import Batch
    from everytoken.functional import CompactTarget
    from everytoken.maps import Maps, MapWriter, ScoreMap
    from everytoken.mixing.methods import CutMix, MixToken, MixUp
    from everytoken.mixing.mix import Mix
    from everytoken.models import TokenModel, TokenView
    from everytoken.objectives.distillation import Distillation, FeatureDistillation, OnlineTokenLabeling
    from everytoken.objectives.drloc import Drloc
    from everytoken.objectives.hard import HardLabels
    from everytoken.objectives.tl_align import TLAlign, TransMix, aligned
    from everytoken.objectives.token_labeling import ReLabel, TokenLabeling
    from everytoken.step import TokenStep
    from everytoken.timm_task import TokenTask

register_with_timm()

try:
    __version__ = _version("everytoken")
except _PackageNotFoundError:  # a tree that was never installed
    __version__ = "unknown"
__getattr__, __dir__ = lazy(
    __name__,
    {
        "everytoken.data.adapter": ["collate", "with_maps"],
        "everytoken.data.batch": ["Batch"],
        "everytoken.functional": ["CompactTarget"],
        "everytoken.maps": ["MapWriter", "Maps", "ScoreMap"],
        "everytoken.mixing.methods": ["CutMix", "MixToken", "MixUp"],
        "everytoken.mixing.mix": ["Mix"],
        "everytoken.models": ["TokenModel", "TokenView"],
        "everytoken.objectives.distillation": ["Distillation", "FeatureDistillation", "OnlineTokenLabeling"],
        "everytoken.objectives.drloc": ["Drloc"],
        "everytoken.objectives.hard": ["HardLabels"],
        "everytoken.objectives.tl_align": ["TLAlign", "TransMix", "aligned"],
        "everytoken.objectives.token_labeling": ["ReLabel", "TokenLabeling"],
        "everytoken.step": ["TokenStep"],
        "everytoken.timm_task": ["TokenTask"],
    },
)
__all__ = [
    "Batch",
    "CompactTarget",
    "CutMix",
    "Distillation",
    "Drloc",
    "EverytokenError",
    "FeatureDistillation",
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
