"""LV-ViT, T2T-ViT and CvT have the published sizes and behave as timm's own: features, heads, groups, tracing."""

import copy

import pytest
import timm
import torch
from timm.layers import create_feature_extractor, get_graph_node_names
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from torch.utils.flop_counter import FlopCounterMode

import everytoken  # noqa: F401  (registers the models)
from everytoken.models import SMALL

VIT = {"img_size": 64, "num_classes": 5, "embed_dim": 48, "depth": 2, "num_heads": 3}
CVT = {"img_size": 64, "num_classes": 5, "embed_dims": (8, 16, 48), "depths": (1, 1, 2), "num_heads": (1, 2, 3)}
MODELS = {
    "lvvit_t": VIT,
    "t2t_vit_7": {**VIT, "token_dim": 16, "token_drop": 0.0},
    "t2t_vit_t_14": {**VIT, "token_dim": 16},
    "cvt_13": CVT,
}
PREFIX = {"lvvit_s_distilled": 2, "cvt_13_pooled": 0}
MORE = {"lvvit_s_distilled": {**VIT, "stem_width": 8}, "cvt_13_pooled": CVT}
every_model = pytest.mark.parametrize("name", MODELS)
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def tiny(name, **more):
    torch.manual_seed(0)
    return timm.create_model(name, **{**(MODELS | MORE)[name], **more})


# (name, image, parameters, keys in the state dict, G multiply-adds of the papers or None)
PUBLISHED = [
    ("lvvit_t", 224, 8_534_720, 160, 2.87),
    ("lvvit_s", 224, 26_151_824, 204, None),
    ("lvvit_s", 384, 26_297_744, 204, 22.17),
    ("lvvit_m", 224, 55_830_544, 248, 12.74),  # one paper prints 16.0
    ("lvvit_m", 448, 56_131_600, 248, None),
    ("lvvit_l", 224, 150_021_968, 292, None),
    ("lvvit_l", 448, 150_473_552, 292, 157.0),
    ("lvvit_l", 512, 150_657_872, 292, None),
    ("t2t_vit_7", 224, 4_310_222, 111, 1.1),
    ("t2t_vit_10", 224, 5_889_230, 144, None),
    ("t2t_vit_12", 224, 6_941_902, 166, None),
    ("t2t_vit_14", 224, 21_545_550, 188, 4.8),
    ("t2t_vit_14", 384, 21_691_470, 188, None),  # published as 21.7 M
    ("t2t_vit_19", 224, 39_177_422, 243, None),
    ("t2t_vit_24", 224, 64_105_934, 298, None),
    ("t2t_vit_t_14", 224, 21_541_070, 184, 6.1),
    ("t2t_vit_t_19", 224, 39_172_942, 239, None),
    ("t2t_vit_t_24", 224, 64_101_454, 294, None),
    ("cvt_13", 224, 19_997_480, 459, 4.5),
    ("cvt_13_pooled", 224, 19_936_296, 339, 4.5),
    ("cvt_21", 224, 31_622_696, 731, 7.1),
]


