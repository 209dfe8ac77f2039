"""`everytoken predict` on images without labels."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from everytoken.errors import EverytokenError
from everytoken.models import TokenView
from everytoken_lab import evaluate, load, predict
from everytoken_lab.classes import ClassList
from everytoken_lab.cli import main
from everytoken_lab.draw import colour_of, rgb
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.evaluation.locate import Location, box_of, guided_filter, main_parts, object_map
from everytoken_lab.evaluation.predictions import ImagePrediction
from everytoken_lab.models import onnx
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import OpenModel

NAMES = ("class-0", "class-1", "class-2")


ABOUT = {"num_classes": 3, "img_size": 32}


def save(path, names=NAMES, classes=3, state=None):
    """Weights of a small ViT that describe themselves; random ones if none are given."""
    arguments = {**ABOUT, "num_classes": classes}
    state = state or timm.create_model("test_vit", **arguments).state_dict()
    save_file(state, path, metadata=Description("test_vit", arguments, names, img_size=(32, 32)).to_metadata())
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", **ABOUT)
        torch.nn.init.normal_(model.head.weight, std=0.3)
    return save(tmp_path_factory.mktemp("weights") / "best.safetensors", state=model.state_dict())


FAST = ("--device", "cpu", "-j", "0", "-b", "5")


def test_predictions_are_those_of_evaluation_in_python_and_on_the_command_line(photos, weights, tmp_path, capsys):
    out = tmp_path / "new folder/predictions.csv"
    assert main(["predict", str(weights), str(photos / "val"), "--out", str(out), *FAST]) == 0
    assert "12 images in" in capsys.readouterr().out
    model = load(weights)
    assert model.class_names == NAMES
    result = model.predict(photos / "val", device="cpu", workers=0)
    result.to_csv(tmp_path / "b.csv")
    assert out.read_bytes() == (tmp_path / "b.csv").read_bytes()
    with out.open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert list(rows) == [image.path for image in result]
    known = evaluate(str(weights), str(photos), device="cpu", workers=0)
    assert model.evaluate(photos, device="cpu", workers=0).numbers["top1"] == known.numbers["top1"]
    answers = known.predictions
    for i, top, sure in zip(answers.index, answers.top, answers.confidence, strict=True):
        row = rows.pop(str(photos / "val" / known.keys[i]))
        assert row["class"] == NAMES[top[0]]
        assert float(row["probability"]) == pytest.approx(sure, abs=1e-3)
        assert sum(float(row[name]) for name in row if name.startswith("prob")) == pytest.approx(1, abs=1e-3)
    assert not rows


def test_one_image_is_a_line_and_outputs_without_a_folder_have_numbers(photos, tmp_path, capsys):
    """A run with --num-classes 5 and three folders."""
    source = save(tmp_path / "best.safetensors", classes=5)
    image = sorted((photos / "val/class-0").iterdir())[0]
    assert main(["predict", str(source), str(image), "--top", "2", *FAST]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith(f"{image}: class")
    assert line.count("%") == 2
    assert main(["predict", str(source), str(image), "--json", "--top", "5", *FAST]) == 0
    assert set(json.loads(capsys.readouterr().out)["classes"]) == {*NAMES, "class 3", "class 4"}


def test_a_convolutional_network_predicts_many_images_by_onnx_runtime(photos, weights, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    calls = []
    faster = onnx.faster

    def counted(module, example):
        forward = faster(module, example)
        assert forward is not module
        return lambda images: calls.append(1) or forward(images)

    monkeypatch.setattr("everytoken_lab.evaluation.run.faster", counted)
    plain = predict(weights, [photos / "val"], device="cpu", workers=0, batch_size=5)
    assert not calls
    monkeypatch.setattr("everytoken_lab.evaluation.run.WORTH_EXPORTING", 12 * 32 * 32)
    predict(weights, [photos / "val"], device="cpu", workers=0, batch_size=5)
    assert not calls  # a transformer would not be faster
    monkeypatch.setattr("everytoken_lab.evaluation.run.CONVOLUTIONS", 1)
    fast = predict(weights, [photos / "val"], device="cpu", workers=0, batch_size=5)
    assert len(calls) == 3  # batches
    for one, other in zip(plain, fast, strict=True):
        assert one.classes == other.classes
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)


def test_what_is_wrong_is_named(weights, tmp_path, capsys):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    assert main(["predict", str(weights), str(bad), *FAST]) == 2
    assert "bad.jpg" in capsys.readouterr().out
    for words, sentence in (
        ([str(tmp_path / "nothing")], "nothing"),
        ([], "name the images"),
        ([str(bad), "--top", "0"], "top is 0, but should be greater than or equal to 1"),
        ([str(bad), "--sure", "95"], "sure is 95.0, but should be less than or equal to 1"),
        ([str(bad), "--device", "gpu"], "device is 'gpu'"),
    ):
        assert main(["predict", str(weights), *FAST, *words]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "predict", "explain"])
def test_answers_that_are_no_numbers_are_told(command, photos, weights, tmp_path, capsys):
    state = load_file(weights)
    state["head.bias"][0] = float("nan")
    save(tmp_path / "nan.safetensors", state=state)
    image = next((photos / "val").rglob("*.png"))
    more = ["--out", str(tmp_path / "out"), "--device", "cpu"] if command == "explain" else FAST
    data = photos if command == "eval" else image
    assert main([command, str(tmp_path / "nan.safetensors"), str(data), *more]) == 2
    assert "not finite numbers" in capsys.readouterr().err


def test_names_that_are_not_unicode_are_spelt_out(photos, weights, tmp_path):
    (tmp_path / "odd").mkdir()
    shutil.copy(next((photos / "val").rglob("*.png")), os.fsencode(tmp_path / "odd") + b"/\xff.png")
    words = ["predict", str(weights), str(tmp_path / "odd"), *FAST]
    assert main([*words, "--out", str(tmp_path / "a.csv")]) == 0
    assert "odd/\\xff.png,class-" in (tmp_path / "a.csv").read_text()
    code = f"from everytoken_lab.cli import main; print(main({words!r}), main({[*words, '--json']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["0", "0"]


def test_an_unreadable_image_is_a_row_with_an_error(photos, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "new"
    folder.mkdir()
    for i, file in enumerate(sorted((photos / "val").rglob("*.*"))[:3]):
        (folder / f"{i}.png").write_bytes(file.read_bytes())
        (folder / f"{'abc'[i]}.jpg").write_bytes(b"no image")  # half of all
    words = ["predict", str(weights), "new", *FAST]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.count("class-0") == 3
    assert "3 images could not be read, the first: new/a.jpg" in text
    table = [*words, "--out", "rows.csv", "--pictures", "drawn"]
    assert main(table) == 0
    with open("rows.csv") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert set(rows) == {f"new/{name}" for name in ("0.png", "1.png", "2.png", "a.jpg", "b.jpg", "c.jpg")}
    for name, row in rows.items():
        assert (name in row["error"], bool(row["class"])) == (name.endswith("jpg"), name.endswith("png"))
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sorted(line) == ["error", "image"] for line in lines] == [False] * 3 + [True] * 3
    assert main([*words, "--on-bad-image", "raise"]) == 2
    for i in range(3):
        (folder / f"{i}.png").unlink()
    assert main(table) == 2  # nothing but errors


def test_a_table_never_lands_on_an_image(photos, weights, tmp_path, capsys):
    image = tmp_path / "mine.png"
    image.write_bytes(next((photos / "val").rglob("*.png")).read_bytes())
    kept = image.read_bytes()
    assert main(["predict", str(weights), str(image), "--out", str(image), *FAST]) == 2
    assert "one of the images" in capsys.readouterr().err
    assert image.read_bytes() == kept


def test_names_are_no_formulas_and_no_markup(photos, tmp_path, capsys):
    """A class called [/red] ended `eval` with an error of rich's, and =1+1 was a formula in a spreadsheet."""
    source, data = str(save(tmp_path / "best.safetensors", ("=1+1", "[/red]", "@home"))), tmp_path / "data"
    data.mkdir()
    for name in ("=1+1", "@home"):  # a folder cannot be called [/red]
        (data / name).symlink_to(photos / "val/class-0")
    table = tmp_path / "e.csv"
    for command, images in (("eval", data), ("predict", photos)):
        assert main([command, source, str(images), "--out", str(table), *FAST]) == 0
        cells = [cell for row in csv.reader(table.read_text().splitlines()) for cell in row]
        assert "'=1+1" in cells or "'@home" in cells
        assert not any(cell.startswith(("=", "@")) for cell in cells)
        assert command == "predict" or "=1+1" in capsys.readouterr().out


