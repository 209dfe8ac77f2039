"""Recipes, overrides and options: every shipped recipe is valid, what is wrong is named before anything is built."""

import dataclasses

import pytest
import timm

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken.objectives.hard import HardLabels
from everytoken_lab.cli import main
from everytoken_lab.dense.detect import DetectOptions
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.optim import check_loop, learning_rate
from everytoken_lab.engine.options import (
    TrainOptions,
    apply,
    flat,
    header,
    how_to_run,
    overrides,
    read_recipe,
    recipe_names,
)
from everytoken_lab.schema import SchemaError
from everytoken_lab.training.build import FINETUNE, check_objectives, check_options, complete

CLASSIFIERS = [n for n in recipe_names() if not n.startswith(("segment_", "detect_"))]  # others: tests/transfer


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_shipped_recipe_fits_the_options_and_says_what_it_is(name):
    options = apply(TrainOptions(), read_recipe(name), name)
    assert timm.is_model(options.model.model.partition(".")[0]) or name in FINETUNE
    text = header(name)
    assert "Run by us:" in text
    assert "Source:" in text
    assert options.objectives or "plain" in name or name in FINETUNE
    if {"token_labeling", "relabel"} & set(options.objectives):
        assert "Needs: score maps" in text or "--maps MAPS" in text


def test_a_recipe_survives_the_way_to_a_run_folder_and_back():
    options = apply(TrainOptions(), read_recipe("lvvit_s_token"), "x")
    assert apply(TrainOptions(), flat(options), "config.yaml") == options
    assert options.optim.lr_base_size == 640
    assert options.objectives == {"token_labeling": {"beta": 0.5}}


def test_an_unknown_key_is_an_error_with_a_suggestion():
    with pytest.raises(SchemaError, match=r"'batch_sise'.*'batch_size'"):
        apply(TrainOptions(), {"batch_sise": 3}, "mine.yaml")
    with pytest.raises(SchemaError, match="lvvit_s_token"):
        read_recipe("lvvit_s_tokens")
    with pytest.raises(SchemaError, match=r"no recipe file nowhere\.yaml"):
        read_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"epochs": "many"}, "epochs is 'many'"),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"amp": 1}, "amp is 1"),
        ({"scale": [0.1]}, "scale"),
        ({"objectives": ["token"]}, "objectives"),
        ({"objectives": {"hard": 3}}, "objectives.hard is 3"),
        ({"batch_size": True}, "batch_size is True"),
        ({"model": None}, "model is None"),
    ],
)
def test_values_of_the_wrong_kind_are_named(values, what):
    with pytest.raises(SchemaError, match=what):
        apply(TrainOptions(), values, "mine.yaml")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"mixing": {"cutmix": {"alpha": "much"}}}, "cutmix: alpha is 'much'"),
        ({"mixing": {"cutmix": {"alpha": True}}}, "alpha is True"),
        ({"objectives": {"drloc": {"pairs": 2.5}}}, r"drloc: pairs.* is 2.5"),
        ({"objectives": {"hard": {"smoothing": "0.1"}}}, "hard: smoothing is '0.1'"),
    ],
)
def test_values_inside_objectives_and_mixing_are_checked_before_anything_is_read(values, what):
    options = apply(TrainOptions(), {"data": "photos", "model": "lvvit_t", **values}, "mine.yaml")
    with pytest.raises(SchemaError, match=what):
        check_options(options)


def test_yaml_numbers_without_a_dot_are_still_numbers(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1e-3\nweight_decay: 0\nobjectives: {hard: }\nmixing:")
    options = apply(TrainOptions(), read_recipe(str(file)), "x")
    assert options.optim.lr == 1e-3
    assert options.optim.weight_decay == 0.0
    assert options.objectives == {"hard": {}}
    assert options.mixing == {}


@pytest.mark.parametrize(("text", "what"), [("a: [1", r"mine\.yaml"), ("- 1", r"mine\.yaml.*object")])
def test_broken_yaml_is_named(tmp_path, text, what):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SchemaError, match=what):
        read_recipe(str(tmp_path / "mine.yaml"))


