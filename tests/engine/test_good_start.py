"""Training that begins from good weights: batch norms and first layers can stay, images can be left out."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import load_file

from everytoken import EverytokenError
from everytoken_lab import train
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.models.description import Description

QUIET = {"workers": 0, "device": "cpu", "threads": 1}
NAMES = ("class-0", "class-1", "class-2")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A tiny ResNet with random weights, which are as good a start as any."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    path = tmp_path_factory.mktemp("start") / "best.safetensors"
    write_weights(path, model.state_dict(), Description("test_resnet", {"num_classes": 3}, NAMES).to_metadata())
    return path


@pytest.fixture
def settings(start, tmp_path):
    """settings(**changes): arguments of a run from these weights that hardly moves."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: test_resnet\nimg_size: 32\nepochs: 4\nbatch_size: 12\nlr: 1.0e-12\nwarmup_epochs: 0\n")
    plain = {"recipe": str(recipe), "weights": str(start), "out": str(tmp_path / "run"), **QUIET}
    return lambda **changes: {**plain, **changes}


@pytest.mark.parametrize("norm_eval", [True, False])
def test_batch_norms_keep_their_statistics_if_they_shall(photos, settings, start, tmp_path, norm_eval):
    train(photos, **settings(epochs=1, norm_eval=norm_eval, lr=0.1))
    weights, last = load_file(start), load_file(tmp_path / "run/best.safetensors")
    assert torch.equal(weights["bn1.running_mean"], last["bn1.running_mean"]) == norm_eval
    assert not torch.equal(weights["conv1.0.weight"], last["conv1.0.weight"])


def test_frozen_groups_stay_as_they_are(photos, settings, start, tmp_path):
    train(photos, **settings(epochs=1, freeze=2, lr=0.1))
    weights, last = load_file(start), load_file(tmp_path / "run/best.safetensors")
    frozen = ("conv1", "bn1", "layer1")
    for name, value in weights.items():
        assert torch.equal(value, last[name]) == name.startswith(frozen), name
    with pytest.raises(EverytokenError, match="has 5 layer groups"):
        train(photos, **settings(freeze=6, out=str(tmp_path / "other")))


def test_images_of_a_list_are_left_out_of_training(photos, settings, tmp_path):
    names = tmp_path / "exclude.txt"
    names.write_text("class-0/photo.0.png\tnearly the same as another\nclass-1/photo.3.png\n")
    train(photos, **settings(epochs=1, exclude=str(names)))
    assert "34 training and 12 validation images" in (tmp_path / "run/log.txt").read_text()
    with pytest.raises(EverytokenError, match="cannot be read"):
        train(photos, **settings(exclude=str(tmp_path / "no.txt"), out=str(tmp_path / "other")))


def test_a_recipe_for_more_images_gets_a_smaller_batch(photos, settings, tmp_path):
    (tmp_path / "large.yaml").write_text((tmp_path / "recipe.yaml").read_text().replace("12", "50"))
    train(photos, **settings(recipe=str(tmp_path / "large.yaml"), epochs=1))
    assert "batch_size: 36" in (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(EverytokenError, match="36 training images do not fill one batch of 50"):
        train(photos, **settings(batch_size=50, epochs=1, out=str(tmp_path / "asked")))
