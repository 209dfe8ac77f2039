"""Alignment through convolution, pooling and convolutional attention, against K-wide labels carried by hand."""

import pytest
import timm
import torch
from timm.models.convnext import ConvNeXt
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

import everytoken as et
from everytoken.errors import EverytokenError
from everytoken.models.align import Aligner, Alignment
from everytoken.models.cvt import CvT
from everytoken.models.families import UnsupportedModelError
from tests.models.by_hand import assert_gradients, batch, convolved, inputs_of, tokens_of, under, unmixed, watched, wide

B, K = 2, 4


def resnet_labels(model, y):
    y = under(convolved(y, model.conv1), torch.ones(3, 3), 2, 1)
    for block in (block for i in (1, 2, 3, 4) for block in getattr(model, f"layer{i}")):
        branch = shortcut = y
        for conv in [getattr(block, f"conv{i}") for i in (1, 2, 3) if hasattr(block, f"conv{i}")]:
            branch = convolved(branch, conv)
        for layer in block.downsample or ():
            if isinstance(layer, nn.Conv2d):
                shortcut = convolved(shortcut, layer)
            elif isinstance(layer, nn.AvgPool2d):
                shortcut = under(shortcut, torch.ones(2, 2), 2, 0, ceil=True)
        y = (branch + shortcut) / 2
    return y


def convnext_labels(model, y):
    y = convolved(y, model.stem[0])
    for stage in model.stages:
        if len(list(stage.downsample.children())):
            y = convolved(y, stage.downsample[1])
        for block in stage.blocks:
            y = (convolved(y, block.conv_dw) + y) / 2
    return y


def resnet(block, **more):
    return ResNet(block, [1, 2, 1, 1], channels=(8, 8, 12, 12), num_classes=K, **more)


CASES = {
    "resnet": (lambda: resnet(BasicBlock), resnet_labels),
    "bottleneck, dilated, average down": (lambda: resnet(Bottleneck, avg_down=True, output_stride=16), resnet_labels),
    "convnext": (lambda: ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 8, 12, 12), num_classes=K), convnext_labels),
}


@pytest.mark.parametrize("case", CASES)
def test_targets_and_gradients_equal_labels_carried_place_by_place(case):
    torch.manual_seed(0)
    build, carry = CASES[case]
    model = build().train()
    images, mix = batch((32, 48))
    everywhere = carry(model, wide(mix.mask, mix, K))
    target = everywhere.mean((1, 2))
    shares, logits = watched(model, images, mix)
    assert logits.shape == (B, K)
    assert (wide(shares.grid, mix, K) - everywhere).abs().max() < 1e-5
    assert (wide(shares.image, mix, K) - target).abs().max() < 1e-6
    assert_gradients(model, images, logits, mix, shares.image, target, 1e-7)


NAMES = (
    "seresnext26d_32x4d regnety_002 tf_efficientnet_lite0 test_efficientnet mobilenetv3_small_050 "
    "mobilenetv4_conv_small_035 convnextv2_atto"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_the_share_map_has_the_shape_of_the_features(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=K).train()
    images, mix = batch((65, 96))
    with Aligner(model).watch(mix) as seen:
        features = model.forward_features(images)
    assert seen.shares.grid.shape == (B, *features.shape[-2:])
    assert 0 <= seen.shares.grid.min() <= seen.shares.grid.max() <= 1


def test_unknown_layers_and_wishes_are_refused():
    for name, layer in (("resnetblur50", "BlurPool2d"), ("densenet121", "alignment")):
        with pytest.raises(UnsupportedModelError, match=layer):
            Aligner(timm.create_model(name))
    with pytest.raises(EverytokenError, match="no token-mixing layers"):
        Aligner(resnet(BasicBlock), Alignment(layers=(1,)))
    with pytest.raises(EverytokenError, match="has not run"), Aligner(resnet(BasicBlock)).watch(batch()[1]):
        pass


# CvT


def make_cvt():
    torch.manual_seed(0)
    small = {"embed_dims": (16, 24, 32), "depths": (1, 1, 2), "num_heads": (1, 2, 2)}
    model = CvT(img_size=64, num_classes=K, drop_path_rate=0.0, **small).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("proj_q.weight", "proj_k.weight")):
                value.normal_(std=1.0)
    return model