def test_overrides_reach_inner_values_and_remove_entries():
    base = {"objectives": {"drloc": {"weight": 0.5}, "hard": {}}}
    assert overrides(["objectives.drloc.weight=0.1"], base) == {"objectives": {"drloc": {"weight": 0.1}, "hard": {}}}
    assert overrides(["objectives.drloc=null"], base) == {"objectives": {"hard": {}}}
    assert overrides(["mixing.cutmix={alpha: 0.5}"], base) == {"mixing": {"cutmix": {"alpha": 0.5}}}
    assert base["objectives"]["drloc"] == {"weight": 0.5}
    with pytest.raises(SchemaError, match="NAME=VALUE"):
        overrides(["objectives.drloc"], base)
    with pytest.raises(SchemaError, match=r"weight is 0\.5"):
        overrides(["objectives.drloc.weight.x=1"], base)
    with pytest.raises(SchemaError, match="'objectives'"):
        overrides(["objective.drloc.weight=1"], base)


@pytest.mark.parametrize("task", [["train"], ["segment", "train"], ["detect", "train"]])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--log-interval", "0"], "log_interval is 0, but should be greater than or equal to 1"),
        (["--lr-base-size", "0"], "lr_base_size is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--val-split", "1.5"], "val_split is 1.5"),
        (["--warmup-iters", "-1"], "warmup_iters is -1, but should be greater than or equal to 0"),
        (["--opt", "adamww"], "Did you mean 'adamw'"),
        (["--device", "gpu"], "device is 'gpu'; it can be cpu, cuda"),
        (["--decay-rate", "0.5", "--sched", "cosine"], "decay_rate is 0.5, which sched cosine does not use"),
    ],
)
def test_every_task_names_the_option_and_its_value(tmp_path, capsys, task, words, what):
    assert main([*task, str(tmp_path), "--model", "vit_tiny_patch16_224", *words]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("opt", ["adamw", "AdamW", "lookahead_sgd"])
def test_what_timm_takes_is_taken(opt):
    check_loop(apply(TrainOptions(), {"opt": opt, "sched": "linear", "device": "cpu"}, "test"))


def test_a_device_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for name in ("", "cpu", "cpu:0", "cuda", "cuda:0"):
        pick_device(name)
    with pytest.raises(EverytokenError, match="device is 'cuda:x'"):
        pick_device("cuda:x")
    with pytest.raises(EverytokenError, match="torch finds 1 such device on this machine; take cpu"):
        pick_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(EverytokenError, match="torch finds no such devices"):
        pick_device("cuda")


def test_colour_jitter_beside_randaugment_is_refused_since_it_would_do_nothing(photos, capsys):
    assert main(["train", str(photos), "--model", "vit_nano_patch4_32", "--color-jitter", "0.4"]) == 2
    assert "color_jitter is 0.4 and aa is 'rand-m9" in capsys.readouterr().err


def test_the_rate_that_is_asked_for_is_taken_whatever_the_recipe_has():
    recipe = apply(TrainOptions(recipe="deit_base_align"), read_recipe("deit_base_align"), "recipe")
    assert recipe.optim.lr == 1e-5
    changed = apply(recipe, {"lr_base": 1e-4}, "flags")
    assert learning_rate(complete(changed, {"lr_base"}).optim, 512) > 1e-5
    with pytest.raises(EverytokenError, match="set one of them"):
        complete(changed, {"lr_base", "lr"})


def test_maps_and_teachers_that_nothing_uses_are_mentioned(photos):
    options = apply(TrainOptions(), {"data": str(photos), "model": "vit_nano_patch4_32", "teacher": "resnet18"}, "test")
    objectives = {"hard": HardLabels()}
    assert any("resnet18" in note for note in check_objectives(options, objectives))
    unused = check_objectives(dataclasses.replace(options, maps="store"), objectives)
    assert any("the maps store are not used by any objective" in note for note in unused)
    guided = dataclasses.replace(options, mixing={"attentivecutmix": {}})
    assert not any("resnet18" in note for note in check_objectives(guided, objectives))


@pytest.mark.parametrize("kind", [TrainOptions, DetectOptions])
def test_an_option_knows_whether_it_changes_what_is_learnt(kind):
    names = how_to_run(kind)
    assert {"out", "device", "workers", "threads", "keep", "wandb", "checkpoint_minutes", "fsdp"} <= names
    assert not {"seed", "lr", "batch_size", "epochs", "val_interval", "model", "weights", "val_split"} & names
