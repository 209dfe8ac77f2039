"""What tests of objectives share: mixes that do mix, and score maps."""

import numpy as np

from everytoken.functional import MapBatch, collate_maps
from everytoken.mixing.mix import Mix, Mixer
from tests.functional.make import record


def a_mix(mixer: Mixer, count: int, size: tuple[int, int], grid: tuple[int, int], least=0.0, most=0.9) -> Mix:
    """The first mix of these images whose boxes are not all empty (they often are on a small grid), nor full."""
    drawn = (mixer.draw(count, size, grid, np.random.default_rng(seed)) for seed in range(100))
    return next(mix for mix in drawn if least < float(mix.ratio.min()) < most)


def score_maps(count: int, h: int, w: int, classes: int, seed: int = 0) -> MapBatch:
    """Random maps of three classes in each cell, of all of them in each image."""
    rng = np.random.default_rng(seed)
    return collate_maps([record(rng, h, w, 3, classes, classes, dtype="f2") for _ in range(count)], classes)
