"""`everytoken detect train | eval | predict` on drawn shapes, through the command line; kills do not change a run."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import everytoken  # noqa: F401
from everytoken.models.weights import read_weights
from everytoken_lab.cli import main
from everytoken_lab.dense.backbone import build_features
from everytoken_lab.dense.detect import CocoOptions, DetectOptions, FindOptions
from everytoken_lab.dense.detect.data import open_instances
from everytoken_lab.dense.detect.model import load_detector
from everytoken_lab.dense.detect.task import Detections, DetectTask, Inference, coco_scores
from everytoken_lab.engine.optim import build_schedule
from everytoken_lab.engine.options import BackboneOptions, header, recipe_names

from .conftest import make_objects

pytest.importorskip("pycocotools.mask")

TINY = [
    *("--model", "resnet10t", "--set", "model_kwargs={stem_width: 8, channels: [16, 24, 32, 48]}", "--drop-path", "0"),
    *("--channels", "16", "--hidden", "48", "--regions", "32"),
    *("--proposals", "100", "--anchor-scale", "4", "--sizes", "64", "--longest", "128"),
    *("--workers", "0", "--threads", "1", "--device", "cpu", "--lr", "0.003", "--weight-decay", "0"),
]
CPU = ["--device", "cpu", "-j", "0"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    return make_objects(tmp_path_factory.mktemp("shapes"), {"train": 33, "val": 4})


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    length = ["--epochs", "8", "--decay-milestones", "7", "--val-interval", "8", "--warmup-iters", "8", "-b", "2"]
    length += ["--max-detections", "3", "--score-thresh", "0.1", "--crop", "0"]
    assert main(["detect", "train", str(shapes), *TINY, "--detector", "mask", *length, "--out", str(out)]) == 0
    return out


def test_a_detector_learns_and_leaves_everything_in_its_folder(run, shapes, tmp_path, capsys):
    names = {p.name for p in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "best.safetensors", "classes.json", "batch.jpg", "summary.json"} <= names
    last = json.loads((run / "summary.json").read_text())["last"]
    assert last["val_box_AP50"] > 80  # of images it has not seen; 92 to 100 with other seeds
    assert last["val_mask_AP50"] > 80
    assert "32 training and 4 validation images" in (run / "log.txt").read_text()  # the empty one is left out
    words = ["detect", "eval", str(run), str(shapes), *CPU, "--results", str(tmp_path / "r.json")]
    assert main([*words, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["mask AP"] == pytest.approx(last["val_mask_AP"], abs=1e-3)  # the file gives what the run measured
    assert numbers["images"] == 4
    rows = json.loads((tmp_path / "r.json").read_text())
    assert {row["category_id"] for row in rows} <= {3, 7}  # ids of the data's own file
    assert {row["image_id"] for row in rows} <= {100, 101, 102, 103}
    assert max(Counter(row["image_id"] for row in rows).values()) <= 3  # as the run was validated
    assert min(row["score"] for row in rows) >= 0.1
    assert {row["class"] for row in numbers["classes"]} == {"disc", "square"}
    assert main([*words, "--size", "80", "--score-thresh", "0.3"]) == 0  # a table, of another size
    text = capsys.readouterr().out
    assert "AP75" in text
    assert "square" in text
    assert min(row["score"] for row in json.loads((tmp_path / "r.json").read_text())) >= 0.3


def test_predictions_are_pictures_and_a_file(run, shapes, tmp_path, capsys):
    image = shapes / "val" / "images" / "0.png"
    assert main(["detect", "predict", str(run), str(image), "--out", str(tmp_path), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0.png: ")
    assert "disc" in said
    assert "square" in said
    drawn = Image.open(tmp_path / "0.objects.jpg")
    assert drawn.size == Image.open(image).size
    objects = json.loads((tmp_path / "predictions.json").read_text())
    best = objects[0]
    assert len(objects) <= 3
    assert best["category_id"] in ("disc", "square")
    assert best["segmentation"]["size"] == [64, 96]
    true = next(a for a in json.loads((shapes / "val/instances.json").read_text())["annotations"])
    near = min(
        np.abs(np.subtract(row["bbox"], true["bbox"])).max()
        for row in objects
        if row["category_id"] == "disc" and row["score"] > 0.5
    )
    assert near < 8  # pixels of the source


def test_of_its_own_undivided_images_a_run_is_judged_by_those_it_held_out(run, shapes, tmp_path, monkeypatch, capsys):
    data, own = tmp_path / "here" / "shapes", tmp_path / "elsewhere" / "run"
    shutil.copytree(shapes / "train", data)
    own.mkdir(parents=True)
    shutil.copy(run / "best.safetensors", own)
    monkeypatch.chdir(shapes)

    def images(source: Path, *more: object) -> tuple[int, str]:
        assert main(["detect", "eval", str(source), *map(str, more or [data]), *CPU, "--json"]) == 0
        said = capsys.readouterr()
        return json.loads(said.out)["images"], said.err

    everything, note = images(own)
    assert everything == 33
    assert "training images may be among them" in note
    (own / "config.yaml").write_text("data: shapes\nval_split: 0.2\n")
    (own / "environment.json").write_text(json.dumps([{"folder": str(tmp_path / "here")}]))
    held = len(open_instances(str(data), "val", CocoOptions(val_split=0.2)))
    assert held < 33
    file, weights = data / "instances.json", own / "best.safetensors"
    for words in ((own,), (weights,), (own, file), (own, data, "--annotations", file)):
        got, note = images(*words)
        assert got == held
        assert "held out (20%)" in note


def test_a_detector_gives_its_backbone_and_describes_itself(run, tmp_path):
    features, about = build_features(BackboneOptions(weights=str(run)), 64)
    assert about.architecture == "resnet10t"
    detector, info = load_detector(run)
    assert torch.equal(features.backbone.conv1[0].weight, detector.features.backbone.conv1[0].weight)
    assert info.class_names == ("disc", "square")
    assert info.find == FindOptions(64, 128, 0.1, 0.5, 3)
    assert Inference(detector, info).find == info.find
    other = Inference(detector, info, FindOptions(size=80, max_detections=9)).find
    assert other == FindOptions(80, 128, 0.1, 0.5, 9)


def test_from_relative_localization_on_few_images_to_boxes(photos, shapes, tmp_path, capsys):
    """Each step by its recipe; that of a larger detector, too, as the weights decide which backbone it is."""
    cpu = ["--device", "cpu", "--workers", "0", "--threads", "1"]
    small = "model_kwargs={embed_dim: 16, depths: [1, 1, 1, 1], num_heads: [1, 1, 2, 2]}"
    words = ["--recipe", "small_64_drloc", "--set", small, "--epochs", "1", "--warmup-epochs", "0", "-b", "12", *cpu]
    assert main(["train", str(photos), *words, "--out", str(tmp_path / "drloc")]) == 0
    trained = read_weights(tmp_path / "drloc/best.safetensors")
    words = ["--weights", str(tmp_path / "drloc"), "--iters", "2", "--sizes", "64", "-b", "2", *cpu]
    words += ["--channels", "16", "--hidden", "32", "--regions", "16", "--proposals", "50", "--lr", "1e-12"]
    for recipe, stages in (("detect_small", 1), ("detect_swin_tiny_cascade_1x", 3)):
        out = tmp_path / recipe
        assert main(["detect", "train", str(shapes), "--recipe", recipe, *words, "--out", str(out)]) == 0
        detector, info = load_detector(out)
        assert info.backbone.architecture == "swin_nano4_patch4_window4_64"
        assert len(detector.heads.stages) == stages
        torch.testing.assert_close(
            detector.features.backbone.layers[2].blocks[0].attn.qkv.weight, trained["layers.2.blocks.0.attn.qkv.weight"]
        )
    capsys.readouterr()
    assert main(["detect", "eval", str(out), str(shapes), *CPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["box AP"] >= 0
    asked = ["--model", "resnet10t"]
    assert main(["detect", "train", str(shapes), "--recipe", "detect_small", *words, *asked]) == 2
    assert "does not belong to" in capsys.readouterr().err


def test_a_killed_run_ends_with_the_very_same_weights(tmp_path, run_with_kills):
    shapes = make_objects(tmp_path / "shapes", {"train": 5, "val": 1}, size=(64, 48), empty=0)
    words = ["detect", "train", str(shapes), *TINY, "--epochs", "3", "--warmup-iters", "2", "-b", "2", "--keep", "1"]
    words += ["--checkpoint-steps", "1", "--sizes", "32", "48", "--regions", "16", "--model-ema"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    # within an epoch, and one epoch later
    run_with_kills(DetectTask, (1, 2), [*words, "--out", str(tmp_path / "cut")])
    a, b = (sorted((tmp_path / n / "checkpoints").iterdir())[-1] for n in ("whole", "cut"))
    assert a.name == b.name == "step-00000006"
    for name in ("model.safetensors", "ema.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_mistakes_are_named(run, shapes, tmp_path, capsys):
    content = json.loads((shapes / "val" / "instances.json").read_text())
    content["annotations"][2]["category_id"] = 12
    (tmp_path / "bad.json").write_text(json.dumps(content))
    other = {**content, "categories": [{"id": 12, "name": "cup"}], "annotations": []}
    (tmp_path / "other.json").write_text(json.dumps(other))
    files = ["--val-annotations", str(tmp_path / "bad.json"), "--annotations", str(shapes / "train/instances.json")]
    evaluate = ["detect", "eval", str(run)]
    for words, sentence in (
        (["detect", "train", "--model", "resnet18"], "data is empty"),
        (["detect", "evall"], "no command 'everytoken detect evall'"),
        ([*evaluate, "nowhere"], "there is no folder or file nowhere"),
        (["detect", "train", str(shapes), *TINY, "--out", str(tmp_path / "r"), *files], "bad.json: annotation 3 is of"),
        (
            [*evaluate, str(shapes / "val"), *CPU, "--annotations", str(tmp_path / "other.json")],
            "has other classes (cup, ...) than the network was trained on (disc, square, ...)",
        ),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


def truth_of(data, i: int) -> Detections:
    """The objects of an image, as if they had been detected."""
    objects = data.objects(i)
    boxes = np.array([o.box for o in objects], dtype=np.float64).reshape(-1, 4)
    labels, runs = np.array([o.label for o in objects], np.int64), [data.run_lengths(i, o) for o in objects]
    return Detections(boxes, np.ones(len(objects)), labels, runs)


def test_perfect_answers_score_100_and_answers_in_crowds_do_not_count(shapes, tmp_path):
    data = open_instances(str(shapes), "val")
    perfect = {i: truth_of(data, i) for i in range(4)}
    numbers, classes = coco_scores(data, perfect)
    assert numbers["box AP"] == numbers["mask AP"] == pytest.approx(100)
    assert [row["objects"] for row in classes] == [3, 3]
    one = perfect[0]
    doubled = Detections(
        np.concatenate([one.boxes, one.boxes]),
        np.array([0.9, 0.9, 0.95, 0.95]),
        np.concatenate([one.labels, 1 - one.labels]),
        [*one.masks, *one.masks],
    )
    wrong_before_right = (67 + 34 * 0.75) / 1.01  # precision 1 up to recall 2/3, then 3/4, at 101 places
    assert coco_scores(data, {**perfect, 0: doubled})[0]["box AP"] == pytest.approx(wrong_before_right)
    crowds = [[replace(o, crowd=True) for o in data.objects(i)] for i in range(4)]
    data.objects = lambda i: crowds[i]
    assert coco_scores(data, perfect)[0]["box AP"] == -1  # nothing to find, and nothing wrong
    nothing = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64), [])
    assert coco_scores(data, {0: nothing})[0]["mask AP50"] == 0


def test_the_learning_rate_falls_after_the_epochs_of_the_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    schedule, updates = build_schedule(optimizer, DetectOptions().optim, 100)
    assert updates == 1200
    for update, rate in ((790, 1e-4), (810, 1e-5), (1090, 1e-5), (1110, 1e-6)):
        schedule.step_update(update)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith("detect_")])
def test_every_recipe_says_what_it_is(name):
    assert all(word in header(name) for word in ("Run by us:", "Source:", "Cost:", "parameters"))
