"""Alignment through shifted windows against a version that looks up every place of every window by itself."""

import math
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment

K, B = 5, 2
SWIN = {
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "num_classes": K,
    "drop_path_rate": 0.0,
}


def make(version, size, **more):
    torch.manual_seed(0)
    name = {1: "swin_tiny_patch4_window7_224", 2: "swinv2_tiny_window8_256"}[version]
    model = timm.create_model(name, img_size=size, **{**SWIN, **more}).train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("qkv.weight", "qkv.bias", "q_bias")) or "bias_table" in key:
                value.normal_(std=0.5)
    return model


def batch(size):
    generator = torch.Generator().manual_seed(1)
    h, w = (size, size) if isinstance(size, int) else size
    images = torch.randn(B, 3, h, w, generator=generator)
    mask = torch.ones(B, h, w)
    mask[0, 6:31, 3:22] = 0
    mask[1, 18:, : w // 2] = 0
    mix = SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]))
    return images, torch.tensor([3, 1]), mix


def window_matrix(attn, tokens, places, regions, version):
    """[heads, n, n] for one window: tokens [n, D], places [n] = (row, column), regions [n] after the cyclic shift."""
    heads, n = attn.num_heads, len(places)
    qkv = tokens @ attn.qkv.weight.t()
    if version == 1:
        qkv = qkv + attn.qkv.bias
    else:
        qkv = qkv + torch.cat((attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias))
    q, k, _ = (t.view(n, heads, -1).transpose(0, 1) for t in qkv.chunk(3, -1))
    wh, ww = attn.window_size
    if version == 1:
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        for i, (yi, xi) in enumerate(places):
            for j, (yj, xj) in enumerate(places):
                scores[:, i, j] += attn.relative_position_bias_table[
                    (yi - yj + wh - 1) * (2 * ww - 1) + xi - xj + ww - 1
                ]
    else:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)
        scores = scores * attn.logit_scale.clamp(max=math.log(100)).exp()

        def coordinate(d, side):
            d = d / (side - 1) * 8
            return math.copysign(math.log2(abs(d) + 1) / 3, d)

        for i, (yi, xi) in enumerate(places):
            for j, (yj, xj) in enumerate(places):
                at = torch.tensor([coordinate(yi - yj, wh), coordinate(xi - xj, ww)])
                scores[:, i, j] += 16 * attn.cpb_mlp(at).sigmoid()
    for i in range(n):
        for j in range(n):
            if regions[i] != regions[j]:
                scores[:, i, j] -= 100
    return scores.softmax(-1)


def region(y, x, height, width, window, shift):
    """Which piece of the cyclically shifted map a place belongs to."""

    def part(v, size, win, sh):
        return 0 if v < size - win else (1 if v < size - sh else 2)

    return part(y, height, window[0], shift[0]), part(x, width, window[1], shift[1])


