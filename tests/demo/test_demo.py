"""The demo's images and its way through the commands."""

import json
from pathlib import Path

import numpy as np
import pytest

from everytoken.demo import images as source
from everytoken.demo import run as runner
from everytoken.errors import EverytokenError


def test_without_a_network_the_digits_are_taken_and_it_is_said(monkeypatch, tmp_path):
    def offline():
        raise OSError("no route to host")

    monkeypatch.setattr(source, "_from_home_page", offline)
    monkeypatch.setattr(source, "_from_npm", offline)
    told = []
    found = source.find_images(told.append, tmp_path)
    assert "digits" in found.origin
    assert sum("not there: no route to host" in line for line in told) == 2
    source.write_tree(found, tmp_path / "tree", 50, 20)
    assert len(list((tmp_path / "tree/train").rglob("*.png"))) == 50
    assert len(list((tmp_path / "tree/val").rglob("*.png"))) == 20


def test_a_download_is_cached_and_a_wrong_one_refused(monkeypatch, tmp_path):
    arrays = {
        "x": np.zeros((4, 32, 32, 3), np.uint8), "y": np.arange(4),
        "vx": np.zeros((2, 32, 32, 3), np.uint8), "vy": np.arange(2),
    }  # fmt: skip
    monkeypatch.setattr(source, "_from_home_page", lambda: arrays)
    first = source.find_images(lambda text: None, tmp_path)
    again = source.find_images(lambda text: None, tmp_path)
    assert "home page" in first.origin
    assert "cache" in again.origin
    assert np.array_equal(again.train[1], arrays["y"])


@pytest.mark.parametrize(
    ("gains", "words"),
    [([1.0, 2.0], "gained +1.50"), ([-1.0, -2.0], "lost 1.50"), ([-1.0, 2.0], "No clear"), ([1.0], "proves nothing")],
)
def test_the_verdict_is_honest(gains, words):
    assert words in runner.verdict(gains)


def test_the_demo_calls_the_real_commands_and_reports_every_seed(tmp_path, capsys, monkeypatch):
    called = []

    def run(words: list[str]) -> int:
        called.append(words)
        if words[0] == "train":
            place = Path(words[words.index("--output") + 1])
            place.mkdir(parents=True)
            score = 50.0 + 2 * ("every-token" in place.name)
            (place / "summary.json").write_text(json.dumps({"last": {"score": score}}))
        return 0

    runner.demo(tmp_path, run, "minutes", data="photos", seeds=3)
    assert [words[0] for words in called] == ["annotate", *["train"] * 6]
    assert all("photos" in words for words in called)
    text = capsys.readouterr().out
    assert "gained +2.00 points" in text
    assert json.loads((tmp_path / "result.json").read_text())["gain"] == [2.0, 2.0, 2.0]
    with pytest.raises(EverytokenError, match="exit code 143"):
        runner.demo(tmp_path, lambda words: 143, "minutes", data="photos")
