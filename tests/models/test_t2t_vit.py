"""T2T-ViT: the released state dict, its layers by hand, a performer that survives half precision, its arguments."""

import math

import pytest
import timm
import torch

import everytoken  # noqa: F401  (registers the models)
from everytoken.models.common import sinusoid_positions
from everytoken.models.t2t_vit import T2TViT, TokenPerformer, TokensToToken, TokenTransformer, performer

TINY = {"img_size": 64, "num_classes": 5, "embed_dim": 48, "depth": 2, "num_heads": 3, "token_dim": 16}


def tiny(name: str = "t2t_vit_7", **kwargs) -> T2TViT:
    torch.manual_seed(0)
    return timm.create_model(name, **{**TINY, **kwargs})


def test_the_keys_are_those_of_the_released_weights():
    layer = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "proj.weight", "proj.bias"]
    of_performer = [*layer, "w", "kqv.weight", "kqv.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    of_transformer = [
        *[k if k.startswith("norm") else f"attn.{k}" for k in layer],
        *["attn.qkv.weight", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"],
    ]
    outer = ["cls_token", "pos_embed", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    outer += ["tokens_to_token.project.weight", "tokens_to_token.project.bias"]
    for name, token_layer in (("t2t_vit_7", of_performer), ("t2t_vit_t_14", of_transformer)):
        wanted = outer + [f"tokens_to_token.attention{i}.{k}" for i in (1, 2) for k in token_layer]
        wanted += [f"blocks.{i}.{k}" for i in range(2) for k in of_transformer]
        assert sorted(tiny(name).state_dict()) == sorted(wanted)


def slow_performer(q, k, v, w, eps):
    """The definition, pair by pair, in double precision."""
    q, k, v, w = (t.double() for t in (q, k, v, w))
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            top, bottom = torch.zeros(v.shape[2], dtype=torch.float64), 0.0
            for j in range(k.shape[1]):
                weight = 0.0
                for row in w:
                    of_query = torch.exp(row @ q[b, i] - q[b, i] @ q[b, i] / 2) / math.sqrt(len(w))
                    weight += of_query * torch.exp(row @ k[b, j] - k[b, j] @ k[b, j] / 2) / math.sqrt(len(w))
                top += weight * v[b, j]
                bottom += weight
            out[b, i] = top / (bottom + eps)
    return out.float()


@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_the_performer_is_its_definition(eps, scale):
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 5, 6).unbind(0)
    w = torch.randn(4, 6)
    wanted = slow_performer(q * scale, k * scale, v, w, eps)
    assert torch.allclose(performer(q * scale, k * scale, v, w, eps), wanted, atol=1e-5)
    if scale == 4.0:  # here the released constant matters, so the two must differ
        assert not torch.allclose(wanted, slow_performer(q * scale, k * scale, v, w, 1e-8 - eps), atol=1e-3)


def test_the_performer_survives_large_inputs_and_half_precision():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 50, 16) * 3).unbind(0)
    w = torch.linalg.qr(torch.randn(16, 8))[0].T * math.sqrt(8)
    half = [t.half() for t in (q, k, v, w)]

    def unsafe(t):  # exponents in half precision, as the released code has them under mixed precision
        return torch.exp(t @ half[3].T - (t * t).sum(-1, keepdim=True) / 2)

    naive = unsafe(half[0]) @ unsafe(half[1]).sum(1).unsqueeze(-1) + torch.tensor(1e-8).half()
    assert bool((naive == 0).any())  # the denominator underflows, and the quotient is NaN
    out = performer(*half, eps=0.0)
    assert out.dtype == torch.float32
    assert torch.allclose(out, performer(*(t.float() for t in half), eps=0.0))
    for eps in (0.0, 1e-8):
        big = [(t * 30).requires_grad_() for t in (q, k, v)]
        out = performer(*big, w, eps)
        out.sum().backward()
        assert bool(torch.isfinite(out).all())
        assert all(bool(torch.isfinite(t.grad).all()) for t in big)


def test_under_autocast_the_performer_stays_in_single_precision():
    layer = TokenPerformer(27, 16, drop=0.0)
    x = torch.randn(2, 40, 27)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k, q, v = layer.kqv(layer.norm1(x)).split(16, dim=-1)
        assert k.dtype == torch.bfloat16
        assert torch.equal(performer(q, k, v, layer.w), performer(q.float(), k.float(), v.float(), layer.w))
        assert torch.allclose(layer(x), layer.float()(x), atol=0.1)


