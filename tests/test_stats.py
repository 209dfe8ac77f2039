"""Intervals of proportions, of means over seeds, of differences."""

import numpy as np
import pytest

from everytoken_lab.stats import Estimate, bootstrap, compared, mean, paired_difference, percentage


def test_a_proportion_has_wilsons_interval():
    e = percentage(np.arange(100) < 80)
    assert (e.value, e.low, e.high) == (80, pytest.approx(71.11, abs=0.01), pytest.approx(86.66, abs=0.01))
    assert percentage(np.ones(10)).high == pytest.approx(100)


def test_a_mean_over_seeds_has_students_interval():
    e = mean([1.0, 2.0, 3.0])
    assert (e.value, e.low, e.high) == (2, pytest.approx(2 - 2.484, abs=1e-3), pytest.approx(2 + 2.484, abs=1e-3))
    assert not e.clear
    assert mean([1.0, 1.1, 1.2]).clear
    assert (mean([1.0]).low, mean([1.0]).clear) == (None, False)


def test_a_paired_difference_has_the_textbook_interval():
    rng = np.random.default_rng(0)
    first = rng.random(2000) < 0.7
    second = first.copy()
    flips = rng.choice(2000, 100, replace=False)
    second[flips] = True
    got = paired_difference(first, second)
    change = second.astype(float) - first
    half = 1.96 * 100 * change.std() / np.sqrt(2000)
    assert got.value == pytest.approx(100 * change.mean())
    assert (got.low, got.high) == (pytest.approx(got.value - half, abs=0.15), pytest.approx(got.value + half, abs=0.15))
    # unpaired, the interval would be many times wider
    assert got.high - got.low < 0.4 * 2 * 1.96 * 100 * np.sqrt(2 * 0.21 / 2000)


def test_few_images_that_agree_do_not_decide():
    first, second = np.zeros(12, bool), np.arange(12) < 4
    assert not paired_difference(first, second).clear  # 4 won, none lost: as likely as four heads in a row
    assert paired_difference(first, np.arange(12) < 6).clear
    same = paired_difference(first, first)
    assert same.low < same.value == 0 < same.high
    assert bootstrap(first[:, None], lambda means: means[..., 0]).low is None
    assert mean([5.0, 5.0]).low is None


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (Estimate(1.25, 0.5, 2), "a is 1.25 points better than b (95 % interval +0.50 to +2.00)"),
        (Estimate(-5.3, -9, -2.6), "a is 5.30 points worse than b (95 % interval -9.00 to -2.60)"),
        (Estimate(-5.3, -13.2, 2.6), "a and b show no clear difference: -5.30 points (95 % interval -13.20 to +2.60)"),
        (Estimate(10.58, values=(10.58,)), "a against b: +10.58 points (1 seed, no interval)"),
    ],
)
def test_better_and_worse_are_said_only_where_the_interval_leaves_zero_out(difference, words):
    assert compared(difference, "a", "b") == words


def test_draws_are_the_same_for_every_column_and_every_time():
    columns = np.random.default_rng(1).random((50, 1)) < 0.5
    got = bootstrap(columns, lambda means: 100 * means[..., 0], 500)
    assert got.low < got.value < got.high
    assert bootstrap(columns, lambda means: 100 * means[..., 0], 500) == got
    twice = np.concatenate([columns, columns], 1)
    assert bootstrap(twice, lambda means: means[..., 0] - means[..., 1], 100) == Estimate(0.0)