@torch.no_grad()
def slow_cvt(model, images, mix, only):
    blocks = [block for stage in model.stages for block in stage.blocks]
    inputs = inputs_of([block.attn for block in blocks], lambda: model(images))
    y, prefix, number = wide(mix.mask, mix, K), torch.empty(B, 0, K), 0
    for stage in model.stages:
        y = convolved(y, stage.patch_embed.proj)
        if stage.cls_token is not None:
            prefix = wide(mix.ratio, mix, K)[:, None]
        for block in stage.blocks:
            number += 1
            if only is not None and number not in only:
                continue
            attn = block.attn
            x, (h, w) = inputs[attn]
            assert (h, w) == y.shape[1:3]
            p = attn.prefix
            grid = x[:, p:].transpose(1, 2).reshape(B, -1, h, w)
            q, k = (
                linear(torch.cat((x[:, :p], conv(grid).flatten(2).transpose(1, 2)), 1))
                for linear, conv in ((attn.proj_q, attn.conv_proj_q), (attn.proj_k, attn.conv_proj_k))
            )
            q, k = (t.view(B, t.shape[1], attn.num_heads, -1).transpose(1, 2) for t in (q, k))
            matrix = (q @ k.transpose(2, 3) * x.shape[-1] ** -0.5).softmax(-1).mean(1)
            mixed = matrix @ torch.cat((prefix, convolved(y, attn.conv_proj_v.conv).flatten(1, 2)), 1)
            prefix, y = (mixed[:, :p] + prefix) / 2, (mixed[:, p:].view(y.shape) + y) / 2
    return torch.cat((prefix, y.flatten(1, 2)), 1)


@pytest.mark.parametrize("layers", [None, (2, 4)])
def test_cvt_mixes_by_its_attention_over_strided_values(layers):
    model = make_cvt()
    images, mix = batch((64, 96))
    everywhere = slow_cvt(model, images, mix, layers)
    shares, logits = watched(model, images, mix, layers=layers)
    assert shares.grid.shape == (B, 4, 6)
    assert (wide(tokens_of(shares), mix, K) - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(shares.image, shares.prefix[:, 0])
    assert (shares.image - mix.ratio).abs().max() > 1e-4
    assert_gradients(model, images, logits, mix, shares.image, everywhere[:, 0], None)


# MViTv2


def make_mvit(**more):
    torch.manual_seed(0)
    config = {"depths": (1, 2), "embed_dim": (16, 32), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2)), **more}
    model = MultiScaleVit(MultiScaleVitCfg(**config), (64, 64), num_classes=K).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("qkv.weight", "attn.q.weight", "attn.k.weight", "rel_pos_h", "rel_pos_w")):
                value.normal_(std=0.5)
    return model


def pooled_tokens(pool, norm, x, h, w):
    """Tokens [B, heads, p + h·w, D] after a pooling convolution, class token apart, and the norm behind it."""
    p = x.shape[2] - h * w
    grid = pool(x[:, :, p:].flatten(0, 1).transpose(1, 2).unflatten(2, (h, w)))
    return norm(torch.cat((x[:, :, :p], grid.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])), 2))


