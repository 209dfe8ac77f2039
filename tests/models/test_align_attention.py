"""Alignment through attention and token MLPs against the paper's algorithm: K-wide labels and explicit matrices."""

from functools import partial

import pytest
import timm
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.mlp_mixer import Affine, MixerBlock, MlpMixer, ResBlock
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn
from torch.nn import functional as F

import everytoken as et
from everytoken.errors import EverytokenError
from everytoken.models.align import RULES, Aligner, Alignment
from everytoken.models.families import UnsupportedModelError
from tests.models.by_hand import assert_gradients, batch, explicit, patches, tokens_of, watched, wide

K, B = 6, 4
SMALL = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": K}
MODELS = {
    "deit": ("deit_tiny_patch16_224", {}),
    "deit, pooled": ("deit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
    "deit, all pooled": (
        "vit_tiny_patch16_224",
        {"global_pool": "avg", "class_token": True, "reg_tokens": 2, "pool_include_prefix": True, "fc_norm": False},
    ),
    "deit, explicit": ("deit_tiny_patch16_224", {"explicit": True}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "registers, oblong": ("vit_small_patch14_reg4_dinov2", {"img_size": (56, 84), "patch_size": 14}),
    "query norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "lv-vit": ("lvvit_t", {}),
    "beit": ("beit_base_patch16_224", {}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 56}),
    "cait": ("cait_xxs24_224", {}),
    "t2t-vit": ("t2t_vit_7", {"token_drop": 0.0}),
}


def make(name, **more):
    entry, options = MODELS[name]
    options = {**SMALL, **options, **more}
    plain = options.pop("explicit", False)
    torch.manual_seed(0)
    model = timm.create_model(entry, **options).train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            # strong attention, so that shares move; biases and layer scale that are not their initial constants
            if key.endswith(("qkv.weight", ".q.weight", ".k.weight", "q_proj.weight", "k_proj.weight")):
                value.normal_(std=0.3)
            elif "relative_position_bias_table" in key or "proj_l" in key or "proj_w" in key or key.endswith("_bias"):
                value.normal_(std=0.5)
            elif "gamma" in key or "ls1" in key or "ls2" in key:
                value.fill_(0.5)
    return explicit(model) if plain else model


def batch_for(model):
    """Of tokens, not pixels: shares start behind the patch embedding, also where that mixes pixels by itself."""
    return batch(getattr(getattr(model, "patch_embed", None), "img_size", 64), B, "tokens")


def softmax_matrix(attn, args, kwargs):
    """The attention matrix [B, heads, M, N] of a timm layer, from its weights."""
    x = args[0]
    b = x.shape[0]
    heads = attn.num_heads
    if hasattr(attn, "q"):  # class attention
        q, k = attn.q(x[:, :1]), attn.k(x)
    elif getattr(attn, "qkv", None) is not None:
        qkv = F.linear(x, attn.qkv.weight, attn.qkv.bias)
        if getattr(attn, "q_bias", None) is not None:
            qkv = qkv + torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        q, k = qkv.chunk(3, -1)[:2]
    else:
        q, k = attn.q_proj(x), attn.k_proj(x)
    q, k = (t.reshape(b, -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k))
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    rope = kwargs.get("rope")
    if rope is not None:
        p = attn.num_prefix_tokens
        half = attn.rotate_half
        q, k = (torch.cat((t[:, :, :p], apply_rot_embed_cat(t[:, :, p:], rope, half=half)), 2) for t in (q, k))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if getattr(attn, "relative_position_bias_table", None) is not None:
        scores = scores + attn._get_rel_pos_bias()
    if kwargs.get("shared_rel_pos_bias") is not None:
        scores = scores + kwargs["shared_rel_pos_bias"]
    if hasattr(attn, "proj_l"):
        scores = torch.einsum("gh,bhij->bgij", attn.proj_l.weight, scores) + attn.proj_l.bias[:, None, None]
        mixed = torch.einsum("gh,bhij->bgij", attn.proj_w.weight, scores.softmax(-1)) + attn.proj_w.bias[:, None, None]
        return mixed.abs() / mixed.abs().sum(-1, keepdim=True)
    return scores.softmax(-1)


def slow(model, images, mix, layers=None, residual=True):
    """The paper's algorithm: K-wide labels, explicit matrices. Gives (target [B, K], labels [B, N, K], matrices)."""
    matrices = []
    kinds = [m for m in model.modules() if hasattr(m, "attn_drop") and hasattr(m, "num_heads")]
    hooks = [
        m.register_forward_pre_hook(lambda m, a, k: matrices.append(softmax_matrix(m, a, k).detach()), with_kwargs=True)
        for m in kinds
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    inside = patches(mix, model.patch_embed.patch_size[0]).flatten(1)
    y, free = wide(inside, mix, K), wide(mix.ratio, mix, K)[:, None]
    for number, matrix in enumerate(matrices, start=1):
        y = torch.cat((free.expand(-1, matrix.shape[-1] - y.shape[1], -1), y), 1)
        if layers is not None and number not in layers:
            continue
        mixed = matrix.mean(1) @ y
        m = mixed.shape[1]
        y = torch.cat(((mixed + y[:, :m]) / 2 if residual else mixed, y[:, m:]), 1)
    if model.global_pool == "avg":
        target = y[:, 0 if getattr(model, "pool_include_prefix", False) else -inside.shape[1] :].mean(1)
    elif hasattr(model, "head_dist") and not model.distilled_training:
        target = (y[:, 0] + y[:, 1]) / 2
    else:
        target = y[:, 0]
    return target, y, matrices


@pytest.mark.parametrize("name", MODELS)
def test_targets_and_gradients_equal_the_k_wide_algorithm(name):
    model = make(name)
    images, mix = batch_for(model)
    target, everywhere, _ = slow(model, images, mix)
    shares, logits = watched(model, images, mix)
    assert (wide(shares.image, mix, K) - target).abs().max() < 1e-6
    assert (wide(tokens_of(shares), mix, K) - everywhere).abs().max() < 1e-6
    assert (shares.image - mix.ratio).abs().max() > 1e-3, "nothing has moved, so nothing was tested"
    if name == "deit, all pooled":
        assert shares.prefix.shape == (B, 3)
        assert (shares.image - shares.grid.mean((1, 2))).abs().max() > 1e-4
    assert_gradients(model, images, logits, mix, shares.image, target)


@pytest.mark.parametrize("layers", [(1, 3), (-1,), (2,)])
def test_a_subset_of_layers_counts_as_in_table_8(layers):
    model = make("deit")
    images, mix = batch_for(model)
    target, *_ = slow(model, images, mix, [number % 4 for number in layers])
    shares, _ = watched(model, images, mix, layers=layers)
    assert (wide(shares.image, mix, K) - target).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["deit", "deit, explicit", "distilled", "registers, oblong", "cait"])
def test_the_last_layer_over_patches_is_the_attention_ratio_of_transmix(name):
    model = make(name)
    images, mix = batch_for(model)
    last = slow(model, images, mix)[2][-1].mean(1)  # [B, 1 or P + N, P + N]
    own = patches(mix, model.patch_embed.patch_size[0]).flatten(1)
    rows = range(2) if name == "distilled" else range(1)  # the head reads the mean of two tokens, or the class token
    ratio = []
    for i in range(B):
        ratio.append(0.0)
        for row in rows:
            attention = last[i, row, -own.shape[1] :]
            ratio[i] += float((attention * own[i]).sum() / attention.sum()) / len(rows)
    ratio = torch.tensor(ratio)
    for residual, wanted in ((False, ratio), (True, (ratio + mix.ratio) / 2)):
        shares, _ = watched(model, images, mix, layers=(-1,), residual=residual, patches_only=True)
        torch.testing.assert_close(shares.image, wanted, atol=1e-6, rtol=0)
    assert (ratio - mix.ratio).abs().max() > 1e-3


def test_without_normalisation_the_target_adds_up_at_every_residual():
    model = make("deit")
    images, mix = batch_for(model)
    (added, _), (normal, _) = (watched(model, images, mix, normalise=n) for n in (False, True))
    assert (added.total, normal.total) == (2 ** (2 * 3), 1)
    torch.testing.assert_close(added.image, normal.image)


def test_the_distillation_token_has_its_own_share_while_it_is_trained():
    model = make("distilled")
    images, mix = batch_for(model)
    model.set_distilled_training()
    shares, _ = watched(model, images, mix)
    assert shares.prefix.shape == (B, 2)
    torch.testing.assert_close(shares.image, shares.prefix[:, 0])
    assert (wide(shares.image, mix, K) - slow(model, images, mix)[0]).abs().max() < 1e-6


def test_history_keeps_the_shares_of_every_layer():
    model = make("cait")
    images, mix = batch_for(model)
    shares, _ = watched(model, images, mix, history=True)
    assert [tuple(s.shape) for s in shares.history] == [(B, 16)] * 3 + [(B, 17)] * 2
    torch.testing.assert_close(shares.history[-1][:, 0], shares.image)


class Strange(nn.Module):
    def forward(self, x, attn_mask=None, is_causal=False):
        return x


def test_attention_that_is_unknown_or_cannot_be_seen_is_an_error_that_names_it(monkeypatch):
    model = make("deit")
    model.blocks[1].attn = Strange()
    with pytest.raises(UnsupportedModelError, match=r"Strange .*'blocks\.1\.attn'"):
        Aligner(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "a failed aligner left hooks"
    path = f"{Strange.__module__}.{Strange.__qualname__}"
    monkeypatch.setitem(RULES, path, RULES["timm.layers.attention.Attention"])
    images, mix = batch_for(model)
    aligner = Aligner(model)
    with pytest.raises(UnsupportedModelError, match=r"Strange .* its attention was not observed"), aligner.watch(mix):
        model(images)
    assert aligner.state.shares is None


@pytest.mark.parametrize(
    ("entry", "options", "what"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2, "global_pool": "prr"}, "global_pool='prr'"),
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2, "block_fn": ParallelThingsBlock}, "ParallelThingsBlock"),
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2, "patch_drop_rate": 0.5}, "PatchDropout"),
        ("twins_svt_small", {"depths": (1, 1, 1, 1)}, "alignment"),
        ("gmlp_ti16_224", {"img_size": 64}, "SpatialGatingBlock"),
    ],
)
def test_models_that_mix_tokens_in_unknown_ways_are_refused(entry, options, what):
    with pytest.raises(UnsupportedModelError, match=what):
        Aligner(timm.create_model(entry, **options))


