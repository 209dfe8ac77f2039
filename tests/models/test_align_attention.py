"""Alignment through attention against the paper's algorithm: K-wide labels and explicit attention matrices."""

from types import SimpleNamespace

import pytest
import timm
import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import nn
from torch.nn import functional as F

import everytoken.models  # noqa: F401  registers LV-ViT
from everytoken.errors import EverytokenError
from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import RULES, Aligner, Alignment
from everytoken.models.families import UnsupportedModelError

K, B = 6, 4
SMALL = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": K}
MODELS = {
    "deit": ("deit_tiny_patch16_224", {}),
    "deit, pooled": ("deit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}),
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
    explicit = options.pop("explicit", False)
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
    if explicit:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
    return model


def batch(model):
    size = getattr(getattr(model, "patch_embed", None), "img_size", (64, 64))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(B, 3, *size, generator=generator)
    mask = torch.ones(B, *size)
    for i in range(B):  # boxes that cut through patches
        mask[i, 5 + 3 * i : 40, 10 : 50 - 5 * i] = 0
    # tokens are mixed, not pixels: shares start behind the patch embedding, also where that mixes pixels by itself
    mix = SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=torch.arange(B - 1, -1, -1), level="tokens")
    return images, torch.tensor([0, 1, 2, 5]), mix


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


def slow(model, images, labels, mix, layers=None, residual=True):
    """The paper's algorithm: K-wide labels, explicit matrices. Gives (logits, target [B, K], labels [B, N, K])."""
    matrices = []
    kinds = [m for m in model.modules() if hasattr(m, "attn_drop") and hasattr(m, "num_heads")]
    hooks = [
        m.register_forward_pre_hook(lambda m, a, k: matrices.append(softmax_matrix(m, a, k).detach()), with_kwargs=True)
        for m in kinds
    ]
    logits = model(images)
    for hook in hooks:
        hook.remove()
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    p = model.patch_embed.patch_size if hasattr(model, "patch_embed") else (16, 16)
    h, w = images.shape[-2] // p[0], images.shape[-1] // p[1]
    inside = mix.mask.view(B, h, p[0], w, p[1]).mean((2, 4)).view(B, h * w, 1)
    y = inside * own[:, None] + (1 - inside) * partner[:, None]
    free = (mix.ratio[:, None] * own + (1 - mix.ratio[:, None]) * partner)[:, None]
    for number, matrix in enumerate(matrices, start=1):
        y = torch.cat((free.expand(-1, matrix.shape[-1] - y.shape[1], -1), y), 1)
        if layers is not None and number not in layers:
            continue
        mixed = matrix.mean(1) @ y
        m = mixed.shape[1]
        y = torch.cat(((mixed + y[:, :m]) / 2 if residual else mixed, y[:, m:]), 1)
    if model.global_pool == "avg":
        target = y[:, y.shape[1] - h * w :].mean(1)
    elif hasattr(model, "head_dist") and not model.distilled_training:
        target = (y[:, 0] + y[:, 1]) / 2
    else:
        target = y[:, 0]
    return logits, target, y, matrices


def gradients(loss, model):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


@pytest.mark.parametrize("name", MODELS)
def test_targets_and_gradients_equal_the_k_wide_algorithm(name):
    model = make(name)
    images, labels, mix = batch(model)
    _, target, everywhere, _ = slow(model, images, labels, mix)

    aligner = Aligner(model)
    with aligner.watch(mix) as seen:
        logits = model(images)
    shares = seen.shares
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    got = shares.image[:, None] * own + (1 - shares.image[:, None]) * partner
    assert (got - target).abs().max() < 1e-6
    tokens = shares.grid.flatten(1) if shares.prefix is None else torch.cat((shares.prefix, shares.grid.flatten(1)), 1)
    got = tokens[..., None] * own[:, None] + (1 - tokens[..., None]) * partner[:, None]
    assert (got - everywhere).abs().max() < 1e-6
    assert (shares.image - mix.ratio).abs().max() > 1e-3, "nothing has moved, so nothing was tested"

    fast = gradients(aligned_cross_entropy(logits, labels, labels[mix.partner], shares.image), model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    exact = gradients(F.cross_entropy(model(images), target), model)
    for a, b in zip(fast, exact, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-8


def test_watching_changes_neither_logits_nor_the_state_dict():
    model = make("deit")
    images, _, mix = batch(model)
    before, keys = model(images), list(model.state_dict())
    aligner = Aligner(model)
    with aligner.watch(mix):
        watched = model(images)
    assert torch.equal(before, watched)
    assert torch.equal(before, model(images))
    assert list(model.state_dict()) == keys
    aligner.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_under_mixup_nothing_moves():
    model = make("deit")
    images, _, _ = batch(model)
    ratio = torch.tensor([0.3, 0.5, 0.9, 1.0])
    mix = SimpleNamespace(mask=ratio.view(B, 1, 1), ratio=ratio)
    with Aligner(model).watch(mix) as seen:
        model(images)
    torch.testing.assert_close(seen.shares.image, ratio)
    torch.testing.assert_close(seen.shares.grid, ratio[:, None, None].expand(B, 4, 4))


def test_a_subset_of_layers_counts_as_in_table_8():
    model = make("deit")
    images, labels, mix = batch(model)
    for layers, numbers in [((1, 3), {1, 3}), ((-1,), {3}), ((2,), {2})]:
        _, target, _, _ = slow(model, images, labels, mix, numbers)
        aligner = Aligner(model, Alignment(layers=layers))
        with aligner.watch(mix) as seen:
            model(images)
        aligner.remove()
        r = seen.shares.image
        own, partner = F.one_hot(labels, K), F.one_hot(labels[mix.partner], K)
        assert (r[:, None] * own + (1 - r[:, None]) * partner - target).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["deit", "deit, explicit", "distilled", "registers, oblong", "cait"])
def test_the_last_layer_over_patches_is_the_attention_ratio_of_transmix(name):
    model = make(name)
    images, labels, mix = batch(model)
    last = slow(model, images, labels, mix)[3][-1].mean(1)  # [B, 1 or P + N, P + N]
    p = model.patch_embed.patch_size[0]
    patches = mix.mask.view(B, images.shape[2] // p, p, -1, p).mean((2, 4)).flatten(1)
    rows = range(2) if name == "distilled" else range(1)  # the head reads the mean of two tokens, or the class token
    ratio = []
    for i in range(B):
        ratio.append(0.0)
        for row in rows:
            attention = last[i, row, -patches.shape[1] :]
            ratio[i] += float((attention * patches[i]).sum() / attention.sum()) / len(rows)
    ratio = torch.tensor(ratio)
    attention_alone = Alignment(layers=(-1,), residual=False, patches_only=True)
    for options, wanted in (
        (attention_alone, ratio),
        (Alignment(layers=(-1,), patches_only=True), (ratio + mix.ratio) / 2),
    ):
        aligner = Aligner(model, options)
        with aligner.watch(mix) as seen:
            model(images)
        aligner.remove()
        torch.testing.assert_close(seen.shares.image, wanted, atol=1e-6, rtol=0)
    assert (ratio - mix.ratio).abs().max() > 1e-3


def test_a_head_that_averages_prefix_tokens_too_reads_their_shares_too():
    options = {
        "global_pool": "avg",
        "class_token": True,
        "reg_tokens": 2,
        "pool_include_prefix": True,
        "fc_norm": False,
    }
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, **options).train()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.3)
    images, labels, mix = batch(model)
    everywhere = slow(model, images, labels, mix)[2]
    with Aligner(model).watch(mix) as seen:
        model(images)
    own, partner = F.one_hot(labels, K).float(), F.one_hot(labels[mix.partner], K).float()
    r = seen.shares.image[:, None]
    assert everywhere.shape[1] == 3 + 16
    assert (r * own + (1 - r) * partner - everywhere.mean(1)).abs().max() < 1e-6
    assert (seen.shares.image - seen.shares.grid.mean((1, 2))).abs().max() > 1e-4


def test_without_normalisation_the_target_adds_up_at_every_residual():
    model = make("deit")
    images, _, mix = batch(model)
    with Aligner(model, Alignment(normalise=False)).watch(mix) as seen:
        model(images)
    with Aligner(model).watch(mix) as normal:
        model(images)
    assert seen.shares.total == 2 ** (2 * 3)
    assert normal.shares.total == 1
    torch.testing.assert_close(seen.shares.image, normal.shares.image)


def test_the_distillation_token_has_its_own_share_while_it_is_trained():
    model = make("distilled")
    images, labels, mix = batch(model)
    model.set_distilled_training()
    with Aligner(model).watch(mix) as seen:
        model(images)
    _, target, _, _ = slow(model, images, labels, mix)
    own = F.one_hot(labels, K)
    assert seen.shares.prefix.shape == (B, 2)
    torch.testing.assert_close(seen.shares.image, seen.shares.prefix[:, 0])
    r = seen.shares.image[0]
    assert (r * own[0] + (1 - r) * own[3] - target[0]).abs().max() < 1e-6


def test_history_keeps_the_shares_of_every_layer():
    model = make("cait")
    images, _, mix = batch(model)
    with Aligner(model, Alignment(history=True)).watch(mix) as seen:
        model(images)
    sizes = [tuple(s.shape) for s in seen.shares.history]
    assert sizes == [(B, 16)] * 3 + [(B, 17)] * 2
    torch.testing.assert_close(seen.shares.history[-1][:, 0], seen.shares.image)


def test_an_unknown_attention_class_is_an_error_that_names_it():
    class StrangeAttention(nn.Module):
        def forward(self, x, attn_mask=None, is_causal=False):
            return x

    model = make("deit")
    model.blocks[1].attn = StrangeAttention()
    with pytest.raises(UnsupportedModelError, match=r"StrangeAttention .*'blocks\.1\.attn'"):
        Aligner(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "a failed aligner left hooks"


def test_attention_that_cannot_be_seen_is_an_error(monkeypatch):
    class Hidden(nn.Module):
        def forward(self, x, attn_mask=None, is_causal=False):
            return x

    model = make("deit")
    model.blocks[1].attn = Hidden()
    path = f"{Hidden.__module__}.{Hidden.__qualname__}"
    monkeypatch.setitem(RULES, path, RULES["timm.layers.attention.Attention"])
    images, _, mix = batch(model)
    aligner = Aligner(model)
    with (
        pytest.raises(UnsupportedModelError, match=r"Hidden .* its attention was not observed"),
        aligner.watch(mix),
    ):
        model(images)
    assert aligner.state.shares is None


@pytest.mark.parametrize("entry", ["vit_tiny_patch16_224", "twins_svt_small", "gmlp_ti16_224"])
def test_models_that_mix_tokens_in_unknown_ways_are_refused(entry):
    if entry.startswith("vit"):
        options = {"img_size": 64, "depth": 2, "global_pool": "prr"}
        with pytest.raises(UnsupportedModelError, match="global_pool='prr'"):
            Aligner(timm.create_model(entry, **options))
        from timm.models.vision_transformer import ParallelThingsBlock

        with pytest.raises(UnsupportedModelError, match="ParallelThingsBlock"):
            Aligner(timm.create_model(entry, img_size=64, depth=2, block_fn=ParallelThingsBlock))
    else:
        with pytest.raises(UnsupportedModelError, match="alignment"):
            Aligner(timm.create_model(entry, img_size=64 if "gmlp" in entry else 224))


def test_mistakes_of_the_caller_are_named():
    model = make("deit")
    images, _, mix = batch(model)
    with pytest.raises(EverytokenError, match=r"layers=\(4,\): this backbone has mixing layers 1 to 3"):
        Aligner(model, Alignment(layers=(4,)))
    aligner = Aligner(model)
    with (
        pytest.raises(ValueError, match="mask"),
        aligner.watch(SimpleNamespace(mask=mix.mask[0], ratio=mix.ratio)),
    ):
        model(images)
    with pytest.raises(EverytokenError, match=f"for 2 images.* {B}"):
        aligner.run(model, images, SimpleNamespace(mask=mix.mask[:1], ratio=mix.ratio[:2]))
    with pytest.raises(EverytokenError, match="has not run"), aligner.watch(mix):
        pass
    with aligner.watch(mix) as seen:
        with pytest.raises(EverytokenError, match="no shares yet"):
            _ = seen.shares
        model(images)


def test_patch_dropping_is_refused():
    with pytest.raises(UnsupportedModelError, match="PatchDropout"):
        Aligner(make("deit", patch_drop_rate=0.5))