# -- confidence -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(weights, photos, tmp_path):
    """A run that held out 24 images, with a network that is far too sure."""
    data = tmp_path / "photos"
    for i in range(3):
        for split, part in (("train", slice(0, 4)), ("val", slice(4, 12))):
            (data / split / f"class-{i}").mkdir(parents=True)
            for file in sorted((photos / f"train/class-{i}").iterdir())[part]:
                (data / split / f"class-{i}" / file.name).symlink_to(file)
    folder = tmp_path / "runs/first"
    folder.mkdir(parents=True)
    state = load_file(weights)
    state |= {name: 6 * value for name, value in state.items() if name.startswith("head.")}
    save(folder / "best.safetensors", state=state)
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": str(data), "seed": 0}))
    return folder


def test_probabilities_of_a_run_are_calibrated_on_what_it_held_out_once(run, monkeypatch):
    photos = run.parents[1] / "photos/val"
    raw, first = (predict(run, photos, calibrate=calibrate, workers=0) for calibrate in (False, True))
    assert "calibrated on 24 images" in first.notes[0]
    kept = json.loads((run / "calibration.json").read_text())["calibration"]
    assert kept["temperature"] > 2
    for calm, sure in zip(first, raw, strict=True):
        assert calm.classes[0] == sure.classes[0]
        tempered = np.array(sure.probabilities) ** (1 / kept["temperature"])
        np.testing.assert_allclose(calm.probabilities, tempered / tempered.sum(), atol=1e-3)

    monkeypatch.setattr("everytoken_lab.evaluation.run.evaluate", None)  # the second time needs no images
    again = read_run(run).load().predict(photos, workers=0)
    assert again.images == first.images
    assert not again.notes
    (run / "calibration.json").write_text("{")  # torn: it would be made again
    with pytest.raises(TypeError):
        predict(run, photos, workers=0)


