"""Accuracy, calibration and ReaL labels against slow, obvious versions."""

import json

import numpy as np
import pytest
import torch

from everytoken.errors import EverytokenError
from everytoken_lab.calibration import calibration_error
from everytoken_lab.classes import ClassList, imagenet_numbers
from everytoken_lab.engine.accuracy import Predictions, join_predictions, predictions_of, read_real, real_accuracy


def predictions(n=50, k=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=g) * 2
    labels = torch.randint(0, k, (n,), generator=g)
    return logits, labels, predictions_of(torch.arange(n), labels, logits)


def test_summary_equals_the_obvious_counts():
    logits, labels, got = predictions()
    summary = got.summary()
    assert summary["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert summary["top5"] == pytest.approx(100 * (ranks < 5).float().mean().item())
    assert summary["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_calibration_error_equals_a_loop_over_bins():
    rng = np.random.default_rng(0)
    confidence, correct = rng.random(500), rng.random(500) < 0.6
    wanted = 0.0
    for i in range(15):
        inside = (confidence >= i / 15) & (confidence < (i + 1) / 15)
        if inside.any():
            wanted += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert calibration_error(confidence, correct) == pytest.approx(wanted)
    assert calibration_error(np.ones(4), np.array([True] * 4)) == 0


def test_joining_parts_restores_the_order_and_drops_repetitions():
    _, _, whole = predictions(20)
    pick = lambda i: Predictions(*(getattr(whole, f)[i] for f in ("index", "label", "top", "confidence", "loss")))  # noqa: E731
    joined = join_predictions([pick(np.arange(19, -1, -2)), pick(np.arange(0, 20, 2)), pick(np.array([3, 4]))])
    assert np.array_equal(joined.index, whole.index)
    assert np.array_equal(joined.top, whole.top)
    with pytest.raises(EverytokenError, match="no images"):
        join_predictions([])


def test_the_class_table_counts_recall_precision_and_confusion():
    label = np.array([0, 0, 0, 1, 1, 2])
    guess = np.array([0, 1, 1, 1, 0, 1])
    p = Predictions(np.arange(6), label, guess[:, None], np.ones(6), np.zeros(6))
    rows = p.per_class(["a", "b", "c", "d"])
    assert (rows[0]["recall"], rows[0]["precision"], rows[0]["taken for"]) == (pytest.approx(100 / 3), 50, "b")
    assert rows[2]["recall"] == 0
    assert rows[3]["recall"] is None  # as in JSON, which has no NaN


def test_real_labels_judge_by_sets_and_leave_out_empty_ones(tmp_path):
    (tmp_path / "real.json").write_text(json.dumps([[3], [], [1, 4], [2]]))
    labels = read_real(tmp_path / "real.json")
    keys = [f"n01/ILSVRC2012_val_{i:08d}.JPEG" for i in (1, 2, 3, 4)]
    top = np.array([[3, 0], [0, 1], [4, 0], [0, 2]])
    p = Predictions(np.arange(4), np.zeros(4, int), top, np.ones(4), np.zeros(4))
    got = real_accuracy(p, keys, labels)
    assert got == {"real_top1": pytest.approx(200 / 3), "real_top5": 100, "real_images": 3}
    with pytest.raises(EverytokenError, match="original validation files"):
        real_accuracy(p, ["a.jpg"] * 4, labels)
    png = [f"n01/ILSVRC2012_val_{i:08d}.png" for i in (1, 2, 3, 4)]  # converted files keep their labels
    assert real_accuracy(p, png, labels) == got
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(EverytokenError, match=r"bad\.json"):
        read_real(tmp_path / "bad.json")


def test_kept_predictions_are_used_for_the_same_note_alone(tmp_path):
    _, _, made = predictions()
    path = tmp_path / "deep" / "p.npz"
    made.save(path, "a note", {"x.png": "broken"})
    found, skipped = Predictions.saved(path, "a note")
    assert np.array_equal(found.top, made.top)
    assert skipped == {"x.png": "broken"}
    assert Predictions.saved(path, "another note") is None
    assert Predictions.saved(tmp_path / "none.npz", "a note") is None
    path.write_bytes(path.read_bytes()[:-40])
    assert Predictions.saved(path, "a note") is None


def test_real_labels_are_compared_with_imagenets_number_of_each_answer():
    keys = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"]
    labels = {keys[0]: [0], keys[1]: [217]}  # tench, English springer
    p = Predictions(np.arange(2), np.zeros(2, int), np.array([[1], [0]]), np.ones(2), np.zeros(2))
    numbers = imagenet_numbers(ClassList(2, ("n02102040", "n01440764_tench")))
    assert numbers.tolist() == [217, 0]
    assert real_accuracy(p, keys, labels, numbers)["real_top1"] == 100
    assert real_accuracy(p, keys, labels)["real_top1"] == 0
    assert imagenet_numbers(ClassList(1000)).tolist() == list(range(1000))
    for names, outputs in ((("my cat", "n01440764"), 2), ((), 10)):
        with pytest.raises(EverytokenError, match="ImageNet's classes"):
            imagenet_numbers(ClassList(outputs, names))
