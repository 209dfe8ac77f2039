"""Token-label alignment (TL-Align) for any timm backbone: labels that follow the tokens through mixed images.

One file per way of mixing places: `attention`, `conv_attention`, `windows`, `token_mlp`, `convolution`, `embedding`;
`rules` lists which layer does which; `fused` carries shares through fused attention; `aligner` is the door.
"""

from everytoken.models.align.aligner import Aligner, Alignment, Seen, Shares
from everytoken.models.align.rules import PLAIN, RULES, TOKENWISE, Rule

__all__ = ["PLAIN", "RULES", "TOKENWISE", "Aligner", "Alignment", "Rule", "Seen", "Shares"]
