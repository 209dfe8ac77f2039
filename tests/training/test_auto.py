"""`train` without a recipe: the linear head first, fine-tuning that has to beat it, a recipe of all decisions."""

from __future__ import annotations

import json
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import everytoken_lab
from everytoken import EverytokenError
from everytoken.maps import Maps
from everytoken_lab import stats, train
from everytoken_lab.annotators import features as features_module
from everytoken_lab.cli import main
from everytoken_lab.data import datasets
from everytoken_lab.data.datasets import keys_hash, open_dataset
from everytoken_lab.engine.accuracy import Predictions
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.options import AutoOptions, DataOptions, ModelOptions, TrainOptions
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.engine.task import Task
from everytoken_lab.evaluation.run import read_calibration
from everytoken_lab.models import open as open_module
from everytoken_lab.models.open import open_model
from everytoken_lab.reports.predictions import predict_run
from everytoken_lab.training import auto as auto_module
from everytoken_lab.training import build as build_module
from everytoken_lab.training import tuning as tuning_module
from everytoken_lab.training.build import Inputs
from everytoken_lab.training.classify import decides_itself
from everytoken_lab.training.tuning import Story

QUIET = {"workers": 0, "device": "cpu", "threads": 1, "batch_size": 12}


@pytest.fixture(scope="module")
def weights(backbone):
    return backbone


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
    """A whole run on data with validation photos, with score maps."""
    output = tmp_path_factory.mktemp("runs") / "photos"
    return train(folder, weights=weights, out=str(output), epochs=2, maps="auto", **QUIET)


@pytest.fixture(scope="module")
def crossed(folder, weights, tmp_path_factory):
    """A whole run on the same photos without validation photos; too little time to fine-tune."""
    output = tmp_path_factory.mktemp("runs") / "photos"
    return train(folder / "train", weights=weights, out=str(output), linear=True, **QUIET)


def story(run) -> dict:
    return json.loads((run.path / "auto.json").read_text())


def test_the_first_model_is_a_linear_head_that_other_commands_open(result, folder):
    opened = open_model(result.path / "linear")
    assert opened.class_names == ("class-0", "class-1", "class-2")
    first = read_run(result.path / "linear")
    assert first.state == "finished"
    assert first.config["data"] == str(folder)
    answers, _ = Predictions.saved(result.path / "linear/out-of-fold.npz", keys_hash(open_dataset(folder, "train")))
    assert len(answers) == 38  # all that can be read


def test_its_record_says_what_happened_and_nothing_else(result, crossed):
    for run, validation in ((read_run(result.path / "linear"), "held-out images"), (crossed, "cross-validation")):
        assert run.config["method"] == "logistic regression on frozen features"
        assert run.config["validation"] == validation
        assert not {"epochs", "opt", "lr", "aa", "smoothing", "batch_size"} & set(run.config)
        assert (run.summary["epochs"], run.summary["updates"]) == (0, 0)


def test_copies_of_held_out_photos_and_unreadable_ones_are_left_out(result):
    assert any(
        "Left out: 1 file that cannot be read, the first: class-2/broken.png" in x for x in story(result)["lines"]
    )
    lines = dict(line.split("\t") for line in (result.path / "exclude.txt").read_text().splitlines())
    assert set(lines) == {"class-0/copy.png", "class-2/broken.png"}
    assert lines["class-0/copy.png"] == "a copy of a held-out photo"
    assert len(Maps(result.path / "maps")) == 37


