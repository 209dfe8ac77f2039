"""LV-ViT, T2T-ViT and CvT behave as timm's own models do: features, heads, groups, tracing, compiling."""

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


@every_model
def test_features_heads_and_intermediates_follow_timm(name):
    model = tiny(name).eval()
    features = model.forward_features(X)
    assert features.shape == (2, 17, 48)
    assert torch.allclose(model.forward_head(features), model(X))
    assert model.forward_head(features, pre_logits=True).shape == (2, 48)
    final, grids = model.forward_intermediates(X)
    assert tuple(grids[-1].shape) == (2, 48, 4, 4)
    assert torch.allclose(final, features)
    backbone = tiny(name, features_only=True, out_indices=(0, 1))
    assert [f.shape[1] for f in backbone(X)] == backbone.feature_info.channels()
    assert model.get_classifier() is model.head
    model.reset_classifier(9, "avg")
    assert torch.allclose(model(X), model.head(model.forward_features(X)[:, 1:].mean(1)), atol=1e-6)
    model.reset_classifier(0)
    assert model(X).shape == (2, 48)


@pytest.mark.parametrize("name", MORE)
def test_variants_without_and_with_more_prefix_tokens_follow_timm_too(name):
    model = tiny(name).eval()
    features = model.forward_features(X)
    assert features.shape == (2, PREFIX[name] + 16, 48)
    assert torch.allclose(model.forward_head(features), model(X))
    assert torch.allclose(model.forward_intermediates(X)[0], features, atol=1e-6)
    backbone = tiny(name, features_only=True, out_indices=(0, 1))
    assert [f.shape[1] for f in backbone(X)] == backbone.feature_info.channels()
    model.reset_classifier(9)
    assert model(X).shape == (2, 9)


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_the_default_configuration_names_real_layers(name):
    weights = tiny(name).state_dict()
    config = tiny(name).pretrained_cfg
    heads = [config["classifier"]] if isinstance(config["classifier"], str) else config["classifier"]
    for layer in (config["first_conv"], *heads):
        assert f"{layer}.weight" in weights


def test_the_default_configurations_of_small_models_name_real_layers():
    for name in (n for n in SMALL if "nano" in n and n.endswith("_32")):
        with torch.device("meta"):
            model = timm.create_model(name)
        assert f"{model.pretrained_cfg['first_conv']}.weight" in model.state_dict()


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
