"""Alignment through the convolutional attention of CvT and MViTv2, against K-wide labels and matrices built by hand."""

from types import SimpleNamespace

import pytest
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment
from everytoken.models.cvt import CvT

B, K = 2, 4


def make():
    torch.manual_seed(0)
    model = CvT(
        img_size=64, num_classes=K, embed_dims=(16, 24, 32), depths=(1, 1, 2), num_heads=(1, 2, 2), drop_path_rate=0.0
    ).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("proj_q.weight", "proj_k.weight")):
                value.normal_(std=1.0)
    return model


def batch():
    images = torch.randn(B, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, 64, 96)
    mask[0, 10:50, 20:61] = 0
    mask[1, :, 40:] = 0
    return images, SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]))


def conv_matrix(conv, h, w):
    """The row-normalised matrix [h'·w', h·w] of a convolution, and (h', w')."""
    each = conv.weight.detach().abs().sum(1)
    kernel = (each / each.sum((1, 2), keepdim=True)).mean(0)
    k, s, p = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    rows, columns = (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1
    matrix = torch.zeros(rows * columns, h * w)
    for i in range(rows):
        for j in range(columns):
            for a in range(k):
                for b in range(k):
                    u, v = i * s + a - p, j * s + b - p
                    if 0 <= u < h and 0 <= v < w:
                        matrix[i * columns + j, u * w + v] += kernel[a, b]
    return matrix / matrix.sum(1, keepdim=True), (rows, columns)


@torch.no_grad()
def slow(model, images, labels, mix, only=None):
    inputs = {}
    hooks = [
        block.attn.register_forward_pre_hook(lambda m, a: inputs.__setitem__(m, (a[0], a[1])))
        for stage in model.stages
        for block in stage.blocks
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    h, w = 64, 96  # the labels of pixels
    r = mix.mask.view(B, -1, 1)
    y = r * own[:, None] + (1 - r) * partner[:, None]
    number = 0
    for stage in model.stages:
        matrix, (h, w) = conv_matrix(stage.patch_embed.proj, h, w)
        y = matrix @ y
        if stage.cls_token is not None:
            y = torch.cat(((mix.ratio[:, None] * own + (1 - mix.ratio[:, None]) * partner)[:, None], y), 1)
        for block in stage.blocks:
            number += 1
            if only is not None and number not in only:
                continue
            attn = block.attn
            x, size = inputs[attn]
            assert size == (h, w)
            p = attn.prefix
            grid = x[:, p:].transpose(1, 2).reshape(B, -1, h, w)
            q, k = (
                linear(torch.cat((x[:, :p], conv(grid).flatten(2).transpose(1, 2)), 1))
                for linear, conv in ((attn.proj_q, attn.conv_proj_q), (attn.proj_k, attn.conv_proj_k))
            )
            q, k = (t.view(B, t.shape[1], attn.num_heads, -1).transpose(1, 2) for t in (q, k))
            matrix = (q @ k.transpose(2, 3) * x.shape[-1] ** -0.5).softmax(-1).mean(1)
            strided, _ = conv_matrix(attn.conv_proj_v.conv, h, w)
            y = (matrix @ torch.cat((y[:, :p], strided @ y[:, p:]), 1) + y) / 2
    return y


@pytest.mark.parametrize("layers", [None, (2, 4)])
def test_targets_and_gradients_equal_the_k_wide_version(layers):
    model = make()
    images, mix = batch()
    labels = torch.tensor([3, 1])
    for module in model.modules():  # batch norm in the slow version must see what it sees in the model
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
    everywhere = slow(model, images, labels, mix, layers)
    with Aligner(model, Alignment(layers=layers)).watch(mix) as seen:
        logits = model(images)
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = torch.cat((seen.shares.prefix, seen.shares.grid.flatten(1)), 1)[..., None]
    assert seen.shares.grid.shape == (B, 4, 6)
    assert (r * own[:, None] + (1 - r) * partner[:, None] - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(seen.shares.image, r[:, 0, 0])
    assert (seen.shares.image - mix.ratio).abs().max() > 1e-4

    parameters = list(model.parameters())
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
    exact = torch.autograd.grad(F.cross_entropy(model(images), everywhere[:, 0]), parameters)
    got = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    exact = torch.cat([g.flatten() for g in exact])
    assert (got - exact).norm() <= 1e-5 * exact.norm()


def make_mvit(**more):
    torch.manual_seed(0)
    config = {"depths": (1, 2), "embed_dim": (16, 32), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2)), **more}
    model = MultiScaleVit(MultiScaleVitCfg(**config), (64, 64), num_classes=K).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("qkv.weight", "attn.q.weight", "attn.k.weight", "rel_pos_h", "rel_pos_w")):
                value.normal_(std=0.5)
    return model


