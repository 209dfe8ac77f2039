"""LV-ViT: every row of its ablation tables, its blocks, its two heads, its arguments."""

import pytest
import timm
import torch

import everytoken  # noqa: F401  (registers the models)
from everytoken.models import TokenModel
from everytoken.models.common import sinusoid_positions
from everytoken.models.lvvit import ConvStem, LVViT, TokenGroupNorm
from everytoken.models.weights import load_weights

TINY = {"img_size": 64, "num_classes": 5, "embed_dim": 48, "depth": 2, "num_heads": 3}


def tiny(**kwargs) -> LVViT:
    return timm.create_model("lvvit_t", **{**TINY, **kwargs})


# the supplement's Tables 2, 3 and 4: arguments, exact count, what the paper prints (in millions)
def stem(kernels, strides):
    return {"stem_kernels": kernels, "stem_strides": strides}


TABLES = {
    "table 2: more blocks": ({**stem([16], [16]), "mlp_ratio": 4.0}, 29_130_088, 28),
    "table 2: smaller MLP, table 3: 1 convolution": (stem([16], [16]), 24_405_352, 25),
    "table 2: more convolutions": ({}, 25_766_824, 26),
    "table 3: 2 convolutions": (stem([7, 8], [2, 8]), 25_692_840, 25),
    "table 3: 3 convolutions, strides 2 2 4": (stem([7, 3, 8], [2, 2, 4]), 25_729_832, 25),
    "table 3: 3 convolutions": (stem([7, 3, 8], [2, 1, 8]), 25_729_832, 26),
    "table 3: 4 convolutions": (stem([7, 3, 3, 8], [2, 1, 1, 8]), 25_766_824, 26),
    "table 3: 4 convolutions, strides 2 2 1 4": (stem([7, 3, 3, 8], [2, 2, 1, 4]), 25_766_824, 26),
    "table 3: 6 convolutions": (stem([7, 3, 3, 3, 3, 8], [2, 1, 1, 1, 1, 8]), 25_840_808, 26),
    **{f"table 4: divided by {n}": ({"residual_divisor": n}, 25_766_824, 26) for n in (1.0, 2.0, 3.0)},
    **{f"norms: groups of {n}": ({"block_norm": "group", "norm_groups": n}, 25_766_824, 26) for n in (1, 6)},
}


@pytest.mark.parametrize("row", TABLES)
def test_each_row_of_the_ablation_tables_can_be_built_with_its_parameter_count(row):
    arguments, exact, printed = TABLES[row]
    with torch.device("meta"):
        model = timm.create_model("lvvit_s", token_classes=0, **arguments)
    assert "aux_head.weight" not in model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == exact
    # The papers round up, down and to the nearest; the 28 M of "more blocks" is 29.1 M by any counting.
    assert abs(exact / 1e6 - printed) < 1.2
    assert model.patch_embed(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 196, 384)


def test_residual_branches_are_divided_by_the_divisor():
    torch.manual_seed(0)
    block = tiny(residual_divisor=4.0).blocks[0].eval()
    x = torch.randn(2, 5, 48)
    half = x + block.attn(block.norm1(x)) / 4
    assert torch.allclose(block(x), half + block.mlp(block.norm2(half)) / 4, atol=1e-6)


def test_post_norm_normalises_after_the_residual_sum():
    block = tiny(norm_position="post").blocks[0].eval()
    x = torch.randn(2, 5, 48) * 7
    y = block(x)
    assert torch.allclose(y.mean(-1), torch.zeros(2, 5), atol=1e-5)
    assert torch.allclose(y.std(-1, unbiased=False), torch.ones(2, 5), atol=1e-3)


def test_group_norm_replaces_the_norms_inside_the_blocks_only():
    model = tiny(block_norm="group", norm_groups=3)
    assert isinstance(model.blocks[0].norm1, TokenGroupNorm)
    assert model.blocks[0].norm1.num_groups == 3
    assert not isinstance(model.norm, TokenGroupNorm)
    x = torch.randn(2, 7, 48)
    y = model.blocks[0].norm1(x).transpose(1, 2).reshape(2, 3, -1)
    assert torch.allclose(y.mean(-1), torch.zeros(2, 3), atol=1e-5)


