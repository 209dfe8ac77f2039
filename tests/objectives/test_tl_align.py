"""The alignment objective, on a real token view and on real mixes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import compact_cross_entropy, from_labels, from_scores, sample_maps
from everytoken.mixing.methods import CutMix, MixToken, MixUp
from everytoken.mixing.mix import Mix, apply_to_pixels, apply_to_tokens
from everytoken.models import TokenModel
from everytoken.models.align import Shares
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.tl_align import TLAlign, TransMix, aligned
from everytoken.objectives.token_labeling import TokenLabeling
from tests.objectives.builders import a_mix, score_maps

B, K, GRID = 4, 7, (4, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    backbone = timm.create_model(
        "deit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3, num_classes=K
    )
    with torch.no_grad():
        for block in backbone.blocks:
            block.attn.qkv.weight.normal_(std=0.3)
    model = TokenModel(backbone, token_classes=K)
    torch.nn.init.normal_(model.token_head.weight)
    return model.train()


def draw(mixer):
    return a_mix(mixer, B, (64, 64), GRID, least=0.1)


def a_batch(mix=None):
    images = torch.randn(B, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    if mix is not None and mix.level == "pixels":
        images = apply_to_pixels(images, mix)
    placement = torch.tensor([[[0.6, 0, 0.1], [0, 0.5, 0.3]]] * B)
    return Batch(images, torch.tensor([0, 3, 6, 1]), placement, score_maps(B, 6, 6, K), mix=mix)


@pytest.mark.parametrize("mixer", [CutMix(), CutMix(mode="elem"), MixToken()])
def test_the_class_token_learns_the_label_that_reached_it(model, mixer):
    batch = a_batch(draw(mixer))
    objective = TLAlign(model, smoothing=0.1)
    view = model(batch.images, batch.mix)
    terms = objective(view, batch)
    smooth = F.one_hot(batch.labels, K) * 0.9 + 0.1 / K
    r = view.shares.image[:, None]
    target = r * smooth + (1 - r) * smooth[batch.mix.partner]
    torch.testing.assert_close(terms["class"], F.cross_entropy(view.logits, target))
    assert set(terms) == {"loss", "class"}
    assert (view.shares.image - batch.mix.ratio).abs().max() > 1e-3
    assert not view.shares.image.requires_grad


@pytest.mark.parametrize("mixer", [None, MixUp()])
def test_a_batch_that_is_not_mixed_or_blended_is_trained_as_usual(model, mixer):
    batch = a_batch(mixer and draw(mixer))
    objective = TLAlign(model)
    view = model(batch.images, batch.mix)
    assert mixer or view.shares is None
    torch.testing.assert_close(objective(view, batch), HardLabels()(view, batch))


def test_token_labels_follow_the_tokens_too(model):
    batch = a_batch(draw(CutMix()))
    objective = TLAlign(model, beta=0.5, class_target="machine")
    assert objective.requires == {"maps", "token_logits"}
    view = model(batch.images, batch.mix)
    terms = objective(view, batch)

    sampled = sample_maps(batch.maps, batch.placement, GRID)
    own = from_scores(sampled.tokens, batch.maps.classes, K, sampled.weight, 1.0, None, 0.1).dense()
    r = view.shares.grid[..., None]
    target = r * own + (1 - r) * own[batch.mix.partner]
    rows = -(view.token_logits.log_softmax(-1) * target).sum(-1)
    torch.testing.assert_close(terms["token"], 0.5 * rows.mean())
    plain = TokenLabeling(beta=0.5)(view, batch)
    assert (plain["token"] - terms["token"]).abs() > 1e-4, "shares moved nothing, so nothing was tested"


def slow_transmix(backbone, images, mix):
    """The published label ratio, image by image: mean of area and of the class token's attention to own patches."""
    attention = backbone.blocks[-1].attn
    inputs = []
    hook = attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    backbone(images)
    hook.remove()
    heads, dim = attention.num_heads, attention.head_dim
    ratios = []
    for i in range(B):
        x = inputs[0][i]
        q, k, _ = F.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
        to_patches = torch.zeros(16)
        for head in range(heads):
            part = slice(head * dim, (head + 1) * dim)
            row = (q[0, part] @ k[:, part].T * dim**-0.5).softmax(0)
            to_patches += row[1:] / heads  # without the class token itself
        mask = mix.mask.expand(B, 64, 64)[i]
        seen = total = 0.0
        for place in range(16):
            y, x0 = place // 4 * 16, place % 4 * 16
            seen += to_patches[place] * mask[y : y + 16, x0 : x0 + 16].mean()
            total += to_patches[place]
        ratios.append((mask.mean() + seen / total) / 2)
    return torch.stack(ratios)