def test_mistakes_of_the_caller_are_named():
    model = make("deit")
    images, mix = batch_for(model)
    with pytest.raises(EverytokenError, match=r"layers=\(4,\): this backbone has mixing layers 1 to 3"):
        Aligner(model, Alignment(layers=(4,)))
    aligner = Aligner(model)
    flat, few = batch_for(model)[1], batch(64, 2)[1]
    flat.mask = mix.mask[0]
    with pytest.raises(ValueError, match="mask"), aligner.watch(flat):
        model(images)
    with pytest.raises(EverytokenError, match=f"for 2 images.* {B}"):
        aligner.run(model, images, few)
    with pytest.raises(EverytokenError, match="has not run"), aligner.watch(mix):
        pass
    with aligner.watch(mix) as seen:
        with pytest.raises(EverytokenError, match="no shares yet"):
            _ = seen.shares
        model(images)


# Attention that is not softmax(QK) between all tokens

SHALLOW = {"img_size": 64, "depth": 2, "num_classes": 3}


def randomised(name, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SHALLOW, **options})
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1 and ("q" in key or "kv" in key or "pos_proj" in key or "latent" in key):
                value.normal_(std=0.3)
    return model.train()


@pytest.mark.parametrize("more", [{}, {"class_token": True, "reg_tokens": 2, "pool_include_prefix": True}])
def test_attention_pooling_reads_the_shares_that_its_weights_choose(more):
    model = randomised("vit_base_patch16_siglip_224", embed_dim=48, num_heads=3, **more)
    images, mix = batch()
    seen = []
    model.attn_pool.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with et.aligned(model, mix) as shares:
        logits = model(images)
    shares, pool = shares.shares, model.attn_pool
    heads = pool.num_heads
    k = pool.kv(seen[0]).unflatten(-1, (2, heads, -1))[:, :, 0].transpose(1, 2)
    q = pool.q(pool.latent).unflatten(-1, (heads, -1)).transpose(1, 2)
    matrix = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1).mean(1)[:, 0]
    tokens = tokens_of(shares) if more else shares.grid.flatten(1)
    torch.testing.assert_close(shares.image, (matrix * tokens).sum(-1), atol=1e-5, rtol=1e-5)
    assert (shares.image - shares.grid.mean((1, 2))).abs().max() > 1e-3
    view_model = et.TokenModel(model)
    view_model.align()
    view = view_model(images, et.Mix(mix.partner, mix.mask, mix.ratio, "pixels"))
    torch.testing.assert_close(view.shares.image, shares.image)
    torch.testing.assert_close(view.logits, logits)


