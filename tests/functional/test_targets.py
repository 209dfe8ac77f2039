import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, blend, from_labels, from_scores, map_classes, mix_with_truth

K = 12


def scores(seed, B=3, middle=(2, 4), U=5, num_classes=K, scale=3.0, short=True):
    """Random vocabulary logits [B, ..., U] and classes [B, U], some rows filled up with -1."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.stack([torch.randperm(num_classes, generator=g)[:U] for _ in range(B)])
    if short:
        classes[0, 3:] = -1
    return torch.randn(B, *middle, U, generator=g) * scale, classes


def densely(logits, classes, num_classes):
    """Scores over all K classes, absent ones 0. One number at a time."""
    out = torch.zeros(*logits.shape[:-1], num_classes, dtype=torch.float64)
    for b, row in enumerate(classes.tolist()):
        for u, c in enumerate(row):
            if c >= 0:
                out[b, ..., c] = logits[b, ..., u].double()
    return out


def close(target, expected, atol=1e-6):
    torch.testing.assert_close(target.dense().double(), expected.double(), rtol=0, atol=atol)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(), (1,), (2, 4)]),
    st.sampled_from([0.1, 3.0, 40.0]),
    st.sampled_from([1.0, 2.5]),
)
def test_scores_become_the_softmax_over_all_classes(seed, middle, scale, temperature):
    logits, classes = scores(seed, middle=middle, scale=scale)
    target = from_scores(logits, classes, K, temperature=temperature)
    close(target, (densely(logits, classes, K) / temperature).softmax(-1))
    assert (target.weight == 1).all()
    assert (target.mass[0, ..., 3:] == 0).all()


@pytest.mark.parametrize("level", [-500.0, -90.0, 90.0, 500.0])
def test_extreme_scores_stay_finite(level):
    logits, classes = scores(0)
    close(from_scores(logits + level, classes, K), densely(logits + level, classes, K).softmax(-1))


def test_a_vocabulary_of_all_classes_has_no_background():
    logits, classes = scores(1, U=K, short=False)
    for shift in (0, -200, 200):
        target = from_scores(logits + shift, classes, K)
        close(target, densely(logits + shift, classes, K).softmax(-1))
        assert (target.background == 0).all()


def test_an_empty_vocabulary_is_the_uniform_target():
    target = from_scores(torch.zeros(2, 3, 4), torch.full((2, 4), -1), K, weight=torch.zeros(2, 3))
    close(target, torch.full((2, 3, K), 1 / K))
    assert (target.weight == 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 100])
def test_top_k_shares_all_mass_among_the_best(top_k):
    logits, classes = scores(2)
    dense = densely(logits, classes, K)
    named = torch.zeros(3, 1, 1, K, dtype=torch.bool)
    for b, row in enumerate(classes.tolist()):
        named[b, ..., [c for c in row if c >= 0]] = True
    dense = dense.masked_fill(~named, -torch.inf)
    kept = min(top_k, 5)
    dense = dense.masked_fill(dense < dense.topk(kept).values[..., -1:], -torch.inf)
    target = from_scores(logits, classes, K, top_k=top_k)
    close(target, dense.softmax(-1))
    assert (target.background == 0).all()


def test_smoothing_keeps_the_sum_and_the_released_one_does_not():
    logits, classes = scores(3)
    target, s = from_scores(logits, classes, K), 0.1
    p = densely(logits, classes, K).softmax(-1)
    close(target.smooth(s), p * (1 - s) + s / K)
    torch.testing.assert_close(target.smooth(s).dense().sum(-1), torch.ones(3, 2, 4))
    close(target.smooth(s, released=True), p * (1 - s + s / K) + s / K)
    torch.testing.assert_close(target.smooth(s, released=True).dense().sum(-1), torch.full((3, 2, 4), 1 + s / K))


def test_labels_become_smoothed_one_hot_vectors():
    y = torch.tensor([3, 0, -1])
    target = from_labels(y, K, smoothing=0.1)
    expected = torch.full((2, K), 0.1 / K)
    expected[0, 3] = expected[1, 0] = 0.9 + 0.1 / K
    torch.testing.assert_close(target.dense()[:2], expected)
    assert target.weight.tolist() == [1, 1, 0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_blending_is_the_mixture_of_the_dense_targets(seed, per_image):
    a = from_scores(*scores(seed), K)
    b = from_scores(*scores(seed + 1, U=3, short=False), K).smooth(0.1)
    r = torch.rand((3,) if per_image else (3, 2, 4), generator=torch.Generator().manual_seed(seed))
    wide = r.view(3, 1, 1, 1) if per_image else r[..., None]
    mixed = blend(a, r, b, 1 - r)
    close(mixed, a.dense() * wide + b.dense() * (1 - wide))
    torch.testing.assert_close(mixed.weight, torch.ones(3, 2, 4))


def test_blending_ignores_the_side_without_a_label():
    a = from_labels(torch.tensor([2, 5]), K)
    b = from_labels(torch.tensor([-1, 7]), K)
    mixed = blend(a, 0.25, b, 0.75)
    torch.testing.assert_close(mixed.weight, torch.tensor([0.25, 1.0]))
    assert mixed.dense()[0, 2] == 1
    torch.testing.assert_close(mixed.dense()[1, [5, 7]], torch.tensor([0.25, 0.75]))
    nothing = blend(b[:1], 0.5, b[:1], 0.5)
    assert nothing.weight.tolist() == [0]
    assert nothing.mass.isfinite().all()


def test_blending_different_class_sets_is_refused():
    with pytest.raises(ValueError, match="cannot blend"):
        blend(from_labels(torch.tensor([1]), K), 0.5, from_labels(torch.tensor([1]), 5), 0.5)


def test_the_released_ground_truth_option_trusts_the_machine_more_when_it_disagrees():
    logits, classes = scores(4, B=8, middle=(), short=False)
    logits[:, 0] = 9.0  # the first class of each row wins
    machine = from_scores(logits, classes, K)
    y = torch.where(torch.arange(8) < 4, classes[:, 0], classes[:, 1])
    truth = torch.nn.functional.one_hot(y, K) * 0.9 + 0.1 / K
    rho = torch.where(machine.dense().argmax(-1) == y, 0.5, 0.9)[:, None]
    assert rho[:4].eq(0.5).all()
    assert rho[4:].eq(0.9).all()
    close(mix_with_truth(machine, y, smoothing=0.1), rho * machine.dense() + (1 - rho) * truth)
    close(mix_with_truth(machine, y, rho=0.3, smoothing=0.1), 0.3 * machine.dense() + 0.7 * truth)


def test_the_truth_of_an_image_is_not_mixed_into_tokens():
    with pytest.raises(ValueError, match="known per image"):
        mix_with_truth(from_scores(*scores(0), K), torch.zeros(3, dtype=torch.long))


def test_the_top_class_counts_a_class_that_is_listed_twice():
    target = CompactTarget(
        torch.tensor([[4, 7, 4], [1, 2, 3]]),
        torch.tensor([[0.3, 0.4, 0.3], [-0.1, 0.0, -0.2]]),
        torch.zeros(2),
        torch.ones(2),
        K,
    )
    assert target.top_class().tolist() == [4, -1]


def test_top_class_equals_the_dense_argmax():
    target = from_scores(*scores(5), K)
    dense = target.dense()
    best = target.top_class()
    clear = best >= 0
    assert clear.any()
    assert (best == dense.argmax(-1))[clear].all()


def test_mapping_classes_drops_renames_and_takes_the_best_of_a_group():
    classes = torch.tensor([[0, 1, 2, 5, -1]])
    logits = torch.tensor([[[3.0, 5.0, -1.0, 7.0, 99.0], [2.0, 1.0, 4.0, 0.5, 99.0]]])
    mapping = torch.tensor([1, 1, 0, -1, -1, -1])  # 0 and 1 are one class; 5 is dropped
    mapped, named = map_classes(logits, classes, mapping)
    target = from_scores(mapped, named, 3)
    expected = torch.tensor([[[-1.0, 5.0, 0.0], [4.0, 2.0, 0.0]]]).softmax(-1)
    close(target, expected)
    assert logits[0, 0, 4] == 99  # untouched


def test_flipping_and_choosing_rows():
    target = from_scores(*scores(6), K, weight=torch.rand(3, 2, 4))
    torch.testing.assert_close(target.flip(2).dense(), target.dense().flip(2))
    torch.testing.assert_close(target.flip(1).weight, target.weight.flip(1))
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(target[rows].dense(), target.dense()[rows])
    torch.testing.assert_close(target[1:].weight, target.weight[1:])
    assert target.to("meta").mass.device.type == "meta"
    with pytest.raises(ValueError, match="cannot flip"):
        target.flip(3)


def test_wrong_arguments_are_named():
    logits, classes = scores(9)
    with pytest.raises(EverytokenError, match="temperature"):
        from_scores(logits, classes, K, temperature=0)
    with pytest.raises(ValueError, match="do not fit"):
        from_scores(logits, classes[:2], K)
    with pytest.raises(EverytokenError, match="smoothing"):
        from_labels(torch.tensor([0]), K, smoothing=1.5)
    with pytest.raises(EverytokenError, match="top_k"):
        from_scores(logits, classes, K, top_k=0)


def test_an_image_with_a_true_label_counts_fully_whatever_the_machine_labelled():
    logits, classes = scores(2, middle=())
    machine = from_scores(logits, classes, K, weight=torch.tensor([0.0, 0.4, 1.0]))
    labels = torch.tensor([7, 1, -1])
    mixed = mix_with_truth(machine, labels, rho=0.5)
    assert mixed.weight.tolist() == [1, 1, 1]
    alone = torch.nn.functional.one_hot(torch.tensor(7), K)
    torch.testing.assert_close(mixed.dense()[0], alone.float())  # no map: the truth
    torch.testing.assert_close(mixed.dense()[2], machine.dense()[2])  # no truth: the map


def test_a_place_whose_classes_were_all_dropped_has_no_label():
    logits, classes = scores(2)
    classes[1] = -1
    target = from_scores(logits, classes, K, top_k=2)
    assert target.weight[1].eq(0).all()
    assert target.weight[[0, 2]].eq(1).all()