@pytest.mark.parametrize(("name", "size", "parameters", "keys", "gmac"), PUBLISHED)
def test_parameters_keys_and_multiply_adds_are_the_published_ones(name, size, parameters, keys, gmac):
    # token_vote runs the token head in evaluation, as the released code does; its counter also counts norms (< 1.5 %)
    vote = {"token_vote": 0.5} if name.startswith("lvvit") else {}
    with torch.device("meta"):
        model = timm.create_model(name, img_size=size, **vote).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == keys
    if gmac is not None:
        with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, size, size))
        printed = 0.02 if name.startswith("cvt") else 0.015
        assert counter.get_total_flops() / 2e9 == pytest.approx(gmac, rel=printed, abs=0.05 * name.startswith("t2t"))


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_features_heads_and_intermediates_follow_timm(name):
    model, prefix = tiny(name).eval(), PREFIX.get(name, 1)
    features = model.forward_features(X)
    assert features.shape == (2, prefix + 16, 48)
    assert torch.allclose(model.forward_head(features), model(X))
    assert model.forward_head(features, pre_logits=True).shape[-1] == 48
    final, grids = model.forward_intermediates(X)
    assert tuple(grids[-1].shape) == (2, 48, 4, 4)
    assert torch.allclose(final, features, atol=1e-6)
    backbone = tiny(name, features_only=True, out_indices=(0, 1))
    assert [f.shape[1] for f in backbone(X)] == backbone.feature_info.channels()
    assert name in MORE or model.get_classifier() is model.head
    model.reset_classifier(9)
    assert model(X).shape == (2, 9)
    if name in MODELS:
        model.reset_classifier(9, "avg")
        assert torch.allclose(model(X), model.head(model.forward_features(X)[:, 1:].mean(1)), atol=1e-6)
        model.reset_classifier(0)
        assert model(X).shape == (2, 48)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("lvvit_t", {"norm_position": "mid"}, "mid"),
        ("lvvit_t", {"block_norm": "batch"}, "batch"),
        ("lvvit_t", {"patch_size": 8}, "patch_size=8"),
        ("t2t_vit_7", {"patch_size": 8}, "patch_size=8"),
        ("t2t_vit_7", {"tokens": "conv"}, "conv"),
        ("t2t_vit_7", {"dynamic_img_pad": True}, "pad"),
        ("cvt_13", {"depths": (1, 1)}, "embed_dims names 3 stages"),
        ("cvt_13", {"global_pool": "max"}, "max"),
        ("cvt_13", {"class_token": False, "global_pool": "token"}, "token"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny(name, **wrong)


@pytest.mark.parametrize("name", [*MODELS, *MORE, *(n for n in SMALL if "nano" in n and n.endswith("_32"))])
def test_the_default_configuration_names_real_layers(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    config, weights = model.pretrained_cfg, model.state_dict()
    heads = [config["classifier"]] if isinstance(config["classifier"], str) else config["classifier"]
    for layer in (config["first_conv"], *heads):
        assert f"{layer}.weight" in weights


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_plain_training_gives_every_trained_weight_a_gradient(name):
    model = tiny(name).train()
    model(X).sum().backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@every_model
def test_weight_decay_and_layer_groups_are_known_to_timm(name):
    model = tiny(name)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    scale_of = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    embedding = model.stage0.patch_embed.proj if name == "cvt_13" else list(model.patch_embed.children())[-1]
    blocks = [b for s in model.stages for b in s.blocks] if name == "cvt_13" else model.blocks
    scales = [scale_of[id(m.weight)] for m in (embedding, *(b.attn.proj for b in blocks), model.head)]
    assert scales == sorted(set(scales))
    if name == "cvt_13":
        assert scale_of[id(model.stage1.patch_embed.proj.weight)] == scales[2]
    optimizer = create_optimizer_v2(model, "adamw", weight_decay=0.05)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    free = model.stage2.cls_token if name == "cvt_13" else model.cls_token
    assert id(model.head.weight) in decayed
    assert not {id(free), id(model.head.bias)} & decayed
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["lvvit_t", "t2t_vit_7", "cvt_13"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = tiny(name).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    model(X).sum().backward()
    other(X).sum().backward()
    for (key, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.requires_grad:
            assert torch.allclose(p.grad, q.grad, atol=1e-5), key


@every_model
def test_attention_is_fused(name):
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 8, 8))
    if not counter.get_total_flops():
        pytest.skip("this torch does not count fused attention on the CPU")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny(name).eval()(X)
    assert any("scaled_dot_product" in str(op) for op in counter.get_flop_counts()["Global"])


@pytest.mark.parametrize("name", ["lvvit_t", "t2t_vit_7", "cvt_13"])
def test_the_model_compiles_as_one_graph(name):
    depth = {"depths": (1, 1, 1)} if name == "cvt_13" else {"depth": 1}
    model = tiny(name, **depth).eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(X), model(X), atol=1e-5)


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_torch_fx_can_trace_it(name):
    model = tiny(name).eval()
    last = get_graph_node_names(model)[1][-1]
    traced = create_feature_extractor(model, [last])
    assert torch.allclose(traced(X)[last], model(X), atol=1e-5)
    if not name.startswith("cvt"):  # it takes images of any size
        with pytest.raises(AssertionError, match="set_input_size"):
            traced(torch.randn(1, 3, 32, 64))


@pytest.mark.parametrize("name", ["lvvit_t", "t2t_vit_7"])
def test_the_input_size_can_change_and_positions_follow(name):
    model = tiny(name)
    model.set_input_size((96, 128))
    assert model.pos_embed.shape == (1, 1 + 6 * 8, 48)
    assert model.pos_embed.requires_grad == (name == "lvvit_t")
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 5)
    for size in ((96, 64), (64, 128)):
        with pytest.raises(AssertionError, match="set_input_size"):
            model(torch.randn(1, 3, *size))
    with pytest.raises(ValueError, match="patch_size=8"):
        model.patch_embed.set_input_size(patch_size=8)
    any_size = tiny(name, dynamic_img_size=True).eval()
    assert any_size(torch.randn(1, 3, 32, 80)).shape == (1, 5)
    assert torch.allclose(any_size(X), tiny(name).eval()(X), atol=1e-6)