def test_answers_that_are_not_likely_enough_are_unsure(run, tmp_path, capsys):
    photos, out = run.parents[1] / "photos/val", tmp_path / "answers.csv"
    predict(run, photos, workers=0)
    kept = json.loads((run / "calibration.json").read_text())["calibration"]
    rate = kept["accuracy"][len(kept["accuracy"]) // 3] / 100
    result = predict(run, photos, sure=rate, workers=0)
    answered = [image for image in result if image.sure]
    assert 0 < len(answered) < 24
    assert np.mean([image.answer == Path(image.path).parent.name for image in answered]) >= rate - 1e-4
    assert all(image.probabilities[0] < result.threshold for image in result if image.answer == "unsure")
    answers = [image.answer for image in result]
    assert main(["predict", str(run), str(photos), "--sure", str(rate), *FAST, "--json", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert [row["answer"] for row in csv.DictReader(out.open())] == answers
    assert [json.loads(line)["answer"] for line in said.out.splitlines()] == answers
    assert "are unsure" in said.err


def test_images_that_look_like_none_of_the_classes_are_told(run, tmp_path, capsys):
    photos = run.parents[1] / "photos/val"
    held_out = predict(run, photos, workers=0)
    assert sorted(image.familiarity for image in held_out) == pytest.approx(np.arange(1, 25) / 24, abs=0.05)
    kept = json.loads((run / "calibration.json").read_text())
    kept["calibration"]["energies"] = [1e6] * 100
    (run / "calibration.json").write_text(json.dumps(kept))
    out = tmp_path / "answers.csv"
    assert main(["predict", str(run), str(photos), "--out", str(out), *FAST]) == 0
    rows = list(csv.DictReader(out.open()))
    assert {(row["familiarity"], row["unfamiliar"]) for row in rows} == {("0.00", "yes")}
    capsys.readouterr()
    assert main(["predict", str(run), str(photos / "class-0"), *FAST]) == 0
    assert all(line.endswith("; unlike the training photos") for line in capsys.readouterr().out.splitlines())
    raw = predict(run, photos, calibrate=False, workers=0)
    assert raw[0].familiarity is None
    assert "familiarity" not in raw[0].to_json()


def test_what_cannot_be_calibrated_says_so_and_still_answers(run, weights, photos):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"data": str(photos)}))
    result = predict(run, photos / "val", workers=0)
    assert "fewer than 20" in result.notes[0]
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"data": "/nowhere"}))
    assert "cannot be used" in predict(run, photos / "val", workers=0).notes[0]
    alone = predict(weights, photos / "val", sure=0.5, workers=0)  # weights without a run
    assert alone.threshold == 0.5
    assert all(image.sure == (image.probabilities[0] >= 0.5) for image in alone)


