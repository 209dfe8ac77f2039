"""Alignment through patch embeddings that overlap or attend, and through VOLO, against K-wide labels of pixels."""

import copy

import pytest
import timm
import torch
from timm.models.volo import VOLO, OutlookAttention
from torch.nn import functional as F

import everytoken.models  # noqa: F401  registers T2T-ViT, LV-ViT and CvT
from everytoken.mixing.mix import Mix
from everytoken.models import TokenModel
from everytoken.models.align import Aligner, Alignment, HookBuilder
from everytoken.models.align.state import ShareState
from tests.models.by_hand import (
    assert_gradients,
    batch,
    convolved,
    inputs_of,
    patches,
    tokens_of,
    under,
    unmixed,
    watched,
    wide,
)

B, K, SIZE = 2, 5, (32, 48)
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
    embedding = model.tokens_to_token
    layers = (embedding.attention1, embedding.attention2)
    inputs = inputs_of(layers, lambda: model(images))
    y = wide(mix.mask, mix, K)
    for i, (k, s, p) in enumerate(embedding.splits):
        y = under(y, torch.ones(k, k), s, p)
        if i < 2 and attend:
            mixed = (matrix_of(layers[i], inputs[layers[i]][0]) @ y.flatten(1, 2)).view(y.shape)
            y = (mixed + y) / 2 if residual else mixed
    return y


def shares_after_the_embedding(model, images, mix, **options):
    """The shares [B, h, w] that the first block is given, and those of the pass."""
    aligner = Aligner(model, Alignment(**options))
    found = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: found.append(aligner.state.shares))
    with aligner.watch(mix) as seen:
        model(images)
    hook.remove()
    aligner.remove()
    (shares,) = found
    return shares.view(seen.shares.grid.shape), seen.shares


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_tokens_to_token_equals_labels_of_pixels_carried_through_it(tokens, residual):
    model = t2t(tokens)
    images, mix = batch(SIZE)
    shares, seen = shares_after_the_embedding(model, images, mix, residual=residual)
    assert seen.grid.shape == (B, 2, 3)
    assert (wide(shares, mix, K) - slow_t2t(model, images, mix, residual=residual)).abs().max() < 1e-5
    assert (shares - patches(mix, 16)).abs().max() > 0.05, "the embedding moved nothing, so nothing was tested"


@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_chosen_layers_leave_the_attention_of_the_embedding_out_but_not_its_windows(tokens):
    model = t2t(tokens)
    images, mix = batch(SIZE)
    shares, _ = shares_after_the_embedding(model, images, mix, layers=(-1,))
    assert (wide(shares, mix, K) - slow_t2t(model, images, mix, attend=False)).abs().max() < 1e-5
    _, seen = shares_after_the_embedding(model, images, mix, normalise=False, history=True)
    assert seen.total == 2 ** (2 * 4)  # two blocks and two narrow layers, two residual connections each
    assert len(seen.history) == 2  # the blocks


@torch.no_grad()
def test_the_stem_of_lv_vit_is_followed_from_the_pixels():
    model = lvvit()
    images, mix = batch(SIZE)
    shares, _ = shares_after_the_embedding(model, images, mix)
    y, embed = wide(mix.mask, mix, K), model.patch_embed
    for conv in (embed.conv1, embed.conv2, embed.conv3, embed.proj):
        y = convolved(y, conv)
    assert (wide(shares, mix, K) - y).abs().max() < 1e-5
    assert (shares - patches(mix, 16)).abs().max() > 1e-3


@pytest.mark.parametrize("build", [t2t, lvvit])
def test_tokens_that_are_mixed_behind_the_embedding_start_there(build):
    images, mix = batch(SIZE, level="tokens")
    shares, _ = shares_after_the_embedding(build(), images, mix)
    torch.testing.assert_close(shares, patches(mix, 16))


@pytest.mark.parametrize("tokens", ["performer", "transformer"])
def test_watching_the_embedding_leaves_logits_gradients_and_copies_alone(tokens):
    model = t2t(tokens)
    images, mix = batch(SIZE)
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
    images, mix = batch(SIZE)
    _, exact = shares_after_the_embedding(model, images, mix)
    with torch.autocast("cpu", dtype):
        _, seen = shares_after_the_embedding(model, images, mix)
    torch.testing.assert_close(seen.grid, exact.grid, atol=1e-2, rtol=0)


def test_the_token_view_with_its_embedding_compiles_as_one_graph():
    torch._dynamo.reset()
    model = TokenModel(t2t(depth=1))
    model.align()
    images, given = batch(SIZE)
    mix = Mix(given.partner, given.mask, given.ratio, "pixels")
    view = model(images, mix)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, mix).shares.image, view.shares.image)


# VOLO: a stem, windows that overlap, and a class token that joins late

WIDE = (64, 96)


