"""Alignment through shifted windows against a version that looks up every place of every window by itself."""

import math
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.nn import functional as F

from everytoken.models.align import Aligner
from tests.models.by_hand import assert_gradients, batch, explicit, inputs_of, patches, watched, wide

K, B = 5, 2
SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "num_classes": K}


def make(version, size, **more):
    torch.manual_seed(0)
    name = {1: "swin_tiny_patch4_window7_224", 2: "swinv2_tiny_window8_256"}[version]
    model = timm.create_model(name, img_size=size, drop_path_rate=0.0, **{**SWIN, **more}).train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("qkv.weight", "qkv.bias", "q_bias")) or "bias_table" in key:
                value.normal_(std=0.5)
    return model


def position_bias(attn, places, version):
    """[heads, n, n] for the places (row, column) of a window."""
    wh, ww = attn.window_size

    def coordinate(d, side):
        d = d / (side - 1) * 8
        return math.copysign(math.log2(abs(d) + 1) / 3, d)

    def bias(dy, dx):
        if version == 1:
            return attn.relative_position_bias_table[(dy + wh - 1) * (2 * ww - 1) + dx + ww - 1]
        return 16 * attn.cpb_mlp(torch.tensor([coordinate(dy, wh), coordinate(dx, ww)])).sigmoid()

    rows = [torch.stack([bias(yi - yj, xi - xj) for yj, xj in places]) for yi, xi in places]
    return torch.stack(rows).permute(2, 0, 1)


def window_matrix(attn, tokens, bias, regions, version):
    """[heads, n, n] for one window: tokens [n, D], regions [n] after the cyclic shift."""
    qkv = tokens @ attn.qkv.weight.t()
    if version == 1:
        qkv = qkv + attn.qkv.bias
    else:
        qkv = qkv + torch.cat((attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias))
    q, k, _ = (t.view(len(tokens), attn.num_heads, -1).transpose(0, 1) for t in qkv.chunk(3, -1))
    if version == 1:
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    else:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)
        scores = scores * attn.logit_scale.clamp(max=math.log(100)).exp()
    apart = torch.tensor([[100.0 * (a != b) for b in regions] for a in regions])
    return (scores + bias - apart).softmax(-1)


def region(y, x, height, width, window, shift):
    """Which piece of the cyclically shifted map a place belongs to."""

    def part(v, size, win, sh):
        return 0 if v < size - win else (1 if v < size - sh else 2)

    return part(y, height, window[0], shift[0]), part(x, width, window[1], shift[1])


@torch.no_grad()
def slow(model, images, mix, version, layers=None):
    """K-wide labels through the model, place by place. Returns target [B, K] and labels of the last map."""
    blocks = [block for stage in model.layers for block in stage.blocks]
    inputs = {block: args[0] for block, args in inputs_of(blocks, lambda: model(images)).items()}
    y, number = wide(patches(mix, 4), mix, K), 0
    for depth, stage in enumerate(model.layers):
        h, w = y.shape[1:3]
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
            places = [(a, c) for a in range(window[0]) for c in range(window[1])]
            bias, new = position_bias(block.attn, places, version), torch.zeros_like(y)
            zero, nobody = torch.zeros(x.shape[-1]), torch.zeros(K)
            for b in range(B):
                for top in range(0, H, window[0]):
                    for left in range(0, W, window[1]):
                        shifted = [(top + a, left + c) for a, c in places]
                        # where each place of the shifted, filled-up map comes from; None: it only fills up
                        source = [
                            ((u + shift[0]) % h, (v + shift[1]) % w) if u < h and v < w else None for u, v in shifted
                        ]
                        tokens = torch.stack([zero if s is None else x[b, s[0], s[1]] for s in source])
                        label = torch.stack([nobody if s is None else y[b, s[0], s[1]] for s in source])
                        parts = [region(u, v, H, W, window, shift) if any(shift) else 0 for u, v in shifted]
                        mixed = window_matrix(block.attn, tokens, bias, parts, version).mean(0) @ label
                        mixed = mixed / mixed.sum(-1, keepdim=True)
                        for s, m in zip(source, mixed, strict=True):
                            if s is not None:
                                new[b, s[0], s[1]] = m
            y = (new + y) / 2
    return y.mean((1, 2)), y


CASES = {
    "swin": (1, 64, None),
    "swin, oblong": (1, (32, 64), None),
    "swin, padded to whole windows, odd merging": (1, 60, None),
    "swin, layers left out, but not the merging": (1, 64, (2, -1)),
    "swin v2, oblong": (2, (32, 64), None),
}


@pytest.mark.parametrize("case", CASES)
def test_targets_and_gradients_equal_the_slow_version(case):
    version, size, layers = CASES[case]
    model = make(version, size)
    images, mix = batch(size)
    target, everywhere = slow(model, images, mix, version, layers and [number % 5 for number in layers])
    shares, logits = watched(model, images, mix, layers=layers)
    assert (wide(shares.image, mix, K) - target).abs().max() < 1e-6
    assert (wide(shares.grid, mix, K) - everywhere).abs().max() < 1e-6
    assert (shares.image - mix.ratio).abs().max() > 1e-4
    if version == 1:
        assert_gradients(model, images, logits, mix, shares.image, target)


def test_fused_window_attention_gives_the_same_shares():
    model = make(1, 60)
    images, mix = batch(60)
    plain, before = watched(model, images, mix)
    explicit(model, fused=True)
    fused, after = watched(model, images, mix)
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.grid, plain.grid, atol=1e-5, rtol=0)


def test_shares_follow_the_tokens_when_images_are_flipped():
    model = make(1, 64)
    images, mix = batch(64)
    for block in (block for stage in model.layers for block in stage.blocks):
        block.shift_size, block.attn_mask = (0, 0), None
    with torch.no_grad():  # nothing that cares for left and right
        for name, value in model.named_parameters():
            if "bias_table" in name:
                value.zero_()
            elif name == "patch_embed.proj.weight":
                value.copy_((value + value.flip(-1)) / 2)
            elif name.endswith("downsample.reduction.weight"):
                d = value.view(value.shape[0], 2, 2, -1)  # [out, column, row, channel]
                d.copy_((d + d.flip(1)) / 2)
            elif name.endswith(("downsample.norm.weight", "downsample.norm.bias")):
                value.fill_(0.5)
    shares, _ = watched(model, images, mix)
    with Aligner(model).watch(SimpleNamespace(mask=mix.mask.flip(-1), ratio=mix.ratio)) as flipped:
        model(images.flip(-1))
    torch.testing.assert_close(flipped.shares.grid, shares.grid.flip(-1), atol=1e-5, rtol=0)