# -- where the object is ----------------------------------------------------------------------------------------------


class Colours(nn.Module):
    """Answers red, green or blue, and its cells (8 x 8 pixels) how red, green or blue they are."""

    backbone, uses_own_head, token_head = nn.Identity(), False, None

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def class_and_cell_logits(self, images):
        contrast = images - images.mean(1, keepdim=True)
        cells = nn.functional.avg_pool2d(contrast, 8).permute(0, 2, 3, 1)
        return cells.amax((1, 2)), cells

    def forward(self, images):
        return TokenView(*self.class_and_cell_logits(images))


@pytest.fixture
def disc(tmp_path):
    """A red disc on a bluish ground, wider than high; and the model that sees colours."""
    rows, columns = np.mgrid[:120, :180]
    inside = (rows - 40) ** 2 + (columns - 120) ** 2 < 25**2
    pixels = np.where(inside[..., None], (220, 40, 40), (90, 100, 120)).astype(np.uint8)
    (tmp_path / "photos").mkdir()
    Image.fromarray(pixels).save(tmp_path / "photos/disc.png")
    classes = ClassList(3, ("red", "green", "blue"))
    info = Description("test_vit", class_names=classes.names, img_size=(64, 64))
    return OpenModel(Colours(), info, "colours", classes), tmp_path / "photos", inside


