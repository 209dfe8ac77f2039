import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.errors import EverytokenError
from everytoken.functional import from_labels, from_scores
from everytoken.mixing import MIXERS
from everytoken.mixing.guided import (
    AttentiveCutMix,
    GuidedMixer,
    PuzzleMix,
    SaliencyMix,
    TokenMix,
    best_mask,
    contrast_saliency,
    energy,
    places,
)
from everytoken.mixing.mix import apply_to_pixels, mix_image_target, mix_token_target

GUIDED = [kind for kind in MIXERS.values() if issubclass(kind, GuidedMixer)]


def rng(seed=0):
    return np.random.default_rng(seed)


def spots(*at, size=8):
    """Importance that lies on one cell of each image, with a little everywhere."""
    out = torch.full((len(at), size, size), 0.01)
    for image, (row, column) in enumerate(at):
        out[image, row, column] = 1
    return out


def numbered(b=3, size=32):
    """Images whose pixels say who and where they are: channel 0 the image, 1 the row, 2 the column."""
    at = torch.arange(size).float()
    rows, columns = torch.meshgrid(at, at, indexing="ij")
    return torch.stack([torch.stack([torch.full_like(rows, i), rows, columns]) for i in range(b)])


@pytest.mark.parametrize("kind", GUIDED)
def test_the_ratio_is_the_mean_of_the_mask_and_draws_repeat(kind):
    importance = torch.rand(5, 8, 8, generator=torch.Generator().manual_seed(0))
    first, again = (kind().draw(5, (32, 32), (8, 8), rng(4), guide=lambda _: importance) for _ in range(2))
    assert torch.equal(first.mask, again.mask)
    assert first.mask.shape == (5, 32, 32)
    assert first.mask.min() >= 0
    assert first.mask.max() <= 1
    if kind is not TokenMix:
        torch.testing.assert_close(first.ratio, first.mask.mean((1, 2)))
    images = numbered(5)
    assert apply_to_pixels(images, first).shape == images.shape


@pytest.mark.parametrize("kind", GUIDED)
def test_images_that_are_left_alone_stay_as_they_are(kind):
    importance = torch.rand(6, 8, 8, generator=torch.Generator().manual_seed(0))
    mix = kind(prob=0.5).draw(6, (32, 32), (8, 8), rng(1), guide=lambda _: importance)
    alone = (mix.mask == 1).all(2).all(1)
    assert 0 < alone.sum() < 6
    images = numbered(6)
    torch.testing.assert_close(apply_to_pixels(images, mix)[alone], images[alone])
    torch.testing.assert_close(mix.ratio[alone], torch.ones(int(alone.sum())))
    assert kind(prob=0.0).draw(6, (32, 32), (8, 8), rng(1)) is None  # nothing is asked for


@pytest.mark.parametrize("kind", GUIDED)
def test_mistakes_are_named(kind):
    with pytest.raises(ValueError, match="looks at the images"):
        kind().draw(2, (32, 32), (8, 8), rng())
    with pytest.raises(EverytokenError, match="mode must be 'elem'"):
        kind(mode="batch")


def test_saliency_mix_takes_a_box_around_the_partners_peak():
    importance = spots((1, 1), (6, 5), size=32)
    mix = SaliencyMix().draw(2, (32, 32), (8, 8), rng(0), guide=lambda kind: importance)
    lam = rng(0).beta(1, 1, size=2)
    for image, (row, column) in enumerate([(6, 5), (1, 1)]):  # the partner's peak
        half = int(32 * np.sqrt(np.float32(1 - lam[image]))) // 2
        expected = torch.ones(32, 32)
        expected[max(0, row - half) : row + half, max(0, column - half) : column + half] = 0
        assert torch.equal(mix.mask[image], expected)


def test_attentive_cutmix_takes_the_most_attended_cells():
    importance = torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(1))
    mix = AttentiveCutMix().draw(4, (224, 224), (14, 14), rng(), guide=lambda _: importance)
    for image in range(4):
        best = importance[3 - image].flatten().argsort(descending=True)[:6]
        expected = torch.ones(49)
        expected[best] = 0
        assert torch.equal(mix.mask[image, ::32, ::32].flatten(), expected)
    torch.testing.assert_close(mix.ratio, torch.full((4,), 43 / 49))


def test_token_mix_weighs_the_label_by_what_is_shown():
    importance = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(2))
    mix = TokenMix(smallest=4).draw(3, (32, 32), (8, 8), rng(3), guide=lambda _: importance)
    shown = mix.mask[:, ::4, ::4]
    for image in range(3):
        own = (shown[image] * importance[image] / importance[image].sum()).sum()
        partner = importance[2 - image]
        other = ((1 - shown[image]) * partner / partner.sum()).sum()
        assert float(mix.ratio[image]) == pytest.approx(float(own / (own + other)), abs=1e-5)
    assert not torch.allclose(mix.ratio, mix.mask.mean((1, 2)), atol=1e-3)


