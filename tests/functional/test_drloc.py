"""Dense relative localization against slow, obvious versions, and the released code's numbers."""

import math

import pytest
import torch
from torch import nn

from everytoken.functional import drloc

GRID = (3, 5)


def pairs_of(batch=4, count=6, grid=GRID, seed=0):
    return drloc.random_pairs(batch, count, grid, torch.Generator().manual_seed(seed))


def test_pairs_are_uniform_over_the_grid_and_repeatable():
    first, second = pairs_of(50, 400)
    assert first.shape == second.shape == (50, 400)
    for side in (first, second):
        share = side.flatten().bincount(minlength=15) / side.numel()
        assert share.shape == (15,)
        assert torch.allclose(share, torch.full((15,), 1 / 15), atol=0.01)
    assert float((first == second).float().mean()) == pytest.approx(1 / 15, abs=0.01)  # a pair may coincide
    again = pairs_of(50, 400)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, pairs_of(50, 400, seed=1)[0])


def test_offsets_and_targets_are_those_of_rows_and_columns():
    h, w = GRID
    first, second = pairs_of()
    offset = drloc.offsets((first, second), GRID)
    for signed in (False, True):
        plain = drloc.offset_targets(offset, GRID, signed)
        raw = drloc.offset_targets(offset, GRID, signed, released=True)
        for b in range(4):
            for m in range(6):
                rows = int(first[b, m]) // w - int(second[b, m]) // w
                columns = int(first[b, m]) % w - int(second[b, m]) % w
                if signed:
                    wanted, wanted_raw = (rows / h, columns / w), (rows + h - 1, columns + w - 1)
                else:
                    wanted, wanted_raw = (abs(rows) / h, abs(columns) / w), (abs(rows), abs(columns))
                assert plain[b, m].tolist() == pytest.approx(wanted)
                assert raw[b, m].tolist() == pytest.approx(wanted_raw)


def test_targets_stay_in_the_range_that_the_paper_states():
    offset = drloc.offsets(drloc.all_pairs((7, 7)), (7, 7))
    near = drloc.offset_targets(offset, (7, 7))
    assert (float(near.min()), float(near.max())) == pytest.approx((0.0, 6 / 7))
    signed = drloc.offset_targets(offset, (7, 7), signed=True)
    assert (float(signed.min()), float(signed.max())) == pytest.approx((-6 / 7, 6 / 7))
    raw = drloc.offset_targets(offset, (7, 7), released=True)
    assert float(raw.mean()) == pytest.approx(2.29, abs=0.005)  # seen in the released code
    shifted = drloc.offset_targets(offset, (7, 7), signed=True, released=True)
    assert (float(shifted.min()), float(shifted.max())) == (0.0, 12.0)


def test_class_counts_are_the_papers_and_the_released_ones():
    assert drloc.class_count(7) == 15
    assert drloc.class_count(7, signed=False, released=True) == 7
    assert drloc.class_count(14, signed=False, released=True) == 14
    assert [drloc.class_count(k, released=True) for k in (56, 28, 14, 7)] == [111, 55, 27, 13]


@pytest.mark.parametrize(("signed", "released"), [(True, False), (True, True), (False, True), (False, False)])
def test_every_offset_has_its_own_class_within_the_count(signed, released):
    offset = drloc.offsets(drloc.all_pairs(GRID), GRID)
    for axis, side in enumerate(GRID):
        classes = drloc.offset_classes(offset, GRID, signed=signed, released=released)[axis]
        values = offset[axis] if signed else offset[axis].abs()
        assert len(set(zip(values.tolist(), classes.tolist(), strict=True))) == len(set(values.tolist()))
        assert len(set(classes.tolist())) == len(set(values.tolist()))
        assert int(classes.min()) >= 0
        assert int(classes.max()) < drloc.class_count(side, signed, released)
    if signed and not released:
        assert int(classes[0]) == 5  # offset 0 is the middle one of -5..5


def test_classes_of_a_larger_count_keep_their_middle():
    offset = drloc.offsets(drloc.all_pairs(GRID), GRID)
    rows, columns = drloc.offset_classes(offset, GRID, sides=(7, 7))
    assert torch.equal(rows, offset[0] + 7)
    assert torch.equal(columns, offset[1] + 7)
    released = drloc.offset_classes(offset, GRID, sides=(14, 14), released=True)
    assert torch.equal(released[0], offset[0] + 2)  # the released code shifts by the grid, whatever the count


