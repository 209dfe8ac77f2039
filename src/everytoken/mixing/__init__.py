"""Mixing the images of a batch: MixToken, CutMix, MixUp, random and block-wise patches behind one interface.

`MIXERS[name](...).draw(batch_size, image_size, grid, rng)` gives a `Mix` or None; `apply_to_pixels` or
`apply_to_tokens` carries it out; `mix_image_target` and `mix_token_target` do the same to labels.
A new method is a subclass of `Mixer` with `masks`, and a line in MIXERS.
"""

from everytoken.mixing.apply import (
    apply_to_pixels,
    apply_to_tokens,
    mix_image_target,
    mix_token_target,
    unmix_tokens,
)
from everytoken.mixing.methods import CutMix, MixToken, MixUp, OneOf
from everytoken.mixing.mix import Mix, Mixer
from everytoken.mixing.patches import BlockPatches, RandomPatches

MIXERS: dict[str, type[Mixer]] = {
    "mixtoken": MixToken,
    "cutmix": CutMix,
    "mixup": MixUp,
    "random": RandomPatches,
    "block": BlockPatches,
}

__all__ = [
    "MIXERS",
    "BlockPatches",
    "CutMix",
    "Mix",
    "MixToken",
    "MixUp",
    "Mixer",
    "OneOf",
    "RandomPatches",
    "apply_to_pixels",
    "apply_to_tokens",
    "mix_image_target",
    "mix_token_target",
    "unmix_tokens",
]
