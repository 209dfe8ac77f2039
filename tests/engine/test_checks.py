"""Options of the loop are checked for every task, before anything is built."""

import dataclasses

import pytest

from everytoken.errors import EverytokenError
from everytoken.objectives.hard import HardLabels
from everytoken_lab.cli import main
from everytoken_lab.dense.detect.options import DetectOptions
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.optim import check_loop, learning_rate
from everytoken_lab.engine.options import TrainOptions, how_to_run
from everytoken_lab.engine.recipe import apply, read_recipe
from everytoken_lab.training.build import check_objectives
from everytoken_lab.training.inputs import complete


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