def test_a_stem_with_unequal_lists_is_refused():
    with pytest.raises(ValueError, match="one stride per kernel"):
        ConvStem(kernels=[7, 3], strides=[2])


def test_the_token_head_is_trained_only_by_a_token_model():
    model = tiny().train()
    assert not model.aux_head.weight.requires_grad
    view = TokenModel(model, 5)(torch.randn(2, 3, 64, 64))
    assert view.token_logits.shape == (2, 4, 4, 5)
    view.token_logits.sum().backward()
    assert model.aux_head.weight.grad is not None
    assert tiny(token_classes=7).aux_head.weight.requires_grad  # whoever asks for one wants to train it


def test_released_weights_fill_both_heads_and_the_token_head_answers():
    released = tiny()
    state = {"state_dict": {f"module.{key}": value for key, value in released.state_dict().items()}}
    model = tiny(img_size=96)
    report = load_weights(model, state)
    assert not report.missing + report.left_out + report.unknown
    view = TokenModel(model, 5).eval()(torch.randn(1, 3, 96, 96))
    assert torch.equal(view.token_logits, released.aux_head(view.grid))


def test_the_token_vote_adds_the_strongest_token_of_each_class_in_evaluation():
    model = tiny().eval()
    x = torch.randn(2, 3, 64, 64)
    view = TokenModel(model, 5)(x)
    assert torch.allclose(model(x), view.logits, atol=1e-6)
    model.token_vote = 0.5
    assert torch.allclose(model(x), view.logits + 0.5 * view.token_logits.amax((1, 2)), atol=1e-6)


def test_ordinary_timm_arguments_work():
    model = tiny(img_size=(64, 96), in_chans=1, global_pool="avg", drop_path_rate=0.2)
    assert model(torch.randn(2, 1, 64, 96)).shape == (2, 5)
    rates = [getattr(b.drop_path1, "drop_prob", 0.0) for b in model.blocks]
    assert rates == pytest.approx([0.0, 0.2])
    assert tiny(pretrained_cfg_overlay={"crop_pct": 0.7}).pretrained_cfg["crop_pct"] == 0.7
    padded = tiny(dynamic_img_size=True, dynamic_img_pad=True)
    assert padded(torch.randn(1, 3, 33, 80)).shape == (1, 5)


def test_reset_classifier_renews_both_heads():
    model = tiny()
    model.reset_classifier(9)
    assert (model.head.out_features, model.aux_head.out_features) == (9, 9)
    model.reset_classifier(3, token_classes=20)
    assert (model.head.out_features, model.aux_head.out_features) == (3, 20)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)
    assert model.get_classifier() is model.head
    model.reset_classifier(0)
    assert model.aux_head is None
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 48)


def test_initial_weights_follow_the_papers():
    model = tiny(embed_dim=96, num_heads=4)
    assert float(model.cls_token.std()) == pytest.approx(0.02, rel=0.4)
    assert float(model.head.weight.std()) == pytest.approx(0.02, rel=0.2)
    assert float(model.aux_head.weight.std()) == pytest.approx(0.02, rel=0.2)
    assert float(model.head.bias.abs().max()) == 0
    assert float(model.patch_embed.conv2.weight.std()) == pytest.approx((1 / (3 * 64 * 9)) ** 0.5, rel=0.1)
    assert model.norm.eps == 1e-5


def test_positions_can_be_fixed_sinusoids():
    model = timm.create_model("lvvit_nano_patch4_32", num_classes=3, pos_embed="sinusoid")
    assert torch.equal(model.pos_embed, sinusoid_positions(65, model.embed_dim))
    model.set_input_size(48)
    assert not model.pos_embed.requires_grad
    model(torch.randn(2, 3, 48, 48)).sum().backward()
    assert model.cls_token.grad is not None
