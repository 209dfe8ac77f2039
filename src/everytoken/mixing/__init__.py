"""Mixing the images of a batch behind one interface: `images, mix = CutMix()(images)`.

Blind: MixToken, CutMix, MixUp, random and block-wise patches. Looking at the images, through a `guide`: SaliencyMix,
Attentive-CutMix, TokenMix, Puzzle-Mix. (TransMix is CutMix with the objective `transmix`.)

`mixer.draw(batch_size, image_size, grid, rng)` gives a `Mix` or None; `apply_to_pixels` or `apply_to_tokens` carries it
out; `mix_image_target` and `mix_token_target` do the same to labels.
A new method is a subclass of `MaskMixer` with `masks`, and a line in MIXERS.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.mixing.guided import AttentiveCutMix, PuzzleMix, SaliencyMix, TokenMix
from everytoken.mixing.methods import BlockPatches, Compose, CutMix, MixToken, MixUp, OneOf, RandomPatches
from everytoken.mixing.mix import MaskMixer, Mixer

MIXERS: dict[str, type[MaskMixer]] = {
    "mixtoken": MixToken,
    "cutmix": CutMix,
    "mixup": MixUp,
    "random": RandomPatches,
    "block": BlockPatches,
    "saliencymix": SaliencyMix,
    "attentivecutmix": AttentiveCutMix,
    "tokenmix": TokenMix,
    "puzzlemix": PuzzleMix,
}
COMPOSE = "compose"  # in recipes: two methods in the same batch


def build_mixer(settings: Mapping[str, Mapping[str, Any] | None]) -> Mixer | None:
    """Mixers by name, as in a recipe. No entry: no mixing. One: that one. Several: one of them for each batch, with
    `odds` (default: equal). `compose: {mixup: {}, mixtoken: {}}`: pixels and tokens of the same batch."""
    mixers: list[Mixer] = []
    odds = []
    for name, given in settings.items():
        fields = dict(given or {})
        odds.append(fields.pop("odds", 1.0))
        if not isinstance(odds[-1], int | float) or not 0 <= odds[-1] < math.inf:
            raise EverytokenError(f"mixing {name!r}: odds is {odds[-1]!r}, but should be a number from 0 on.")
        mixers.append(_compose(fields) if name == COMPOSE else _mixer(name, fields))
    if not mixers:
        return None
    return mixers[0] if len(mixers) == 1 else OneOf(mixers, odds)


def mixer_settings(settings: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Mapping[str, Any]]:
    """All mixers that settings name, those inside of `compose` too, with their settings."""
    named = {name: fields or {} for name, fields in settings.items() if name != COMPOSE}
    inner = settings.get(COMPOSE) or {}
    return {**named, **{name: fields or {} for name, fields in inner.items() if name != "odds"}}


def _mixer(name: str, fields: Mapping[str, Any]) -> MaskMixer:
    if name not in MIXERS:
        raise EverytokenError(f"there is no mixing method {name!r}.{did_you_mean(name, [*MIXERS, COMPOSE])}")
    allowed = [field.name for field in dataclasses.fields(MIXERS[name])]
    for field in fields:
        if field not in allowed:
            raise EverytokenError(f"mixing {name!r} has no setting {field!r}.{did_you_mean(field, allowed)}")
    return MIXERS[name](**fields)


def _compose(inner: Mapping[str, Mapping[str, Any] | None]) -> Compose:
    mixers = sorted((_mixer(name, fields or {}) for name, fields in inner.items()), key=lambda mixer: mixer.level)
    if len(mixers) != 2:
        got = ", ".join(inner) or "none"
        raise EverytokenError(f"mixing {COMPOSE!r} takes a method of pixels and one of tokens, got {got}.")
    return Compose(*mixers)
