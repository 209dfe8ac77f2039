"""Mixing the images of a batch behind one interface.

Blind: MixToken, CutMix, MixUp, random and block-wise patches, MaskMix. Looking at the images, through a `guide`:
SaliencyMix, Attentive-CutMix, TokenMix, SMMix, Puzzle-Mix. (TransMix is CutMix with the objective `transmix`.)

`MIXERS[name](...).draw(batch_size, image_size, grid, rng)` gives a `Mix` or None; `apply_to_pixels` or
`apply_to_tokens` carries it out; `mix_image_target` and `mix_token_target` do the same to labels.
A new method is a subclass of `Mixer` with `masks`, and a line in MIXERS.
"""

from everytoken.mixing.apply import (
    apply_to_pixels,
    apply_to_tokens,
    mix_image_target,
    mix_token_target,
    placed_token_targets,
    unmix_tokens,
)
from everytoken.mixing.guided import AttentiveCutMix, GuidedMixer, SaliencyMix, SMMix, TokenMix
from everytoken.mixing.methods import CutMix, MixToken, MixUp, OneOf
from everytoken.mixing.mix import Guide, GuideKind, Mix, Mixer, Scene
from everytoken.mixing.patches import BlockPatches, MaskMix, RandomPatches
from everytoken.mixing.puzzle import PuzzleMix
from everytoken.mixing.saliency import contrast_saliency

MIXERS: dict[str, type[Mixer]] = {
    "mixtoken": MixToken,
    "cutmix": CutMix,
    "mixup": MixUp,
    "random": RandomPatches,
    "block": BlockPatches,
    "maskmix": MaskMix,
    "saliencymix": SaliencyMix,
    "attentivecutmix": AttentiveCutMix,
    "tokenmix": TokenMix,
    "smmix": SMMix,
    "puzzlemix": PuzzleMix,
}

__all__ = [
    "MIXERS",
    "AttentiveCutMix",
    "BlockPatches",
    "CutMix",
    "Guide",
    "GuideKind",
    "GuidedMixer",
    "MaskMix",
    "Mix",
    "MixToken",
    "MixUp",
    "Mixer",
    "OneOf",
    "PuzzleMix",
    "RandomPatches",
    "SMMix",
    "SaliencyMix",
    "Scene",
    "TokenMix",
    "apply_to_pixels",
    "apply_to_tokens",
    "contrast_saliency",
    "mix_image_target",
    "mix_token_target",
    "placed_token_targets",
    "unmix_tokens",
]
