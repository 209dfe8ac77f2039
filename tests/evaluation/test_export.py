"""`everytoken export`: what others open without this package, checked before it is kept."""

import json
import shutil
import sys

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config

import everytoken_lab as lab
from everytoken.errors import EverytokenError, MissingExtraError
from everytoken_lab.cli import main
from everytoken_lab.evaluation import exporting
from everytoken_lab.models.description import Description
from everytoken_lab.models.onnx import OnnxModel, open_session, sealed
from everytoken_lab.models.open import open_model

NAMES = ("ants", "bees", "wasps & co")
SEEN = {"img_size": (48, 48), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25), "crop_pct": 0.9}


def write_run(folder, data, architecture, arguments, token_names=(), **more):
    """A run folder with random weights."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    info = Description(architecture, {"num_classes": 3, **arguments}, NAMES, token_names, **SEEN, **more)
    save_file(
        timm.create_model(architecture, num_classes=3, **arguments).state_dict(),
        folder / "best.safetensors",
        metadata=info.to_metadata(),
    )
    config = {"data": str(data), "model": architecture, "recipe": "small_96_token", "epochs": 7}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "objectives": {"token_labeling": {}}}))
    (folder / "summary.json").write_text(json.dumps({"best": {"score": 75.0, "epoch": 5}, "epochs": 7}))
    return folder


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory):
    """The photos, under the names of the model's classes."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        for i, name in enumerate(NAMES):
            shutil.copytree(photos / split / f"class-{i}", folder / split / name)
    return folder


@pytest.fixture(scope="module")
def vit(data, tmp_path_factory):
    """A ViT whose tokens were taught two classes of their own."""
    folder = write_run(tmp_path_factory.mktemp("vit") / "run", data, "test_vit", {"img_size": 48}, ("sky", "grass"))
    head = torch.nn.Linear(64, 2)
    save_file(dict(head.state_dict()), folder / "best.token_head.safetensors")
    return folder


def test_plain_timm_opens_the_folder_with_classes_size_and_normalisation(vit, data, tmp_path):
    result = lab.export(vit, tmp_path / "out")
    assert result.differences == {"model.safetensors": 0.0}
    assert "held out" in result.checked_on
    model = timm.create_model(f"local-dir:{result.folder}", pretrained=True).eval()
    assert model.num_classes == 3
    assert model.pretrained_cfg["label_names"] == list(NAMES)
    config = resolve_model_data_config(model)
    found = {"img_size": config["input_size"][1:], **{name: config[name] for name in ("mean", "std", "crop_pct")}}
    assert {name: tuple(v) if name != "crop_pct" else v for name, v in found.items()} == SEEN
    files = sorted(file for name in NAMES for file in (data / "val" / name).iterdir())
    transform = create_transform(**config, is_training=False)
    with torch.no_grad():
        logits = torch.cat([model(transform(Image.open(file).convert("RGB"))[None]) for file in files])
    predicted = lab.load(vit).predict(data / "val", workers=0)
    assert [image.classes[0] for image in predicted] == [NAMES[i] for i in logits.argmax(1)]
    assert [image.probabilities[0] for image in predicted] == pytest.approx(
        logits.softmax(1).amax(1).tolist(), abs=1e-4
    )


