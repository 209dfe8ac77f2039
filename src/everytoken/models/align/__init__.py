"""Token-label alignment (TL-Align) for any timm backbone: labels that follow the tokens through mixed images.

`aligner` is the interface; `rules` lists which layer mixes tokens in which way; `attention` and `convolution` are these
ways; `fused` carries shares through fused attention; `state` holds the shares of the pass under way.
"""

from everytoken.models.align.aligner import AlignedPass, Aligner, Alignment, Shares
from everytoken.models.align.rules import CONTAINERS, RULES, TOKENWISE, HookBuilder, Rule

__all__ = [
    "CONTAINERS",
    "RULES",
    "TOKENWISE",
    "AlignedPass",
    "Aligner",
    "Alignment",
    "HookBuilder",
    "Rule",
    "Shares",
]
