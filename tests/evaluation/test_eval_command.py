"""`everytoken eval` on a small trained model."""

import json
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken_lab import evaluate, predict
from everytoken_lab.cli import main
from everytoken_lab.engine.run_folder import open_part
from everytoken_lab.models.description import Description

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}

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


def test_numbers_table_and_files_are_written(photos, weights, tmp_path, capsys):
    words = ["eval", str(weights), str(photos), "--workers", "0", "--device", "cpu", "--out", str(tmp_path / "e")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "top-1" in text
    assert "Classes, worst first" in text
    numbers = json.loads((tmp_path / "e.json").read_text())
    lines = (tmp_path / "e.csv").read_text().splitlines()
    assert numbers["images"] == 12 == len(lines) - 1
    right = sum(line.split(",")[1] == line.split(",")[2] for line in lines[1:])
    assert numbers["top1"] == pytest.approx(100 * right / 12)


def test_the_result_is_that_of_a_plain_loop_over_timms_own_transform(photos, weights, capsys):
    from PIL import Image
    from timm.data import create_transform

    model = timm.create_model("vit_tiny_patch16_224", **TINY, checkpoint_path=weights).eval()
    transform = create_transform(32, is_training=False, crop_pct=1.0, interpolation="bicubic")
    files = sorted((photos / "val").rglob("*.png"))
    with torch.no_grad():
        logits = torch.cat([model(transform(Image.open(f).convert("RGB"))[None]) for f in files])
    labels = torch.tensor([int(f.parent.name[-1]) for f in files])
    main(["eval", str(weights), str(photos / "val"), "--workers", "0", "--device", "cpu", "--json"])
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert numbers["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


def test_a_run_is_evaluated_in_the_precision_that_it_was_validated_in(photos, tmp_path, capsys):
    words = [word for word in TRAIN if word != "--no-amp"]
    assert main(["train", str(photos), *words, "--amp", "--out", str(tmp_path / "run")]) == 0
    validated = json.loads((tmp_path / "run/summary.json").read_text())["last"]["val_loss"]
    losses = {}
    for flags in ((), ("--amp",), ("--no-amp",)):
        capsys.readouterr()
        assert main(["eval", str(tmp_path / "run"), "--workers", "0", "--device", "cpu", "--json", *flags]) == 0
        losses[flags] = json.loads(capsys.readouterr().out)["loss"]
    assert round(losses[()], 4) == validated
    assert losses[()] == losses["--amp",] != losses["--no-amp",]
    likely = [
        predict(tmp_path / "run", photos / "val", workers=0, device="cpu", amp=amp) for amp in (None, True, False)
    ]
    first, same, other = ([image.probabilities for image in images] for images in likely)
    assert first == same != other


def test_what_is_not_there_is_named(weights, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "none")]) == 2
    assert "there is no run folder or weights file at" in capsys.readouterr().err
    assert main(["eval", str(weights), str(tmp_path / "nodata")]) == 2
    assert "nodata" in capsys.readouterr().err
    assert main(["eval", "timm:resnet18"]) == 2
    assert "no run that says what it was trained on" in capsys.readouterr().err


