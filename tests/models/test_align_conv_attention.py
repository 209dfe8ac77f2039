"""Alignment through CvT's convolutional attention, against K-wide labels and matrices built by hand."""

from types import SimpleNamespace

import pytest
import torch
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
