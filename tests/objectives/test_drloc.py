"""The drloc objective: variants, levels, released options, mixed images, and that it leaves the backbone alone."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import everytoken  # noqa: F401
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import drloc as fn
from everytoken.keyed import StepKey
from everytoken.mixing import CutMix, MixToken
from everytoken.models import FAMILIES, TokenModel, UnsupportedModelError
from everytoken.models.token_model import LayerTaps
from everytoken.objectives.drloc import LAMBDA, RELEASED, Drloc, DrlocHead

B, DIM = 3, 12


def view(grid=(14, 14), seed=0):
    tokens = torch.randn(B, *grid, DIM, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(
        grid=tokens.requires_grad_(), logits=torch.zeros(B, 2), token_logits=None, distill_logits=None
    )


def batch(mix=None):
    return Batch(images=torch.zeros(B, 3, 32, 32), mix=mix, key=StepKey())


def make(**settings) -> Drloc:
    torch.manual_seed(0)
    objective = Drloc(**{"dim": DIM, "hidden": 16, "pairs": 20, **settings})
    with torch.no_grad():  # at the start the answers hardly depend on the tokens, which would hide mistakes
        for parameter in objective.modules().parameters():
            parameter.mul_(20 if parameter.ndim > 1 else 1).add_(0.1 if parameter.ndim == 1 else 0)
    return objective


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
                        goal = delta[axis] + sides[axis] - 1 if "offsets" in released else delta[axis] / sides[axis]
                    else:
                        goal = abs(delta[axis]) / (1 if "offsets" in released else sides[axis])
                    total.append((hidden[axis] - goal).abs() / 2)
                continue
            for axis in (0, 1):
                logits = head.unshared[axis](hidden)
                if "classes" in released:
                    c = delta[axis] + sides[axis] - 1 if objective.direction else abs(delta[axis])
                else:
                    c = delta[axis] + (len(logits) - 1) // 2
                if objective.variant == "ce":
                    total.append(F.cross_entropy(logits, torch.tensor(c)))
                else:
                    p, k = logits.softmax(0), torch.arange(len(logits))
                    mean = (p * k).sum()
                    variance = (p * (k - mean) ** 2).sum() + 1e-8
                    log = variance.log() if "variance" in released else variance.sqrt().log()
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
        {"released": ["offsets"]},
        {"variant": "signed", "released": ["offsets"]},
        {"variant": "ce", "released": ["classes", "head"]},
        {"variant": "ce", "released": ["classes"], "direction": True, "sides": 14},
        {"variant": "reg", "released": "all"},
    ],
)
def test_every_variant_is_its_slow_version(settings, grid):
    objective = make(**settings)
    tokens = view(grid).grid
    got = objective.loss(tokens, torch.Generator().manual_seed(5))
    how = "released" if "pooling" in objective.released else "mean"
    pooled = fn.pool_grid(tokens, (7, 7), how)
    pairs = fn.random_pairs(B, 20, pooled.shape[1:3], torch.Generator().manual_seed(5))
    wanted = slow_loss(objective, pooled, pairs, objective.heads[0])
    assert float(got.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)


@torch.no_grad()
def test_all_pairs_are_what_random_pairs_are_on_average():
    every, some = make(pairs="all"), make(pairs=20_000)
    tokens = view((4, 6)).grid
    generator = torch.Generator().manual_seed(0)
    exact = every.loss(tokens, generator).detach()
    assert float(some.loss(tokens, generator).detach()) == pytest.approx(float(exact), rel=0.02)
    pairs = tuple(p.expand(B, -1) for p in fn.all_pairs((4, 6)))
    assert float(exact) == pytest.approx(float(slow_loss(every, tokens, pairs, every.heads[0])), rel=1e-4)


@pytest.mark.parametrize(("dim", "parameters"), [(768, 1_050_626), (384, 657_410), (2048, 2_361_346)])
def test_the_mlp_has_the_parameters_and_keys_of_the_released_one(dim, parameters):
    head = Drloc(dim=dim).heads[0]
    assert sum(p.numel() for p in head.parameters()) == parameters
    assert list(head.state_dict()) == [f"layers.{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")]


def test_heads_with_classes_have_three_layers_in_the_paper_and_four_in_the_released_code():
    paper, released = make(variant="ce").heads[0], make(variant="ce", released="all", sides=14).heads[0]
    assert [tuple(b.weight.shape) for b in paper.unshared] == [(15, 16)] * 2
    assert sorted(k.split(".weight")[0] for k in paper.state_dict() if "weight" in k) == [
        *["layers.0", "layers.2", "unshared.0", "unshared.1"],
    ]
    assert [tuple(b.weight.shape) for b in released.unshared] == [(14, 16)] * 2
    assert "layers.4.weight" in released.state_dict()
    assert make(variant="ce", released=["classes"], direction=True, sides=14).heads[0].unshared[0].out_features == 27


def test_the_multi_scale_mlps_have_the_parameters_of_the_released_ones():
    with torch.device("meta"):
        model = TokenModel(timm.create_model("swin_tiny_patch4_window7_224"))
        objective = Drloc(family="Swin", levels="merged")
        objective.attach(model)
    assert objective.taps.dims == [192, 384, 768, 768]
    assert sum(p.numel() for p in objective.modules().parameters()) == 3_219_464


def test_lambda_is_that_of_the_family():
    assert set(LAMBDA) <= {family.title for family in FAMILIES.values()}
    for title, weight in {"Swin": 0.5, "T2T-ViT": 0.1, "CvT": 0.1, "ViT, DeiT, DINOv2, SigLIP": 0.01}.items():
        assert make(family=title).weight == weight
    assert make(family="ResNet, ResNeXt, SE-ResNet").weight == 0.1
    assert make(family="Swin", weight=0.3).weight == 0.3


def test_a_model_tells_its_lambda_when_nobody_else_does():
    objective = Drloc(hidden=16)
    objective.attach(tiny_swin())
    assert (objective.weight, objective.family) == (0.5, "Swin")
    objective.attach(tiny_vit())  # another model, another λ
    assert objective.weight == 0.01
    for given in (Drloc(weight=0.3), Drloc(family="CvT")):
        wanted = given.weight
        given.attach(tiny_swin())
        assert given.weight == wanted


def test_released_mlps_start_as_torch_does_but_for_swin_and_t2t():
    def spread(**settings):
        torch.manual_seed(0)
        layer = Drloc(dim=DIM, **settings).heads[0].layers[2]  # 512 to 512: torch's deviation is 1 / sqrt(3 · 512)
        return float(layer.weight.detach().std()), float(layer.bias.detach().abs().max())

    assert spread() == pytest.approx((0.02, 0.0), rel=0.02)
    for family in ("CvT", "ViT, DeiT, DINOv2, SigLIP", "ResNet, ResNeXt, SE-ResNet"):
        std, bias = spread(family=family, released=["init"])
        assert std == pytest.approx((3 * 512) ** -0.5, rel=0.02)
        assert 0 < bias <= 512**-0.5
    for family in ("Swin", "T2T-ViT"):
        assert spread(family=family, released="all") == pytest.approx((0.02, 0.0), rel=0.02)
    attached = Drloc(released=["init"])
    attached.attach(tiny_swin())
    assert float(attached.heads[0].layers[2].bias.detach().abs().max()) == 0


@pytest.mark.parametrize("variant", ["l1", "signed", "ce", "reg"])
def test_a_grid_of_one_token_is_refused(variant):
    with pytest.raises(EverytokenError, match=r"grid is 1x1.*--img-size.*levels='stages'"):
        make(variant=variant)(view((1, 1)), batch())
    with pytest.raises(EverytokenError, match=r"grid of 14x14 tokens to 1x1.*set pool"):
        make(variant=variant, pool=1).loss(view().grid, torch.Generator())
    assert make(variant=variant)(view((1, 2)), batch())[variant] > 0


def test_a_level_of_one_token_is_left_out_beside_larger_ones():
    torch.manual_seed(0)
    model = TokenModel(timm.create_model("resnet18", num_classes=4)).train()
    objective = make(levels="stages")
    objective.attach(model)
    images = torch.randn(2, 3, 32, 32)
    seen = model(images)
    grids = objective.taps.grids((32, 32))
    assert [tuple(g.shape[1:3]) for g in grids] == [(8, 8), (4, 4), (2, 2), (1, 1)]
    ones = [objective.loss(g, StepKey().torch_generator(f"drloc/{i}", "cpu"), level=i) for i, g in enumerate(grids[:3])]
    seen = model(images)
    got = objective(seen, Batch(images=images, key=StepKey()))["l1"]
    assert float(got.detach()) == pytest.approx(float(sum(ones).detach()), rel=1e-4)
    got.backward()
    assert all(p.grad is not None for p in objective.modules().parameters())  # distributed training waits for all
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


def test_it_is_off_in_evaluation():
    objective = make()
    objective.modules().eval()
    assert objective(view(), batch()) == {}


def test_gradients_reach_the_backbone_and_the_mlp_which_stays_outside_of_it():
    model = tiny_vit().train()
    keys = list(model.state_dict())
    objective = make(dim=24, family=model.family.title)
    loss = objective(model(torch.randn(2, 3, 64, 64)), batch())["l1"]
    loss.backward()
    assert float(model.backbone.patch_embed.proj.weight.grad.abs().sum()) > 0
    assert all(p.grad is not None for p in objective.modules().parameters())
    assert list(model.state_dict()) == keys


def test_training_on_it_teaches_positions():
    torch.manual_seed(0)
    objective = Drloc(dim=8, hidden=32, pool=None)
    tokens = torch.randn(16, 5, 5, 8) * 0.1
    tokens[..., 0] += torch.arange(5.0)[:, None]  # where a token is shows in its embedding
    tokens[..., 1] += torch.arange(5.0)
    optimizer = torch.optim.Adam(objective.modules().parameters(), lr=1e-2)
    losses = []
    for step in range(150):
        loss = objective.loss(tokens, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < 0.3 * losses[0]


def test_every_block_has_its_own_mlp_in_all():
    model = tiny_vit().train()
    objective = make(variant="all", dim=24)
    with pytest.raises(EverytokenError, match="attach"):
        objective(view(), batch())
    objective.attach(model)
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
    assert all(p.grad is not None for p in objective.modules().parameters())


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
    objective = make(levels=levels)
    objective.attach(model)
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


@pytest.mark.parametrize("levels", ["stages", "merged"])
def test_levels_that_a_backbone_does_not_have_are_refused(levels):
    with pytest.raises(UnsupportedModelError, match="no stages"):
        make(levels=levels).attach(tiny_vit())


def a_mix(mixer, grid=(4, 4)):
    drawn = (mixer.draw(B, (32, 32), grid, np.random.default_rng(seed)) for seed in range(100))
    return next(mix for mix in drawn if 0.2 < float(mix.ratio[0]) < 0.9)


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
    plain, scheduled = make(), make(released=["schedule"], warmup=0.2)
    seen = view()
    full = plain(seen, batch())["l1"].item()
    for progress, factor in ((0.0, 0.0), (0.1, 0.5), (0.2, 1.0), (0.6, 0.5), (1.0, 0.0)):
        got = scheduled(seen, replace(batch(), key=StepKey(epoch=progress)))["l1"].item()
        assert got == pytest.approx(full * factor, abs=1e-6)
        assert plain(seen, replace(batch(), key=StepKey(epoch=progress)))["l1"].item() == pytest.approx(full)


@pytest.mark.parametrize("variant", ["l1", "ce", "reg"])
@pytest.mark.parametrize("pairs", [20, "all"])
def test_nothing_waits_for_the_device(variant, pairs):
    objective = make(variant=variant, pairs=pairs, skip_crossing=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses to tell any value
        grid = torch.randn(B, 14, 14, DIM)
        loss = objective.loss(grid, torch.Generator(), torch.ones(B, 14, 14))
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
        ({"levels": "block"}, "Did you mean 'blocks'"),
        ({"pairs": 0}, "pairs"),
        ({"warmup": 1.0}, "warmup"),
        ({"released": ["offset"]}, "Did you mean 'offsets'"),
        ({"variant": "ce", "pool": None}, "set pool, or sides"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(EverytokenError, match=message):
        make(**wrong)


def test_a_grid_that_the_classes_do_not_cover_is_refused():
    with pytest.raises(EverytokenError, match=r"\(14, 14\).*set pool"):
        make(variant="ce", pool=None, sides=7).loss(view().grid, torch.Generator())


def test_one_released_part_may_be_named_alone():
    assert make(released="offsets").released == ("offsets",)
    assert make(released="all").released == tuple(RELEASED)


def test_it_must_know_the_token_width():
    with pytest.raises(EverytokenError, match="give dim"):
        Drloc()(view(), batch())


def test_the_snippet_in_the_documentation_runs():
    page = Path(__file__).parents[2] / "docs" / "drloc.md"
    if not page.exists():
        pytest.skip("the documentation is not here")
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    images = torch.randn(2, 3, 32, 32)
    names = {"loader": [(images, torch.tensor([1, 2]))] * 2}
    exec(code, names)
    assert bool(torch.isfinite(names["loss"]))
    assert not any("drloc" in key or "layers" in key for key in names["weights"])