def test_token_targets_move_with_the_pixels():
    """A label that says its image and place comes out where the pixels of that image and place do."""
    importance = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(5))
    mixer = PuzzleMix(blocks=(4,), levels=1, smooth=0.1, move=0.01)
    mix = mixer.draw(2, (4, 4), (4, 4), rng(2), guide=lambda _: importance)
    images = torch.arange(32).view(2, 1, 4, 4).float()
    scores = torch.full((2, 4, 4, 32), -100.0)
    scores.view(32, 32).fill_diagonal_(100.0)
    target = from_scores(scores, torch.arange(32).expand(2, 32), 32)
    moved = mix_token_target(target, mix).dense().argmax(-1)
    assert torch.equal(moved, apply_to_pixels(images, mix)[:, 0].round().long())
    assert not torch.equal(moved, torch.where(mix.mask >= 0.5, images[:, 0], images.flip(0)[:, 0]).long())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(MIXERS)), batch=st.integers(1, 6))
def test_shares_average_to_the_ratio_and_the_target_is_the_classic_one(seed, name, batch):
    torch.manual_seed(seed)
    importance = torch.rand(batch, 8, 8)
    mixer = MIXERS[name]()
    mix = mixer.draw(batch, (32, 32), (8, 8), rng(seed), guide=lambda _: importance)
    cells = mix.at((8, 8)).expand(batch, 8, 8)
    labels = torch.randint(0, 5, (batch,))
    classic = torch.nn.functional.one_hot(labels, 5) * mix.ratio[:, None]
    classic = classic + torch.nn.functional.one_hot(labels[mix.partner], 5) * (1 - mix.ratio[:, None])
    torch.testing.assert_close(mix_image_target(from_labels(labels, 5), mix).dense(), classic)
    if name != "tokenmix":
        torch.testing.assert_close(cells.mean((1, 2)), mix.ratio)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(["cutmix", "random", "block"]))
def test_mixing_twice_with_a_symmetric_mask_is_the_identity(seed, name):
    mix = MIXERS[name](mode="batch").draw(4, (32, 32), (8, 8), rng(seed))
    images = numbered(4)
    assert torch.equal(apply_to_pixels(apply_to_pixels(images, mix), mix), images)


def slow_saliency(image, windows=(12, 24, 48, 28, 56, 112)):
    grey = image.mean(0)
    size = grey.shape[0]
    out = torch.zeros_like(grey)
    for window in windows:
        half = max(1, round(window * size / 224))
        for i, j in itertools.product(range(size), repeat=2):
            around = grey[max(0, i - half) : i + half + 1, max(0, j - half) : j + half + 1]
            out[i, j] += (grey[i, j] - around.mean()).abs()
    return out


def test_saliency_is_contrast_with_the_surroundings():
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([slow_saliency(image) for image in images])
    torch.testing.assert_close(contrast_saliency(images), expected, atol=1e-5, rtol=1e-5)
    spot = torch.zeros(1, 3, 64, 64)
    spot[:, :, 20:24, 40:44] = 1
    row, column = divmod(int(contrast_saliency(spot)[0].argmax()), 64)
    assert 20 <= row < 24
    assert 40 <= column < 44


# -- Puzzle-Mix ---------------------------------------------------------------------------------------------------


def slow_energy(z, own, other, lam, m, smooth, prior):
    n = len(z)
    total = 0.0
    for i, j in itertools.product(range(n), repeat=2):
        total -= z[i][j] * own[i][j] + (1 - z[i][j]) * other[i][j]
        for a, b in ((i + 1, j), (i, j + 1)):
            if a < n and b < n:
                total += smooth * (z[i][j] - z[a][b]) ** 2
        k = round(z[i][j] * m)
        total -= prior * np.log([(1 - lam) ** m, m * lam * (1 - lam) if m == 2 else lam, lam**m][k])
    return total


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_of_puzzle_mix_has_nearly_the_least_energy(seed):
    generator = torch.Generator().manual_seed(seed)
    own, other = torch.rand(2, 1, 3, 3, generator=generator).unbind(0)
    lam = torch.rand(1, generator=generator) * 0.8 + 0.1
    mask = best_mask(own, other, lam, 2, 0.3, 0.2)
    words = (own[0].tolist(), other[0].tolist(), float(lam), 2, 0.3, 0.2)
    reached = slow_energy(mask[0].tolist(), *words)
    assert float(energy(mask, own, other, lam, 2, 0.3, 0.2)) == pytest.approx(reached, abs=1e-4)
    every = torch.tensor(list(itertools.product((0.0, 0.5, 1.0), repeat=9))).view(-1, 3, 3)
    energies = energy(every, own.expand_as(every), other.expand_as(every), lam.expand(len(every)), 2, 0.3, 0.2)
    assert reached <= float(energies.min()) + 0.03 * float(energies.max() - energies.min())


def test_the_mask_of_puzzle_mix_shows_what_matters():
    own, other = spots((1, 1), (6, 6)) * 50
    mask = best_mask(own[None], other[None], torch.tensor([0.5]), 2, 0.3, 0.2)[0]
    assert mask[1, 1] == 1
    assert mask[6, 6] == 0


def test_blocks_move_to_where_they_are_shown():
    shown = torch.zeros(1, 4, 4)
    shown[0, 0, 0] = 1  # only the first place is shown
    importance = spots((2, 3), size=4)
    moved = places(shown, importance, price=0.01)
    assert moved[0, 0, 0] == 2 * 4 + 3
    assert sorted(moved.flatten().tolist()) == list(range(16))
    assert places(shown, importance, price=1e6).flatten().tolist() == list(range(16))
