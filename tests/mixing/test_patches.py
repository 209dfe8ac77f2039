"""Random and block-wise mixing: exact amounts, whole patches, reproducible."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.errors import EverytokenError
from everytoken.mixing import MIXERS
from everytoken.mixing.methods import BlockPatches, CutMix, MixToken, patches_to_pixels


@pytest.mark.parametrize("name", ["random", "block"])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@given(seed=st.integers(0, 10_000), h=st.integers(1, 9), w=st.integers(1, 9), b=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_whole_patches_are_mixed_and_the_ratio_is_their_share(name, mode, seed, h, w, b):
    mix = MIXERS[name](mode=mode).draw(b, (h * 4, w * 4), (h, w), np.random.default_rng(seed))
    cells = mix.mask.view(-1, h, 4, w, 4)
    assert torch.equal(cells.amin((2, 4)), cells.amax((2, 4)))  # no patch is mixed inside
    assert torch.allclose(mix.ratio, mix.at((h, w)).mean((1, 2)).expand(b))
    assert torch.allclose(mix.ratio * h * w, (mix.ratio * h * w).round(), atol=1e-4)


@pytest.mark.parametrize("name", ["random", "block"])
def test_the_amount_follows_the_draw_and_is_uniform_for_alpha_one(name):
    ratios = [MIXERS[name]().draw(2, (28, 28), (14, 14), np.random.default_rng(i)).ratio[0] for i in range(600)]
    assert float(np.mean(ratios)) == pytest.approx(0.5, abs=0.04)
    assert float(np.std(ratios)) == pytest.approx(12**-0.5, abs=0.03)


def test_blocks_hang_together_more_than_scattered_patches():
    def edges(name):
        total = 0.0
        for i in range(100):
            m = MIXERS[name](alpha=50.0).draw(1, (14, 14), (14, 14), np.random.default_rng(i)).mask[0]
            total += float((m[1:] != m[:-1]).sum() + (m[:, 1:] != m[:, :-1]).sum())
        return total

    assert edges("block") < 0.5 * edges("random")


def test_patches_that_do_not_divide_the_image_still_tile_it():
    own = np.array([[[True, False], [False, True]]])
    mask = patches_to_pixels(torch.from_numpy(own), (5, 7))
    assert mask.shape == (1, 5, 7)
    assert float(mask[0, 0, 0]) == 1
    assert float(mask[0, 0, -1]) == 0


def test_probability_zero_leaves_batches_alone_and_wrong_settings_are_named():
    assert MIXERS["random"](prob=0.0).draw(2, (8, 8), (2, 2), np.random.default_rng(0)) is None
    with pytest.raises(EverytokenError, match="smallest"):
        BlockPatches(smallest=0)


def test_a_box_on_the_token_grid_cuts_no_patch():
    for seed in range(5):
        mask = CutMix(patches=True).draw(2, (32, 48), (4, 6), np.random.default_rng(seed)).mask
        cells = mask.view(1, 4, 8, 6, 8).mean((2, 4))
        assert set(cells.unique().tolist()) <= {0.0, 1.0}
        expected = MixToken().draw(2, (32, 48), (4, 6), np.random.default_rng(seed)).mask
        assert torch.equal(cells, expected), "the boxes of MixToken, as TL-Align's released code draws them"
