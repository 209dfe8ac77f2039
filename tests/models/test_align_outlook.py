"""Alignment through VOLO, whose windows overlap, against K-wide labels that visit every place of every window."""

from types import SimpleNamespace

import pytest
import torch
from timm.models.volo import VOLO, OutlookAttention
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment, HookBuilder
from everytoken.models.align.state import ShareState

K, B, SIZE = 4, 2, (64, 96)


def make():
    torch.manual_seed(0)
    options = {
        "embed_dims": [8, 16, 16],
        "num_heads": [2, 2, 2],
        "stem_hidden_dim": 6,
        "mlp_ratio": 2,
        "qkv_bias": True,
    }
    model = VOLO([2, 1, 1], SIZE, num_classes=K, downsamples=(True, False, False), **options).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith((".qkv.weight", ".q.weight", ".kv.weight", ".attn.weight", ".attn.bias")):
                value.normal_(std=0.7)
    for module in model.modules():  # batch norm in the slow version must see what it sees in the model
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0
    return model


def batch(level="pixels"):
    images = torch.randn(B, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, *SIZE)
    mask[0, 10:50, 20:61] = 0
    mask[1, :, 40:] = 0
    mix = SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]), level=level)
    return images, torch.tensor([3, 1]), mix


def convolved(conv, y):
    """Labels [B, h, w, K] after a convolution: each place is a mean of the places under the kernel and in the image."""
    each = conv.weight.detach().abs().sum(1)
    kernel = (each / each.sum((1, 2), keepdim=True)).mean(0)
    (k, _), (s, _), (p, _) = conv.kernel_size, conv.stride, conv.padding
    if k == s:
        kernel = torch.ones(k, k)
    h, w = y.shape[1:3]
    out = torch.zeros(B, (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1, K)
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            for a in range(max(0, p - i * s), min(k, h + p - i * s)):
                for b in range(max(0, p - j * s), min(k, w + p - j * s)):
                    out[:, i, j] += kernel[a, b] * y[:, i * s + a - p, j * s + b - p]
    return out / out.sum(-1, keepdim=True)


def outlooked(layer, x, y):
    """Labels [B, h, w, K] after outlook attention of x [B, h, w, D]."""
    h, w, heads = *y.shape[1:3], layer.num_heads
    out = torch.zeros_like(y)
    centres = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, 2, ceil_mode=True).permute(0, 2, 3, 1)
    for b in range(B):
        for i in range(centres.shape[1]):
            for j in range(centres.shape[2]):
                scores = layer.attn(centres[b, i, j]).view(heads, 9, 9) * (x.shape[-1] // heads) ** -0.5
                matrix = scores.softmax(-1).mean(0)
                places = [(2 * i + u - 1, 2 * j + v - 1) for u in range(3) for v in range(3)]
                inside = [n for n, (u, v) in enumerate(places) if 0 <= u < h and 0 <= v < w]
                for to in inside:
                    for of in inside:
                        out[b, places[to][0], places[to][1]] += matrix[to, of] * y[b, places[of][0], places[of][1]]
    return out / out.sum(-1, keepdim=True)


def attended(layer, x, y):
    """Labels [B, N, K] after attention between all tokens x [B, N, D], or of the class token to all."""
    of_class = hasattr(layer, "q")
    q, k = (layer.q(x[:, :1]), layer.kv(x).chunk(2, -1)[0]) if of_class else layer.qkv(x).chunk(3, -1)[:2]
    q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k))
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1).mean(1) @ y


