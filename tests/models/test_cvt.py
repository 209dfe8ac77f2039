"""CvT: the released state dict, convolutional attention and the pooled form by hand, its arguments."""

import math

import pytest
import timm
import torch

import everytoken  # noqa: F401  (registers the models)
from everytoken.models import TokenModel
from everytoken.models.cvt import CvT

TINY = {"img_size": 64, "num_classes": 5, "embed_dims": (8, 16, 24), "depths": (1, 1, 2), "num_heads": (1, 2, 3)}


def tiny(**kwargs) -> CvT:
    torch.manual_seed(0)
    return timm.create_model("cvt_13", **{**TINY, **kwargs})


def busy(model: CvT) -> CvT:
    """Batch norms that do something in evaluation."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def test_the_keys_are_those_of_the_released_weights():
    block = [f"norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")]
    block += [f"attn.proj{x}.{p}" for x in ("_q", "_k", "_v", "") for p in ("weight", "bias")]
    block += [f"mlp.fc{i}.{p}" for i in (1, 2) for p in ("weight", "bias")]
    statistics = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    for x in "qkv":
        block += [f"attn.conv_proj_{x}.conv.weight", *[f"attn.conv_proj_{x}.bn.{p}" for p in statistics]]
    wanted = ["norm.weight", "norm.bias", "head.weight", "head.bias", "stage2.cls_token"]
    for stage, depth in enumerate((1, 1, 2)):
        wanted += [f"stage{stage}.patch_embed.{m}.{p}" for m in ("proj", "norm") for p in ("weight", "bias")]
        wanted += [f"stage{stage}.blocks.{i}.{k}" for i in range(depth) for k in block]
    assert sorted(tiny().state_dict()) == sorted(wanted)


@torch.no_grad()
def test_convolutional_attention_is_what_the_paper_says_written_out():
    model = busy(tiny(img_size=(64, 96)))
    attention = model.stage2.blocks[0].attn
    h, w, dim, heads = 4, 6, 24, 3
    x = torch.randn(1, 1 + h * w, dim)

    def project(name: str, stride: int) -> torch.Tensor:
        conv, bn = getattr(attention, f"conv_proj_{name}").conv.weight, getattr(attention, f"conv_proj_{name}").bn
        grid = torch.nn.functional.pad(x[0, 1:].reshape(h, w, dim), (0, 0, 1, 1, 1, 1))
        tokens = [x[0, 0]]  # the class token passes by the convolution
        for i in range(0, h, stride):
            for j in range(0, w, stride):
                window = grid[i : i + 3, j : j + 3]
                value = torch.stack([(window[..., c] * conv[c, 0]).sum() for c in range(dim)])
                tokens.append((value - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias)
        return getattr(attention, f"proj_{name}")(torch.stack(tokens))

    q, k, v = project("q", 1), project("k", 2), project("v", 2)
    assert len(k) == 1 + 6
    out = torch.zeros(len(q), dim)
    for head in range(heads):
        part = slice(8 * head, 8 * head + 8)
        for i in range(len(q)):
            score = torch.tensor([float(q[i, part] @ k[j, part]) / math.sqrt(dim) for j in range(len(k))])
            out[i, part] = score.softmax(0) @ v[:, part]
    assert torch.allclose(attention(x, (h, w))[0], attention.proj(out), atol=1e-5)


@torch.no_grad()
def test_stages_follow_each_other_and_only_the_last_has_a_class_token():
    model = busy(tiny())
    grid = torch.randn(1, 3, 64, 64)
    x = grid
    for stage in (model.stage0, model.stage1, model.stage2):
        embedded = stage.patch_embed.proj(grid)
        h, w = embedded.shape[2:]
        tokens = stage.patch_embed.norm(embedded.flatten(2).transpose(1, 2))
        if stage is model.stage2:
            tokens = torch.cat([stage.cls_token, tokens], 1)
        for block in stage.blocks:
            tokens = tokens + block.attn(block.norm1(tokens), (h, w))
            hidden = block.mlp.fc1(block.norm2(tokens))
            tokens = tokens + block.mlp.fc2(hidden * torch.sigmoid(1.702 * hidden))
        grid = tokens.transpose(1, 2)[..., -h * w :].reshape(1, -1, h, w)
    assert [s.cls_token is not None for s in model.stages] == [False, False, True]
    assert torch.allclose(model(x), model.head(model.norm(tokens[:, 0])), atol=1e-5)
    assert torch.allclose(model.forward_features(x), model.norm(tokens), atol=1e-5)


def test_intermediates_are_the_grids_of_the_stages():
    model = busy(tiny())
    x = torch.randn(2, 3, 64, 64)
    features = model.forward_features(x)
    _, grids = model.forward_intermediates(x)
    assert [tuple(g.shape) for g in grids] == [(2, 8, 16, 16), (2, 16, 8, 8), (2, 24, 4, 4)]
    (last,) = model.forward_intermediates(x, 1, norm=True, intermediates_only=True)
    assert torch.allclose(last.flatten(2).transpose(1, 2), features[:, 1:], atol=1e-6)
    early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], grids[0])
    backbone = tiny(features_only=True, out_indices=(0, 1))
    assert backbone.feature_info.reduction() == [4, 8]
    assert not any("stage2" in k or "head" in k for k in backbone.state_dict())
    with pytest.raises(ValueError, match="NLC"):
        model.forward_intermediates(x, output_fmt="NLC")


def test_ordinary_arguments_work():
    model = tiny(in_chans=1, drop_path_rate=0.2, drop_rate=0.1, attn_drop_rate=0.1, proj_drop_rate=0.1)
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 5)
    rates = [[getattr(b.drop_path, "drop_prob", 0.0) for b in s.blocks] for s in model.stages]
    assert rates == [[0.0], [0.0], [0.0, pytest.approx(0.2)]]
    each = tiny(drop_path_rate=(0.0, 0.0, 0.4), depths=(1, 1, 3))
    assert getattr(each.stage2.blocks[1].drop_path, "drop_prob", 0.0) == pytest.approx(0.2)
    plain = tiny(class_token=False).eval()
    assert plain.num_prefix_tokens == 0
    assert plain.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 16, 24)
    assert plain.global_pool == "avg"
    gelu = tiny(act_layer="gelu").stage0.blocks[0].mlp.act
    assert torch.allclose(gelu(x := torch.randn(9)), torch.nn.functional.gelu(x))


def test_every_image_size_works_and_the_grid_is_told():
    model = tiny().eval()
    assert model.grid_size == (4, 4)
    for size in ((64, 96), (50, 70), (33, 17)):
        model.set_input_size(size)
        h, w = model.grid_size
        assert model.forward_features(torch.randn(1, 3, *size)).shape == (1, 1 + h * w, 24)
    assert tiny(img_size=(64, 96)).grid_size == (4, 6)


def test_the_pooled_form_is_that_of_the_other_port_written_out():
    """vit-pytorch's form, which drloc's code builds on, on maps and with 1x1 convolutions."""
    model = busy(tiny(class_token=False, final_norm=False, act_layer="gelu", qkv_bias=False, shared_kv=True))
    for block in (block for stage in model.stages for block in stage.blocks):
        block.attn.scale = (block.attn.proj.in_features // block.attn.num_heads) ** -0.5
    pooled = timm.create_model("cvt_13_pooled", **TINY, embeds=model.embeds).eval()
    pooled.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def over_channels(norm, maps):
        return norm(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def pointwise(linear, maps):
        return torch.nn.functional.conv2d(maps, linear.weight[..., None, None], linear.bias)

    maps = x
    with torch.no_grad():
        for stage in model.stages:
            maps = over_channels(stage.patch_embed.norm, stage.patch_embed.proj(maps))
            for block in stage.blocks:
                attn, normed = block.attn, over_channels(block.norm1, maps)
                shared = attn.conv_proj_k(normed)
                sources = (attn.conv_proj_q(normed), shared, shared)
                q, k, v = (
                    pointwise(linear, source).flatten(2).unflatten(1, (attn.num_heads, -1)).transpose(2, 3)
                    for linear, source in zip((attn.proj_q, attn.proj_k, attn.proj_v), sources, strict=True)
                )
                mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
                mixed = mixed.transpose(2, 3).flatten(1, 2).unflatten(2, maps.shape[2:])
                maps = maps + pointwise(attn.proj, mixed)
                hidden = torch.nn.functional.gelu(pointwise(block.mlp.fc1, over_channels(block.norm2, maps)))
                maps = maps + pointwise(block.mlp.fc2, hidden)
        expected = maps.mean((2, 3)) @ model.head.weight.T + model.head.bias
        torch.testing.assert_close(pooled(x), expected, rtol=1e-4, atol=1e-5)
    view = TokenModel(pooled)(x)
    assert view.prefix is None
    assert view.grid.shape == (2, 4, 4, 24)
