"""The equations against slow versions, every family, what a trained model finds; nothing of it stays in the model."""

import pytest
import timm
import torch
from torch import nn

import everytoken.models  # noqa: F401
from everytoken.models import TokenModel, UnsupportedModelError
from everytoken_lab.explanation.saliency import NoAttentionError, accumulate, choose_method, record_attention, relevance

from .conftest import planted, tiny_vit, train


def images(count=2, size=32, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def slow_attention_matrices(model, x):
    """A plain ViT written out, without fused attention: logits and each block's matrix, one by one."""
    x = model._pos_embed(model.patch_embed(x))
    matrices = []
    for block in model.blocks:
        attn, y = block.attn, block.norm1(x)
        b, n, d = y.shape
        q, k, v = attn.qkv(y).view(b, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        matrix = torch.softmax(torch.einsum("bhmd,bhnd->bhmn", q, k) / q.shape[-1] ** 0.5, dim=-1)
        matrices.append(matrix)
        x = x + attn.proj(torch.einsum("bhmn,bhnd->bhmd", matrix, v).transpose(1, 2).reshape(b, n, d))
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x)), matrices


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_relevance_is_the_paper_s_sum_written_out(pool):
    torch.manual_seed(0)
    model = tiny_vit(global_pool=pool).eval()
    x, classes = images(), torch.tensor([[0, 2], [3, 1]])
    found = relevance(model, x, classes, "attention")
    for i in range(2):
        for j in range(2):
            logits, matrices = slow_attention_matrices(model, x[i : i + 1])
            grads = torch.autograd.grad(logits[0, classes[i, j]], matrices)
            result = torch.eye(65)
            for a, g in zip(matrices, grads, strict=True):
                mean = sum(torch.relu(g[0, h] * a[0, h]) for h in range(3)) / 3
                result = result + mean @ result
            result = result - torch.eye(65)
            row = result[0, 1:] if pool == "token" else result[1:, 1:].mean(0)
            torch.testing.assert_close(found[i, j].flatten(), row.detach(), rtol=1e-4, atol=1e-8)


class LinearConv(nn.Module):
    """What Grad-CAM can be worked out for by hand; it passes for a timm ResNet by its module's name."""

    __module__ = "timm.models.resnet"
    num_classes = 2

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 4, 4)
        self.fc = nn.Linear(5, 2)
        self.places = torch.linspace(0, 2, 16).view(4, 4)  # how much each counts; 1 on average

    def forward_features(self, x):
        return self.conv(x)

    def forward_head(self, x):
        return self.fc((self.places * x).mean((2, 3)))


def test_grad_cam_of_a_linear_model_is_what_one_computes_by_hand():
    torch.manual_seed(0)
    model, x = LinearConv(), images(size=16)
    # the logit is the mean over 16 places of (how much it counts)·w·F, so the slopes are w / 16 on average
    by_hand = torch.stack(
        [torch.relu((model.fc.weight[c] / 16 * model.conv(x).movedim(1, -1)).sum(-1)) for c in (1, 0)]
    )
    torch.testing.assert_close(relevance(model, x, [1, 0], "cam"), by_hand.transpose(0, 1).detach())
    assert choose_method(model) == "cam"


SMALL = {"img_size": 64, "num_classes": 7}
ATTENTION = [
    ("vit_tiny_patch16_224", {**SMALL, "depth": 2}, 4),
    ("vit_small_patch14_reg4_dinov2", {**SMALL, "patch_size": 16, "depth": 2}, 4),
    ("eva02_tiny_patch14_224", {**SMALL, "patch_size": 16, "depth": 2, "global_pool": "token"}, 4),
    ("vit_relpos_small_patch16_224", {**SMALL, "depth": 2, "class_token": True, "global_pool": "token"}, 4),
    ("deit_tiny_patch16_224", {**SMALL, "depth": 2}, 4),
    ("deit_tiny_distilled_patch16_224", {**SMALL, "depth": 2}, 4),
    ("deit3_small_patch16_224", {**SMALL, "depth": 2}, 4),
    ("beit_base_patch16_224", {**SMALL, "depth": 2, "embed_dim": 96, "num_heads": 3, "global_pool": "token"}, 4),
    ("cait_xxs24_224", {**SMALL, "depth": 2}, 4),
    ("lvvit_t", {**SMALL, "depth": 2}, 4),
    ("t2t_vit_7", SMALL, 4),
    ("t2t_vit_t_14", {**SMALL, "depth": 2}, 4),
]
CAM = [
    ("swin_tiny_patch4_window7_224", {**SMALL, "depths": (1, 1, 1, 1)}, 2),
    ("convnext_atto", {"num_classes": 7}, 2),
    ("resnet18", {"num_classes": 7}, 2),
    ("cvt_13", SMALL, 4),
    ("mixer_s32_224", SMALL, 2),
    ("tf_efficientnet_lite0", {"num_classes": 7}, 2),
]
CASES = [(*case, "attention") for case in ATTENTION] + [(*case, "cam") for case in CAM]


