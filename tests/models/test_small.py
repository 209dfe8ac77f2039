"""Small-image variants: names, grids, parameter counts, and that each of them trains."""

import re

import pytest
import timm
import torch

import everytoken  # noqa: F401  (registers the models)
from everytoken.models import SMALL, TokenModel, family_of, family_of_name, probe
from everytoken.models.weights import load_weights

SIZES = {"pico": (0.18, 0.22), "nano": (1.1, 1.3), "micro": (2.4, 2.8), "mini": (5.0, 5.7)}  # millions of parameters


def build(name: str, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


FOUR_STAGES = "swin_nano4_patch4_window4_64"


def test_every_family_comes_in_three_sizes_for_three_image_sizes_and_two_in_a_fourth():
    assert len(SMALL) == (5 * 3 + 2) * 3 + 1
    assert set(SMALL) <= set(timm.list_models())
    families = {"vit", "swin", "lvvit", "t2t_vit", "cvt"}
    assert {re.sub(r"_(pico|nano4?|micro|mini)_.*", "", name) for name in SMALL} == families


@pytest.mark.parametrize("name", [n for n in SMALL if "nano" in n or n.endswith("_32")])
def test_names_tell_parameters_image_and_grid(name):
    size, patch, image = re.fullmatch(r".*_(pico|nano|micro|mini)4?_patch(\d+)_(?:window\d+_)?(\d+)", name).groups()
    patch, image = int(patch), int(image)
    model = build(name)
    low, high = SIZES[size]
    assert low < sum(p.numel() for p in model.parameters()) / 1e6 < high
    assert model.pretrained_cfg["input_size"] == (3, image, image)
    assert model.num_classes == 10
    view = TokenModel(model, token_classes=10)
    with torch.device("meta"):
        grid = probe(view, (image, image))
    side = image // patch // (8 if name == FOUR_STAGES else 4 if name.startswith("swin") else 1)
    assert grid == (side, side)
    assert family_of_name(name) == family_of(model)


# ViT by hand: 9,408 patches + 192 class token + 12,480 positions + 6 * (12 * 192² + 13 * 192) + 384 norm + 1,930 head
EXACT = {
    "vit_micro_patch4_32": 2_693_578,
    "lvvit_pico_patch4_32": 193_380,
    "swin_micro_patch2_window4_32": 2_643_758,
    "lvvit_micro_patch4_32": 2_727_476,
    "t2t_vit_micro_patch4_32": 2_480_608,
    "cvt_micro_patch4_32": 2_728_042,
}


@pytest.mark.parametrize("name", EXACT)
def test_the_parameter_counts_do_not_drift(name):
    assert sum(p.numel() for p in build(name).parameters()) == EXACT[name]


@pytest.mark.parametrize("name", [n for n in SMALL if "nano" in n and n.endswith("_32")])
def test_a_few_steps_of_training_fit_four_images(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(16):
        loss = torch.nn.functional.cross_entropy(model.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    rest = {"pos_embed", "tokens_to_token.attention1.w", "tokens_to_token.attention2.w"}
    rest |= {"aux_head.weight", "aux_head.bias"}  # trained by token objectives only
    assert {n for n, p in model.named_parameters() if p.grad is None} <= rest


@pytest.mark.parametrize("name", [FOUR_STAGES, *(n for n in SMALL if "micro" in n and n.endswith("_64"))])
def test_other_image_sizes_and_features_work(name):
    size = 128 if name.startswith("swin") else 48
    model = timm.create_model(name, img_size=size, num_classes=0).eval()
    assert model(torch.randn(1, 3, size, size)).shape == (1, model.num_features)
    features = timm.create_model(name, features_only=True)
    assert len(features(torch.randn(1, 3, 64, 64))) == (4 if name == FOUR_STAGES else 3)
    if name == FOUR_STAGES:
        assert features.feature_info.reduction() == [4, 8, 16, 32]  # what a detector wants


def test_weights_move_between_image_sizes():
    old, new = timm.create_model("lvvit_nano_patch8_64"), timm.create_model("lvvit_nano_patch8_96")
    report = load_weights(new, old.state_dict())
    assert [entry.split(" ")[0] for entry in report.resized] == ["pos_embed"]
    assert not report.missing
