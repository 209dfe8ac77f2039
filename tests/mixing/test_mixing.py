import numpy as np
import pytest
import torch

from everytoken.errors import EverytokenError
from everytoken.functional import from_labels, from_scores
from everytoken.mixing import MIXERS
from everytoken.mixing.methods import CutMix, MixToken, MixUp, OneOf
from everytoken.mixing.mix import (
    apply_to_pixels,
    apply_to_tokens,
    box_masks,
    boxes_at,
    draw_boxes,
    mix_image_target,
    mix_token_target,
    unmix_tokens,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def one_box(lam, row, column, h, w):
    """The released geometry, one number at a time."""
    cut_h, cut_w = int(h * np.sqrt(1.0 - lam)), int(w * np.sqrt(1.0 - lam))
    return [
        min(max(row - cut_h // 2, 0), h),
        min(max(column - cut_w // 2, 0), w),
        min(max(row + cut_h // 2, 0), h),
        min(max(column + cut_w // 2, 0), w),
    ]


def test_boxes_are_those_of_the_released_geometry():
    assert boxes_at(np.array([0.0]), np.array([[7, 7]]), (14, 14)).tolist() == [[0, 0, 14, 14]]
    assert boxes_at(np.array([0.75]), np.array([[0, 13]]), (14, 14)).tolist() == [[0, 10, 3, 14]]
    assert boxes_at(np.array([0.99]), np.array([[5, 5]]), (14, 14)).tolist() == [[5, 5, 5, 5]]  # cut 1, half 0
    g = rng(1)
    for _ in range(200):
        h, w = g.integers(1, 20, size=2)
        lam, row, column = g.random(), g.integers(h), g.integers(w)
        assert boxes_at(np.array([lam]), np.array([[row, column]]), (h, w)).tolist() == [
            one_box(lam, row, column, h, w)
        ]


def test_draws_come_in_the_released_order():
    drawn = draw_boxes(1, (14, 10), 1.0, rng(3))
    g = rng(3)
    lam, row, column = g.beta(1.0, 1.0), g.integers(0, 14), g.integers(0, 10)
    assert drawn.tolist() == [one_box(lam, row, column, 14, 10)]


def test_on_a_14x14_grid_two_percent_of_boxes_are_empty_and_the_mean_covers_27_percent():
    boxes = draw_boxes(100_000, (14, 14), 1.0, rng(4))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    assert (area == 0).mean() == pytest.approx(0.021, abs=0.002)
    assert area.mean() / 196 == pytest.approx(0.27, abs=0.005)


def test_a_mask_is_zero_exactly_inside_the_box():
    mask = box_masks(np.array([[1, 2, 3, 4], [0, 0, 0, 0]]), (4, 5), None)
    expected = torch.ones(2, 4, 5)
    expected[0, 1:3, 2:4] = 0
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("name", ["mixtoken", "cutmix", "mixup", "random", "block"])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("B", [1, 2, 5, 8])
def test_any_batch_size_and_mode_gives_a_mix_that_fits(name, mode, B):
    mixer = MIXERS[name](mode=mode)
    mix = mixer.draw(B, (32, 48), (4, 6), rng(B))
    assert len(mix) == B
    assert mix.partner.tolist() == list(range(B))[::-1]
    assert mix.mask.shape[0] in (1, B)
    torch.testing.assert_close(mix.ratio, mix.mask.mean((1, 2)).expand(B))
    assert mix.symmetric == (mode != "elem")
    if mix.symmetric:
        assert torch.equal(mix.mask.expand(B, -1, -1), mix.mask.expand(B, -1, -1)[mix.partner])
    if mode == "elem" and B == 8:
        assert len({tuple(m.flatten().tolist()) for m in mix.mask}) > 4
    images = torch.randn(B, 3, 32, 48)
    target = mix_image_target(from_labels(torch.arange(B), 9), mix).dense()
    for b in range(B):
        expected = torch.zeros(9)
        expected[b] += mix.ratio[b]
        expected[B - 1 - b] += 1 - mix.ratio[b]
        torch.testing.assert_close(target[b], expected)
    if mix.level == "pixels":
        mixed = apply_to_pixels(images, mix)
        wide = mix.mask.expand(B, *(mix.mask.shape[1:] if name == "cutmix" else (32, 48)))[:, None]
        torch.testing.assert_close(mixed, images * wide + images.flip(0) * (1 - wide))


def test_probability_says_how_often_a_batch_is_mixed():
    g = rng(9)
    drawn = [MixUp(prob=0.3).draw(4, (8, 8), (2, 2), g) for _ in range(2000)]
    assert sum(d is not None for d in drawn) / 2000 == pytest.approx(0.3, abs=0.04)
    assert all(CutMix(prob=0).draw(4, (8, 8), (2, 2), g) is None for _ in range(20))
    one = MixUp(prob=0.5, mode="elem").draw(400, (8, 8), (2, 2), g)
    assert (one.ratio == 1).float().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("mode", ["batch", "pair"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NLC"])
def test_unmixing_puts_every_token_back_to_its_own_image(mode, layout):
    B, h, w = 5, 6, 4
    mix = MixToken(mode=mode).draw(B, (96, 64), (h, w), rng(11))
    assert mix.unmixes
    assert mix.ratio.min() < 1
    owner = torch.arange(B).view(B, 1, 1, 1) * 1000 + torch.arange(h * w).view(1, h, w, 1)
    tokens = {"NHWC": owner, "NCHW": owner.permute(0, 3, 1, 2), "NLC": owner.flatten(1, 2)}[layout].float()
    before = tokens.clone()
    mixed = apply_to_tokens(tokens, mix, layout)
    assert not torch.equal(mixed, tokens)
    assert torch.equal(unmix_tokens(mixed, mix, layout), tokens)
    assert torch.equal(tokens, before)
    if layout == "NHWC":
        grid = mix.mask.expand(B, h, w)[..., None]
        assert torch.equal(mixed, torch.where(grid == 1, tokens, tokens.flip(0)))


def test_unmixed_outputs_with_own_labels_equal_mixed_labels():
    """Eq. 6 of the paper and the released swap-back give the same sum of losses."""
    from everytoken.functional import compact_cross_entropy

    B, h, w, K = 4, 3, 3, 7
    mix = MixToken().draw(B, (48, 48), (h, w), rng(2))
    classes = torch.stack([torch.randperm(K)[:3] for _ in range(B)])
    target = from_scores(torch.randn(B, h, w, 3), classes, K)
    logits = torch.randn(B, h, w, K)
    own = compact_cross_entropy(unmix_tokens(logits, mix), target)
    torch.testing.assert_close(own, compact_cross_entropy(logits, mix_token_target(target, mix)))


def test_elem_masks_do_not_unmix_so_the_targets_are_mixed():
    mix = MixToken(mode="elem").draw(4, (48, 48), (6, 6), rng(5))
    assert not mix.unmixes
    tokens = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 6, 6, 1)
    shown = apply_to_tokens(tokens, mix)
    assert torch.equal(unmix_tokens(shown, mix), shown)
    labels = from_scores(torch.full((4, 6, 6, 1), 50.0), torch.arange(4)[:, None], 4)
    assert torch.equal(mix_token_target(labels, mix).top_class(), shown[..., 0].long())


def test_a_coarse_mask_mixes_the_finer_grid_after_patch_embedding():
    mix = MixToken().draw(2, (56, 56), (7, 7), rng(0))
    tokens = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 28, 28, 1)
    mixed = apply_to_tokens(tokens, mix)
    assert torch.equal(mixed[0, ::4, ::4, 0], 1 - mix.mask[0])
    assert torch.equal(mixed[0, 3::4, 1::4, 0], 1 - mix.mask[0])
    with pytest.raises(EverytokenError, match="does not fit 5x5 tokens"):
        apply_to_tokens(tokens[:, :5, :5], mix)


@pytest.mark.parametrize("size", [(32, 48), (28, 36)])  # 36 is not a multiple of 8 columns
def test_cutmix_gives_a_crossed_token_the_true_ratio_of_its_two_images(size):
    g, grid = rng(3), (4, 8)
    for _ in range(20):
        mix = CutMix(mode="elem").draw(3, size, grid, g)
        labels = from_scores(torch.full((3, *grid, 1), 80.0), torch.arange(3)[:, None], 3)
        got = mix_token_target(labels, mix).dense()
        # the pixels say whose they are; average them over each token
        owners = torch.nn.functional.one_hot(torch.arange(3)).float()[:, :, None, None].expand(3, 3, *size)
        shown = torch.nn.functional.adaptive_avg_pool2d(apply_to_pixels(owners, mix), grid)
        torch.testing.assert_close(got, shown.permute(0, 2, 3, 1), atol=1e-5, rtol=0)
        torch.testing.assert_close(mix.ratio, apply_to_pixels(owners, mix).mean((2, 3)).diagonal() - _self(mix))


def _self(mix):
    """The middle image of an odd batch is its own partner."""
    return torch.where(mix.partner == torch.arange(len(mix)), 1 - mix.ratio, 0)


def test_mixup_blends_every_token_target_alike():
    mix = MixUp().draw(2, (8, 8), (2, 2), rng(1))
    lam = mix.ratio[0]
    labels = from_scores(torch.full((2, 2, 2, 1), 80.0), torch.arange(2)[:, None], 2)
    got = mix_token_target(labels, mix).dense()
    torch.testing.assert_close(got[0], torch.stack([lam, 1 - lam]).expand(2, 2, 2))
    images = torch.tensor([0, 100], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    torch.testing.assert_close(apply_to_pixels(images, mix)[1], (100 * lam).expand(3, 8, 8))


def test_bytes_stay_bytes_under_cutmix():
    mix = CutMix().draw(2, (8, 8), (2, 2), rng(1))
    images = torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8)
    assert apply_to_pixels(images, mix).dtype == torch.uint8


def test_tokens_without_a_label_stay_without_one():
    mix = CutMix().draw(2, (8, 8), (2, 2), rng(1))
    weight = torch.stack([torch.ones(2, 2), torch.zeros(2, 2)])
    labels = from_scores(torch.full((2, 2, 2, 1), 80.0), torch.arange(2)[:, None], 2, weight)
    mixed = mix_token_target(labels, mix)
    own = mix.at((2, 2))
    torch.testing.assert_close(mixed.weight, torch.cat([own, 1 - own]))
    shown = mixed.weight > 0
    assert (mixed.top_class()[shown] == 0).all()


def test_mixing_compiles_without_a_break_and_without_a_graph_per_box():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(tokens, mix):
        return unmix_tokens(apply_to_tokens(tokens, mix) * 2, mix)

    compiled = torch.compile(step, fullgraph=True, backend=count)
    tokens = torch.randn(4, 6, 6, 3)
    for seed in range(4):
        mix = MixToken().draw(4, (48, 48), (6, 6), rng(seed))
        torch.testing.assert_close(compiled(tokens, mix), tokens * 2)
    assert len(graphs) == 1


def test_one_of_several_mixers_is_chosen_by_its_odds():
    g = rng(0)
    both = OneOf([MixUp(), CutMix()], odds=[3, 1])
    drawn = [both.draw(2, (8, 8), (2, 2), g).soft for _ in range(1000)]
    assert np.mean(drawn) == pytest.approx(0.75, abs=0.05)


def test_wrong_use_is_named():
    mix = MixToken().draw(2, (8, 8), (2, 2), rng(0))
    with pytest.raises(ValueError, match="for the tokens of 2 images, not for the pixels"):
        apply_to_pixels(torch.randn(2, 3, 8, 8), mix)
    with pytest.raises(ValueError, match="not for the tokens of 3"):
        apply_to_tokens(torch.randn(3, 2, 2, 5), mix)
    with pytest.raises(ValueError, match="does not fit images"):
        apply_to_pixels(torch.randn(2, 3, 16, 16), CutMix().draw(2, (8, 8), (2, 2), rng(0)))
    with pytest.raises(EverytokenError, match="mode must be"):
        MixToken(mode="row")
    with pytest.raises(EverytokenError, match="alpha"):
        CutMix(alpha=0)
    with pytest.raises(EverytokenError, match="prob"):
        CutMix(prob=2)
    with pytest.raises(EverytokenError, match="OneOf"):
        OneOf([])
