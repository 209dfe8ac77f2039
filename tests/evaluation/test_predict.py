"""`everytoken predict` on images without labels."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from everytoken.cli import main
from everytoken.evaluation import evaluate, load, predict
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


def test_python_and_the_command_line_say_the_same(photos, weights, tmp_path, capsys):
    assert main(["predict", str(weights), str(photos / "val"), "--out", str(tmp_path / "a.csv"), *FAST]) == 0
    model = load(weights)
    assert model.class_names == NAMES
    result = model.predict(photos / "val", device="cpu", workers=0)
    result.to_csv(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert [image.path for image in result] == [image.path for image in predict(weights, photos / "val", workers=0)]
    assert len(result[0].classes) == len(result[0].probabilities) == 3
    numbers = model.evaluate(photos, device="cpu", workers=0).numbers
    assert numbers["top1"] == evaluate(weights, photos, device="cpu", workers=0).numbers["top1"]


def test_names_are_no_formulas_and_no_markup(photos, tmp_path, capsys):
    """A class called [/red] ended `eval` with an error of rich's, and =1+1 was a formula in a spreadsheet."""
    names = ("=1+1", "[/red]", "@home")
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    info = Description("test_vit", {"num_classes": 3, "img_size": 32}, names, img_size=(32, 32))
    save_file(model.state_dict(), tmp_path / "best.safetensors", metadata=info.to_metadata())
    (tmp_path / "data").mkdir()
    for name, folder in zip(names, sorted((photos / "val").iterdir()), strict=True):
        # a folder cannot be called [/red]; `eval` compares by name, so the other two are enough for it
        if "/" not in name:
            (tmp_path / "data" / name).symlink_to(folder)
    out = tmp_path / "e"
    assert main(["eval", str(tmp_path / "best.safetensors"), str(tmp_path / "data"), "--out", str(out), *FAST]) == 0
    assert "=1+1" in capsys.readouterr().out
    assert main(["predict", str(tmp_path / "best.safetensors"), str(photos), "--out", str(out), *FAST]) == 0
    for file in (tmp_path / "e.csv", out):
        cells = [cell for row in csv.reader(file.read_text().splitlines()) for cell in row]
        assert "'=1+1" in cells or "'@home" in cells
        assert not any(cell.startswith(("=", "@")) for cell in cells)


def test_markup_in_class_names_is_shown_as_it_is(capsys):
    from everytoken.cli.eval import _print
    from everytoken.engine.accuracy import Predictions
    from everytoken.evaluation.run import Evaluation

    predictions = Predictions(np.arange(2), np.array([0, 1]), np.array([[1], [1]]), np.ones(2), np.zeros(2))
    result = Evaluation(predictions.summary(), predictions, ["[/red]", "[bold]x"], ["a", "b"])
    _print(result, "[/blue] on data", 10)
    text = capsys.readouterr().out
    assert "[/red]" in text
    assert "[bold]x" in text
    assert "[/blue]" in text