def test_the_package_opens_it_whole_by_path_by_timms_name_and_from_the_hub(vit, tmp_path, monkeypatch):
    (tmp_path / ".export-x1").mkdir()  # what a killed export left
    (tmp_path / ".export-x1/model.safetensors").touch()
    (tmp_path / ".tmp-0-17-abc-README.md").touch()
    folder, wanted = lab.export(vit, tmp_path, to="hf").folder, []
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []

    def download(name, file):
        wanted.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("everytoken_lab.models.open.download_from_hf", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    images = torch.randn(2, 3, 48, 48)
    expected = open_model(vit).model(images)
    for name in (str(folder), f"local-dir:{folder}", "hf-hub:me/bugs"):
        opened = lab.load(name)
        assert opened.class_names == NAMES
        assert opened.token_classes.names == ("sky", "grass")
        view = opened.model(images)
        torch.testing.assert_close(view.logits, expected.logits)
        torch.testing.assert_close(view.token_logits, expected.token_logits)
    files = ("config.json", "model.safetensors", "model.token_head.safetensors")
    assert wanted == [("me/bugs", file) for file in files]


def test_the_card_says_data_recipe_result_with_interval_and_use(vit, tmp_path):
    card = (lab.export(vit, tmp_path / "out", license="apache-2.0").folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "timm"
    assert front["license"] == "apache-2.0"
    for part in ("`wasps & co`", "36 images to train on, 12 held out", "`small_96_token`", "`token_labeling`"):
        assert part in card
    assert "75.0 % (95 % interval 46.8 to 91.1) on 12 held-out images" in card
    assert 'timm.create_model("local-dir:FOLDER", pretrained=True)' in card
    assert "model.token_head.safetensors" in card
    assert "import everytoken" not in card


@pytest.fixture(scope="module")
def program(data, tmp_path_factory):
    """(run, exported): an LV-ViT whose token head votes, as ONNX file with its cells."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    arguments = {"img_size": 48, "embed_dim": 16, "depth": 1, "num_heads": 2, "stem_width": 8}
    folder = tmp_path_factory.mktemp("lvvit") / "run"
    write_run(folder, data, "lvvit_nano_patch4_32", arguments, NAMES, token_vote=0.5)
    return folder, lab.export(folder, to=("onnx", "timm"), cells=True)


def test_an_onnx_file_answers_like_the_run(program, data, capsys):
    folder, result = program
    assert result.folder == folder / "export"
    assert max(result.differences.values()) < 1e-4
    words = ["predict", "--json", "--device", "cpu", "-j", "0", "--no-calibrate", "--locate", "-b", "5"]
    rows = []
    for source in (folder, result.folder / "model.onnx"):
        assert main([*words, str(source), str(data / "val")]) == 0
        rows.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    for own, other in zip(*rows, strict=True):
        assert own["classes"] == pytest.approx(other["classes"], abs=1e-4)
    loaded = lab.load(result.folder / "model.onnx")
    assert loaded.info.mean == SEEN["mean"]
    assert loaded.class_names == NAMES
    evaluated = loaded.evaluate(data, workers=0, device="cpu")
    assert evaluated.numbers["images"] == 12

    images = torch.randn(3, 3, 48, 48)
    session = open_session((result.folder / "model.onnx").read_bytes())
    logits, cells = map(torch.from_numpy, session.run(["logits", "cells"], {"images": images.numpy()}))
    view = open_model(folder).model(images)
    torch.testing.assert_close(logits, view.voted(0.5), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cells, view.token_logits, atol=1e-4, rtol=1e-4)
    assert "import everytoken" in (result.folder / "README.md").read_text()


def test_what_a_program_cannot_do_is_said(program, data, tmp_path):
    run, result = program
    onnx, bad = result.folder / "model.onnx", tmp_path / "bad.onnx"
    bad.write_bytes(b"no program")
    for action, words in (
        (lambda: open_model(onnx, img_size=64), "48 x 48"),
        (lambda: lab.explain(onnx, next((data / "val" / NAMES[0]).iterdir())), "gradients"),
        (lambda: lab.export(onnx, tmp_path), "exported program"),
        (lambda: open_model(bad), r"bad\.onnx"),
        (lambda: lab.export(run, result.folder, to="onnx"), "earlier export"),
    ):
        with pytest.raises(EverytokenError, match=words):
            action()


def test_a_program_with_a_wrong_bit_is_refused(program, tmp_path):
    content = (program[1].folder / "model.onnx").read_bytes()
    for at in (8, len(content) // 3, len(content) // 2, len(content) - 70, len(content) - 1):
        wrong = bytearray(content)
        wrong[at] ^= 16
        (tmp_path / "model.onnx").write_bytes(wrong)
        with pytest.raises(EverytokenError, match=r"model\.onnx is damaged"):
            open_model(tmp_path / "model.onnx")


def test_a_program_says_its_shapes_and_keeps_to_them(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node = onnx.helper.make_node("ReduceMean", ["images"], ["logits"], axes=[2, 3], keepdims=0)
    for shape, logits, words in (
        (["b", 3, "h", "w"], ["b", 3], "other shapes"),
        (["b", 3, 8, 8], ["b", 10**9], "other shapes"),
        ([1, 3, 8, 8], [1, 3], "cannot be run"),
    ):
        kind = onnx.TensorProto.FLOAT
        places = [onnx.helper.make_tensor_value_info(n, kind, s) for n, s in (("images", shape), ("logits", logits))]
        graph = onnx.helper.make_graph([node], "g", places[:1], places[1:])
        made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        (tmp_path / "a.onnx").write_bytes(sealed(made.SerializeToString()))
        with pytest.raises(EverytokenError, match=words):
            OnnxModel(tmp_path / "a.onnx")(torch.zeros(2, 3, 8, 8))


def test_a_file_that_answers_differently_is_not_kept(vit, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_TOLERANCE", -1.0)
    with pytest.raises(EverytokenError, match="was not kept"):
        lab.export(vit, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_extra_is_said_before_anything_is_done(vit, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"\[export\]"):
        lab.export(vit, tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()
    with pytest.raises(EverytokenError, match="onx"):
        lab.export(vit, tmp_path / "out", to="onx")


def test_the_calibration_travels_with_the_export(vit, data, tmp_path, monkeypatch):
    monkeypatch.setattr("everytoken_lab.evaluation.run.FEWEST", 5)
    wanted = lab.predict(vit, data / "val", workers=0)
    assert "calibrated on 12" in wanted.notes[0]
    folder = lab.export(vit, tmp_path / "out").folder
    (vit / "calibration.json").unlink()
    again = lab.predict(folder, data / "val", workers=0)
    assert not again.notes
    assert [image.probabilities for image in again] == [pytest.approx(image.probabilities) for image in wanted]
    assert "Divide logits by" in (folder / "README.md").read_text()
