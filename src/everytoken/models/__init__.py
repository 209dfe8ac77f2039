"""Backbones: LV-ViT, T2T-ViT, CvT and small-image variants as timm models (importing this registers them), and the
token view of every family."""

from everytoken.models.cvt import CvT
from everytoken.models.families import (
    FAMILIES,
    FOREIGN,
    Family,
    UnsupportedModelError,
    family_of,
    family_of_name,
    grid_shape,
)
from everytoken.models.lvvit import LVViT
from everytoken.models.small import SMALL
from everytoken.models.t2t_vit import T2TViT
from everytoken.models.token_model import TokenModel, TokenView, probe

__all__ = [
    "FAMILIES",
    "FOREIGN",
    "SMALL",
    "CvT",
    "Family",
    "LVViT",
    "T2TViT",
    "TokenModel",
    "TokenView",
    "UnsupportedModelError",
    "family_of",
    "family_of_name",
    "grid_shape",
    "probe",
]