def test_copies_of_a_photo_are_in_one_fold(folder, weights, tmp_path):
    own = tmp_path / "photos"
    shutil.copytree(folder / "train", own)
    source = sorted((own / "class-0").glob("photo*"))[0]
    image = Image.open(source)
    brighter = np.clip(np.asarray(image).astype(int) + 1, 0, 255).astype(np.uint8)
    Image.fromarray(brighter).save(own / "class-0/nearly-the-same.png")
    data = open_dataset(own, "train")
    choice = features_module.choose_backbone(data, [features_module.Candidate(weights)], tmp_path, workers=0)
    choice, groups = auto_module.without_copies(choice, data, seed=0)
    at = {data.key(i): i for i in range(len(data))}
    pair = [at[f"class-0/{source.name}"], at["class-0/nearly-the-same.png"]]
    assert groups[pair[0]] == groups[pair[1]]
    rows = {int(i): n for n, i in enumerate(choice.features.readable)}
    assert choice.fit.fold[rows[pair[0]]] == choice.fit.fold[rows[pair[1]]]


def test_the_kept_model_is_compared_on_photos_that_neither_has_seen(result):
    content = story(result)["result"]
    rival = tuning_module.saved_answers(result.path / "linear/on-held-out.npz")
    assert content["gain"][0] == pytest.approx(content["fine-tuned"] - rival.accuracy.value)
    kept = result.path / content["kept"] / "best.safetensors"
    if content["kept"] == "linear":
        assert (result.path / "best.safetensors").read_bytes() == kept.read_bytes()
    assert content["text"] in (result.path / "log.txt").read_text()
    assert (result.path / "report.html").is_file()


def test_without_validation_photos_all_are_trained_on_and_the_number_is_out_of_fold(crossed, folder):
    content = story(crossed)["result"]
    assert (content["kept"], content["judged on"], content["cross-validated"]) == ("linear", 38, True)
    data = open_dataset(folder / "train", "train")
    answers, _ = Predictions.saved(crossed.path / "linear/out-of-fold.npz", keys_hash(data))
    assert content["top1"] == pytest.approx(answers.accuracy.value)
    assert content["top1"] == pytest.approx(crossed.score)
    assert "5-fold cross-validation of 38 photos" in content["text"]
    # the report and the calibration are of these answers, not of what the model says about photos that it knows
    predicted = predict_run(crossed, "cpu")
    assert predicted.predictions.correct.tolist() == answers.correct.tolist()
    assert read_calibration(crossed, crossed.path / "best.safetensors").images == 38
    (crossed.path / "report-predictions.npz").rename(crossed.path / "away.npz")
    with pytest.raises(EverytokenError, match="out-of-fold predictions"):
        predict_run(crossed, "cpu")
    (crossed.path / "away.npz").rename(crossed.path / "report-predictions.npz")