def test_convit_mixes_by_its_gated_attention_and_then_by_plain_attention():
    model = randomised("convit_tiny", local_up_to_layer=1, embed_dim=16, num_heads=4)
    matrices = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda module, args: matrices.append(args[0].mean(1)))
    images, mix = batch()
    shares, _ = watched(model, images, mix)
    r = patches(mix, 16).flatten(1)
    r = ((matrices[0] @ r[..., None])[..., 0] + r) / 2
    r = torch.cat((mix.ratio[:, None], r), dim=1)
    r = ((matrices[1] @ r[..., None])[..., 0] + r) / 2
    torch.testing.assert_close(tokens_of(shares), r, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shares.image, r[:, 0], atol=1e-5, rtol=1e-5)
    assert (r[:, 0] - mix.ratio).abs().max() > 1e-3


# Learned token mixing


def mixer(block):
    torch.manual_seed(0)
    more = {"mlp_ratio": 2, "norm_layer": Affine, "block_layer": partial(ResBlock, init_values=0.5)}
    more = more if block is ResBlock else {}
    model = MlpMixer(num_classes=K, img_size=64, patch_size=16, num_blocks=3, embed_dim=32, **more)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "tokens" in name:
                value.normal_()
    return model.train()


def normal(weight):
    out = weight.detach().abs().clone()
    for i in range(out.shape[0]):
        out[i] /= out[i].sum()
    return out


@pytest.mark.parametrize("block", [MixerBlock, ResBlock])
def test_token_mlps_mix_by_the_size_of_their_weights(block):
    model = mixer(block)
    images, mix = batch(64, B)
    y = wide(patches(mix, 16).flatten(1), mix, K)
    for each in model.blocks:
        layers = [each.linear_tokens] if block is ResBlock else [each.mlp_tokens.fc1, each.mlp_tokens.fc2]
        mixed = y
        for layer in layers:
            mixed = normal(layer.weight) @ mixed
        y = (mixed + y) / 2
    shares, logits = watched(model, images, mix)
    assert (wide(shares.image, mix, K) - y.mean(1)).abs().max() < 1e-6
    assert (shares.image - mix.ratio).abs().max() > 1e-3
    assert_gradients(model, images, logits, mix, shares.image, y.mean(1))


def test_layers_of_token_mlps_can_be_left_out():
    model = mixer(ResBlock)
    images, mix = batch(64, B)
    shares, _ = watched(model, images, mix, layers=(2,), residual=False)
    wanted = patches(mix, 16).flatten(1) @ normal(model.blocks[1].linear_tokens.weight).t()
    torch.testing.assert_close(shares.grid.flatten(1), wanted, atol=1e-6, rtol=0)