@torch.no_grad()
def slow(model, images, labels, mix, version, layers=None):
    """K-wide labels through the model, place by place. Returns target [B, K] and labels of the last map."""
    inputs = {}
    hooks = []
    for stage in model.layers:
        for block in stage.blocks:
            hooks.append(block.register_forward_pre_hook(lambda m, a: inputs.__setitem__(m, a[0])))
    model(images)
    for hook in hooks:
        hook.remove()
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    h, w = images.shape[-2] // 4, images.shape[-1] // 4
    r = mix.mask.view(B, h, 4, w, 4).mean((2, 4))[..., None]
    y = r * own[:, None, None] + (1 - r) * partner[:, None, None]
    number = 0
    for depth, stage in enumerate(model.layers):
        if depth:
            merged = torch.zeros(B, -(-h // 2), -(-w // 2), K)
            for i in range(h):
                for j in range(w):
                    merged[:, i // 2, j // 2] += y[:, i, j]
            y = merged / merged.sum(-1, keepdim=True)
            h, w = y.shape[1:3]
        for block in stage.blocks:
            number += 1
            if layers is not None and number not in layers:
                continue
            x = block.norm1(inputs[block]) if version == 1 else inputs[block]
            window, shift = block.window_size, block.shift_size
            H, W = -(-h // window[0]) * window[0], -(-w // window[1]) * window[1]
            new = torch.zeros_like(y)
            for b in range(B):
                for top in range(0, H, window[0]):
                    for left in range(0, W, window[1]):
                        places = [(a, c) for a in range(window[0]) for c in range(window[1])]
                        shifted = [(top + a, left + c) for a, c in places]
                        # where each place of the shifted, filled-up map comes from; None: it only fills up
                        source = [
                            ((u + shift[0]) % h, (v + shift[1]) % w) if u < h and v < w else None for u, v in shifted
                        ]
                        zero, nobody = torch.zeros(x.shape[-1]), torch.zeros(K)
                        tokens = torch.stack([zero if s is None else x[b, s[0], s[1]] for s in source])
                        label = torch.stack([nobody if s is None else y[b, s[0], s[1]] for s in source])
                        parts = [region(u, v, H, W, window, shift) if any(shift) else 0 for u, v in shifted]
                        matrix = window_matrix(block.attn, tokens, places, parts, version)
                        mixed = matrix.mean(0) @ label
                        mixed = mixed / mixed.sum(-1, keepdim=True)
                        for s, m in zip(source, mixed, strict=True):
                            if s is not None:
                                new[b, s[0], s[1]] = m
            y = (new + y) / 2
    return y.mean((1, 2)), y


CASES = {
    "swin, oblong": (1, (32, 64)),
    "swin, padded to whole windows, odd merging": (1, 60),
    "swin v2, oblong": (2, (32, 64)),
}


@pytest.mark.parametrize("case", CASES)
def test_targets_equal_the_slow_version(case):
    version, size = CASES[case]
    model = make(version, size)
    images, labels, mix = batch(size)
    target, everywhere = slow(model, images, labels, mix, version)
    with Aligner(model).watch(mix) as seen:
        model(images)
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = seen.shares.image[:, None]
    assert (r * own + (1 - r) * partner - target).abs().max() < 1e-6
    r = seen.shares.grid[..., None]
    assert (r * own[:, None, None] + (1 - r) * partner[:, None, None] - everywhere).abs().max() < 1e-6
    assert (seen.shares.image - mix.ratio).abs().max() > 1e-4


def test_gradients_are_those_of_the_plain_model_with_the_slow_target():
    model = make(1, 64)
    images, labels, mix = batch(64)
    target, _ = slow(model, images, labels, mix, 1)
    exact = torch.autograd.grad(F.cross_entropy(model(images), target), list(model.parameters()))
    with Aligner(model).watch(mix) as seen:
        logits = model(images)
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image)
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-8


def test_fused_window_attention_gives_the_same_shares():
    model = make(1, 60)
    images, _, mix = batch(60)
    with Aligner(model).watch(mix) as explicit:
        before = model(images)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    with Aligner(model).watch(mix) as fused:
        after = model(images)
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.shares.grid, explicit.shares.grid, atol=1e-5, rtol=0)


def test_layers_can_be_left_out_but_merging_stays():
    model = make(1, 64)
    images, labels, mix = batch(64)
    target, _ = slow(model, images, labels, mix, 1, layers={2, 4})
    with Aligner(model, Alignment(layers=(2, -1))).watch(mix) as seen:
        model(images)
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = seen.shares.image[:, None]
    assert (r * own + (1 - r) * partner - target).abs().max() < 1e-6


def test_shares_follow_the_tokens_when_images_are_flipped():
    model = make(1, 64)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "bias_table" in key:
                value.zero_()
    images, _, mix = batch(64)
    for stage in model.layers:
        for block in stage.blocks:
            block.shift_size = (0, 0)
            block.attn_mask = None
    with torch.no_grad():  # a patch embedding that does not care for left and right
        weight = model.patch_embed.proj.weight
        weight.copy_((weight + weight.flip(-1)) / 2)
        for name, value in model.named_parameters():
            if name.endswith("downsample.reduction.weight"):
                d = value.view(value.shape[0], 2, 2, -1)  # [out, column, row, channel]
                d.copy_((d + d.flip(1)) / 2)
            if name.endswith(("downsample.norm.weight", "downsample.norm.bias")):
                value.fill_(0.5)
    with Aligner(model).watch(mix) as seen:
        model(images)
    turned = SimpleNamespace(mask=mix.mask.flip(-1), ratio=mix.ratio)
    with Aligner(model).watch(turned) as flipped:
        model(images.flip(-1))
    torch.testing.assert_close(flipped.shares.grid, seen.shares.grid.flip(-1), atol=1e-5, rtol=0)