@pytest.mark.parametrize(("name", "arguments", "side", "method"), CASES)
def test_every_family_has_its_method_and_is_the_same_afterwards(name, arguments, side, method):
    torch.manual_seed(0)
    model = TokenModel(timm.create_model(name, **arguments)).eval()
    for parameter in model.parameters():  # fresh models have zeros and tiny scales in places, which hide errors
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.train()
    x = images(2, 64)
    with torch.no_grad():
        before = model.eval()(x).logits
    model.train()
    assert choose_method(model) == method
    methods = ["attention", "cam"] if method == "attention" else ["cam"]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for way in methods:
        maps = relevance(model, x, torch.tensor([[0, 1], [2, 3]]), way)
        assert maps.shape == (2, 2, side, side)
        assert torch.isfinite(maps).all()
        assert (maps >= 0).all()
        assert (maps.flatten(2).amax(-1) > 0).any()
    assert all(m.training for m in model.modules())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model.eval()(x).logits, before)


def test_the_matrices_are_those_of_attention_written_out():
    torch.manual_seed(0)
    model = tiny_vit().eval()
    x = images(1)
    logits, expected = slow_attention_matrices(model, x)
    with record_attention(model) as matrices:
        torch.testing.assert_close(model(x), logits)
    torch.testing.assert_close(matrices, expected)
    assert all(block.attn.fused_attn for block in model.blocks)


def test_class_attention_changes_the_row_of_the_class_token_only():
    torch.manual_seed(0)
    patches, to_class = torch.rand(1, 4, 4), torch.rand(1, 1, 5)
    result = accumulate([patches, to_class])[0]
    expected = torch.eye(5)
    expected[1:, 1:] += patches[0]
    expected[0] += to_class[0, 0] @ expected
    torch.testing.assert_close(result, expected)


def test_a_distilled_model_answers_with_both_tokens():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    x = images(1)
    with record_attention(model) as matrices:
        logits = model(x)
    (grad,) = torch.autograd.grad(logits[0, 1], matrices)
    step = torch.relu(grad * matrices[0]).mean(1)[0]
    expected = (step[0, 2:] + step[1, 2:]) / 2
    torch.testing.assert_close(relevance(model, x, [1])[0, 0].flatten(), expected.detach())


def test_frozen_weights_and_inference_mode_change_nothing():
    torch.manual_seed(0)
    model = tiny_vit().eval()
    plain = relevance(model, images(), [1])
    model.requires_grad_(False)
    with torch.inference_mode():
        assert torch.equal(relevance(model, images(), [1]), plain)


def slow_lrp(model, x, number):
    """Relevance propagation of one image, every rule by autograd in double precision: the map [N] of the patches."""
    gradient = torch.autograd.grad

    def leaf(value):
        return value.detach().clone().requires_grad_()

    def safe(a, b):
        lower, upper = b.clamp(min=1e-9), b.clamp(max=1e-9)
        return a / (lower + upper + (lower + upper == 0) * 1e-9) * (b != 0)

    def linear(relevance, value, layer):
        plus, minus = leaf(value.clamp(min=0)), leaf(value.clamp(max=0))
        out = plus @ layer.weight.clamp(min=0).T + minus @ layer.weight.clamp(max=0).T
        slopes = gradient(out, (plus, minus), safe(relevance, out))
        return plus * slopes[0] + minus * slopes[1]

    def product(relevance, a, b):
        a, b = leaf(a), leaf(b)
        slopes = gradient(a @ b, (a, b), safe(relevance, a @ b))
        return a * slopes[0] / 2, b * slopes[1] / 2

    def total(relevance, a, b):
        parts = [value * safe(relevance, a + b) for value in (a, b)]
        size = sum(part.sum().abs() for part in parts)
        return [part * safe(safe(part.sum().abs(), size) * relevance.sum(), part.sum()) for part in parts]

    stages, matrices, divisor = [], [], getattr(model.blocks[0], "divisor", 1)
    tokens = model._pos_embed(model.patch_embed(x))
    for block in model.blocks:
        attn, normed = block.attn, block.norm1(tokens)
        q, k, v = attn.qkv(normed)[0].view(len(normed[0]), 3, attn.num_heads, -1).permute(1, 2, 0, 3)
        matrix = (q @ k.mT * attn.scale).softmax(-1)
        matrices.append(matrix)
        heads = (matrix @ v).transpose(0, 1).flatten(1)
        middle = tokens + attn.proj(heads) / divisor
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(middle)))
        after = middle + block.mlp.fc2(hidden) / divisor
        stages.append((tokens, normed, q, k, v, matrix, heads, middle, block.norm2(middle), hidden, after))
        tokens = after
    features = model.norm(tokens)[:, 0]
    logit = model.head(features)[0, number]
    slopes = gradient(logit, matrices, retain_graph=True)
    relevance = torch.zeros_like(tokens[0])
    start = torch.zeros(model.num_classes, dtype=x.dtype)
    start[number] = 1
    relevance[0] = linear(start, features[0], model.head)
    result = torch.eye(len(relevance), dtype=x.dtype)
    steps = []
    for block, stage, slope in zip(reversed(model.blocks), reversed(stages), reversed(slopes), strict=True):
        before, normed, q, k, v, matrix, heads, middle, normed2, hidden, after = (value.detach() for value in stage)
        skip, branch = total(relevance, middle[0], (after - middle)[0])
        relevance = skip + linear(linear(branch, hidden[0], block.mlp.fc2), normed2[0], block.mlp.fc1)
        skip, branch = total(relevance, before[0], (middle - before)[0])
        branch = linear(branch, heads, block.attn.proj).unflatten(1, (len(v), -1)).transpose(0, 1)
        of_matrix, of_values = product(branch, matrix, v)
        of_queries, of_keys = product(of_matrix, q, k.mT)
        packed = torch.stack((of_queries, of_keys.mT, of_values)).permute(2, 0, 1, 3).flatten(1)
        relevance = skip + linear(packed, normed[0], block.attn.qkv)
        steps.append((slope * of_matrix).clamp(min=0).mean(0).detach())
    for step in reversed(steps):
        result = result + step @ result
    return result[0, 1:]


