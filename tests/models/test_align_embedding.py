"""Alignment through patch embeddings that overlap or attend, against K-wide labels of pixels, place by place."""

import copy
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.nn import functional as F

import everytoken.models  # noqa: F401  registers T2T-ViT, LV-ViT and CvT
from everytoken.mixing.mix import Mix
from everytoken.models import TokenModel
from everytoken.models.align import Aligner, Alignment

B, K, SIZE = 2, 5, (32, 48)
LABELS = torch.tensor([3, 1])
T2T = {"img_size": SIZE, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": K, "token_dim": 8}


def t2t(tokens="performer", **more):
    torch.manual_seed(0)
    model = timm.create_model("t2t_vit_7", tokens=tokens, token_drop=0.0, **{**T2T, **more}).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("kqv.weight", "qkv.weight")):
                value.normal_(std=0.3)  # strong attention, so that shares move
    return model


def lvvit():
    torch.manual_seed(0)
    return timm.create_model("lvvit_t", img_size=SIZE, depth=1, embed_dim=24, num_heads=2, num_classes=K).train()


def batch(level="pixels"):
    images = torch.randn(B, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, *SIZE)
    mask[0, 7:29, 11:30] = 0
    mask[1, :, 25:] = 0
    return images, SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.tensor([1, 0]), level=level)


def labels_of_pixels(mix):
    own, partner = F.one_hot(LABELS, K).float(), F.one_hot(LABELS[mix.partner], K).float()
    r = mix.mask[..., None]
    return r * own[:, None, None] + (1 - r) * partner[:, None, None]


def windows(y, kernel, stride, padding):
    """Norm(T(kernel))·Y of labels [B, h, w, K]: the weighted mean of what is inside, one output place at a time."""
    _, h, w, _ = y.shape
    k = len(kernel)
    rows, columns = ((side + 2 * padding - k) // stride + 1 for side in (h, w))
    new = torch.zeros(B, rows, columns, K)
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            for a in range(k):
                for b in range(k):
                    u, v = i * stride + a - padding, j * stride + b - padding
                    if 0 <= u < h and 0 <= v < w:
                        new[:, i, j] += kernel[a][b] * y[:, u, v]
                        total += kernel[a][b]
            new[:, i, j] /= total
    return new


def matrix_of(layer, x):
    """The row-normalised weights [B, N, N] of a narrow attention layer."""
    if hasattr(layer, "w"):
        k, q, _ = layer.kqv(layer.norm1(x)).double().chunk(3, dim=-1)
        w = layer.w.double()
        k, q = (torch.exp(t @ w.T - t.square().sum(-1, keepdim=True) / 2) for t in (k, q))
        weights = q @ k.transpose(1, 2)
        return (weights / weights.sum(-1, keepdim=True)).float()
    q, k, _ = layer.attn.qkv(layer.norm1(x)).chunk(3, dim=-1)
    return (q @ k.transpose(1, 2) * x.shape[-1] ** -0.5).softmax(-1)


@torch.no_grad()
def slow_t2t(model, images, mix, attend=True, residual=True):
    inputs = []
    embedding = model.tokens_to_token
    layers = (embedding.attention1, embedding.attention2)
    hooks = [layer.register_forward_pre_hook(lambda m, a: inputs.append(a[0])) for layer in layers]
    model(images)
    for hook in hooks:
        hook.remove()
    y = labels_of_pixels(mix)
    for i, (k, s, p) in enumerate(embedding.splits):
        y = windows(y, torch.ones(k, k).tolist(), s, p)
        if i < 2 and attend:
            mixed = (matrix_of(layers[i], inputs[i]) @ y.flatten(1, 2)).view(y.shape)
            y = (mixed + y) / 2 if residual else mixed
    return y


def shares_after_the_embedding(model, images, mix, **options):
    """The shares [B, h, w] that the first block is given."""
    aligner = Aligner(model, Alignment(**options))
    found = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: found.append(aligner.state.shares))
    with aligner.watch(mix) as seen:
        model(images)
    hook.remove()
    aligner.remove()
    (shares,) = found
    return shares.view(seen.shares.grid.shape), seen.shares


