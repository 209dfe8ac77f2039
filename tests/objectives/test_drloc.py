"""The drloc objective: variants, levels, released options, mixed images, and that it leaves the backbone alone."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import everytoken  # noqa: F401
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import drloc as fn
from everytoken.keyed import StepKey
from everytoken.mixing.methods import CutMix, MixToken
from everytoken.models import FAMILIES, TokenModel, UnsupportedModelError
from everytoken.models.token_model import LayerTaps
from everytoken.objectives.drloc import PAPER_LAMBDA, Drloc, DrlocHead
from everytoken.objectives.registry import build_objectives
from tests.objectives import builders

B, DIM = 3, 12
RELEASED = {"released": True, "levels": "last", "pool": 7}  # a ViT: read as if it were none of the released models


def view(grid=(14, 14), seed=0):
    tokens = torch.randn(B, *grid, DIM, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(
        grid=tokens.requires_grad_(), logits=torch.zeros(B, 2), token_logits=None, distill_logits=None
    )


def batch(mix=None):
    return Batch(images=torch.zeros(B, 3, 32, 32), mix=mix, key=StepKey())


def make(model=None, **settings) -> Drloc:
    torch.manual_seed(0)
    model = model or TokenModel(timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=DIM, num_heads=2))
    objective = Drloc(model, **{"hidden": 16, "pairs": 20, **settings})
    with torch.no_grad():  # at the start the answers hardly depend on the tokens, which would hide mistakes
        for parameter in objective.parameters():
            parameter.mul_(20 if parameter.ndim > 1 else 1).add_(0.1 if parameter.ndim == 1 else 0)
    return objective


def grid_loss(objective, grid, generator, mask=None, level=0):
    """The loss of one grid, without λ and schedule."""
    pooled = objective._pooled(grid)
    return objective._loss(pooled, objective._pairs(pooled, generator), mask, level)


def tiny_swin() -> TokenModel:
    torch.manual_seed(0)
    small = {"img_size": 64, "window_size": 4, "depths": (1, 2), "embed_dim": 16, "num_heads": (1, 2), "num_classes": 4}
    return TokenModel(timm.create_model("swin_tiny_patch4_window7_224", **small))


def tiny_vit(name="vit_tiny_patch16_224") -> TokenModel:
    torch.manual_seed(0)
    return TokenModel(timm.create_model(name, img_size=64, depth=3, embed_dim=24, num_heads=2, num_classes=4))


def slow_loss(objective, grid, pairs, head):
    """The method, image by image and pair by pair, from the concatenated embeddings."""
    b, h, w, _ = grid.shape
    released = objective.released
    total = []
    for i in range(b):
        for first, second in zip(pairs[0][i].tolist(), pairs[1][i].tolist(), strict=True):
            (y1, x1), (y2, x2) = divmod(first, w), divmod(second, w)
            hidden = torch.cat([grid[i, y1, x1], grid[i, y2, x2]])
            for layer in head.layers:
                hidden = layer(hidden)
            delta, sides = (y1 - y2, x1 - x2), (h, w)
            if objective.variant in ("l1", "all", "signed"):
                for axis in (0, 1):
                    if objective.variant == "signed":
                        goal = delta[axis] + sides[axis] - 1 if released else delta[axis] / sides[axis]
                    else:
                        goal = abs(delta[axis]) / (1 if released else sides[axis])
                    total.append((hidden[axis] - goal).abs() / 2)
                continue
            for axis in (0, 1):
                logits = head.unshared[axis](hidden)
                if released:
                    c = delta[axis] + sides[axis] - 1 if objective.signed else abs(delta[axis])
                else:
                    c = delta[axis] + (len(logits) - 1) // 2
                if objective.variant == "ce":
                    total.append(F.cross_entropy(logits, torch.tensor(c)))
                else:
                    p, k = logits.softmax(0), torch.arange(len(logits))
                    mean = (p * k).sum()
                    variance = (p * (k - mean) ** 2).sum() + 1e-8
                    log = variance.log() if released else variance.sqrt().log()
                    total.append((c - mean) ** 2 / variance + 0.001 * log)
    return sum(total) / (b * pairs[0].shape[1])


@pytest.mark.parametrize("grid", [(14, 14), (4, 6)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"variant": "signed"},
        {"variant": "ce"},
        {"variant": "reg"},
        RELEASED,
        {"variant": "signed", **RELEASED},
        {"variant": "ce", **RELEASED},
        {"variant": "ce", "signed": True, **RELEASED},
        {"variant": "reg", **RELEASED},
    ],
)
def test_every_variant_is_its_slow_version(settings, grid):
    objective = make(**settings)
    tokens = view(grid).grid
    got = grid_loss(objective, tokens, torch.Generator().manual_seed(5))
    how = "released" if objective.released else "mean"
    pooled = fn.pool_grid(tokens, (7, 7), how)
    pairs = fn.random_pairs(B, 20, pooled.shape[1:3], torch.Generator().manual_seed(5))
    wanted = slow_loss(objective, pooled, pairs, objective.heads[0])
    assert float(got.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)


@torch.no_grad()
def test_all_pairs_are_what_random_pairs_are_on_average():
    every, some = make(pairs="all"), make(pairs=20_000)
    tokens = view((4, 6)).grid
    generator = torch.Generator().manual_seed(0)
    exact = grid_loss(every, tokens, generator).detach()
    assert float(grid_loss(some, tokens, generator).detach()) == pytest.approx(float(exact), rel=0.02)
    pairs = tuple(p.expand(B, -1) for p in fn.all_pairs((4, 6)))
    assert float(exact) == pytest.approx(float(slow_loss(every, tokens, pairs, every.heads[0])), rel=1e-4)


@pytest.mark.parametrize(("dim", "parameters"), [(768, 1_050_626), (384, 657_410), (2048, 2_361_346)])
def test_the_mlp_has_the_parameters_and_keys_of_the_released_one(dim, parameters):
    with torch.device("meta"):
        (head,) = Drloc(dim=dim).heads
    assert sum(p.numel() for p in head.parameters()) == parameters
    assert list(head.state_dict()) == [f"layers.{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")]


def test_heads_with_classes_have_three_layers_in_the_paper_and_four_in_the_released_code():
    paper, released = make(variant="ce").heads[0], make(variant="ce", released=True).heads[0]
    assert [tuple(b.weight.shape) for b in paper.unshared] == [(15, 16)] * 2
    assert sorted(k.split(".weight")[0] for k in paper.state_dict() if "weight" in k) == [
        *["layers.0", "layers.2", "unshared.0", "unshared.1"],
    ]
    assert [tuple(b.weight.shape) for b in released.unshared] == [(14, 16)] * 2
    assert "layers.4.weight" in released.state_dict()
    assert make(variant="ce", released=True, signed=True).heads[0].unshared[0].out_features == 27
    swin = make(tiny_swin(), variant="ce", released=True)
    assert swin.heads[0].unshared[0].out_features == 7


def test_the_multi_scale_mlps_have_the_parameters_of_the_released_ones():
    with torch.device("meta"):
        objective = Drloc(TokenModel(timm.create_model("swin_tiny_patch4_window7_224")), variant="all", released=True)
    assert objective.taps.dims == [192, 384, 768, 768]
    assert sum(p.numel() for p in objective.parameters()) == 3_219_464


@pytest.mark.parametrize(
    ("name", "weight", "levels", "pool"),
    [
        ("swin_tiny_patch4_window7_224", 0.5, "final", (7, 7)),
        ("t2t_vit_14", 0.1, "last", (7, 7)),
        ("cvt_13", 0.1, "last", (7, 7)),
        ("vit_base_patch16_224", 0.01, "final", None),
        ("resnet50", 0.1, "last", (7, 7)),
    ],
)
def test_the_papers_lambda_is_that_of_the_family_and_released_reads_the_grid_that_the_released_model_reads(
    name, weight, levels, pool
):
    assert set(PAPER_LAMBDA) <= {family.title for family in FAMILIES.values()}
    with torch.device("meta"):
        model = TokenModel(timm.create_model(name))
        paper, released = Drloc(model, weight="paper"), Drloc(model, released=True)
        assert (paper.weight, paper.levels, paper.pool) == (weight, "last", (7, 7))
        assert (released.weight, released.levels, released.pool) == (weight, levels, pool)
        assert Drloc(model, weight=0.3).weight == 0.3
        assert "weight=0.1, variant='l1', distances divided by the grid's size" in repr(Drloc(model))
        assert f"weight={weight}, variant='l1', distances as counted" in repr(released)


def test_released_mlps_start_as_torch_does_but_for_swin_and_t2t():
    def spread(model, **settings):
        torch.manual_seed(0)
        layer = Drloc(model, **settings).heads[0].layers[2]  # 512 to 512: torch's deviation is 1 / sqrt(3 · 512)
        return float(layer.weight.detach().std()), float(layer.bias.detach().abs().max())

    assert spread(tiny_vit()) == pytest.approx((0.02, 0.0), rel=0.02)
    std, bias = spread(tiny_vit(), released=True)
    assert std == pytest.approx((3 * 512) ** -0.5, rel=0.02)
    assert 0 < bias <= 512**-0.5
    assert spread(tiny_swin(), released=True) == pytest.approx((0.02, 0.0), rel=0.02)


@pytest.mark.parametrize("variant", ["l1", "signed", "ce", "reg"])
def test_a_grid_of_one_token_is_refused(variant):
    with pytest.raises(EverytokenError, match=r"grid of 1x1.*img_size.*levels='stages'"):
        make(variant=variant)(view((1, 1)), batch())
    with pytest.raises(EverytokenError, match=r"grid of 14x14 tokens is pooled to 1x1.*Set pool"):
        grid_loss(make(variant=variant, pool=1), view().grid, torch.Generator())
    assert make(variant=variant)(view((1, 2)), batch())[variant] > 0


def test_a_level_of_one_token_is_left_out_beside_larger_ones():
    torch.manual_seed(0)
    model = TokenModel(timm.create_model("resnet18", num_classes=4)).train()
    objective = make(model, levels="stages")
    images = torch.randn(2, 3, 32, 32)
    seen = model(images)
    grids = objective.taps.grids((32, 32))
    assert [tuple(g.shape[1:3]) for g in grids] == [(8, 8), (4, 4), (2, 2), (1, 1)]
    draws = [StepKey().torch_generator(f"drloc/{i}", "cpu") for i in range(3)]
    ones = [grid_loss(objective, grids[i], draws[i], level=i) for i in range(3)]
    seen = model(images)
    got = objective(seen, Batch(images=images, key=StepKey()))["l1"]
    assert float(got.detach()) == pytest.approx(float(sum(ones).detach()), rel=1e-4)
    got.backward()
    assert all(p.grad is not None for p in objective.parameters())  # distributed training waits for all
    assert float(objective.heads[3].layers[0].weight.grad.abs().sum()) == 0


def test_steps_draw_other_pairs_and_the_same_step_the_same():
    objective, seen = make(), view()
    losses = [float(objective(seen, replace(batch(), key=StepKey(seed=1, step=s)))["l1"].detach()) for s in (3, 4, 3)]
    assert losses[0] == losses[2] != losses[1]
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    objective(seen, batch())
    assert torch.equal(torch.rand(1), before)  # the global generator is not touched


def test_a_grid_of_any_network_is_enough():
    torch.manual_seed(0)
    by_model = make()
    by_dim = Drloc(dim=DIM, hidden=16, pairs=20)
    by_dim.load_state_dict(by_model.state_dict())
    seen = view()
    wanted = by_model(seen, batch())
    assert by_dim(seen.grid, batch()) == wanted  # the same pairs and weights
    assert by_dim(seen, batch()) == by_model(seen.grid, batch()) == wanted
    assert (by_dim.weight, by_dim.levels, by_dim.pool) == (by_model.weight, "last", (7, 7))
    mix = a_mix(CutMix(), (14, 14))
    skipping = [make(skip_crossing=True), Drloc(dim=DIM, hidden=16, pairs=20, skip_crossing=True)]
    skipping[1].load_state_dict(skipping[0].state_dict())
    assert skipping[1](seen.grid, batch(mix)) == skipping[0](seen, batch(mix)) != skipping[0](seen, batch())


def test_gradients_reach_a_network_that_is_not_timms():
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=DIM, mlp_dim=24)
    drloc, kept = Drloc(dim=DIM, weight=0.5), []
    vit.encoder.register_forward_hook(lambda module, given, output: kept.append(output))
    vit(torch.randn(B, 3, 32, 32))
    result = drloc(kept[0][:, 1:].unflatten(1, (4, 4)))
    assert set(result) == {"loss", "l1"}
    result["loss"].backward()
    assert float(vit.conv_proj.weight.grad.abs().sum()) > 0
    assert all(p.grad is not None for p in drloc.parameters())


@pytest.mark.parametrize("shape", [(B, 197, DIM), (B, DIM), (B, 7, 7, DIM + 1), (B, DIM, 7, 7)])
def test_what_is_no_grid_of_the_right_width_is_named_by_its_shape(shape):
    with pytest.raises(ValueError, match=rf"got \[{', '.join(map(str, shape))}\]"):
        Drloc(dim=DIM)(torch.zeros(shape))


@pytest.mark.parametrize("wrong", [{"released": True}, {"weight": "paper"}, {"variant": "all"}, {"levels": "blocks"}])
def test_settings_that_follow_a_network_need_one(wrong):
    with pytest.raises(ValueError, match="need a network"):
        Drloc(dim=DIM, **wrong)
    for both in ({}, {"model": tiny_vit(), "dim": DIM}):
        with pytest.raises(ValueError, match=r"Drloc\(model\).*Drloc\(dim=384\)"):
            Drloc(**both)
    with pytest.raises(EverytokenError, match="no setting 'dim'"):
        build_objectives({"drloc": {"dim": DIM}}, tiny_vit())


def test_it_is_off_in_evaluation():
    objective = make()
    objective.eval()
    result = objective(view(), batch())
    assert set(result) == {"loss"}
    assert result["loss"] == 0


def test_gradients_reach_the_backbone_and_the_mlp_which_stays_outside_of_it():
    model = tiny_vit().train()
    keys = list(model.state_dict())
    objective = make(model)
    loss = objective(model(torch.randn(2, 3, 64, 64)), batch())["l1"]
    loss.backward()
    assert float(model.backbone.patch_embed.proj.weight.grad.abs().sum()) > 0
    assert all(p.grad is not None for p in objective.parameters())
    assert list(model.state_dict()) == keys


def test_every_block_has_its_own_mlp_in_all():
    model = tiny_vit().train()
    objective = make(model, variant="all")
    assert len(objective.heads) == 3
    images = torch.randn(2, 3, 64, 64)
    seen = model(images)
    got = objective(seen, Batch(images=images, key=StepKey()))["all"]
    _, grids = model.backbone.forward_intermediates(images)
    wanted = 0.0
    for i, grid in enumerate(grids):
        pairs = fn.random_pairs(2, 20, (4, 4), StepKey().torch_generator(f"drloc/{i}", "cpu"))
        wanted += float(slow_loss(objective, grid.permute(0, 2, 3, 1), pairs, objective.heads[i]).detach())
    assert float(got.detach()) == pytest.approx(wanted, rel=1e-4)
    got.backward()
    assert all(p.grad is not None for p in objective.parameters())


@pytest.mark.parametrize(
    ("levels", "shapes"),
    [
        ("blocks", [(16, 16, 16), (8, 8, 32), (8, 8, 32)]),
        ("stages", [(16, 16, 16), (8, 8, 32)]),
        ("merged", [(8, 8, 32), (8, 8, 32)]),
        ("final", [(8, 8, 32)]),
    ],
)
def test_levels_of_a_hierarchical_model(levels, shapes):
    model = tiny_swin().train()
    taps = LayerTaps(model, levels)
    model(images := torch.randn(2, 3, 64, 64))
    assert [tuple(g.shape[1:]) for g in taps.grids((64, 64))] == shapes
    taps.remove()
    objective = make(model, levels=levels)
    loss = objective(model(images), Batch(images=images, key=StepKey()))["l1"]
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert len(objective.heads) == len(shapes)


def test_the_final_level_is_the_grid_before_the_last_norm():
    model = tiny_vit().train()
    taps = LayerTaps(model, "final")
    seen = model(torch.randn(2, 3, 64, 64))
    (grid,) = taps.grids((64, 64))
    assert torch.allclose(model.backbone.norm(grid), seen.grid, atol=1e-6)


def test_taps_follow_class_tokens_that_join_late_and_rectangular_images():
    small = {"embed_dims": (8, 16, 24), "depths": (1, 1, 1), "num_heads": (1, 2, 3)}
    model = TokenModel(timm.create_model("cvt_13", **small)).train()
    taps = LayerTaps(model, "blocks")
    model(torch.randn(2, 3, 64, 96))
    assert [tuple(g.shape[1:]) for g in taps.grids((64, 96))] == [(16, 24, 8), (8, 12, 16), (4, 6, 24)]


def test_taps_hold_nothing_in_evaluation_nor_in_copies():
    model = tiny_vit().eval()
    taps = LayerTaps(model, "blocks")
    model(torch.randn(1, 3, 64, 64))
    assert not taps.outputs
    with pytest.raises(UnsupportedModelError, match="0 of 3"):
        taps.grids((64, 64))
    model.train()(torch.randn(1, 3, 64, 64))
    copied = copy.deepcopy(model)
    copied(torch.randn(1, 3, 64, 64))
    assert len(taps.grids((64, 64))) == 3
    model(torch.randn(1, 3, 64, 64))
    taps.remove()
    model(torch.randn(1, 3, 64, 64))
    assert not taps.outputs


def test_taps_work_in_a_model_compiled_as_one_graph():
    model = tiny_vit().train()
    taps = LayerTaps(model, "blocks")
    images = torch.randn(1, 3, 64, 64)
    model(images)
    wanted = taps.grids((64, 64))
    torch.compile(model, fullgraph=True, backend="eager")(images)
    for got, plain in zip(taps.grids((64, 64)), wanted, strict=True):
        assert torch.allclose(got, plain, atol=1e-5)
        assert got.requires_grad


def a_mix(mixer, grid=(4, 4)):
    return builders.a_mix(mixer, B, (32, 32), grid, least=0.2)


@torch.no_grad()
def test_pairs_that_cross_two_images_can_be_left_out():
    mix = a_mix(CutMix())
    kept, left_out = make(pairs="all", pool=None), make(pairs="all", pool=None, skip_crossing=True)
    seen = view((4, 4))
    losses = [float(o(seen, batch(mix))["l1"].detach()) for o in (kept, left_out)]
    share = mix.at((4, 4)).expand(B, 4, 4).flatten(1)
    own, partner = share >= 0.5, share <= 0.5  # a token of two halves goes with both
    answer = kept.heads[0](seen.grid.flatten(1, 2), None)
    first, second = fn.all_pairs((4, 4))
    target = fn.offset_targets(fn.offsets((first, second), (4, 4)), (4, 4))
    error = (answer - target).abs().mean(-1)
    assert losses[0] == pytest.approx(float(error.mean().detach()), rel=1e-5)
    inside = (own[:, first] & own[:, second]) | (partner[:, first] & partner[:, second])
    assert 0 < float(inside.float().mean()) < 1
    assert losses[1] == pytest.approx(float(error[inside].mean().detach()), rel=1e-5)
    assert float(left_out(seen, batch())["l1"]) == pytest.approx(losses[0])  # nothing is mixed
    seen.mix = mix
    assert float(left_out(seen)["l1"]) == pytest.approx(losses[1])  # the view knows it, too


def test_pooled_grids_pool_the_mask_as_well():
    mix = a_mix(CutMix(), (14, 14))
    objective = make(skip_crossing=True, pairs=50)
    seen = view((14, 14))
    got = objective(seen, batch(mix))["l1"]
    pairs = fn.random_pairs(B, 50, (7, 7), StepKey().torch_generator("drloc/0", "cpu"))
    weight = fn.same_image(slow_mean(mix.at((14, 14)).expand(B, 14, 14)), pairs)
    answer = objective.heads[0](fn.pool_grid(seen.grid, (7, 7)).flatten(1, 2), pairs)
    target = fn.offset_targets(fn.offsets(pairs, (7, 7)), (7, 7))
    assert 0 < float(weight.mean()) < 1
    assert torch.allclose(got, fn.drloc_l1(answer, target, weight))


def slow_mean(mask):
    return (mask[:, ::2, ::2] + mask[:, 1::2, ::2] + mask[:, ::2, 1::2] + mask[:, 1::2, 1::2]) / 4


@torch.no_grad()
def test_tokens_that_were_put_back_to_their_images_do_not_cross():
    mix = a_mix(MixToken())
    assert mix.unmixes
    seen = view((4, 4))
    losses = [float(make(skip_crossing=s)(seen, batch(mix))["l1"]) for s in (False, True)]
    assert losses[0] == losses[1]


def test_the_released_schedule_scales_the_loss():
    objective, seen = make(warmup=0.2, **RELEASED), view()
    full = objective(seen, replace(batch(), key=StepKey(epoch=0.2)))["l1"].item()
    assert full > 0
    for progress, factor in ((0.0, 0.0), (0.1, 0.5), (0.6, 0.5), (1.0, 0.0)):
        got = objective(seen, replace(batch(), key=StepKey(epoch=progress)))["l1"].item()
        assert got == pytest.approx(full * factor, abs=1e-6)
    assert objective.requires == {"progress"}
    with pytest.raises(EverytokenError, match="epochs"):
        objective(seen)
    plain = make()
    losses = [plain(seen, replace(batch(), key=StepKey(epoch=e)))["l1"].item() for e in (0.0, 0.7)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("variant", ["l1", "ce", "reg"])
@pytest.mark.parametrize("pairs", [20, "all"])
def test_nothing_waits_for_the_device(variant, pairs):
    objective = make(variant=variant, pairs=pairs, skip_crossing=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses to tell any value
        grid = torch.randn(B, 14, 14, DIM)
        loss = grid_loss(objective, grid, torch.Generator(), torch.ones(B, 14, 14))
        assert loss.shape == ()


def test_mixed_precision_gives_a_loss_in_single_precision():
    for variant in ("l1", "ce", "reg"):
        objective, seen = make(variant=variant), view()
        exact = objective(seen, batch())[variant]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = objective(seen, batch())[variant]
        assert got.dtype == torch.float32
        assert float(got) == pytest.approx(float(exact), rel=0.05)


def test_the_mlp_compiles_as_one_graph():
    head = DrlocHead(DIM, hidden=16)
    tokens, pairs = torch.randn(2, 49, DIM), fn.random_pairs(2, 64, (7, 7), torch.Generator())
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(tokens, pairs), head(tokens, pairs), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"variant": "l2"}, "l2"),
        ({"weight": "mine"}, "'paper'"),
        ({"levels": "block"}, "levels is 'block'.*'blocks'"),
        ({"levels": "stages"}, "no stages"),  # in a ViT
        ({"levels": "merged"}, "no stages"),
        ({"pairs": 0}, "pairs"),
        ({"warmup": 1.0}, "warmup"),
        ({"variant": "ce", "pool": None}, "set pool"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(EverytokenError, match=message):
        make(**wrong)


def test_a_grid_that_the_classes_do_not_cover_is_refused():
    with pytest.raises(EverytokenError, match=r"\(16, 16\).*set pool"):
        grid_loss(make(variant="ce", **{**RELEASED, "pool": None}), view((16, 16)).grid, torch.Generator())


def test_without_a_batch_it_draws_from_torchs_generator():
    objective, seen = make(), view()
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(float(objective(seen)["loss"].detach()))
    assert losses[0] == losses[2] != losses[1]
    model = tiny_vit().train()
    inside = make(model, variant="all")
    assert float(inside(model(torch.randn(2, 3, 64, 64)))["loss"].detach()) > 0
