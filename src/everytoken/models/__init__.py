"""Backbones: LV-ViT as a timm model (importing this registers it), and the token view of every timm family."""

from everytoken.models.families import FAMILIES, Family, UnsupportedModelError, family_of, family_of_name
from everytoken.models.lvvit import LVViT
from everytoken.models.view import TokenModel, TokenView, grid_shape, probe

__all__ = [
    "FAMILIES",
    "Family",
    "LVViT",
    "TokenModel",
    "TokenView",
    "UnsupportedModelError",
    "family_of",
    "family_of_name",
    "grid_shape",
    "probe",
]
