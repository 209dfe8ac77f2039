"""Alignment through attention pooling (SigLIP), ConViT's gated and XCiT's channel attention."""

import pytest
import timm
import torch
from torch.nn import functional as F

import everytoken as et
from everytoken.functional.shares import kernel_of
from everytoken.mixing.mix import Mix

SMALL = {"img_size": 64, "depth": 2, "num_classes": 3}


def mixed(size=64):
    mask = torch.ones(2, size, size)
    mask[0, 5:40, 10:50], mask[1, :, 30:] = 0, 0
    return torch.randn(2, 3, size, size), Mix(torch.tensor([1, 0]), mask, mask.mean((1, 2)), "pixels")


def randomised(model, std=0.3):
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1 and ("q" in name or "kv" in name or "pos_proj" in name or "latent" in name):
                value.normal_(std=std)
    return model.train()


@pytest.mark.parametrize("more", [{}, {"class_token": True, "reg_tokens": 2, "pool_include_prefix": True}])
def test_attention_pooling_reads_the_shares_that_its_weights_choose(more):
    torch.manual_seed(0)
    options = {**SMALL, "embed_dim": 48, "num_heads": 3, **more}
    model = randomised(timm.create_model("vit_base_patch16_siglip_224", **options))
    images, mix = mixed()
    seen = []
    model.attn_pool.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with et.aligned(model, mix) as shares:
        logits = model(images)
    shares, pool = shares.shares, model.attn_pool
    heads = pool.num_heads
    k = pool.kv(seen[0]).unflatten(-1, (2, heads, -1))[:, :, 0].transpose(1, 2)
    q = pool.q(pool.latent).unflatten(-1, (heads, -1)).transpose(1, 2)
    matrix = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1).mean(1)[:, 0]
    tokens = shares.grid.flatten(1)
    if more:
        tokens = torch.cat((shares.prefix, tokens), dim=1)
    torch.testing.assert_close(shares.image, (matrix * tokens).sum(-1), atol=1e-5, rtol=1e-5)
    assert (shares.image - shares.grid.mean((1, 2))).abs().max() > 1e-3
    view_model = et.TokenModel(model)
    view_model.align()
    view = view_model(images, mix)
    torch.testing.assert_close(view.shares.image, shares.image)
    torch.testing.assert_close(view.logits, logits)


def test_convit_mixes_by_its_gated_attention_and_then_by_plain_attention():
    torch.manual_seed(0)
    options = {**SMALL, "local_up_to_layer": 1, "embed_dim": 16, "num_heads": 4}
    model = randomised(timm.create_model("convit_tiny", **options))
    matrices = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda module, args: matrices.append(args[0].mean(1)))
    images, mix = mixed()
    with et.aligned(model, mix) as shares:
        model(images)
    r = mix.at((4, 4)).flatten(1)
    r = ((matrices[0] @ r[..., None])[..., 0] + r) / 2
    r = torch.cat((mix.ratio[:, None], r), dim=1)
    r = ((matrices[1] @ r[..., None])[..., 0] + r) / 2
    torch.testing.assert_close(shares.shares.image, r[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shares.shares.grid.flatten(1), r[:, 1:], atol=1e-5, rtol=1e-5)
    assert (r[:, 0] - mix.ratio).abs().max() > 1e-3


def test_xcit_mixes_tokens_by_its_convolutions_and_not_by_its_channel_attention():
    torch.manual_seed(0)
    model = timm.create_model("xcit_nano_12_p16_224", **{**SMALL, "img_size": 128, "cls_attn_layers": 1}).train()
    images, mix = mixed(128)
    token_model = et.TokenModel(model)
    with et.aligned(model, mix, layers=(1, 2)) as shares:
        model(images)

    def convolved(r, layer, stride=1):
        kernel = kernel_of(layer.weight)[None, None]
        pair = F.conv2d(
            torch.stack((r, torch.ones_like(r)), 1).flatten(0, 1)[:, None], kernel, stride=stride, padding=1
        )
        pair = pair.unflatten(0, (-1, 2))[:, :, 0]
        return pair[:, 0] / pair[:, 1]

    r = mix.at((128, 128)).expand(2, -1, -1)
    for layer in model.patch_embed.proj:
        r = convolved(r, layer[0], 2) if isinstance(layer, torch.nn.Sequential) else r
    for block in model.blocks:
        lpi = block.local_mp
        r = (convolved(convolved(r, lpi.conv1), lpi.conv2) + r) / 2
    torch.testing.assert_close(shares.shares.grid, r, atol=1e-5, rtol=1e-5)
    with et.aligned(model, mix) as every:
        model(images)
    assert (every.shares.image - mix.ratio).abs().max() > 1e-4
    tokens = Mix(mix.partner, (mix.at((8, 8)) > 0.5).float(), mix.ratio, "tokens")
    assert token_model(images, tokens).grid.shape == (2, 8, 8, 128)