@pytest.mark.parametrize("name", ["vit_nano_patch4_32", "lvvit_nano_patch4_32"])
def test_propagated_relevance_is_that_of_the_rules_one_by_one(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, depth=3).eval().double()
    x, classes = images(2).double(), torch.tensor([[0, 2], [3, 1]])
    heat = relevance(TokenModel(model), x, classes, "lrp").flatten(2)
    for i in range(2):
        for j in range(2):
            expected = slow_lrp(model, x[i : i + 1], int(classes[i, j]))
            torch.testing.assert_close(heat[i, j], expected, rtol=1e-5, atol=1e-12)
    assert not torch.allclose(heat, relevance(model, x, classes, "attention").flatten(2), rtol=0.1)


def test_models_that_a_method_does_not_know_are_refused_with_a_way_out():
    strange = tiny_vit()
    strange.blocks[1].attn = nn.LSTM(48, 48)  # nobody knows how it mixes tokens
    with pytest.raises(UnsupportedModelError, match=r"LSTM.*method='cam'"):
        relevance(strange, images(), [0])
    with pytest.raises(NoAttentionError, match=r"ResNet.*method='cam'"):
        choose_method(timm.create_model("resnet18"), "attention")
    for name, arguments in (
        ("swin_nano_patch2_window4_32", {}),
        ("lvvit_nano_patch4_32", {"norm_position": "post"}),
        ("vit_nano_patch4_32", {"global_pool": "avg"}),
    ):
        with pytest.raises(UnsupportedModelError, match="method='"):
            choose_method(timm.create_model(name, num_classes=4, **arguments), "lrp")


# -- a model that was trained to find something ------------------------------------------------------------------------


def mass_inside(maps, mask):
    return (maps * mask).sum((1, 2)) / maps.sum((1, 2))


def peak_inside(maps, mask):
    best = maps.flatten(1).argmax(1, keepdim=True)
    return mask.flatten(1).gather(1, best).mean()


def test_relevance_of_each_class_lies_on_its_own_square():
    torch.manual_seed(1)
    finder, (shown, labels, mask) = train(tiny_vit(), 120), planted(24, seed=1000)
    assert mask.mean() == 4 / 64
    maps = relevance(finder, shown, labels, "attention")
    for this, other in ((0, 1), (1, 0)):
        on_it = mass_inside(maps[:, this], mask[:, this]).mean()
        assert on_it > 0.4
        assert on_it > 4 * mass_inside(maps[:, this], mask[:, other]).mean()
        assert peak_inside(maps[:, this], mask[:, this]) > 0.7


def test_grad_cam_of_a_pooled_vit_lies_on_the_square_of_the_class():
    torch.manual_seed(0)
    pooled = train(tiny_vit(depth=2, global_pool="avg", class_token=False), 60)
    shown, labels, mask = planted(24, seed=1000)
    maps = relevance(pooled, shown, labels)  # what "auto" takes
    assert torch.equal(maps, relevance(pooled, shown, labels, "cam"))
    assert mass_inside(maps[:, 0], mask[:, 0]).mean() > 0.6
    assert mass_inside(maps[:, 0], mask[:, 1]).mean() < 0.06
    assert peak_inside(maps[:, 0], mask[:, 0]) > 0.9