def test_fewer_classes_are_matched_by_name_and_unknown_ones_refused(photos, weights, tmp_path, capsys):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/class-2").symlink_to(photos / "val/class-2")
    (tmp_path / "some/class-0").symlink_to(photos / "val/class-0")
    assert main(["eval", str(weights), str(tmp_path / "some"), "--workers", "0", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 8
    (tmp_path / "some/owl").symlink_to(photos / "val/class-1")
    assert main(["eval", str(weights), str(tmp_path / "some"), "--workers", "0", "--device", "cpu"]) == 2
    assert "no class of the model: 'owl'" in capsys.readouterr().err


def test_foreign_weights_need_a_name_and_released_ones_vote(photos, tmp_path, capsys):
    torch.manual_seed(0)
    small = {"img_size": 224, "num_classes": 3}
    model = timm.create_model("lvvit_t", **small)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "released.pth.tar")
    words = ["eval", str(tmp_path / "released.pth.tar"), str(photos), "--workers", "0", "--device", "cpu", "--json"]
    assert main(words) == 2
    assert "architecture (model)" in capsys.readouterr().err
    for vote in ("0", "0.5"):
        assert main([*words, "--model", "lvvit_t", "--token-vote", vote]) == 0
    first, second = [json.loads(t) for t in capsys.readouterr().out.split("\n}\n")[0:2] for t in [t + "\n}"]]
    assert first["loss"] != second["loss"]


def test_a_run_is_evaluated_on_what_it_held_out_of_its_own_images(photos, weights, tmp_path, capsys):
    run, undivided = tmp_path / "run", photos / "train"
    run.mkdir()
    (run / "best.safetensors").write_bytes(weights.read_bytes())
    words = ["eval", str(run), str(undivided), "--workers", "0", "--device", "cpu", "--json"]

    def images(*more):
        assert main([*words, *more]) == 0
        said = capsys.readouterr()
        return json.loads(said.out)["images"], said.err

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
    assert main(["train", "photos", *TRAIN, "--val-split", "0.3", "--out", "../big/run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = tmp_path / "big" / "run"
    (newest,) = (run / "checkpoints").iterdir()
    capsys.readouterr()
    log = (run / "log.txt").read_text()
    for source in (run, run / "best.safetensors", newest, newest / "model.safetensors"):
        assert main(["eval", str(source), "../here/photos", "-j", "0", "--device", "cpu", "--json"]) == 0
        said = capsys.readouterr()
        images = json.loads(said.out)["images"]
        assert images < 36
        assert f"{images} validation" in log
        assert "held out (30%)" in said.err
    run.rename(tmp_path / "moved")  # the folder that the path was typed in is known all the same
    found, note = open_part([str(tmp_path / "moved")], str(tmp_path / "here/photos"))
    assert len(found) == images
    assert "held out" in note
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "moved/best.safetensors").read_bytes())
    assert (
        main(["eval", str(tmp_path / "copy.safetensors"), "../here/photos", "-j", "0", "--device", "cpu", "--json"])
        == 0
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["images"] == 36
    assert "all 36 images of ../here/photos are used" in said.err


def test_a_folder_with_train_alone_gives_what_the_run_held_out_of_it(photos, weights, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/train").symlink_to(photos / "train")
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.safetensors").write_bytes(weights.read_bytes())
    words = ["eval", str(run), str(tmp_path / "photos"), "--workers", "0", "--device", "cpu", "--json"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "split='train'" in said
    assert "val-split" not in said
    assert main([*words, "--split", "test"]) == 2
    assert "val-split" not in capsys.readouterr().err
    (run / "config.yaml").write_text(f"data: {tmp_path / 'photos'}\nval_split: 0.5\n")
    assert main(words) == 0
    half = json.loads(capsys.readouterr().out)["images"]
    assert 0 < half < 36
    words[2] = str(photos / "train")  # the same images by another name
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["images"] == half


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


def test_numbers_that_are_not_there_are_null_in_json(photos, weights, tmp_path, capsys):
    (tmp_path / "some").mkdir()
    (tmp_path / "some/class-2").symlink_to(photos / "val/class-2")
    out = tmp_path / "n"
    assert main(["eval", str(weights), str(tmp_path / "some"), "-j", "0", "--device", "cpu", "--out", str(out)]) == 0
    text = (tmp_path / "n.json").read_text()
    assert "NaN" not in text
    assert plain_json({"a": [float("nan"), 1.5, (float("inf"),)]}, None) == '{"a": [null, 1.5, [null]]}'


def test_numbered_folders_are_numbers_for_weights_without_names(photos, tmp_path):
    """Sorted as text, 10 and 11 come before 2: with the folders' order for the model's, nearly all were wrong."""
    model = timm.create_model("test_vit", num_classes=12, img_size=32)
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.linspace(0, 1, 12)  # class 11 is the answer to everything
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    image = next((photos / "val").rglob("*.png"))
    for number in range(12):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
        shutil.copy(image, tmp_path / "data" / str(number) / "x.png")
    source = tmp_path / "foreign.safetensors"
    result = evaluate(source, tmp_path / "data", model="test_vit", img_size=32, workers=0, device="cpu")
    right = result.predictions.correct
    assert [result.keys[i] for i in result.predictions.index[right]] == ["11/x.png"]


def test_a_part_of_imagenets_folders_is_enough_for_a_model_of_all_its_classes(photos, tmp_path):
    model = timm.create_model("test_vit", img_size=32)
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data[:] = 0
    model.head.bias.data[1] = 1
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    for wnid, folder in (("n01440764", "class-0"), ("n01443537", "class-1")):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / wnid).symlink_to(photos / "val" / folder)
    options = {"model": "test_vit", "img_size": 32, "workers": 0, "device": "cpu"}
    result = evaluate(tmp_path / "foreign.safetensors", tmp_path / "data", **options)
    assert result.numbers["top1"] == 50
    assert [row["class"] for row in result.per_class()] == ["tench", "goldfish"]
