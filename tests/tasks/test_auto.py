"""`train` without a recipe: the linear head first, fine-tuning that has to beat it, a recipe of all decisions."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from everytoken import EverytokenError, train
from everytoken.annotators import features as features_module
from everytoken.cli import main
from everytoken.engine.accuracy import Predictions
from everytoken.engine.checkpoint import write_weights
from everytoken.engine.options import AutoOptions, DataOptions, ModelOptions, TrainOptions
from everytoken.engine.run_folder import read_run
from everytoken.maps import Maps
from everytoken.models.open import Description, open_model
from everytoken.tasks import auto as auto_module
from everytoken.tasks.classify import decides_itself

QUIET = {"workers": 0, "device": "cpu", "threads": 1, "batch_size": 12}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A tiny network with random weights in the place of a pretrained one."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=7)
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 32, 32))
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    about = Description("test_resnet", {"num_classes": 7}, img_size=(32, 32), crop_pct=1.0)
    write_weights(path, model.state_dict(), about.to_metadata())
    return str(path)


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory):
    """Photos with a copy of a held-out one, one that only looks like it, and one that cannot be read."""
    place = tmp_path_factory.mktemp("own") / "photos"
    shutil.copytree(photos, place)
    shutil.copyfile(place / "val/class-0/photo.1.png", place / "train/class-0/copy.png")
    image = Image.open(place / "val/class-1/photo.2.png")
    Image.fromarray(np.clip(np.asarray(image).astype(int) + 1, 0, 255).astype(np.uint8)).save(
        place / "train/class-1/brighter.png"
    )
    (place / "train/class-2/broken.png").write_bytes(b"not an image")
    return place


@pytest.fixture(scope="module")
def result(folder, weights, tmp_path_factory):
    """A whole run, with its plain twin."""
    output = tmp_path_factory.mktemp("runs") / "photos"
    return train(folder, weights=weights, output=str(output), epochs=2, compare=True, **QUIET)


def test_the_first_model_is_a_linear_head_that_other_commands_open(result, folder):
    opened = open_model(result.path / "linear")
    assert opened.class_names == ("class-0", "class-1", "class-2")
    first = read_run(result.path / "linear")
    assert first.state == "finished"
    assert first.config["data"] == str(folder)
    note = auto_module.keys_hash(auto_module.open_splits(auto_module._read_decisions(result.path, TrainOptions()))[0])
    answers, _ = Predictions.saved(result.path / "linear/out-of-fold.npz", note)
    assert len(answers) == 36  # without the three that are left out


def test_copies_of_held_out_photos_and_unreadable_ones_are_left_out(result):
    lines = dict(line.split("\t") for line in (result.path / "exclude.txt").read_text().splitlines())
    assert set(lines) == {"class-0/copy.png", "class-1/brighter.png", "class-2/broken.png"}
    assert lines["class-0/copy.png"] == "the same as class-0/photo.1.png"
    assert lines["class-1/brighter.png"] == "looks like class-1/photo.2.png"
    assert len(Maps(result.path / "maps")) == 36


def test_the_last_epoch_is_compared_with_the_linear_head(result):
    content = json.loads((result.path / "result.json").read_text())
    assert [row["epoch"] for row in result.history if "score" in row] == [2]  # few photos are held out
    assert result.summary["best"]["step"] == result.summary["updates"]
    assert content["kept"] == "fine-tuned"
    assert content["top1"] == pytest.approx(result.history[-1]["ema_score"], abs=0.01)
    assert content["gain"][0] == pytest.approx(content["top1"] - content["linear"])
    assert "kept: the" in (result.path / "log.txt").read_text()
    assert len(content["tokens_gain"]) == 3
    assert read_run(result.path / "plain").config["objectives"] in ({}, {"hard": {}}, None)


def test_maps_that_know_less_than_the_head_they_come_from_are_refused(monkeypatch, tmp_path):
    photos = SimpleNamespace(train=SimpleNamespace(num_classes=10), choice=SimpleNamespace(fit=SimpleNamespace()))
    photos.choice.fit.accuracy = 0.8
    for agree, fine in ((0.75, True), (0.11, False)):
        monkeypatch.setattr(auto_module, "summarise", lambda *_, agree=agree: SimpleNamespace(images_agree=agree))
        with nullcontext() if fine else pytest.raises(EverytokenError, match="11%"):
            assert "75%" in auto_module._agreement(photos, tmp_path)


def test_later_commands_find_the_held_out_photos_by_themselves(result, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(result.path), "--json", "--workers", "0", "--device", "cpu"]) in (0, None)
    numbers = json.loads(capsys.readouterr().out)
    content = json.loads((result.path / "result.json").read_text())
    assert (numbers["images"], numbers["top1"]) == (content["held_out"], pytest.approx(content["top1"]))
    assert main(["eval", "timm:resnet18"]) == 2
    assert "name the images" in capsys.readouterr().err


def test_decisions_are_a_recipe_that_can_be_edited_and_run_again(result, folder, tmp_path):
    text = (result.path / "recipe.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["weights"] == str(result.path / "linear")
    assert values["epochs"] == 2
    assert "# first model: a linear head" in text
    (tmp_path / "mine.yaml").write_text(text.replace("epochs: 2", "epochs: 1"))
    again = train(folder, recipe=str(tmp_path / "mine.yaml"), output=str(tmp_path / "run"), workers=0, device="cpu")
    assert [row["epoch"] for row in again.history] == [1]


def test_the_same_call_again_does_nothing_and_decides_nothing(result, folder, weights, monkeypatch):
    monkeypatch.setattr(auto_module, "_decide", None)
    again = train(folder, weights=weights, output=str(result.path), epochs=2, compare=True, **QUIET)
    assert again.history == result.history


def test_new_photos_and_a_new_class_go_on_from_the_last_run(result, folder, weights, tmp_path, monkeypatch, caplog):
    more = tmp_path / "photos"
    shutil.copytree(folder, more)
    for split in ("train", "val"):
        (more / split / "class-3").mkdir()
        for number in range(4):
            pixels = np.random.default_rng((number, len(split))).integers(0, 255, (36, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(more / split / "class-3" / f"{split}{number}.png")
    computed: list[int] = []
    real = features_module.FeatureCache.add

    def add(self, digests, values):
        computed.append(len(digests))
        real(self, digests, values)

    monkeypatch.setattr(features_module.FeatureCache, "add", add)
    with caplog.at_level(logging.INFO):
        run = train(more, weights=weights, output=str(result.path), epochs=1, minutes=5, **QUIET)
    assert run.path == result.path.with_name("photos-2")
    assert "continuing" in caplog.text
    assert sum(computed) == 8
    assert open_model(run.path).class_names == ("class-0", "class-1", "class-2", "class-3")


def test_the_budget_becomes_epochs_once(folder, weights, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(auto_module, "step_seconds", lambda task, options: (task.close(), (5.0, 0.0))[1])
    monkeypatch.setattr(auto_module, "train_with", lambda options: read_run(tmp_path / "run/linear"))
    monkeypatch.setattr(auto_module, "_choose", lambda output, options: {"kept": "fine-tuned"})
    train(folder, weights=weights, output=str(tmp_path / "run"), minutes=10, maps="none", **QUIET)
    values = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert 14 <= values["epochs"] <= 40  # an epoch of three updates takes 15 s and more
    assert "maps" not in values
    assert values["warmup_epochs"] == pytest.approx(values["epochs"] / 10)


@pytest.mark.parametrize(("device", "epochs"), [("cpu", 5), ("cuda", 9)])
def test_loading_costs_time_of_training_where_both_share_the_cores(device, epochs, monkeypatch, tmp_path):
    monkeypatch.setattr(auto_module, "_time_steps", lambda *_: (1.0, 4.0, 10))  # a step, loading it, batches
    monkeypatch.setattr(auto_module, "_device", lambda _: torch.device(device))
    monkeypatch.setattr(auto_module, "cores", lambda: 2)
    backbone = SimpleNamespace(model=torch.nn.Linear(2, 2))
    choice = SimpleNamespace(features=SimpleNamespace(seconds=0.1, computed=100), backbone=backbone)
    photos = SimpleNamespace(val=range(100), choice=choice)
    options = TrainOptions(dataset=DataOptions(workers=2, batch_size=32))
    decided = auto_module._epochs(options, photos, tmp_path, 200.0, auto_module.Decisions())
    assert decided["epochs"] == epochs  # of 33 s: 1.1 times (1 + 4 / 2) ten times; or of 20 s: 4 / 2 ten times


def test_a_larger_backbone_must_suit_the_time_or_be_far_ahead():
    def trial(loss: float, seconds: float) -> features_module.Trial:
        return features_module.Trial(features_module.Candidate("any"), 0.5, loss, 0.0, seconds)

    better = features_module._suits_better
    assert better(trial(0.5, 0.2), trial(0.6, 0.1), seconds=0.2)  # there is time for both
    assert not better(trial(0.5, 0.2), trial(0.6, 0.1), seconds=0.1)
    assert not better(trial(0.5, 0.2), trial(0.6, 0.1), seconds=0.01)  # there is time for neither


@pytest.mark.parametrize(("accuracy", "images", "far"), [(0.87, 400, True), (0.82, 400, False), (0.85, 100, False)])
def test_without_time_for_fine_tuning_a_backbone_must_be_ahead_by_more_than_chance(accuracy, images, far):
    def trial(accuracy: float) -> features_module.Trial:
        return features_module.Trial(features_module.Candidate("any"), accuracy, 0.5, 0.0, images=images)

    assert features_module._far_ahead(trial(accuracy), trial(0.79)) == far


def test_without_time_the_linear_head_is_the_result(folder, weights, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(auto_module, "step_seconds", lambda task, options: (task.close(), (500.0, 0.0))[1])
    with caplog.at_level(logging.INFO):
        run = train(folder, weights=weights, output=str(tmp_path / "run"), minutes=1, **QUIET)
    assert "no fine-tuning" in caplog.text
    assert json.loads((run.path / "result.json").read_text())["kept"] == "linear"
    assert open_model(run.path).class_names == ("class-0", "class-1", "class-2")
    assert run.state == "finished"


def test_a_disk_without_room_for_checkpoints_is_not_filled(folder, weights, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(auto_module, "step_seconds", lambda task, options: (task.close(), (0.01, 0.0))[1])
    monkeypatch.setattr(auto_module, "free_disk", lambda path: 10_000)
    with caplog.at_level(logging.INFO):
        run = train(folder, weights=weights, output=str(tmp_path / "run"), minutes=5, **QUIET)
    assert "checkpoints take" in caplog.text
    assert "mostly about 40 x 36 px" in caplog.text
    assert not any((run.path / "checkpoints").iterdir())


def test_a_fine_tuned_model_that_is_clearly_worse_is_not_kept(folder, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_module, "clearly_worse", lambda first, last: True)
    call = lambda: train(folder, weights=weights, output=str(tmp_path / "run"), epochs=1, minutes=5, **QUIET)  # noqa: E731
    run = call()
    assert "clearly worse" in (run.path / "log.txt").read_text()
    assert run.summary["updates"] == 0
    kept = (run.path / "best.safetensors").read_bytes()
    assert kept == (run.path / "linear/best.safetensors").read_bytes()
    (run.path / "best.safetensors").write_bytes(b"killed while it was copied")
    (run.path / "summary.json").unlink()  # which is copied last
    assert call().summary["updates"] == 0
    assert (run.path / "best.safetensors").read_bytes() == kept


def test_many_held_out_photos_choose_the_epoch_and_the_linear_head_is_the_first(folder, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_module, "FEW_HELD_OUT", 5)
    run = train(folder, weights=weights, output=str(tmp_path / "run"), epochs=2, minutes=5, lr=1e-9, **QUIET)
    content = json.loads((run.path / "result.json").read_text())
    assert run.history[0]["epoch"] == 0
    assert run.history[0]["ema_score"] == pytest.approx(content["linear"], abs=0.01)
    assert (content["kept"], run.summary["best"]["step"]) == ("linear", 0)  # such a rate changes nothing
    assert content["top1"] == content["linear"]


def test_clearly_worse_means_by_more_than_a_standard_error():
    right, wrong = np.ones(15, bool), np.zeros(15, bool)
    assert auto_module.clearly_worse(right, wrong)
    assert not auto_module.clearly_worse(wrong, right)
    assert not auto_module.clearly_worse(right, right)
    one_worse = right.copy()
    one_worse[0] = False
    assert not auto_module.clearly_worse(right, one_worse)
    one_worse[:4] = False
    assert auto_module.clearly_worse(right, one_worse)


def test_unequal_classes_are_adjusted_for_in_the_head_and_in_training(folder, weights, tmp_path, caplog):
    unequal = tmp_path / "photos"
    shutil.copytree(folder, unequal)
    for path in sorted((unequal / "train/class-2").iterdir())[4:]:
        path.unlink()
    with caplog.at_level(logging.INFO):
        run = train(unequal, weights=weights, output=str(tmp_path / "run"), epochs=1, minutes=5, **QUIET)
    assert "imbalance: the largest class" in caplog.text
    assert run.config["logit_adjustment"] == 0.5
    setup = auto_module.build(auto_module._read_decisions(run.path, TrainOptions()), auto_module.World(0, 1, "cpu"))
    counts = np.bincount(setup.train_set.labels)
    wanted = 0.5 * np.log(counts / counts.sum())
    assert setup.step.class_offsets.numpy() == pytest.approx(wanted, abs=1e-5)
    assert "class_offsets" not in setup.step.state_dict()
    # in training, logits with these offsets are those of the head as it was fitted
    answers, _ = Predictions.saved(run.path / "linear/out-of-fold.npz", auto_module.keys_hash(setup.train_set))
    assert len(answers) == counts.sum()


def test_the_batch_is_divided_where_memory_is_scarce(weights, monkeypatch):
    backbone = features_module.FrozenBackbone(weights, 32)
    monkeypatch.setattr(auto_module, "_free_memory", lambda device: 2**40)
    assert auto_module._batch_in_memory(backbone, 32, torch.device("cpu")) == 32
    fixed = 5 / 0.7 * sum(p.numel() * 4 for p in backbone.model.backbone.parameters())
    monkeypatch.setattr(auto_module, "_free_memory", lambda device: fixed + 2**20)
    assert auto_module._batch_in_memory(backbone, 32, torch.device("cpu")) < 32


@pytest.mark.parametrize(
    ("options", "auto", "wanted"),
    [
        (TrainOptions(), AutoOptions(), True),
        (TrainOptions(maps="auto"), AutoOptions(), True),
        (TrainOptions(recipe="small_32"), AutoOptions(), False),
        (TrainOptions(model=ModelOptions("lvvit_t")), AutoOptions(), False),
        (TrainOptions(objectives={"hard": {}}), AutoOptions(), False),
        (TrainOptions(maps="maps"), AutoOptions(), False),
        (TrainOptions(model=ModelOptions(weights="timm:resnet18")), AutoOptions(), False),
        (TrainOptions(model=ModelOptions(weights="timm:resnet18")), AutoOptions(minutes=5), True),
    ],
)
def test_what_is_asked_for_is_trained_as_before(options, auto, wanted):
    assert decides_itself(options, auto) == wanted


def test_a_budget_with_a_recipe_is_a_contradiction(folder, capsys):
    with pytest.raises(EverytokenError, match="without a recipe"):
        train(folder, recipe="small_32", minutes=3)
    assert main(["train", str(folder), "--recipe", "small_32", "--compare"]) == 2
    assert "without a recipe" in capsys.readouterr().err
    assert main(["train", str(folder), "--dry-run"]) == 2
    assert "recipe.yaml" in capsys.readouterr().err


def test_without_any_weights_the_way_out_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(features_module, "available_weights", list)
    with pytest.raises(EverytokenError, match=r"everytoken\[registry\]"):
        train(folder, output=str(tmp_path / "run"), **QUIET)
