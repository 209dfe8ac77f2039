"""Training and annotating from Python: the same defaults as the commands, objects instead of exit codes."""

import logging

import pytest
from torch.backends.cuda import flash_sdp_enabled

from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken.step import TokenStep
from everytoken_lab.annotators.job import annotate
from everytoken_lab.cli.train import Train
from everytoken_lab.engine.options import DataOptions, TrainOptions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.schema import SchemaError
from everytoken_lab.training.build import Inputs, check_held_out
from everytoken_lab.training.classify import train

TINY = {"model": "vit_tiny_patch16_224", "img_size": 32, "batch_size": 8, "workers": 0, "device": "cpu"}
TINY |= {"warmup_epochs": 0, "epochs": 1, "threads": 1}
TINY["model_kwargs"] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def undivided(photos, tmp_path_factory):
    """Class folders without a validation part."""
    folder = tmp_path_factory.mktemp("undivided") / "photos"
    folder.symlink_to(photos / "train")
    return folder


@pytest.fixture(scope="module")
def maps(undivided, backbone, tmp_path_factory):
    out = tmp_path_factory.mktemp("maps") / "maps"
    return annotate(undivided, out, "fit", fit_model=backbone, workers=0, device="cpu")


def test_annotate_returns_maps_and_train_the_run_and_its_history(undivided, maps, tmp_path, capsys, monkeypatch):
    assert isinstance(maps, Maps)
    assert (len(maps), maps.class_names) == (36, ["class-0", "class-1", "class-2"])
    monkeypatch.setattr(logging.getLogger("everytoken_lab"), "handlers", [])  # as before any command was called
    run = train(undivided, maps=maps.path, objectives={"token_labeling": {}}, out=str(tmp_path / "run"), **TINY)
    assert isinstance(run, Run)
    assert run.path == tmp_path / "run"
    assert run.summary["updates"] == run.history[-1]["step"]
    assert set(run.history[0]) >= {"epoch", "score", "val_top1"}
    assert run.load().class_names == ("class-0", "class-1", "class-2")
    assert run.config["maps"] == str(maps.path)
    assert capsys.readouterr().out == ""  # a library logs
    again = train(undivided, maps=maps.path, objectives={"token_labeling": {}}, out=str(tmp_path / "run"), **TINY)
    assert again.history == run.history


@pytest.mark.parametrize(("amp", "again"), [(False, False), (True, False), (True, True)])
def test_mixed_precision_on_the_cpu_leaves_fused_attention_alone(photos, tmp_path, monkeypatch, amp, again):
    kernel, layers = [], []
    forward = TokenStep.forward

    def watched(step, batch):
        kernel.append(flash_sdp_enabled())
        layers.extend(m.fused_attn for m in step.modules() if hasattr(m, "fused_attn"))
        return forward(step, batch)

    monkeypatch.setattr(TokenStep, "forward", watched)
    run = train(photos, amp=amp, grad_checkpointing=again, out=str(tmp_path / "run"), **TINY)
    assert kernel[0] is (not amp or again)  # torch differentiates it slowly in bfloat16
    assert kernel[-1] is True  # validation
    assert layers
    assert set(layers) == {not amp}
    assert run.history[-1]["val_loss"] < 2


def test_python_and_the_command_have_the_same_defaults():
    options = Train()
    assert {name: getattr(options, name) for name in vars(TrainOptions())} == vars(TrainOptions())


@pytest.mark.parametrize(
    ("name", "value"), [("epoch", 3), ("epochs", "many"), ("objectives", {"hard": {"smoothin": 1}})]
)
def test_wrong_arguments_are_exceptions_that_name_them(undivided, tmp_path, name, value):
    with pytest.raises(EverytokenError, match=name if name != "objectives" else "smoothing"):
        train(undivided, out=str(tmp_path / "r"), **{**TINY, name: value})
    with pytest.raises(SchemaError, match="top_k"):
        annotate(undivided, tmp_path / "m", "fit", top_k="all")


def test_an_annotator_is_not_fitted_on_what_training_validates_on(undivided, maps, monkeypatch):
    """By default; a larger part is another matter, and so is a store that does not say what it held out."""
    train_set, val_set, _ = Inputs().splits(TrainOptions(data=str(undivided)))
    assert len(val_set)
    assert check_held_out(maps, train_set, val_set) == []
    assert check_held_out(maps, train_set, train_set) == []  # val/ with the names of train/: other images
    rest, more, _ = Inputs().splits(TrainOptions(data=str(undivided), dataset=DataOptions(val_split=0.6)))
    (note,) = check_held_out(maps, rest, more)
    assert str(maps.path) in note
    assert "val_split" in note
    fit = {k: v for k, v in maps.meta.annotator["fit"].items() if k != "held_out"}
    monkeypatch.setitem(maps.meta.annotator, "fit", fit)
    assert len(check_held_out(maps, train_set, val_set)) == 1
    monkeypatch.setitem(maps.meta.annotator, "name", "timm:resnet50")  # it has not learnt from these images
    assert check_held_out(maps, train_set, val_set) == []