def volo():
    torch.manual_seed(0)
    widths = {"embed_dims": [8, 16, 16], "num_heads": [2, 2, 2], "stem_hidden_dim": 6, "mlp_ratio": 2}
    model = VOLO([2, 1, 1], WIDE, num_classes=K, downsamples=(True, False, False), qkv_bias=True, **widths).train()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith((".qkv.weight", ".q.weight", ".kv.weight", ".attn.weight", ".attn.bias")):
                value.normal_(std=0.7)
    return model


def outlooked(layer, x, y):
    """Labels [B, h, w, K] after outlook attention of x [B, h, w, D]."""
    h, w, heads = *y.shape[1:3], layer.num_heads
    out = torch.zeros_like(y)
    centres = F.avg_pool2d(x.permute(0, 3, 1, 2), 2, 2, ceil_mode=True).permute(0, 2, 3, 1)
    for i in range(centres.shape[1]):
        for j in range(centres.shape[2]):
            scores = layer.attn(centres[:, i, j]).view(B, heads, 9, 9) * (x.shape[-1] // heads) ** -0.5
            matrix = scores.softmax(-1).mean(1)
            places = [(2 * i + u - 1, 2 * j + v - 1) for u in range(3) for v in range(3)]
            inside = [(n, u, v) for n, (u, v) in enumerate(places) if 0 <= u < h and 0 <= v < w]
            for to, u, v in inside:
                for of, a, b in inside:
                    out[:, u, v] += matrix[:, to, of, None] * y[:, a, b]
    return out / out.sum(-1, keepdim=True)


def attended(layer, x, y):
    """Labels [B, N, K] after attention between all tokens x [B, N, D], or of the class token to all."""
    of_class = hasattr(layer, "q")
    q, k = (layer.q(x[:, :1]), layer.kv(x).chunk(2, -1)[0]) if of_class else layer.qkv(x).chunk(3, -1)[:2]
    q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k))
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1).mean(1) @ y


@torch.no_grad()
def slow_volo(model, images, mix):
    """Labels of the class token and of the tokens, [B, 1 + N, K]."""
    outlooks, blocks = list(model.network[0]), [*model.network[2], *model.network[3]]
    layers = [block.attn for block in (*outlooks, *blocks, *model.post_network)]
    inputs = {layer: args[0] for layer, args in inputs_of(layers, lambda: model(images)).items()}
    if mix.level == "pixels":
        y = wide(mix.mask, mix, K)
        for conv in (*(model.patch_embed.conv[i] for i in (0, 3, 6)), model.patch_embed.proj):
            y = convolved(y, conv)
    else:
        y = wide(patches(mix, 8), mix, K)
    for block in outlooks:
        y = (outlooked(block.attn, inputs[block.attn], y) + y) / 2
    y = y.view(B, 4, 2, 6, 2, K).mean((2, 4)).flatten(1, 2)
    for block in blocks:
        y = (attended(block.attn, inputs[block.attn].flatten(1, 2), y) + y) / 2
    y = torch.cat((wide(mix.ratio, mix, K)[:, None], y), 1)
    for block in model.post_network:
        y = torch.cat(((attended(block.attn, inputs[block.attn], y) + y[:, :1]) / 2, y[:, 1:]), 1)
    return y


@pytest.mark.parametrize("level", ["pixels", "tokens"])
def test_volo_equals_labels_that_visit_every_place_of_every_window(level):
    model = volo()
    images, mix = batch(WIDE, level=level)
    everywhere = slow_volo(model, images, mix)
    plain = model(images)
    shares, logits = watched(model, images, mix)
    torch.testing.assert_close(logits, plain)
    tokens = tokens_of(shares)
    assert shares.grid.shape == (B, 4, 6)
    assert 0 <= tokens.min() <= tokens.max() <= 1
    assert (wide(tokens, mix, K) - everywhere).abs().max() < 1e-6
    torch.testing.assert_close(shares.image, tokens[:, 0])
    assert (shares.image - mix.ratio).abs().max() > 1e-3
    assert_gradients(model, images, logits, mix, shares.image, everywhere[:, 0], None)


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_shares_are_what_outlook_attention_makes_of_values_that_are_shares(size):
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


def test_in_volo_layers_can_be_left_out_and_a_head_that_averages_reads_the_class_token_too():
    model = volo()
    images, mix = batch(WIDE, level="tokens")
    shares, _ = watched(model, images, mix, layers=(6,), residual=False)
    torch.testing.assert_close(shares.grid, patches(mix, 16))
    model.global_pool = "avg"
    shares, _ = watched(model, images, mix)
    torch.testing.assert_close(shares.image, tokens_of(shares).mean(1))


@pytest.mark.parametrize("build", [t2t, lambda: t2t("transformer"), lvvit, volo])
def test_whole_images_stay_whole_and_mixup_moves_nothing(build):
    model = build()
    images, _ = batch(WIDE if build is volo else SIZE)
    for ratio in (torch.ones(B), torch.tensor([0.25, 0.6])):
        with Aligner(model).watch(unmixed(ratio)) as seen:
            model(images)
        wanted = ratio.view(B, 1, 1).expand(seen.shares.grid.shape)
        torch.testing.assert_close(seen.shares.grid, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.shares.image, ratio, atol=1e-5, rtol=0)