def slow_pool(grid, size):
    b, h, w, d = grid.shape
    out = torch.zeros(b, *size, d)
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(i * h // size[0], -(-(i + 1) * h // size[0]))
            columns = slice(j * w // size[1], -(-(j + 1) * w // size[1]))
            out[:, i, j] = grid[:, rows, columns].mean((1, 2))
    return out


@pytest.mark.parametrize("shape", [(14, 14), (14, 21), (9, 16), (7, 30)])
def test_pooling_averages_parts_of_the_grid(shape):
    grid = torch.randn(2, *shape, 3)
    assert torch.allclose(drloc.pool_grid(grid, (7, 7)), slow_pool(grid, (7, 7)), atol=1e-6)


def test_small_grids_are_not_pooled_and_released_windows_overlap():
    small = torch.randn(2, 4, 7, 3)
    assert drloc.pool_grid(small, (7, 7)) is small
    grid = torch.randn(1, 14, 14, 2)
    released = drloc.pool_grid(grid, (7, 7), "released")
    assert released.shape == (1, 7, 7, 2)
    for i in range(7):
        for j in range(7):
            window = grid[:, max(0, 2 * i - 1) : 2 * i + 2, max(0, 2 * j - 1) : 2 * j + 2]
            assert torch.allclose(released[:, i, j], window.mean((1, 2)), atol=1e-6)


@pytest.mark.parametrize("count", [4, 40])  # fewer and more pairs than the 15 positions
def test_the_split_first_layer_is_exact_with_its_gradients(count):
    torch.manual_seed(0)
    tokens = torch.randn(3, 15, 8, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(16, 7, dtype=torch.float64)
    pairs = pairs_of(3, count)
    wanted = torch.stack(
        [
            torch.stack([layer(torch.cat([tokens[b, i], tokens[b, j]])) for i, j in zip(pairs[0][b], pairs[1][b])])  # noqa: B905
            for b in range(3)
        ]
    )
    got = drloc.pair_hidden(tokens, pairs, layer.weight, layer.bias)
    assert torch.allclose(got, wanted, atol=1e-12)
    parameters = [tokens, layer.weight, layer.bias]
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-10)


def test_the_cheaper_way_through_the_first_layer_is_taken():
    from torch.utils.flop_counter import FlopCounterMode

    for positions, count, rows in ((49, 64, 49), (196, 64, 64), (49, 30, 30)):
        pairs = tuple(torch.zeros(2, 1, count, dtype=torch.int64))
        with FlopCounterMode(display=False) as counter:
            drloc.pair_hidden(torch.zeros(1, positions, 10), pairs, torch.zeros(6, 20), torch.zeros(6))
        assert counter.get_total_flops() == 2 * rows * 20 * 6


def test_all_pairs_come_in_the_order_of_their_positions():
    tokens, layer = torch.randn(2, 6, 4), nn.Linear(8, 3)
    first, second = drloc.all_pairs((2, 3))
    assert len(first) == 36
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == 36
    wanted = layer(torch.cat([tokens[:, first], tokens[:, second]], -1))
    assert torch.allclose(drloc.pair_hidden(tokens, None, layer.weight, layer.bias), wanted, atol=1e-6)


def test_l1_is_the_mean_of_the_pseudocode_and_half_the_norm_of_the_equation():
    predicted, target = torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    rows = [
        (abs(float(predicted[b, m, 0] - target[b, m, 0])), abs(float(predicted[b, m, 1] - target[b, m, 1])))
        for b in range(4)
        for m in range(6)
    ]
    mean = sum(u + v for u, v in rows) / (2 * 24)
    assert float(drloc.drloc_l1(predicted, target)) == pytest.approx(mean, rel=1e-5)
    assert float(drloc.drloc_l1(predicted, target, norm=True)) == pytest.approx(2 * mean, rel=1e-5)


def slow_ce_and_reg(logits, classes, alpha, log):
    """Per pair, per axis, class by class."""
    ce = reg = 0.0
    b, m = classes[0].shape
    for i in range(b):
        for j in range(m):
            for axis in (0, 1):
                z = logits[axis][i, j].tolist()
                c = int(classes[axis][i, j])
                bottom = sum(math.exp(v) for v in z)
                p = [math.exp(v) / bottom for v in z]
                ce -= math.log(p[c])
                mean = sum(q * k for k, q in enumerate(p))
                variance = sum(q * (k - mean) ** 2 for k, q in enumerate(p)) + 1e-8
                reg += (c - mean) ** 2 / variance
                reg += alpha * (math.log(math.sqrt(variance)) if log == "sigma" else math.log(variance))
    return ce / (b * m), reg / (b * m)


@pytest.mark.parametrize("log", ["sigma", "variance"])
def test_cross_entropy_and_regression_match_equations_5_and_6(log):
    torch.manual_seed(0)
    offset = drloc.offsets(pairs_of(), GRID)
    classes = drloc.offset_classes(offset, GRID)
    logits = (torch.randn(4, 6, 7), torch.randn(4, 6, 11))
    ce, reg = slow_ce_and_reg(logits, classes, 0.5, log)
    assert float(drloc.drloc_ce(logits, classes)) == pytest.approx(ce, rel=1e-5)
    assert float(drloc.drloc_reg(logits, classes, alpha=0.5, log=log)) == pytest.approx(reg, rel=1e-5)


def test_a_certain_answer_keeps_the_regression_finite():
    logits = torch.full((1, 1, 7), -1e4)
    logits[..., 3] = 1e4
    logits.requires_grad_()
    classes = (torch.tensor([[3]]), torch.tensor([[2]]))
    loss = drloc.drloc_reg((logits, logits), classes)
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(logits.grad).all())


def test_weights_leave_pairs_out_of_every_loss():
    torch.manual_seed(0)
    weight = (torch.rand(4, 6) > 0.5).float()
    kept = weight.bool()
    predicted, target = torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    alone = drloc.drloc_l1(predicted[kept][None], target[kept][None])
    assert torch.allclose(drloc.drloc_l1(predicted, target, weight), alone)
    logits, classes = (
        (torch.randn(4, 6, 7), torch.randn(4, 6, 11)),
        (torch.randint(7, (4, 6)), torch.randint(11, (4, 6))),
    )
    chosen = tuple(z[kept][None] for z in logits), tuple(c[kept][None] for c in classes)
    for loss in (drloc.drloc_ce, drloc.drloc_reg):
        assert torch.allclose(loss(logits, classes, weight), loss(*chosen), rtol=1e-4)
    assert float(drloc.drloc_l1(predicted, target, torch.zeros(4, 6))) == 0


def test_pairs_of_one_source_image_are_told_from_those_that_cross():
    mask = torch.ones(4, *GRID)
    mask[:, 1:, 2:4] = 0
    mask[:, 0, 4] = 0.3
    pairs = pairs_of(4, 200)
    got, strict = drloc.same_image(mask, pairs), drloc.same_image(mask, pairs, purity=0.9)
    assert 0 < float(got.mean()) < 1
    for b in range(4):
        for m in range(200):
            ends = [float(mask[b].flatten()[p[b, m]]) for p in pairs]
            assert float(got[b, m]) == float((ends[0] >= 0.5) == (ends[1] >= 0.5))
            assert float(strict[b, m]) == float(ends[0] == ends[1] != pytest.approx(0.3))
    every = drloc.same_image(mask, drloc.all_pairs(GRID))
    assert every.shape == (4, 225)
    assert torch.equal(every.view(4, 15, 15), every.view(4, 15, 15).transpose(1, 2))


def test_a_uniform_blend_crosses_nothing():
    assert float(drloc.same_image(torch.full((2, 3, 5), 0.3), pairs_of(2, 9)).min()) == 1


def test_the_released_schedule_ends_a_hundred_epochs_at_the_value_in_its_log():
    assert drloc.ramp(0, 20 / 300) == 0
    assert drloc.ramp(10 / 300, 20 / 300) == pytest.approx(0.5)
    assert drloc.ramp(20 / 300, 20 / 300) == pytest.approx(1)
    assert 0.5 * drloc.ramp(100 / 300, 20 / 300) == pytest.approx(0.357, abs=5e-4)
    assert drloc.ramp(1, 20 / 300) == 0
    assert drloc.ramp(0, 0) == 1