def as_labels(shares, mix):
    own, partner = F.one_hot(LABELS, K).float(), F.one_hot(LABELS[mix.partner], K).float()
    return shares[..., None] * own[:, None, None] + (1 - shares[..., None]) * partner[:, None, None]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_tokens_to_token_equals_labels_of_pixels_carried_through_it(tokens, residual):
    model = t2t(tokens)
    images, mix = batch()
    shares, seen = shares_after_the_embedding(model, images, mix, residual=residual)
    wanted = slow_t2t(model, images, mix, residual=residual)
    assert seen.grid.shape == (B, 2, 3)
    assert (as_labels(shares, mix) - wanted).abs().max() < 1e-5
    patches = mix.mask.view(B, 2, 16, 3, 16).mean((2, 4))
    assert (shares - patches).abs().max() > 0.05, "the embedding moved nothing, so nothing was tested"


def test_chosen_layers_leave_the_attention_of_the_embedding_out_but_not_its_windows():
    images, mix = batch()
    for tokens in ("performer", "transformer"):
        model = t2t(tokens)
        shares, _ = shares_after_the_embedding(model, images, mix, layers=(-1,))
        assert (as_labels(shares, mix) - slow_t2t(model, images, mix, attend=False)).abs().max() < 1e-5
        _, seen = shares_after_the_embedding(model, images, mix, normalise=False)
        assert seen.total == 2 ** (2 * 4)  # two blocks and two narrow layers, two residual connections each
        _, seen = shares_after_the_embedding(model, images, mix, history=True)
        assert len(seen.history) == 2  # the blocks


@torch.no_grad()
def test_the_stem_of_lv_vit_is_followed_from_the_pixels():
    model = lvvit()
    images, mix = batch()
    shares, _ = shares_after_the_embedding(model, images, mix)
    y = labels_of_pixels(mix)
    for i in (1, 2, 3):
        conv = getattr(model.patch_embed, f"conv{i}")
        each = conv.weight.abs().sum(1)
        kernel = (each / each.sum((1, 2), keepdim=True)).mean(0)
        y = windows(y, kernel.tolist(), conv.stride[0], conv.padding[0])
    y = windows(y, torch.ones(8, 8).tolist(), 8, 0)
    assert (as_labels(shares, mix) - y).abs().max() < 1e-5
    assert (shares - mix.mask.view(B, 2, 16, 3, 16).mean((2, 4))).abs().max() > 1e-3


@pytest.mark.parametrize("build", [t2t, lvvit])
def test_tokens_that_are_mixed_behind_the_embedding_start_there(build):
    model = build()
    images, mix = batch("tokens")
    shares, _ = shares_after_the_embedding(model, images, mix)
    torch.testing.assert_close(shares, mix.mask.view(B, 2, 16, 3, 16).mean((2, 4)))


@pytest.mark.parametrize("build", [t2t, lambda: t2t("transformer"), lvvit])
def test_whole_images_stay_whole_and_mixup_moves_nothing(build):
    model = build()
    images, _ = batch()
    for ratio in (torch.ones(B), torch.tensor([0.25, 0.6])):
        _, seen = shares_after_the_embedding(model, images, SimpleNamespace(mask=ratio.view(B, 1, 1), ratio=ratio))
        torch.testing.assert_close(seen.grid, ratio.view(B, 1, 1).expand(B, 2, 3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_watching_the_embedding_leaves_logits_gradients_and_copies_alone(tokens):
    model = t2t(tokens)
    images, mix = batch()
    plain = model(images)
    wanted = torch.autograd.grad(plain.square().sum(), model.head.weight)[0]
    aligner = Aligner(model)
    with aligner.watch(mix):
        watched = model(images)
    torch.testing.assert_close(watched, plain)
    torch.testing.assert_close(torch.autograd.grad(watched.square().sum(), model.head.weight)[0], wanted)
    torch.testing.assert_close(copy.deepcopy(model)(images), plain)
    assert aligner.state.projected is None
    aligner.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hardly_moves_the_shares(dtype):
    model = t2t()
    images, mix = batch()
    _, exact = shares_after_the_embedding(model, images, mix)
    with torch.autocast("cpu", dtype):
        _, seen = shares_after_the_embedding(model, images, mix)
    torch.testing.assert_close(seen.grid, exact.grid, atol=1e-2, rtol=0)


def test_the_token_view_with_its_embedding_compiles_as_one_graph():
    torch._dynamo.reset()
    model = TokenModel(t2t(depth=1))
    model.align()
    images, given = batch()
    mix = Mix(given.partner, given.mask, given.ratio, "pixels")
    view = model(images, mix)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, mix).shares.image, view.shares.image)