def test_such_a_model_is_not_evaluated_on_the_photos_that_it_knows(crossed, capsys):
    assert main(["eval", str(crossed.path), "--workers", "0", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "trained on all of its photos" in error
    assert "Name photos that it has not seen" in error


def test_fine_tuning_without_validation_photos_is_judged_on_halves_and_its_rivals_have_not_seen_them(
    folder, weights, tmp_path, monkeypatch
):
    fitted: list[set[str]] = []
    real = auto_module.fitted_head
    monkeypatch.setattr(
        auto_module,
        "fitted_head",
        lambda choice, data, rows: (fitted.append({data.key(i) for i in rows}), real(choice, data, rows))[1],
    )
    listed = tmp_path / "exclude.txt"
    listed.write_text("class-0/photo.0.png\tblurred\n")
    shutil.copytree(folder / "train", tmp_path / "photos")
    shutil.copyfile(tmp_path / "photos/class-1/photo.0.png", tmp_path / "photos/class-1/again.png")
    more = {"epochs": 1, "minutes": 5, "exclude": str(listed), **QUIET}
    run = train(tmp_path / "photos", weights=weights, out=str(tmp_path / "run"), **more)
    tuning = auto_module.read_tuning(run.path, TrainOptions())
    halves = [part.splits(tuning)[0] for part in (Inputs().only("train"), Inputs().only("held out"))]
    whole = Inputs().undivided(tuning)
    assert set(halves[0].keys()) | set(halves[1].keys()) == set(whole.keys())
    assert set(halves[0].keys()).isdisjoint(halves[1].keys())
    assert fitted == [set(half.keys()) for half in halves]
    assert len(set(whole.keys()) & {"class-1/again.png", "class-1/photo.0.png"}) == 1
    assert not {"class-2/broken.png", "class-0/photo.0.png"} & set(whole.keys())
    assert len(tuning_module.saved_answers(run.path / "linear/on-held-out.npz")) == len(whole)
    for number, half in enumerate(halves, 1):
        log = (run.path / f"fold-{number}/log.txt").read_text()
        assert f"data: {len(half)} training and 0 validation" in log


def test_the_smaller_half_fills_a_batch_and_too_few_photos_are_not_fine_tuned(folder, weights, tmp_path, caplog):
    own = {"weights": weights, "minutes": 5, "epochs": 1, "workers": 0, "device": "cpu", "threads": 1}
    run = train(folder / "train", out=str(tmp_path / "run"), **own)
    tuning = auto_module.read_tuning(run.path, TrainOptions())
    halves = [len(Inputs().only(part).splits(tuning)[0]) for part in ("train", "held out")]
    assert halves[0] != halves[1]
    assert yaml.safe_load((run.path / "recipe.yaml").read_text())["batch_size"] == min(halves)
    for name in ("class-0", "class-1", "class-2"):
        (tmp_path / "few" / name).mkdir(parents=True)
        for path in sorted((folder / "train" / name).glob("photo*"))[:3]:
            shutil.copy(path, tmp_path / "few" / name)
    with caplog.at_level(logging.INFO):
        few = train(tmp_path / "few", out=str(tmp_path / "run-few"), **own)
    assert "are too few for 3 classes" in caplog.text
    assert story(few)["result"]["kept"] == "linear"


@pytest.mark.parametrize("divided", [True, False])
def test_a_better_fine_tuned_model_is_trained_on_all_photos_and_judged_by_its_twin(
    folder, weights, tmp_path, monkeypatch, divided
):
    monkeypatch.setattr(tuning_module, "MIX", 0.5)
    monkeypatch.setattr(tuning_module, "compared", lambda *_: (stats.Estimate(5.0, 1.0, 9.0), "better", "by far"))
    data = folder if divided else folder / "train"
    run = train(data, weights=weights, out=str(tmp_path / "run"), epochs=2, minutes=5, lr=0.01, **QUIET)
    content = story(run)["result"]
    assert (content["kept"], content["cross-validated"]) == ("fine-tuned", not divided)
    # the weights: the mean of those before and after
    before, after = (load_file(run.path / name) for name in ("start.safetensors", "fine-tuned/best.safetensors"))
    kept = load_file(run.path / "best.safetensors")
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    for name, value in kept.items():
        assert torch.allclose(value.float(), (before[name].float() + after[name].float()) / 2, atol=1e-6), name
    # the number: of the model that has not seen these photos
    if not divided:
        assert "data: 38 training and 0 validation" in (run.path / "fine-tuned/log.txt").read_text()
        assert "in 2-fold cross-validation of 38 photos; models of cross-validation saw 50 %" in content["text"]
    tuning = auto_module.read_tuning(run.path, TrainOptions())
    twins, *_ = tuning_module.judge(run.path, tuning, Inputs(), crossed=not divided)
    predicted = predict_run(read_run(run.path), "cpu")
    assert len(twins.answers) == (12 if divided else 38)
    assert predicted.predictions.correct.tolist() == twins.answers.correct.tolist()
    assert read_calibration(run, run.path / "best.safetensors").temperature == twins.calibration.temperature
    assert content["top1"] == pytest.approx(twins.answers.accuracy.value)
    assert read_run(run.path).score == pytest.approx(content["top1"])
    assert run.cross_validated != divided
    everytoken_lab.export(run.path, tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "the weights are a mean: 50 % of the fine-tuned ones" in card
    assert ("in cross-validation of its 38 images; the model itself was then fitted on all" in card) != divided


@pytest.mark.parametrize(
    ("loss", "wrong", "verdict", "words"),
    [
        (0.05, 9, "better", "log loss -0.05 (95 % interval -0.0"),  # as many right answers, surer ones
        (0.1, 9, "", "log loss +0.00"),
        (0.15, 9, "worse", "log loss +0.05"),
        (0.05, 20, "worse", "accuracy -50.0 points"),  # sure of the wrong answers only
    ],
)
def test_a_model_is_better_only_beyond_chance(loss, wrong, verdict, words):
    def answers(correct, loss):
        label, noise = np.zeros(20, dtype=np.int64), 0.01 * np.cos(np.arange(20))
        top = np.where(correct, 0, 1)[:, None]
        return Predictions(np.arange(20), label, top, np.full(20, 0.9), loss + (loss != 0.1) * noise)

    _, found, how = tuning_module.compared(answers(np.arange(20) >= 10, 0.1), answers(np.arange(20) >= wrong, loss))
    assert found == verdict
    assert words in how


def test_maps_that_know_less_than_the_head_they_come_from_are_refused(folder, weights, monkeypatch, tmp_path):
    monkeypatch.setattr(auto_module, "run_job", lambda *_: None)
    monkeypatch.setattr(auto_module, "summarise", lambda *_: SimpleNamespace(images_agree=0.11))
    with pytest.raises(EverytokenError, match="the class of 11%"):
        train(folder, weights=weights, out=str(tmp_path / "run"), epochs=1, maps="auto", **QUIET)


def test_later_commands_find_the_held_out_photos_by_themselves(result, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(result.path), "--json", "--workers", "0", "--device", "cpu"]) in (0, None)
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["top1"] == pytest.approx(story(result)["result"]["top1"])
    assert main(["eval", "timm:resnet18"]) == 2
    assert "name the images" in capsys.readouterr().err


def test_decisions_are_a_recipe_that_can_be_edited_and_run_again(result, folder, tmp_path):
    text = (result.path / "recipe.yaml").read_text()
    values = yaml.safe_load(text)
    assert values["weights"] == str(result.path / "start.safetensors")
    assert values["epochs"] == 2
    assert "# First model: a linear head" in text
    (tmp_path / "mine.yaml").write_text(text.replace("epochs: 2", "epochs: 1"))
    again = train(folder, recipe=str(tmp_path / "mine.yaml"), out=str(tmp_path / "run"), workers=0, device="cpu")
    assert [row["epoch"] for row in again.history] == [1]


@pytest.fixture
def planned(monkeypatch):
    """Nothing is fine-tuned: a run ends when it is decided how."""
    monkeypatch.setattr(auto_module, "train_with", lambda *_, **__: None)
    monkeypatch.setattr(tuning_module, "keep", lambda *_: {"text": "stopped here", "kept": "linear"})


def test_the_average_follows_the_number_of_updates(folder, weights, tmp_path, planned):
    for epochs, decay in ((2, 0.95), (200, round(1 - 5 / 600, 4))):  # of three updates
        out = tmp_path / f"run{epochs}"
        train(folder, weights=weights, out=str(out), epochs=epochs, minutes=5, **QUIET)
        assert yaml.safe_load((out / "recipe.yaml").read_text())["model_ema_decay"] == decay


def test_the_same_call_again_does_nothing_and_decides_nothing(result, folder, weights, monkeypatch):
    monkeypatch.setattr(auto_module, "_look", None)
    again = train(folder, weights=weights, out=str(result.path), epochs=2, maps="auto", **QUIET)
    assert again.history == result.history


def test_a_run_that_was_killed_while_it_kept_its_model_keeps_it_again(folder, weights, tmp_path):
    call = lambda: train(folder, weights=weights, out=str(tmp_path / "run"), linear=True, **QUIET)  # noqa: E731
    run = call()
    kept = (run.path / "best.safetensors").read_bytes()
    (run.path / "best.safetensors").write_bytes(b"killed while it was copied")
    (run.path / "summary.json").unlink()
    content = story(run)
    (run.path / "auto.json").write_text(json.dumps({**content, "result": {}}))
    assert call().state == "finished"
    assert (run.path / "best.safetensors").read_bytes() == kept


def test_two_at_once_are_told_apart(folder, weights, tmp_path):
    folder_of = auto_module.RunFolder(tmp_path / "run")
    with folder_of.open(), pytest.raises(EverytokenError, match="another process is training"):
        train(folder, weights=weights, out=str(tmp_path / "run"), linear=True, **QUIET)


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

    def add(self, rows):
        computed.append(len(rows))
        real(self, rows)

    monkeypatch.setattr(features_module.FeatureCache, "add", add)
    with caplog.at_level(logging.INFO):
        run = train(more, weights=weights, out=str(result.path), linear=True, **QUIET)
    assert run.path == result.path.with_name("photos-2")
    assert "Continuing" in caplog.text
    assert sum(computed) == 8
    assert open_model(run.path).class_names == ("class-0", "class-1", "class-2", "class-3")


@pytest.mark.parametrize("divided", [True, False])
def test_the_budget_becomes_updates_once(folder, weights, tmp_path, monkeypatch, planned, divided):
    monkeypatch.setattr(tuning_module, "step_seconds", lambda *_: (4.0, 0.0))
    data = folder if divided else folder / "train"
    train(data, weights=weights, out=str(tmp_path / "run"), minutes=10, maps="none", **QUIET)
    values = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    wanted = 100 if divided else 42  # of 4.4 s each; three trainings without val/
    assert values["iters"] == pytest.approx(wanted, abs=3)
    assert "maps" not in values
    assert values["warmup_iters"] == values["iters"] // 10


@pytest.mark.parametrize(("device", "updates"), [("cpu", 58), ("cuda", 97)])
def test_loading_costs_time_of_training_where_both_share_the_cores(device, updates, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning_module, "cores", lambda: 2)
    options = TrainOptions(dataset=DataOptions(workers=2, batch_size=32))
    monkeypatch.setattr(tuning_module, "step_seconds", lambda *_: (1.0, 4.0))  # a step, loading it
    job = SimpleNamespace(device=torch.device(device), left=200.0, output=tmp_path, story=Story(""))
    backbone = SimpleNamespace(model=torch.nn.Linear(2, 2))
    found = tuning_module.updates_in_time(job, options, backbone, 32, 1)
    assert found == updates  # of 3.3 s: 1.1 times (1 + 4 / 2); or of 2 s: 4 / 2


@pytest.mark.parametrize(
    ("seconds", "behind", "chosen"),
    [(1000, 0.02, "large"), (100, 0.02, "small"), (100, 0.2, None), (5, 0.02, None)],
)
def test_the_backbone_to_fine_tune_suits_the_time_and_can_catch_up(seconds, behind, chosen, monkeypatch):
    def trial(name: str, accuracy: float, cost: float) -> features_module.Trial:
        return features_module.Trial(features_module.Candidate(name, 64), accuracy, 1 - accuracy, 0.0, cost, images=400)

    monkeypatch.setattr(tuning_module, "cores", lambda: 1)
    monkeypatch.setattr(features_module, "FrozenBackbone", lambda name, *_: SimpleNamespace(name=name))
    large = SimpleNamespace(name="large", candidate=features_module.Candidate("large", 64), device="cpu")
    trials = (trial("small", 0.8 - behind, 0.01), trial("large", 0.8, 0.2))
    choice = features_module.Choice(large, SimpleNamespace(digests=[]), None, trials)
    told = Story("")
    job = SimpleNamespace(story=told, train=None, features=lambda *_: None, left=seconds)
    found = tuning_module.tunable(job, choice, trainings=1)
    assert (None if found is None else found.backbone.name) == chosen
    assert ("Skipping fine-tuning" in "".join(told.lines)) == (chosen is None)


@pytest.mark.parametrize(
    ("scarce", "answer", "said"),
    [
        ("step_seconds", (500.0, 0.0), "Skipping fine-tuning: 40 updates need about"),
        ("free_disk", 10_000, "checkpoints need"),
    ],
)
def test_without_time_or_disk_the_linear_head_is_the_result(
    folder, weights, tmp_path, monkeypatch, caplog, scarce, answer, said
):
    monkeypatch.setattr(tuning_module, scarce, lambda *_: answer)
    with caplog.at_level(logging.INFO):
        run = train(folder, weights=weights, out=str(tmp_path / "run"), minutes=1, **QUIET)
    assert said in caplog.text
    assert story(run)["result"]["kept"] == "linear"
    assert not (run.path / "fine-tuned").exists()
    assert open_model(run.path).class_names == ("class-0", "class-1", "class-2")
    assert run.state == "finished"


@pytest.mark.parametrize("asked", [{}, {"epochs": 1}])
def test_fine_tuning_ends_when_the_time_is_over_unless_its_length_was_asked_for(
    folder, weights, tmp_path, monkeypatch, caplog, asked
):
    monkeypatch.setattr(auto_module, "_LATEST", -1.0)
    with caplog.at_level(logging.INFO):
        run = train(folder, weights=weights, out=str(tmp_path / "run"), minutes=5, maps="none", **asked, **QUIET)
    given_up = "Fine-tuning was given up for lack of time: 1 of" in caplog.text
    assert given_up == (not asked)
    assert ("fine-tuned" in story(run)["result"]) == bool(asked)
    assert run.state == "finished"
    assert train(folder, weights=weights, out=str(run.path), minutes=5, maps="none", **asked, **QUIET).path == run.path


def test_unequal_classes_are_adjusted_for_in_the_head_and_in_training(folder, weights, tmp_path, caplog):
    unequal = tmp_path / "photos"
    shutil.copytree(folder, unequal)
    for path in sorted((unequal / "train/class-2").iterdir())[4:]:
        path.unlink()
    with caplog.at_level(logging.INFO):
        run = train(unequal, weights=weights, out=str(tmp_path / "run"), epochs=1, minutes=5, **QUIET)
    assert "Imbalance: the largest class" in caplog.text
    assert yaml.safe_load((run.path / "recipe.yaml").read_text())["logit_adjustment"] == 0.5
    setup = tuning_module.build(auto_module.read_tuning(run.path, TrainOptions()), tuning_module.World(0, 1, "cpu"))
    counts = np.bincount(setup.train_set.labels)
    wanted = 0.5 * np.log(counts / counts.sum())
    assert setup.step.class_offsets.numpy() == pytest.approx(wanted, abs=1e-5)
    assert "class_offsets" not in setup.step.state_dict()


def test_the_batch_is_divided_where_memory_is_scarce(weights, monkeypatch):
    backbone = features_module.FrozenBackbone(weights, 32)
    monkeypatch.setattr(tuning_module, "free_memory", lambda device: 2**40)
    assert tuning_module.batch_in_memory(backbone, 32, torch.device("cpu")) == 32
    fixed = 5 / 0.7 * sum(p.numel() * 4 for p in backbone.model.backbone.parameters())
    monkeypatch.setattr(tuning_module, "free_memory", lambda device: fixed + 2**20)
    assert tuning_module.batch_in_memory(backbone, 32, torch.device("cpu")) < 32


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
        (TrainOptions(model=ModelOptions(weights="runs/mine")), AutoOptions(linear=True), True),
    ],
)
def test_what_is_asked_for_is_trained_as_before(options, auto, wanted):
    assert decides_itself(options, auto) == wanted


