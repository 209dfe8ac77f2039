"""`everytoken eval` on a small trained model."""

import json
import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken_lab import predict
from everytoken_lab.cli import main
from everytoken_lab.engine.run_folder import open_part
from everytoken_lab.models.description import Description

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}

CPU = ["--workers", "0", "--device", "cpu"]
TRAIN = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--workers", "0", "--batch-size", "8", "--epochs", "1"),
    *("--warmup-epochs", "0", "--aa", "", "--threads", "1", "--device", "cpu", "--no-amp"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    about = Description(
        "vit_tiny_patch16_224", TINY, ("class-0", "class-1", "class-2"), img_size=(32, 32), crop_pct=1.0
    )
    save_file(model.state_dict(), path, metadata=about.to_metadata())
    return path


def numbers_of(capsys, source, *words):
    """(numbers, what was said beside them)"""
    capsys.readouterr()
    assert main(["eval", str(source), *map(str, words), *CPU, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_numbers_table_and_files_are_written(photos, weights, tmp_path, capsys):
    assert main(["eval", str(weights), str(photos), *CPU, "--out", str(tmp_path / "e")]) == 0
    text = capsys.readouterr().out
    assert "top-1" in text
    assert "Classes, worst first" in text
    numbers = json.loads((tmp_path / "e.json").read_text())
    lines = (tmp_path / "e.csv").read_text().splitlines()
    assert numbers["images"] == 12 == len(lines) - 1
    right = sum(line.split(",")[1] == line.split(",")[2] for line in lines[1:])
    assert numbers["top1"] == pytest.approx(100 * right / 12)


def test_the_result_is_that_of_a_plain_loop_over_timms_own_transform(photos, weights, capsys):
    model = timm.create_model("vit_tiny_patch16_224", **TINY, checkpoint_path=weights).eval()
    transform = create_transform(32, is_training=False, crop_pct=1.0, interpolation="bicubic")
    files = sorted((photos / "val").rglob("*.png"))
    with torch.no_grad():
        logits = torch.cat([model(transform(Image.open(f).convert("RGB"))[None]) for f in files])
    labels = torch.tensor([int(f.parent.name[-1]) for f in files])
    numbers, _ = numbers_of(capsys, weights, photos / "val")
    assert numbers["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert numbers["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


def test_a_run_is_evaluated_in_the_precision_that_it_was_validated_in(photos, tmp_path, capsys):
    words = [word for word in TRAIN if word != "--no-amp"]
    assert main(["train", str(photos), *words, "--amp", "--out", str(tmp_path / "run")]) == 0
    validated = json.loads((tmp_path / "run/summary.json").read_text())["last"]["val_loss"]
    own, with_amp, without = (
        numbers_of(capsys, tmp_path / "run", *flags)[0]["loss"] for flags in ((), ("--amp",), ("--no-amp",))
    )
    assert round(own, 4) == validated
    assert own == with_amp != without
    predicted = [predict(tmp_path / "run", photos / "val", workers=0, device="cpu", amp=a) for a in (None, True, False)]
    first, same, other = ([image.probabilities for image in images] for images in predicted)
    assert first == same != other


def test_what_is_not_there_is_named(weights, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "none")]) == 2
    assert "there is no run folder or weights file at" in capsys.readouterr().err
    assert main(["eval", str(weights), str(tmp_path / "nodata")]) == 2
    assert "nodata" in capsys.readouterr().err
    assert main(["eval", "timm:resnet18"]) == 2
    assert "name the images: timm:resnet18 is no run folder that says what it was trained on" in capsys.readouterr().err


def test_fewer_classes_are_matched_by_name_and_unknown_ones_refused(photos, weights, tmp_path, capsys):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/class-2").symlink_to(photos / "val/class-2")
    numbers, _ = numbers_of(capsys, weights, tmp_path / "some", "--out", tmp_path / "n")
    assert numbers["images"] == 4
    assert "NaN" not in (tmp_path / "n.json").read_text()  # of classes without images
    (tmp_path / "some/owl").symlink_to(photos / "val/class-1")
    assert main(["eval", str(weights), str(tmp_path / "some"), *CPU]) == 2
    assert "no class of the model: 'owl'" in capsys.readouterr().err


def test_foreign_weights_need_a_name_and_released_ones_vote(photos, tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("lvvit_t", img_size=224, num_classes=3)
    released = tmp_path / "released.pth.tar"
    torch.save({"state_dict": model.state_dict()}, released)
    assert main(["eval", str(released), str(photos), *CPU]) == 2
    assert "architecture (model)" in capsys.readouterr().err
    plain, voted = (
        numbers_of(capsys, released, photos, "--model", "lvvit_t", "--token-vote", vote)[0] for vote in ("0", "0.5")
    )
    assert plain["loss"] != voted["loss"]


@pytest.fixture
def run(weights, tmp_path):
    """A folder with the weights, which says nothing about its data yet."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "best.safetensors").write_bytes(weights.read_bytes())
    return folder


def test_a_run_is_evaluated_on_what_it_held_out_of_its_own_images(photos, run, tmp_path, capsys):
    undivided = photos / "train"

    def images(*more):
        numbers, said = numbers_of(capsys, run, undivided, *more)
        return numbers["images"], said

    everything, doubt = images()
    assert f"all {everything} images" in doubt
    assert "training images may be among them" in doubt
    (run / "config.yaml").write_text(f"data: {undivided}\nval_split: 0.5\n")
    half, note = images()
    assert 0 < half < everything
    assert f"only the {half} images that it held out (50%)" in note
    assert images("--split", "all")[0] == everything
    (run / "config.yaml").write_text(f"data: {tmp_path}\nval_split: 0.5\n")  # trained on something else
    assert images() == (everything, "")
    (run / "config.yaml").write_text(f"data: {photos}\n")  # which has a val/ of its own
    assert "these are its training images" in images()[1]


def test_runs_that_held_out_different_images_are_not_compared(photos, tmp_path):
    undivided = photos / "train"
    for name, share in (("one", 0.5), ("two", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"data: {undivided}\nval_split: {share}\n")
    sources = [str(tmp_path / "one"), str(tmp_path / "two")]
    with pytest.raises(EverytokenError, match="different fractions"):
        open_part(sources, str(undivided))
    assert len(open_part(sources[:1], str(undivided))[0]) < len(open_part([], str(undivided))[0])


def test_the_held_out_images_are_found_from_anywhere_and_for_any_file_of_the_run(photos, tmp_path, monkeypatch, capsys):
    """The whole way: train on one relative folder of class folders, evaluate elsewhere."""
    shutil.copytree(photos / "train", tmp_path / "here/photos")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["train", "photos", *TRAIN, "--val-split", "0.3", "--out", "../run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "run"
    (newest,) = (run / "checkpoints").iterdir()
    log = (run / "log.txt").read_text()
    for source in (run, run / "best.safetensors", newest, newest / "model.safetensors"):
        numbers, said = numbers_of(capsys, source, "../here/photos")
        assert numbers["images"] < 36
        assert f"{numbers['images']} validation" in log
        assert "held out (30%)" in said
    run.rename(tmp_path / "moved")  # the folder that the path was typed in is known all the same
    found, note = open_part([str(tmp_path / "moved")], str(tmp_path / "here/photos"))
    assert len(found) == numbers["images"]
    assert "held out" in note
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "moved/best.safetensors").read_bytes())
    found, note = open_part([str(tmp_path / "copy.safetensors")], "../here/photos")
    assert len(found) == 36
    assert "all 36 images of ../here/photos are used" in note


def test_a_folder_with_train_alone_gives_what_the_run_held_out_of_it(photos, run, tmp_path, capsys):
    data = tmp_path / "photos"
    data.mkdir()
    (data / "train").symlink_to(photos / "train")
    for more, way_out in (((), "split='train'"), (("--split", "test"), "choose another split")):
        assert main(["eval", str(run), str(data), *CPU, *more]) == 2
        said = capsys.readouterr().err
        assert way_out in said
        assert "val-split" not in said
    (run / "config.yaml").write_text(f"data: {data}\nval_split: 0.5\n")
    half = numbers_of(capsys, run, data)[0]["images"]
    assert 0 < half < 36
    assert numbers_of(capsys, run, photos / "train")[0]["images"] == half  # the same images by another name


def test_a_run_of_other_data_that_was_called_the_same_is_not_mixed_up(photos, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copytree(photos / "train", tmp_path / name / "photos")
    run = tmp_path / "one" / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("data: photos\n")
    monkeypatch.chdir(tmp_path / "two")
    found, note = open_part([str(run)], "photos")
    assert (len(found), note) == (36, "")
    found, note = open_part([str(run)], "../one/photos")
    assert len(found) < 36
    shutil.rmtree(tmp_path / "one" / "photos")
    (run / "config.yaml").write_text(f"data: {tmp_path}/one/photos\n")
    found, note = open_part([str(run)], "photos")  # moved here, perhaps
    assert len(found) == 36
    assert "may be among them" in note