@torch.no_grad()
def slow(model, images, labels, mix):
    """Labels of the class token and of the tokens, [B, 1 + N, K]."""
    inputs = {}
    blocks = [b for i in (0, 2, 3) for b in model.network[i]] + list(model.post_network)
    hooks = [b.attn.register_forward_pre_hook(lambda m, a: inputs.__setitem__(m, a[0])) for b in blocks]
    model(images)
    for hook in hooks:
        hook.remove()
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = mix.mask[..., None]
    if mix.level == "pixels":
        y = r * own[:, None, None] + (1 - r) * partner[:, None, None]
        for i in (0, 3, 6):
            y = convolved(model.patch_embed.conv[i], y)
        y = convolved(model.patch_embed.proj, y)
    else:
        r = r.view(B, 8, 8, 12, 8, 1).mean((2, 4))
        y = r * own[:, None, None] + (1 - r) * partner[:, None, None]
    for block in model.network[0]:
        y = (outlooked(block.attn, inputs[block.attn], y) + y) / 2
    y = y.view(B, 4, 2, 6, 2, K).mean((2, 4)).flatten(1, 2)
    for block in (*model.network[2], *model.network[3]):
        y = (attended(block.attn, inputs[block.attn].flatten(1, 2), y) + y) / 2
    y = torch.cat(((mix.ratio[:, None] * own + (1 - mix.ratio[:, None]) * partner)[:, None], y), 1)
    for block in model.post_network:
        y = torch.cat(((attended(block.attn, inputs[block.attn], y) + y[:, :1]) / 2, y[:, 1:]), 1)
    return y


@pytest.mark.parametrize("level", ["pixels", "tokens"])
def test_targets_and_gradients_equal_the_slow_version(level):
    model = make()
    images, labels, mix = batch(level)
    everywhere = slow(model, images, labels, mix)
    plain = model(images)
    with Aligner(model).watch(mix) as seen:
        logits = model(images)
    torch.testing.assert_close(logits, plain)
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = torch.cat((seen.shares.prefix, seen.shares.grid.flatten(1)), 1)[..., None]
    assert seen.shares.grid.shape == (B, 4, 6)
    assert float(r.min()) >= 0
    assert float(r.max()) <= 1
    assert (r * own[:, None] + (1 - r) * partner[:, None] - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(seen.shares.image, r[:, 0, 0])
    assert (seen.shares.image - mix.ratio).abs().max() > 1e-3

    parameters = list(model.parameters())
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
    exact = torch.autograd.grad(F.cross_entropy(model(images), everywhere[:, 0]), parameters)
    got = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    exact = torch.cat([g.flatten() for g in exact])
    assert (got - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_shares_are_what_the_layer_makes_of_values_that_are_shares(size):
    torch.manual_seed(0)
    layer = OutlookAttention(4, 1, stride=2)
    shares = torch.rand(B, *size)
    tokens = torch.stack((shares, torch.ones_like(shares), *torch.randn(2, B, *size)), -1)
    with torch.no_grad():
        layer.v.weight.copy_(torch.eye(4))
        layer.proj.weight.copy_(torch.eye(4))
        layer.proj.bias.zero_()
        mixed, state = layer(tokens), ShareState()
        HookBuilder(state).attach(layer, "layer")
        state.mask, state.ratio = torch.ones(B, 1, 1), torch.ones(B)
        state.shares, state.grid = shares.flatten(1), size
        layer(tokens)
    expected = (mixed[..., 0] / mixed[..., 1] + shares) / 2
    torch.testing.assert_close(state.shares.unflatten(1, size), expected, atol=1e-5, rtol=1e-5)
    assert (expected - shares).abs().max() > 0.01


def test_layers_can_be_left_out_and_unmixed_images_keep_shares_of_one():
    model = make()
    images, _, mix = batch("tokens")
    with Aligner(model, Alignment(layers=(6,), residual=False)).watch(mix) as seen:
        model(images)
    torch.testing.assert_close(seen.shares.grid, mix.mask.view(B, 4, 16, 6, 16).mean((2, 4)))
    whole = SimpleNamespace(mask=torch.ones(B, *SIZE), ratio=torch.ones(B))
    with Aligner(model).watch(whole) as seen:
        model(images)
    torch.testing.assert_close(seen.shares.grid, torch.ones(B, 4, 6))
    torch.testing.assert_close(seen.shares.image, torch.ones(B))


def test_a_head_that_averages_reads_the_class_token_too():
    model = make()
    model.global_pool = "avg"
    images, _, mix = batch()
    with Aligner(model).watch(mix) as seen:
        model(images)
    tokens = torch.cat((seen.shares.prefix, seen.shares.grid.flatten(1)), 1)
    torch.testing.assert_close(seen.shares.image, tokens.mean(1))
