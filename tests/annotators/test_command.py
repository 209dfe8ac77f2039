"""`everytoken annotate`, as it is typed."""

from __future__ import annotations

import pytest
import torch

from everytoken.maps import Maps
from everytoken_lab.annotators.annotator import ANNOTATORS, Annotator
from everytoken_lab.classes import ClassList
from everytoken_lab.cli import main
from everytoken_lab.data.augment import EvalTransform


def score(images):
    assert images.min() >= 0
    assert images.max() <= 1
    return torch.nn.functional.avg_pool2d(images, 8).permute(0, 2, 3, 1) * 10


def by_colour(spec, size=None, weights=""):
    """An annotator that is never wrong about these photos; `wrong` gives other scores than it has classes."""
    names = ("red", "green", "blue") if spec.endswith("score") else ("a", "b")
    preprocessing = EvalTransform((24, 32), mean=(0.0,) * 3, std=(1.0,) * 3)
    return Annotator(spec, preprocessing, ClassList(len(names), names), {}, score)


@pytest.fixture
def here(tmp_path, monkeypatch, photos):
    """A working directory with photos, and an annotator of their colours."""
    monkeypatch.setitem(ANNOTATORS, "colour", ("colour:NAME", by_colour))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return main(["annotate", *words])


def test_an_annotator_fills_a_store_and_the_result_is_told(here, capsys):
    assert run("photos", "--out", "maps", "--annotator", "colour:score", "-j", "0", "--device", "cpu") == 0
    said = capsys.readouterr().out
    store = Maps("maps")
    assert store.meta.class_names == ["blue", "green", "red"]
    assert store.meta.grid == (3, 4)
    assert (store["blue/1.blue.png"].classes[..., 0] == 0).all()
    for part in (
        "3 x 4",
        "100.0%",
        "bytes per image",
        "maps sheet maps",
        "train photos --maps maps --recipe small_32_token",
    ):
        assert part in said


def test_running_it_again_does_nothing_and_says_so(here, capsys):
    words = ("photos", "--out", "maps", "--annotator", "colour:score", "-j", "0", "--device", "cpu")
    run(*words)
    before = {p.name: p.stat().st_mtime_ns for p in (here / "maps").iterdir() if not p.name.startswith(".")}
    capsys.readouterr()
    assert run(*words) == 0
    assert "0 images in" in capsys.readouterr().out
    assert before == {p.name: p.stat().st_mtime_ns for p in (here / "maps").iterdir() if not p.name.startswith(".")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--annotator", "colour:wrong"], "2] is needed"),
        (["--annotator", "colour:score", "--fit-size", "64"], "can only be used with the annotator fit"),
        (["--annotator", "fit", "--weights", "x"], "trains its own weights"),
        (["--annotator", "colour:score", "--top-k", "4"], "more than the 3 classes"),
        (["--annotator", "nonsense"], "there is no annotator"),
        (["--annotator", "fit", "--batch-size", "0"], "batch_size is 0"),
        (["--annotator", "fit", "--val-split", "1"], "val_split is 1.0"),
        (["--annotator", "fit", "--img-size", "1", "2", "3"], "img_size is (1, 2, 3)"),
        (["--annotator", "fit", "--img-size", "0"], "img_size is 0"),
    ],
)
def test_mistakes_are_explained_in_one_message(here, capsys, words, said):
    more = ["--foreign-classes"] if "colour:wrong" in words else []
    assert run("photos", "--out", "maps", "-j", "0", "--device", "cpu", *words, *more) == 2
    text = capsys.readouterr().err
    assert said in text
    assert "Traceback" not in text


@pytest.mark.parametrize("out", ["photos", "photos/maps", "full"])
def test_a_folder_that_cannot_be_a_store_is_refused_before_anything_is_trained_or_written(here, capsys, out):
    (here / "full").mkdir()
    (here / "full" / "notes.txt").touch()
    before = sorted(here.rglob("*"))
    assert run("photos", "--out", out, "--annotator", "fit", "-j", "0", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert out in said
    assert "training" not in said or "taken for a class in training" in said
    assert sorted(here.rglob("*")) == before


def test_a_store_of_another_annotator_is_refused_before_anything_is_trained(here, capsys):
    words = ("photos", "--out", "maps", "-j", "0", "--device", "cpu")
    assert run(*words, "--annotator", "colour:score") == 0
    assert run(*words, "--annotator", "fit") == 2
    assert "annotator: colour:score in the store, fit now" in capsys.readouterr().err
    assert not (here / "maps" / "annotator").exists()


def test_the_commands_to_run_next_can_be_pasted(here, capsys):
    (here / "photos").rename(here / "my photos")
    words = ("my photos", "--out", "my maps", "--annotator", "colour:score", "-j", "0", "--device", "cpu")
    assert run(*words) == 0
    said = capsys.readouterr().out
    assert "maps sheet 'my maps' --images 'my photos' --out" in said
    assert "train 'my photos' --maps 'my maps' --recipe" in said


def test_nothing_but_unreadable_images_is_a_failure(here, capsys):
    for path in (here / "photos").glob("*/*.png"):
        path.write_bytes(b"broken")
    assert run("photos", "--out", "maps", "--annotator", "colour:score", "-j", "0", "--device", "cpu") == 1
    said = capsys.readouterr()
    assert "skipped blue/0.blue.png" in said.out
    assert "none of the images could be read" in said.err