def test_an_object_is_located_in_the_whole_photo(disc, tmp_path):
    model, folder, inside = disc
    told = []
    result = predict(model, folder, locate=True, workers=0, progress=lambda *at: told.append(at))
    assert told == [(0, 1), (0, 1), (0, 1), (1, 1)]  # a photo is done after both passes, and counts once
    (image,) = result
    assert image.classes[0] == "red"
    mask, pixels = image.location.mask(), image.location.pixels
    assert mask.shape == (120, 180)
    assert (mask & inside).sum() / (mask | inside).sum() > 0.8
    np.testing.assert_allclose(pixels, (95, 15, 146, 66), atol=6)

    result.to_csv(tmp_path / "a.csv")
    row = next(csv.DictReader((tmp_path / "a.csv").open()))
    edges = [float(row[edge]) for edge in ("left", "top", "right", "bottom")]
    np.testing.assert_allclose(edges, pixels, atol=0.6)
    row = json.loads(json.dumps(image.to_json()))
    assert (row["box"], row["size"]) == ([*pixels], [180, 120])
    counts = row["mask"]["counts"]
    assert (mask == np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(180, 120).T).all()
    (picture,) = result.save_pictures(tmp_path / "pictures")
    drawn = Image.open(picture)
    assert drawn.size == (640, 427)
    left, top, _, bottom = (round(edge * 640 / 180) for edge in pixels)
    colour = colour_of(result.class_names.index("red"))
    np.testing.assert_allclose(drawn.getpixel((left + 1, (top + bottom) // 2)), rgb(colour), atol=40)  # of the frame
    with pytest.raises(EverytokenError, match="locate=True"):
        predict(model, folder, workers=0).save_pictures(tmp_path / "more")


def test_boxes_come_with_every_kind_of_network_on_the_command_line(weights, photos, tmp_path, capsys):
    """Of a transformer without a token head, and of a CNN, which looks more closely."""
    network = timm.create_model("test_resnet", num_classes=3)
    about = Description("test_resnet", {"num_classes": 3}, NAMES, img_size=(32, 32))
    save_file(network.state_dict(), tmp_path / "cnn.safetensors", metadata=about.to_metadata())
    image = sorted((photos / "val/class-0").iterdir())[0]
    for file in (weights, tmp_path / "cnn.safetensors"):
        pictures = tmp_path / file.stem
        assert main(["predict", str(file), str(image), "--json", "--pictures", str(pictures), *FAST]) == 0
        row = json.loads(capsys.readouterr().out)
        left, top, right, bottom = row.get("box", (0, 0, 40, 36))  # networks that learnt nothing may see nothing
        assert 0 <= left < right <= 40
        assert 0 <= top < bottom <= 36
        assert (pictures / f"{image.stem}.jpg").is_file()


@pytest.mark.parametrize(
    ("row", "counts"), [((0, 1, 1, 0), [3, 6, 3]), ((1, 1, 1, 1), [0, 12]), ((0, 0, 1, 1), [6, 6])]
)
def test_masks_are_cocos_run_lengths(row, counts):
    coco = pytest.importorskip("pycocotools.mask")
    heat = np.array([row] * 3, np.float16)
    told = ImagePrediction("a", ("b",), (1.0,), location=Location(heat, (0, 0, 1, 1), (4, 3))).to_json()["mask"]
    assert told["counts"] == counts
    assert (coco.decode(coco.frPyObjects(told, 3, 4)) == heat).all()


def test_the_guided_filter_equals_a_regression_in_every_window():
    generator = torch.Generator().manual_seed(0)
    colours, values = torch.rand(1, 3, 9, 9, generator=generator), torch.rand(1, 1, 9, 9, generator=generator)
    radius, smoothness = 1, 0.01
    out = guided_filter(values, colours, radius, smoothness)[0, 0]
    fits = np.zeros((9, 9, 4))
    for y in range(1, 8):
        for x in range(1, 8):
            c = colours[0, :, y - 1 : y + 2, x - 1 : x + 2].reshape(3, 9).T.numpy()
            v = values[0, 0, y - 1 : y + 2, x - 1 : x + 2].reshape(9).numpy()
            centred = c - c.mean(0)
            slope = np.linalg.solve(centred.T @ centred / 9 + smoothness * np.eye(3), centred.T @ (v - v.mean()) / 9)
            fits[y, x] = (*slope, v.mean() - slope @ c.mean(0))
    for y in range(2, 7):
        for x in range(2, 7):
            mean = fits[y - 1 : y + 2, x - 1 : x + 2].mean((0, 1))
            assert float(out[y, x]) == pytest.approx(mean[:3] @ colours[0, :, y, x].numpy() + mean[3], abs=1e-4)


def test_the_object_is_the_parts_with_the_most_evidence():
    mask, evidence = np.zeros((10, 20), bool), np.zeros((10, 20), np.float32)
    mask[1:4, 2:6] = mask[6:9, 10:18] = True
    evidence[1:4, 2:6], evidence[8, 17] = 1, 2
    small = main_parts(mask, evidence)
    assert box_of(small) == (0.1, 0.1, 0.3, 0.4)
    evidence[6:9, 10:18] = 0.8
    assert (main_parts(mask, evidence) == mask).all()
    assert box_of(mask) == (0.1, 0.1, 0.9, 0.9)


def test_the_map_follows_the_tokens_and_not_the_guess():
    """Two kinds of tokens, and a guess that knows only where the middle of one of them is."""
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    inside = (columns > 4 + rows // 4) & (rows > 5)
    generator = torch.Generator().manual_seed(0)
    kinds, noise = torch.randn(2, 16, generator=generator), torch.randn(20, 20, 16, generator=generator)
    tokens = kinds[inside.long()] + 0.3 * noise
    guess = ((rows - 11) ** 2 + (columns - 12) ** 2 < 9).float()
    maps = object_map(guess[None], tokens[None])
    small = torch.nn.functional.interpolate(maps[:, None], (20, 20), mode="bilinear")[0, 0]
    assert maps.shape == (1, 32, 32)
    assert ((small > 0.5) == inside).float().mean() > 0.97
    assert ((guess > 0.5) == inside).float().mean() < 0.7


def test_where_no_object_is_seen_there_is_no_box(disc, tmp_path, capsys):
    model, folder, _ = disc
    Image.new("RGB", (60, 40), (90, 100, 120)).save(folder / "empty.png")
    result = predict(model, folder, locate=True, workers=0)
    assert [Path(image.path).name for image in result if image.location is None] == ["empty.png"]
    assert "box" not in result[1].to_json()
    result.to_csv(tmp_path / "a.csv")
    first, second = csv.DictReader((tmp_path / "a.csv").open())
    assert first["left"]
    assert second["left"] == second["bottom"] == ""
    assert len(result.save_pictures(tmp_path / "pictures")) == 2