def test_a_budget_with_a_recipe_is_a_contradiction(folder, capsys):
    with pytest.raises(EverytokenError, match="without a recipe"):
        train(folder, recipe="small_32", minutes=3)
    assert main(["train", str(folder), "--recipe", "small_32", "--linear"]) == 2
    assert "without a recipe" in capsys.readouterr().err


def test_card_and_report_of_a_linear_head_tell_what_happened(crossed, tmp_path):
    page = (crossed.path / "report.html").read_text()
    assert '"method": "logistic regression on frozen features"' in page
    everytoken_lab.export(crossed.path, tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "logistic regression on frozen features" in card
    assert "in cross-validation of its 39 images; the model itself was then fitted on all of them" in card
    for untrue in ("adamw", "epoch", "rand-m9", "smoothing", "pip install", "https://pypi"):
        assert untrue not in card.lower()


def test_a_report_that_was_interrupted_is_written_by_the_same_command(crossed, folder, weights):
    page = crossed.path / "report.html"
    page.unlink()
    train(folder / "train", weights=weights, out=str(crossed.path), linear=True, **QUIET)
    assert page.is_file()


def test_explain_and_predict_show_one_probability(crossed, folder, tmp_path):
    photo = str(folder / "val/class-1/photo.2.png")
    assert read_calibration(crossed, crossed.path / "best.safetensors").temperature != 1.0
    (predicted,) = everytoken_lab.predict(crossed.path, photo, workers=0, device="cpu")
    shown = everytoken_lab.explain(crossed.path, photo, device="cpu").facts["images"][0]["models"][0]["top"][0]
    assert shown["class"] == predicted.classes[0]
    assert shown["probability"] == pytest.approx(predicted.probabilities[0], abs=1e-3)


def test_a_calibration_is_of_the_weights_that_it_was_made_with(crossed, tmp_path):
    shutil.copytree(crossed.path, tmp_path / "run")
    run, weights = read_run(tmp_path / "run"), tmp_path / "run/best.safetensors"
    assert read_calibration(run, weights) is not None
    opened = open_model(weights)
    state = {k: v + 1 if v.is_floating_point() else v for k, v in opened.model.backbone.state_dict().items()}
    write_weights(weights, state, opened.info.to_metadata())
    assert read_calibration(run, weights) is None


@pytest.fixture
def openings(monkeypatch):
    """Datasets that are walked, weights that are found, and files of weights that are read."""
    seen: list[str] = []

    def watch(module, name, what):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (seen.append(what(*a)), real(*a, **k))[1])

    watch(datasets, "_read_tree", lambda tree, *_: f"data {tree.name}")
    watch(build_module, "open_weights", lambda source, *_: f"weights {source}")
    watch(open_module, "read_weights", lambda path: f"read {path}")
    return seen


