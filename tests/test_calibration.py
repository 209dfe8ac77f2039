"""Calibration on synthetic logits, whose true probabilities are known."""

import numpy as np
import pytest

from everytoken_lab.calibration import UNFAMILIAR, calibrate, calibration_error, confidence, fit_temperature


def answers(images=10_000, classes=10, seed=0, spread=2.5):
    """Logits whose softmax is the probability of the labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (images, classes))
    weights = np.exp(logits - logits.max(1, keepdims=True))
    labels = ((weights / weights.sum(1, keepdims=True)).cumsum(1) > rng.random((images, 1))).argmax(1)
    return logits, labels


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_the_temperature_undoes_what_was_done_to_right_probabilities(factor):
    logits, labels = answers()
    calibration = calibrate(factor * logits, labels)
    assert calibration.temperature == pytest.approx(factor, rel=0.05)
    new, new_labels = answers(seed=1)
    raw = calibration_error(*confidence(factor * new, new_labels))
    fitted = calibration_error(*confidence(factor * new, new_labels, calibration.temperature))
    assert fitted < 0.025
    assert fitted < raw or factor == 1


def test_the_temperature_is_the_minimum_of_the_cross_entropy():
    logits, labels = answers(200)
    logits *= 2

    def loss(temperature):
        tempered = logits / temperature
        return (np.log(np.exp(tempered).sum(1)) - tempered[np.arange(200), labels]).mean()

    grid = np.geomspace(0.2, 10, 400)
    assert fit_temperature(logits, labels) == pytest.approx(grid[np.argmin([loss(t) for t in grid])], rel=0.05)


def test_a_threshold_gives_the_wanted_rate_with_the_most_answers():
    logits, labels = answers()
    calibration = calibrate(3 * logits, labels)
    probability, correct = confidence(3 * logits, labels, calibration.temperature)
    shares = []
    for rate in (0.8, 0.9, 0.95):
        threshold, coverage = calibration.threshold(rate)
        sure = probability >= threshold
        assert correct[sure].mean() >= rate - 0.005  # the curve has 100 points
        assert 100 * sure.mean() == pytest.approx(coverage, abs=0.2)
        shares.append(coverage)
    assert shares == sorted(shares, reverse=True)
    assert calibration.threshold(0.0)[1] == 100
    wrong = calibrate(np.eye(4)[[0, 1, 2, 3] * 8], np.array([1, 2, 3, 0] * 8))
    assert wrong.threshold(0.9) == (1.01, 0.0)


def test_a_few_images_that_are_all_right_do_not_make_a_network_certain():
    logits = 5 * np.eye(3)[[0, 1, 2] * 8]
    calibration = calibrate(logits, np.array([0, 1, 2] * 8))
    assert 0.3 < calibration.temperature < 3
    assert calibrate(logits[:1], np.array([0])).images == 1


def test_familiarity_is_the_fraction_of_held_out_images_with_less_energy():
    logits, labels = answers(2_000)
    calibration = calibrate(logits, labels)
    assert (calibration.familiarity(answers(seed=1)[0]) < UNFAMILIAR).mean() == pytest.approx(UNFAMILIAR, abs=0.01)
    assert calibration.familiarity(np.stack([np.full(10, -20.0), np.full(10, 20.0)])).tolist() == [0.0, 1.0]
    one_by_one = np.log(np.exp(logits).sum(1))
    assert calibration.familiarity(logits[:5]) == pytest.approx(
        [(one_by_one < e).mean() for e in one_by_one[:5]], abs=0.01
    )
    assert calibrate(logits, np.eye(10)[labels]).energies == ()