def mvit_matrix(attn, x, h, w):
    """The attention matrix [B, M, N] of a layer, the mean over its heads."""
    q, k, _ = attn.qkv(x).view(B, -1, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q = pooled_tokens(attn.pool_q, attn.norm_q, q, h, w)
    k = pooled_tokens(attn.pool_k, attn.norm_k, k, h, w)
    scores, p = (q * attn.scale) @ k.transpose(2, 3), int(attn.has_cls_token)
    qs, ks = (round((t.shape[2] - p) ** 0.5) for t in (q, k))
    up = max(ks // qs, 1), max(qs // ks, 1)
    for i in range(qs * qs):
        for j in range(ks * ks):
            row = (i // qs) * up[0] - (j // ks) * up[1] + (ks - 1) * up[1]
            column = (i % qs) * up[0] - (j % ks) * up[1] + (ks - 1) * up[1]
            scores[:, :, p + i, p + j] += q[:, :, p + i] @ (attn.rel_pos_h[row] + attn.rel_pos_w[column])
    return scores.softmax(-1).mean(1)


@torch.no_grad()
def slow_mvit(model, images, mix, only):
    blocks = [block for stage in model.stages for block in stage.blocks]
    inputs = inputs_of([block.attn for block in blocks], lambda: model(images))
    y, prefix = convolved(wide(mix.mask, mix, K), model.patch_embed.proj), torch.empty(B, 0, K)
    if model.cls_token is not None:
        prefix = wide(mix.ratio, mix, K)[:, None]
    for number, block in enumerate(blocks, start=1):
        attn, p = block.attn, prefix.shape[1]
        shortcut = y if block.shortcut_pool_attn is None else under(y, torch.ones(3, 3), 2, 1)
        values = torch.cat((prefix, convolved(y, attn.pool_v).flatten(1, 2)), 1)
        mixed = mvit_matrix(attn, inputs[attn][0], *y.shape[1:3]) @ values
        if attn.residual_pooling:
            mixed = (mixed + torch.cat((prefix, convolved(y, attn.pool_q).flatten(1, 2)), 1)) / 2
        y = shortcut
        if only is None or number in only:
            prefix, y = (mixed[:, :p] + prefix) / 2, (mixed[:, p:].view(shortcut.shape) + shortcut) / 2
    return torch.cat((prefix, y.flatten(1, 2)), 1)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"use_cls_token": True}, None),
        ({"use_cls_token": True}, (1, 3)),
        ({"expand_attn": False}, None),
        ({"residual_pooling": False}, None),
    ],
)
def test_mvit_pools_shares_as_it_pools_values_queries_and_shortcut(options, layers):
    model = make_mvit(**options)
    images, mix = batch()
    everywhere = slow_mvit(model, images, mix, layers)
    plain = model(images)
    shares, logits = watched(model, images, mix, layers=layers, normalise=False)
    torch.testing.assert_close(logits, plain)
    tokens = tokens_of(shares)
    assert shares.grid.shape == (B, 8, 8)
    assert 0 <= tokens.min() <= tokens.max() <= 1
    assert (wide(tokens, mix, K) - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(shares.image, tokens[:, 0] if "use_cls_token" in options else tokens.mean(1))
    assert (shares.image - mix.ratio).abs().max() > 1e-4
    assert shares.total == 2 ** (len(layers or (1, 2, 3)) * (3 if options.get("residual_pooling", True) else 2))
    target = everywhere[:, 0] if "use_cls_token" in options else everywhere.mean(1)
    assert_gradients(model, images, logits, mix, shares.image, target, None)


@pytest.mark.parametrize(("build", "size"), [(lambda: resnet(BasicBlock), (47, 33)), (make_mvit, 64), (make_cvt, 64)])
def test_images_that_are_whole_stay_whole_whatever_the_padding(build, size):
    model = build()
    with Aligner(model).watch(unmixed(torch.ones(B))) as seen:
        model(batch(size)[0])
    torch.testing.assert_close(seen.shares.image, torch.ones(B))
    torch.testing.assert_close(seen.shares.grid, torch.ones_like(seen.shares.grid))


# XCiT


def test_xcit_mixes_tokens_by_its_convolutions_and_not_by_its_channel_attention():
    torch.manual_seed(0)
    small = {"img_size": 128, "depth": 2, "num_classes": 3, "cls_attn_layers": 1}
    model = timm.create_model("xcit_nano_12_p16_224", **small).train()
    images, mix = batch(128)
    with Aligner(model, Alignment(layers=(1, 2))).watch(mix) as shares, torch.no_grad():
        model(images)
    r = mix.mask[..., None]
    for layer in model.patch_embed.proj:
        r = convolved(r, layer[0]) if isinstance(layer, nn.Sequential) else r
    for block in model.blocks:
        r = (convolved(convolved(r, block.local_mp.conv1), block.local_mp.conv2) + r) / 2
    torch.testing.assert_close(shares.shares.grid, r[..., 0], atol=1e-5, rtol=1e-5)
    with et.aligned(model, mix) as every:
        model(images)
    assert (every.shares.image - mix.ratio).abs().max() > 1e-4
    tokens = et.Mix(mix.partner, (torch.rand(1, 8, 8) > 0.5).float(), mix.ratio, "tokens")
    assert et.TokenModel(model)(images, tokens).grid.shape == (2, 8, 8, 128)