def test_data_and_weights_are_opened_once(folder, weights, tmp_path, monkeypatch, openings):
    monkeypatch.setattr(Task, "is_reported", True)
    run = train(folder, weights=weights, epochs=1, out=str(tmp_path / "run"), workers=0, device="cpu", batch_size=8)
    assert (run.path / "report.html").is_file()
    assert len(openings) == len(set(openings))
    assert {f"data {folder}/train", f"data {folder}/val", f"weights {weights}", f"read {weights}"} <= set(openings)
    assert sum(name.startswith(("data", "weights")) for name in openings) == 3


@pytest.mark.parametrize("divided", [True, False])
def test_photos_are_opened_once(folder, weights, tmp_path, monkeypatch, openings, divided):
    monkeypatch.setattr(Task, "is_reported", True)
    data = folder if divided else folder / "train"
    run = train(data, weights=weights, epochs=1, minutes=5, out=str(tmp_path / "run"), **QUIET)
    assert (run.path / "report.html").is_file()
    splits = [f"data {data}/train", f"data {data}/val"] if divided else [f"data {data}"]
    starts = ["start.safetensors"] if divided else ["start-1.safetensors", "start-2.safetensors"]
    assert [name for name in sorted(openings) if "data" in name] == splits
    assert set(openings) >= {f"{what} {run.path / start}" for start in starts for what in ("weights", "read")}
    assert len(openings) == len(set(openings))
