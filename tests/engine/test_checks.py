"""Options of the loop are checked for every task, before anything is built."""

import pytest

from everytoken.cli import main
from everytoken.engine.checks import check_device, check_loop
from everytoken.engine.options import TrainOptions
from everytoken.engine.recipe import apply
from everytoken.errors import EverytokenError


@pytest.mark.parametrize("task", [["train"], ["segment", "train"], ["detect", "train"]])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--log-interval", "0"], "log_interval is 0; it must be at least 1"),
        (["--lr-base-size", "0"], "lr_base_size is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--val-split", "1.5"], "val_split is 1.5"),
        (["--opt", "adamww"], "Did you mean 'adamw'"),
        (["--sched", "cosin"], "Did you mean 'cosine'"),
        (["--device", "gpu"], "device is 'gpu'; it can be cpu, cuda"),
    ],
)
def test_every_task_names_the_option_and_its_value(tmp_path, capsys, task, words, what):
    assert main([*task, str(tmp_path), "--model", "vit_tiny_patch16_224", *words]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iters", "val_iters", "warmup_iters"])
def test_updates_are_checked_like_epochs(tmp_path, capsys, name):
    assert main(["segment", "train", str(tmp_path), f"--{name.replace('_', '-')}", "-1"]) == 2
    assert f"{name} is -1; it must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("opt", ["adamw", "AdamW", "lookahead_sgd"])
def test_what_timm_takes_is_taken(opt):
    check_loop(apply(TrainOptions(), {"opt": opt, "sched": "linear", "device": "cpu"}, "test"))


@pytest.mark.parametrize(("name", "fine"), [("", True), ("cpu", True), ("cpu:0", True), ("cuda:x", False)])
def test_devices(name, fine):
    if fine:
        check_device(name)
    else:
        with pytest.raises(EverytokenError, match=name):
            check_device(name)


def test_a_device_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_device("cuda")
    check_device("cuda:0")
    with pytest.raises(EverytokenError, match="torch finds 1 such device on this machine; take cpu"):
        check_device("cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(EverytokenError, match="torch finds no such devices"):
        check_device("cuda")
