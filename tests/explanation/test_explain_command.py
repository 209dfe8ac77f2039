"""`everytoken explain` from end to end, on small images."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from everytoken_lab import explain
from everytoken_lab.cli import main
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.explanation.cards import open_explained
from everytoken_lab.explanation.saliency import relevance
from everytoken_lab.models.description import Description

NAMES = ("cat", "dog", "cow", "hen")


def save_model(path, name, token_names=(), **arguments):
    torch.manual_seed(0)
    arguments = {"num_classes": 4, **arguments}
    model = timm.create_model(name, **arguments)
    about = Description(name, arguments, NAMES, token_names, img_size=(32, 32))
    save_file(model.state_dict(), path, metadata=about.to_metadata())
    if token_names:
        head = torch.nn.Linear(model.num_features, len(token_names))
        torch.nn.init.normal_(head.weight, std=0.3)
        save_file(head.state_dict(), path.with_name(path.stem + ".token_head.safetensors"))
    return str(path)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Two models and three images."""
    root = tmp_path_factory.mktemp("explain")
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    save_model(root / "vit.safetensors", "vit_tiny_patch16_224", NAMES, **small)
    save_model(root / "cnn.safetensors", "resnet10t")
    rng = np.random.default_rng(0)
    for name, size in (("train/cat/one.png", (40, 36)), ("two.jpg", (36, 60)), ("grey.png", (32, 32))):
        path = root / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).convert("L" if name.startswith("grey") else "RGB").save(path)
    return root


def run(here, *argv):
    return main(["explain", *map(str, argv), "--device", "cpu"])


def test_cards_an_overview_and_numbers_are_written_and_named(here, tmp_path, capsys):
    images = [here / "photos/train/cat/one.png", here / "photos/two.jpg", here / "photos/grey.png"]
    assert run(here, here / "vit.safetensors", *images, "--out", tmp_path) == 0
    printed = [line.rsplit("/", 1)[-1] for line in capsys.readouterr().out.split()]
    assert printed == ["01-one.png", "02-two.png", "03-grey.png", "overview.png", "explain.json"]
    facts = json.loads((tmp_path / "explain.json").read_text())
    assert facts["models"][0]["method"] == "attention"
    first = facts["images"][0]["models"][0]
    assert first["tokens"]["from"] == "token head"
    assert np.shape(first["tokens"]["classes"]) == np.shape(first["tokens"]["confidence"]) == (8, 8)
    assert len(first["relevance"]) == 2
    assert [r["index"] for r in first["relevance"]] == [t["index"] for t in first["top"][:2]]
    assert np.shape(first["relevance"][0]["grid"]) == (8, 8)
    assert sum(t["probability"] for t in first["top"]) == pytest.approx(1, abs=1e-4)
    sizes = [Image.open(tmp_path / name).size for name in printed[:4]]
    assert sizes[3][1] > sum(height for _, height in sizes[:3])


def test_the_numbers_are_those_of_the_functions_and_python_writes_nothing_unless_asked(here, tmp_path):
    image, model = here / "photos/two.jpg", str(here / "vit.safetensors")
    assert run(here, model, image, "--class", "hen", "--class", "1", "--out", tmp_path) == 0
    said = json.loads((tmp_path / "explain.json").read_text())["images"][0]["models"][0]["relevance"]
    assert [(one["class"], one["index"]) for one in said] == [("hen", 3), ("dog", 1)]
    subject = open_explained(model, InferenceOptions(workers=0))
    maps = relevance(subject.opened.model, subject.read(image)[1], [3, 1])[0]
    np.testing.assert_allclose([one["grid"] for one in said], maps, rtol=1e-4, atol=1e-9)
    result = explain(model, image, classes=("hen", "1"), device="cpu")
    assert result.files == []
    assert result.cards[0].width > 600
    assert result.facts["images"][0]["models"][0]["relevance"] == said


def test_two_models_are_asked_about_the_same_classes(here, tmp_path):
    image = here / "photos/two.jpg"
    options = ["--compare", here / "cnn.safetensors", "--out", tmp_path]
    assert run(here, here / "vit.safetensors", image, *options) == 0
    facts = json.loads((tmp_path / "explain.json").read_text())
    assert [m["method"] for m in facts["models"]] == ["attention", "cam"]
    one, other = facts["images"][0]["models"]
    assert [r["class"] for r in one["relevance"]] == [r["class"] for r in other["relevance"]]
    assert other["tokens"]["from"] == "class head"


@pytest.mark.parametrize("model", ["vit", "cnn"])
def test_a_mixture_is_drawn_and_told(here, tmp_path, model):
    images = [here / "photos/train/cat/one.png", here / "photos/two.jpg"]
    assert run(here, here / f"{model}.safetensors", *images, "--mix", "--mix-part", 0.3, "--out", tmp_path) == 0
    (story,) = json.loads((tmp_path / "explain.json").read_text())["mix"]["models"]
    assert story["ratio"] == pytest.approx(0.7, abs=0.03)
    assert Image.open(tmp_path / "mix.png").width > 1000


@pytest.mark.parametrize(("more", "message"), [
    (["--class", "dgo"], "has no class 'dgo', or several. Did you mean 'dog'"),
    (["--class", "4"], "a number from 0 to 3"),
    (["--mix"], "exactly two images, got 1"),
    (["--weights", "x.pt"], "go with timm:NAME"),
    (["--mix-part", "1"], "mix_part is 1.0, but should be less than 1"),
])  # fmt: skip
def test_mistakes_are_told_with_the_way_out(here, tmp_path, capsys, more, message):
    assert run(here, here / "vit.safetensors", here / "photos/two.jpg", *more, "--out", tmp_path) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_and_a_folder_are_told(here, tmp_path, capsys):
    assert run(here, here / "vit.safetensors", here / "photos", "--out", tmp_path) == 2
    assert "name the files" in capsys.readouterr().err
    assert run(here, here / "vit.safetensors", "--out", tmp_path) == 2
    assert "at least one image" in capsys.readouterr().err
