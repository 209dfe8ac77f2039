"""`everytoken predict` on images without labels."""

import csv
import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from everytoken.cli import main
from everytoken.evaluation.run import evaluate
from everytoken.models.open import Description

NAMES = ("class-0", "class-1", "class-2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "best.safetensors"
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=3, img_size=32)
        torch.nn.init.normal_(model.head.weight, std=0.3)
    about = Description("test_vit", {"num_classes": 3, "img_size": 32}, NAMES, img_size=(32, 32))
    save_file(model.state_dict(), path, metadata=about.to_metadata())
    return path


FAST = ("--device", "cpu", "-j", "0", "-b", "5")


def test_predictions_are_those_of_evaluation(photos, weights, tmp_path, capsys):
    out = tmp_path / "new folder/predictions.csv"
    assert main(["predict", str(weights), str(photos / "val"), "--out", str(out), *FAST]) == 0
    assert "12 images in" in capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    known = evaluate(str(weights), str(photos), device="cpu", workers=0)
    wanted = {str(photos / "val" / known.keys[i]): (NAMES[top[0]], sure)
              for i, top, sure in zip(known.predictions.index, known.predictions.top, known.predictions.confidence,
                                      strict=True)}  # fmt: skip
    assert {row["image"] for row in rows} == set(wanted)
    for row in rows:
        assert row["class"] == wanted[row["image"]][0]
        assert float(row["probability"]) == pytest.approx(wanted[row["image"]][1], abs=1e-3)
        assert sum(float(row[name]) for name in row if name.startswith("prob")) == pytest.approx(1, abs=1e-3)


def test_one_image_is_a_line_and_json_is_a_line(photos, weights, capsys):
    image = sorted((photos / "val/class-0").iterdir())[0]
    assert main(["predict", str(weights), str(image), "--top", "2", *FAST]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith(f"{image}: class-")
    assert line.count("%") == 2
    assert main(["predict", str(weights), str(image), "--json", *FAST]) == 0
    row = json.loads(capsys.readouterr().out)
    assert set(row["classes"]) == set(NAMES)


def test_what_is_wrong_is_named(weights, tmp_path, capsys):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    assert main(["predict", str(weights), str(bad), *FAST]) == 2
    assert "bad.jpg" in capsys.readouterr().err
    assert main(["predict", str(weights), str(tmp_path / "nothing"), *FAST]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["predict", str(weights), *FAST]) == 2
    assert "name the images" in capsys.readouterr().err
    assert main(["predict", str(weights), str(bad), "--top", "0", *FAST]) == 2
    assert "top is 0" in capsys.readouterr().err
    assert main(["predict", str(weights), str(bad), "--device", "gpu"]) == 2
    assert "device is 'gpu'" in capsys.readouterr().err


def test_unreadable_images_can_be_left_out(photos, weights, tmp_path, capsys):
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(sorted((photos / "val").rglob("*.*"))[i].read_bytes())
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    assert main(["predict", str(weights), str(tmp_path), "--on-bad-image", "skip", *FAST]) == 0
    text = capsys.readouterr().out
    assert text.count("class-0") == 12
    assert "1 images could not be read" in text


def test_outputs_without_a_folder_have_numbers(photos, tmp_path, capsys):
    """A run with --num-classes 5 and three folders."""
    model = timm.create_model("test_vit", num_classes=5, img_size=32)
    about = Description("test_vit", {"num_classes": 5, "img_size": 32}, NAMES, img_size=(32, 32))
    save_file(model.state_dict(), tmp_path / "best.safetensors", metadata=about.to_metadata())
    image = next((photos / "val/class-0").iterdir())
    assert main(["predict", str(tmp_path / "best.safetensors"), str(image), "--json", "--top", "5", *FAST]) == 0
    assert set(json.loads(capsys.readouterr().out)["classes"]) == {*NAMES, "class 3", "class 4"}


def test_a_table_never_lands_on_an_image(photos, weights, tmp_path, capsys):
    image = tmp_path / "mine.png"
    image.write_bytes(next((photos / "val").rglob("*.png")).read_bytes())
    kept = image.read_bytes()
    assert main(["predict", str(weights), str(image), "--out", str(image), *FAST]) == 2
    assert "one of the images" in capsys.readouterr().err
    assert image.read_bytes() == kept
