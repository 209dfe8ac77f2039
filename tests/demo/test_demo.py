"""The demo's images and its way through the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everytoken.cli import main
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
    [
        ([1.0, 1.1, 0.9], "1.00 points better than"), ([-1.0, -1.1, -0.9], "1.00 points worse than"),
        ([-1.0, 2.0], "no clear difference"), ([1.0, 3.0], "no clear difference"), ([1.0], "1 seed, no interval"),
    ],
)  # fmt: skip
def test_the_verdict_is_honest(gains, words):
    assert words in runner.verdict(gains)


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch):
    """From scratch, unless a test says otherwise."""
    monkeypatch.setattr(runner, "available_weights", list)


def test_with_pretrained_weights_the_demo_is_train_without_a_recipe(tmp_path, capsys, photos, monkeypatch):
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

    assert runner.demo(tmp_path, run, "minutes", data=str(photos)) == 0
    assert [words[0] for words in called] == ["train", "maps", "report", "export"]
    assert called[0][1] == str(photos)
    assert called[3][1] == str(tmp_path / "run")  # the one that was kept
    assert called[2][1:3] == [str(tmp_path / "run/linear"), "--out"]
    assert "Kept: the linear head" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["top1"] == 76.0


def test_the_two_kinds_are_trained_alike_but_for_the_objective(tmp_path):
    words = {
        k: runner.train_words(runner.SCALES["minutes"], k, "i", tmp_path, 1, tmp_path / k, ()) for k in runner.KINDS
    }
    plain = [w for w in words["plain"] if w not in words["every-token"]]
    assert plain == ["objectives.hard={}", str(tmp_path / "plain")]


def test_a_smaller_or_larger_folder_takes_as_long_by_more_or_fewer_epochs():
    scale = runner.SCALES["minutes"]
    assert runner.budget(scale, scale.train) == scale
    assert runner.budget(scale, scale.train // 2).epochs == 2 * scale.epochs
    assert runner.budget(scale, 20).epochs == 40
    assert runner.budget(scale, 10**6).fit_epochs == 1


def test_the_demo_calls_the_real_commands_and_reports_every_seed(tmp_path, capsys, photos):
    called = []

    def run(words: list[str]) -> int:
        called.append(words)
        if words[0] == "train":
            place = Path(words[words.index("--out") + 1])
            place.mkdir(parents=True)
            seed = int(words[words.index("--seed") + 1])
            score = 50.0 + (2 + seed / 10) * ("every-token" in place.name)
            (place / "summary.json").write_text(json.dumps({"last": {"score": score}}))
        return 0

    runner.demo(tmp_path, run, "minutes", data=str(photos), seeds=3)
    assert [words[0] for words in called] == ["annotate", *["train"] * 6, "report"]
    assert all(str(photos) in words for words in called[:-1])
    assert not any("--val-split" in words for words in called)  # these photos have a val folder
    assert [Path(p).name for p in called[-1][1:7]] == [f"{k}-seed{s}" for k in runner.KINDS for s in (1, 2, 3)]
    text = capsys.readouterr().out
    assert "training on every token is 2.20 points better than plain training" in text
    assert str(tmp_path / "report.html") in text.splitlines()[-1]
    assert json.loads((tmp_path / "result.json").read_text())["gain"] == pytest.approx([2.1, 2.2, 2.3])
    with Image.open(tmp_path / "data.png") as sheet:
        assert np.asarray(sheet).std() > 30
    with pytest.raises(EverytokenError, match="exit code 143"):
        runner.demo(tmp_path, lambda words: 143, "minutes", data=str(photos))


def test_a_folder_without_val_is_divided_in_every_step(tmp_path, photos):
    called = []

    def run(words: list[str]) -> int:
        called.append(words)
        return 0 if words[0] != "train" else 7

    with pytest.raises(EverytokenError):
        runner.demo(tmp_path, run, "minutes", data=str(photos / "train"))
    assert all(words[words.index("--val-split") + 1] == "0.2" for words in called)


def test_the_smallest_demo_runs_to_its_page_and_the_second_time_trains_nothing(tmp_path, capsys, photos, monkeypatch):
    tiny = ("--model", "vit_nano_patch4_32", "--set", "model_kwargs={embed_dim: 32, depth: 1, num_heads: 2}")
    tiny += ("--device", "cpu")
    monkeypatch.setitem(runner.SCALES, "minutes", runner.Scale(36, 12, 1, 1, 1, 1, 12, 1e-3, tiny))
    assert main(["demo", "--data", str(photos), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "every-token against plain" in page
    weights = tmp_path / "runs/every-token-seed1/best.safetensors"
    before = weights.stat().st_mtime_ns
    assert main(["demo", "--data", str(photos), "--out", str(tmp_path)]) == 0
    assert weights.stat().st_mtime_ns == before
    assert "1 seed, no interval" in capsys.readouterr().out