def pooled_tokens(layer, x, h, w):
    """Tokens [B, heads, p + h·w, D] after a pooling convolution, class token apart, and the norm behind it."""
    pool, norm = layer
    p = x.shape[2] - h * w
    grid = pool(x[:, :, p:].flatten(0, 1).transpose(1, 2).unflatten(2, (h, w)))
    return norm(torch.cat((x[:, :, :p], grid.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])), 2))


def mvit_matrix(attn, x, h, w):
    """The attention matrix [B, M, N] of a layer, the mean over its heads."""
    q, k, _ = attn.qkv(x).view(B, -1, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q = pooled_tokens((attn.pool_q, attn.norm_q), q, h, w)
    k = pooled_tokens((attn.pool_k, attn.norm_k), k, h, w)
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
def slow_mvit(model, images, labels, mix, only=None):
    inputs = {}
    blocks = [block for stage in model.stages for block in stage.blocks]
    hooks = [b.attn.register_forward_pre_hook(lambda m, a: inputs.__setitem__(m, a[0])) for b in blocks]
    model(images)
    for hook in hooks:
        hook.remove()
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = mix.mask.view(B, -1, 1)
    y = r * own[:, None] + (1 - r) * partner[:, None]
    matrix, (h, w) = conv_matrix(model.patch_embed.proj, 64, 64)
    y = matrix @ y
    if model.cls_token is not None:
        y = torch.cat(((mix.ratio[:, None] * own + (1 - mix.ratio[:, None]) * partner)[:, None], y), 1)
    for number, block in enumerate(blocks, start=1):
        attn, p = block.attn, int(block.has_cls_token)

        def convolved(y, conv, h=h, w=w, p=p):
            matrix, size = conv_matrix(conv, h, w)
            return torch.cat((y[:, :p], matrix @ y[:, p:]), 1), size

        shortcut, size = y, (h, w)
        if block.shortcut_pool_attn is not None:
            even = torch.nn.Conv2d(1, 1, 3, 2, 1)
            torch.nn.init.ones_(even.weight)
            shortcut, size = convolved(y, even)
        mixed = mvit_matrix(attn, inputs[attn], h, w) @ convolved(y, attn.pool_v)[0]
        if attn.residual_pooling:
            mixed = (mixed + convolved(y, attn.pool_q)[0]) / 2
        y = (mixed + shortcut) / 2 if only is None or number in only else shortcut
        h, w = size
    return y


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
    images, labels = torch.randn(B, 3, 64, 64), torch.tensor([3, 1])
    mask = torch.ones(B, 64, 64)
    mask[0, 10:50, 20:61] = 0
    mask[1, :, 40:] = 0
    mix = SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]))
    everywhere = slow_mvit(model, images, labels, mix, layers)
    plain = model(images)
    with Aligner(model, Alignment(layers=layers, normalise=False)).watch(mix) as seen:
        logits = model(images)
    torch.testing.assert_close(logits, plain)
    shares, tokens = seen.shares, seen.shares.grid.flatten(1)
    tokens = tokens if shares.prefix is None else torch.cat((shares.prefix, tokens), 1)
    assert shares.grid.shape == (B, 8, 8)
    assert 0 <= tokens.min() <= tokens.max() <= 1
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = tokens[..., None]
    assert (r * own[:, None] + (1 - r) * partner[:, None] - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(shares.image, tokens[:, 0] if "use_cls_token" in options else tokens.mean(1))
    assert (shares.image - mix.ratio).abs().max() > 1e-4
    assert shares.total == 2 ** (len(layers or (1, 2, 3)) * (3 if options.get("residual_pooling", True) else 2))
    parameters = list(model.parameters())
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], shares.image)
    target = everywhere[:, 0] if "use_cls_token" in options else everywhere.mean(1)
    exact = torch.autograd.grad(F.cross_entropy(model(images), target), parameters)
    got = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    exact = torch.cat([g.flatten() for g in exact])
    assert (got - exact).norm() <= 1e-5 * exact.norm()
    with Aligner(model).watch(SimpleNamespace(mask=torch.ones(B, 1, 1), ratio=torch.ones(B))) as whole:
        model(images)
    torch.testing.assert_close(whole.shares.grid, torch.ones(B, 8, 8))