@torch.no_grad()
def test_the_token_performer_keeps_the_released_order_key_query_value():
    layer = TokenPerformer(27, 16, drop=0.0)
    layer.kqv.weight.normal_(std=0.2)
    x = torch.randn(2, 9, 27)
    k, q, v = (
        layer.norm1(x) @ w.T + b for w, b in zip(layer.kqv.weight.split(16), layer.kqv.bias.split(16), strict=True)
    )
    attended = v + layer.proj(performer(q, k, v, layer.w))
    assert torch.allclose(layer(x), attended + layer.mlp(layer.norm2(attended)), atol=1e-5)
    swapped = v + layer.proj(performer(k, q, v, layer.w))
    assert not torch.allclose(attended, swapped, atol=1e-2)


def test_random_features_are_orthogonal_and_fixed():
    layer = TokenPerformer(27, 16)
    assert layer.w.shape == (8, 16)
    assert torch.allclose(layer.w @ layer.w.T, 8 * torch.eye(8), atol=1e-4)
    assert not layer.w.requires_grad


@torch.no_grad()
def test_the_token_transformer_attends_with_the_scale_of_its_input():
    layer = TokenTransformer(27, 8).eval()
    x = torch.randn(1, 6, 27)
    q, k, v = (layer.norm1(x) @ layer.attn.qkv.weight.T)[0].split(8, dim=-1)
    rows = []
    for i in range(6):
        weights = torch.tensor([math.exp(float(q[i] @ k[j]) / math.sqrt(27)) for j in range(6)])
        mixed = sum(float(weights[j] / weights.sum()) * v[j] for j in range(6))
        rows.append(v[i] + layer.attn.proj(mixed))
    attended = torch.stack(rows)
    assert torch.allclose(layer(x)[0], attended + layer.mlp(layer.norm2(attended)), atol=1e-5)


def test_windows_overlap_and_lie_as_the_image_does():
    module = TokensToToken((32, 48), embed_dim=8, token_dim=4, token_drop=0.0)
    image = torch.randn(1, 3, 32, 48)

    def windows(grid, kernel, stride, padding):
        """[C, H, W] -> [h, w, C * kernel * kernel], one window after the other."""
        padded = torch.nn.functional.pad(grid, (padding,) * 4)
        h, w = ((n + 2 * padding - kernel) // stride + 1 for n in grid.shape[1:])
        rows = [
            [padded[:, stride * i : stride * i + kernel, stride * j : stride * j + kernel].flatten() for j in range(w)]
            for i in range(h)
        ]
        return torch.stack([torch.stack(row) for row in rows])

    grid = image[0]
    for i, split in enumerate(module.splits, start=1):
        cut = windows(grid, *split)
        if i < 3:
            layer = getattr(module, f"attention{i}")
            grid = layer(cut.flatten(0, 1).unsqueeze(0))[0].reshape(*cut.shape[:2], -1).permute(2, 0, 1)
    wanted = module.project(cut)
    assert wanted.shape == (2, 3, 8)
    assert torch.allclose(module(image)[0], wanted.flatten(0, 1), atol=1e-5)


def test_positions_are_sinusoids_and_are_not_trained():
    table = sinusoid_positions(5, 6)
    for p in range(5):
        for c in range(6):
            angle = p / 10000 ** (2 * (c // 2) / 6)
            assert float(table[0, p, c]) == pytest.approx(math.sin(angle) if c % 2 == 0 else math.cos(angle), abs=1e-6)
    model = tiny()
    assert torch.equal(model.pos_embed, sinusoid_positions(17, 48))
    assert not model.pos_embed.requires_grad
    assert {"pos_embed", "cls_token"} <= model.no_weight_decay()


def test_ordinary_arguments_work():
    model = tiny(img_size=(64, 96), in_chans=1, global_pool="avg", drop_path_rate=0.2)
    assert model(torch.randn(2, 1, 64, 96)).shape == (2, 5)
    assert [getattr(b.drop_path1, "drop_prob", 0.0) for b in model.blocks] == pytest.approx([0.0, 0.2])
    assert [m.p for m in model.tokens_to_token.modules() if isinstance(m, torch.nn.Dropout)] == [0.1] * 4
    quiet = tiny(token_drop=0.0).train()
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(quiet(x), quiet(x))


def test_odd_sizes_have_the_grid_that_the_windows_make():
    model = tiny(img_size=(50, 70)).eval()
    h, w = model.patch_embed.grid_size
    assert (h, w) == (3, 5)
    assert model.forward_features(torch.randn(1, 3, 50, 70)).shape == (1, 1 + h * w, 48)