@pytest.mark.parametrize("mixer", [CutMix(), CutMix(mode="elem")])
def test_transmix_is_the_mean_of_area_and_attention_ratio(model, mixer):
    batch = a_batch(draw(mixer))
    objective = TransMix(model, smoothing=0.0)
    view = model(batch.images, batch.mix)
    with torch.no_grad():
        ratio = slow_transmix(model.backbone, batch.images, batch.mix)
    torch.testing.assert_close(view.shares.image, ratio, atol=1e-6, rtol=0)
    assert (ratio - batch.mix.ratio).abs().max() > 1e-3
    one_hot = F.one_hot(batch.labels, K).float()
    target = ratio[:, None] * one_hot + (1 - ratio[:, None]) * one_hot[batch.mix.partner]
    torch.testing.assert_close(objective(view, batch)["class"], F.cross_entropy(view.logits, target))


def test_token_labels_move_with_patches_that_a_mix_moves(model):
    # token labels: in both images the class of a token is the number of its patch, in the second one more
    classes = torch.arange(4).view(1, 2, 2) + torch.arange(2).view(2, 1, 1)
    scores = F.one_hot(classes % 4, 4).float() * 50
    target = from_scores(scores, torch.arange(4).expand(2, 4), 4, torch.ones(2, 2, 2))
    moves = torch.tensor([[[3, 2], [1, 0]], [[1, 0], [3, 2]]]).expand(2, 2, 2, 2)  # of the own image, of the partner
    mask = torch.tensor([[1.0, 0.0], [0.25, 1.0]]).expand(2, 2, 2)
    mix = Mix(torch.tensor([1, 0]), mask, mask.mean((1, 2)), "pixels", soft=True, moves=moves)
    logits = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))
    shares = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(1))
    view = SimpleNamespace(logits=torch.zeros(2, 4), token_logits=logits, shares=Shares(mix.ratio, shares))
    batch = Batch(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), token_target=target, mix=mix)
    got = TLAlign(model, beta=1.0, smoothing=0.0)(view, batch)["token"]

    dense, total = target.dense(), 0.0
    for b in range(2):
        for place in range(4):
            y, x = divmod(place, 2)
            own = dense[b].flatten(0, 1)[moves[b, 0].flatten()[place]]
            partner = dense[1 - b].flatten(0, 1)[moves[b, 1].flatten()[place]]
            r = shares[b, y, x]
            total -= ((r * own + (1 - r) * partner) * logits[b, y, x].log_softmax(0)).sum() / 8
    torch.testing.assert_close(got, total)


def test_tokens_that_are_put_back_to_their_images_take_their_shares_along(model):
    mix = draw(MixToken())
    batch = a_batch(mix)
    TLAlign(model, beta=1.0)
    view = model(batch.images, mix)
    model.aligner.remove()
    model.aligner = None
    # by hand: shares of the mixed batch as two "classes", which un-mixing carries along with the tokens
    again = TokenModel(model.backbone)
    again.align()
    raw = again(batch.images, replace(mix, symmetric=False)).shares.grid  # not symmetric: nothing is put back
    number = torch.arange(B)
    who = torch.zeros(B, *GRID, B)  # what part of a token belongs to each image of the batch
    who.scatter_add_(-1, number.view(B, 1, 1, 1).expand(B, *GRID, 1), raw[..., None])
    who.scatter_add_(-1, mix.partner.view(B, 1, 1, 1).expand(B, *GRID, 1), 1 - raw[..., None])
    home = apply_to_tokens(who, mix)
    wanted = home.gather(-1, number.view(B, 1, 1, 1).expand(B, *GRID, 1))[..., 0]
    torch.testing.assert_close(view.shares.grid, wanted)


def test_table_8_is_reachable_from_the_objective(model):
    batch = a_batch(draw(CutMix()))
    losses = {}
    for name, options in {
        "full": {},
        "last": {"layers": [-1]},
        "attention": {"layers": [-1], "residual": False},
        "sum": {"normalise": False},
    }.items():
        objective = TLAlign(model, **options)
        losses[name] = objective(model(batch.images, batch.mix), batch)["class"].item()
    assert len({round(v, 5) for v in losses.values()}) == 4
    assert losses["sum"] == pytest.approx(losses["full"] * 2**4, rel=1e-5)


def test_a_view_without_shares_gets_an_error_that_says_what_to_do(model):
    batch = a_batch(draw(CutMix()))
    view = model(batch.images, batch.mix)
    with pytest.raises(EverytokenError, match=r"tl_align.*model\(images, mix\)"):
        TLAlign(model)(view, batch)


def test_the_machine_label_of_the_image_can_follow_as_well(model):
    batch = a_batch(draw(CutMix()))
    objective = TLAlign(model, class_target="machine")
    view = model(batch.images, batch.mix)
    own = objective.image_target(view, replace(batch, mix=None), None).dense()
    r = view.shares.image[:, None]
    wanted = F.cross_entropy(view.logits, r * own + (1 - r) * own[batch.mix.partner])
    torch.testing.assert_close(objective(view, batch)["class"], wanted)


def test_an_image_without_label_counts_by_its_partners_part(model):
    batch = a_batch(draw(CutMix()))
    batch = replace(batch, labels=torch.tensor([0, -1, 6, 1]))
    objective = TLAlign(model, smoothing=0.0)
    view = model(batch.images, batch.mix)
    loss = objective(view, batch)["class"]
    known = from_labels(batch.labels, K)
    rows, weights = [], []
    for i in range(B):
        for who, part in ((i, view.shares.image[i]), (batch.mix.partner[i].item(), 1 - view.shares.image[i])):
            if batch.labels[who] >= 0:
                rows.append(part * compact_cross_entropy(view.logits[i : i + 1], known[who : who + 1]))
                weights.append(part)
    torch.testing.assert_close(loss, torch.stack(rows).sum() / torch.stack(weights).sum())


def test_aligned_equals_the_objective_and_leaves_the_model_as_it_was(model):
    mix = draw(CutMix())
    batch = a_batch(mix)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for watched in (model, model.backbone):
        with aligned(watched, mix) as shares:
            answer = watched(batch.images)
        loss = shares.cross_entropy(answer, batch.labels, smoothing=0.1)
        wanted = TLAlign(model)(model(batch.images, mix), batch)["loss"]
        model.aligner.remove()
        model.aligner = None
        torch.testing.assert_close(loss, wanted)
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    loss.backward()
    assert model.backbone.patch_embed.proj.weight.grad.abs().sum() > 0


def test_aligned_takes_soft_labels_and_the_settings_of_the_objective(model):
    mix = draw(CutMix())
    batch = a_batch(mix)
    one_hot = F.one_hot(batch.labels, K).float()
    for settings in ({}, {"layers": [-1], "patches_only": True}, {"normalise": False}):
        with aligned(model, mix, **settings) as shares:
            view = model(batch.images)
        for smoothing in (0.1, 0.0):
            hard = shares.cross_entropy(view, batch.labels, smoothing)
            torch.testing.assert_close(hard, shares.cross_entropy(view.logits, one_hot, smoothing))
        torch.testing.assert_close(
            hard, TLAlign(model, smoothing=0.0, **settings)(model(batch.images, mix), batch)["loss"]
        )
        model.aligner.remove()


def test_aligned_says_what_is_wrong(model):
    mix = draw(CutMix())
    images = a_batch(mix).images
    with pytest.raises(EverytokenError, match="has not run"), aligned(model, mix):
        pass
    with aligned(model, mix) as shares:
        view = model(images)
    for labels in (torch.zeros(B + 1, dtype=torch.long), torch.zeros(B, K + 1)):
        with pytest.raises(ValueError, match="do not fit logits"):
            shares.cross_entropy(view, labels)
    with pytest.raises(ValueError, match="mine"), aligned(model, mix):
        raise ValueError("mine")


def test_images_that_are_not_mixed_align_to_themselves(model):
    images, mix = CutMix(prob=0)(a_batch().images)
    labels = a_batch().labels
    with aligned(model, mix) as shares:
        view = model(images)
    torch.testing.assert_close(shares.cross_entropy(view, labels), F.cross_entropy(view.logits, labels))


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        *((name, CutMix()) for name in ("vit_nano_patch4_32", "swin_nano_patch2_window4_32", "test_resnet")),
        *((name, MixToken()) for name in ("vit_nano_patch4_32", "lvvit_micro_patch4_32")),
    ],
)
def test_a_second_pass_in_one_block_is_an_error_and_in_two_blocks_is_not(name, mixer):
    model = TokenModel(timm.create_model(name, num_classes=K))
    images, mix = mixer(torch.randn(B, 3, 32, 32), grid=(8, 8))
    for _ in range(2):
        with aligned(model, mix):
            model(images, mix)
    with aligned(model, mix):
        model(images, mix)
        with pytest.raises(EverytokenError, match="ran twice in one `with` block"):
            model(images, mix)
