"""Feature distillation: the slow loop, unequal grids, mixing, stored features, and what is trained."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import everytoken as et
from everytoken.functional import collate_maps, sample_features
from everytoken.maps import StoreMeta
from everytoken.mixing.guided import PuzzleMix
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher
from tests.objectives.builders import a_mix

B, DIM, CHANNELS = 4, 12, 6


class Teacher(nn.Module):
    """Answers with a grid of its own; every token depends on its own part of the image only."""

    num_features = CHANNELS

    def __init__(self, grid=(4, 4)):
        super().__init__()
        self.grid = grid
        self.mix = nn.Linear(3, CHANNELS)

    def forward(self, images):
        return self.mix(F.adaptive_avg_pool2d(images, self.grid).movedim(1, -1)).sin()


def images(seed=0):
    return torch.randn(B, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def student(grid=(4, 4), mix=None):
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(B, *grid, DIM, generator=g).requires_grad_()
    return et.TokenView(torch.zeros(B, 2), tokens, mix=mix)


def make(teacher=None, **settings):
    torch.manual_seed(0)
    return et.FeatureDistillation(Teacher() if teacher is None else teacher, dim=DIM, **settings)


def overlap(a, n, b, m):
    """How much of cell a of n, in fractions, is covered by cell b of m."""
    return max(0.0, min((a + 1) / n, (b + 1) / m) - max(a / n, b / m)) * n


def slow(objective, view, goals, own=None, partner=None):
    """Token by token: the distance to the mean of the teacher's tokens on the same area, of each image shown there."""
    _, h, w, _ = view.grid.shape
    total = 0.0
    for b in range(B):
        for i in range(h):
            for j in range(w):
                part = 1.0 if own is None else float(own[b, i, j])
                shown = [(b, part)] + ([] if own is None else [(int(partner[b]), 1 - part)])
                for image, part in shown:
                    goal = goals[image]
                    H, W, _ = goal.shape
                    y = sum(overlap(i, h, r, H) * overlap(j, w, c, W) * goal[r, c] for r in range(H) for c in range(W))
                    x = objective.projection(view.grid[b, i, j])
                    d = 1 - (x @ y) / (x.norm() * y.norm())
                    total = total + part * d
    return total / (B * h * w)


@pytest.mark.parametrize("grid", [(4, 4), (8, 8), (2, 4)])
def test_every_token_learns_the_teachers_tokens_of_its_own_area(grid):
    teacher = Teacher(grid)
    objective, view = make(teacher), student()
    got = objective(view, et.Batch(images()))
    goals = teacher(images()).detach()
    if grid == (2, 4):  # finer tokens than the teacher's: between its centres, as score maps are sampled
        goals = sample_features(goals, (4, 4))[0]
        planes = F.interpolate(teacher(images()).movedim(-1, 1), (4, 4), mode="bilinear", align_corners=False)
        torch.testing.assert_close(goals, planes.movedim(1, -1).detach())
    torch.testing.assert_close(got["token"], slow(objective, view, goals))
    got["loss"].backward()
    assert float(view.grid.grad.abs().sum()) > 0
    assert teacher.mix.weight.grad is None


@pytest.mark.parametrize("mixer", [et.CutMix(), et.MixUp(), et.CutMix(mode="elem"), et.MixToken(mode="elem")])
def test_in_mixed_images_each_token_learns_its_own_source(mixer):
    x, mix = images(), a_mix(mixer, B, (32, 32), (4, 4), least=0.2)
    objective, view = make(), student(mix=mix)
    own = mix.at((4, 4)).expand(B, 4, 4)
    assert bool((own < 1).any())
    goals = objective.teacher.tokens(x)
    torch.testing.assert_close(objective(view, et.Batch(x))["token"], slow(objective, view, goals, own, mix.partner))


def test_tokens_that_were_put_back_to_their_images_learn_those():
    x, mix = images(), a_mix(et.MixToken(), B, (32, 32), (4, 4), least=0.2)
    objective = make()
    torch.testing.assert_close(objective(student(mix=mix), et.Batch(x)), objective(student(), et.Batch(x)))


def test_where_patches_move_their_features_move_along():
    x = images()
    maps = torch.rand(B, 32, 32, generator=torch.Generator().manual_seed(3))
    _, mix = PuzzleMix(blocks=(4,))(x, guide=lambda kind: maps)
    assert mix.moves is not None
    objective, view = make(), student(mix=mix)
    goals, own = objective.teacher.tokens(x).flatten(1, 2), mix.at((4, 4))
    total = 0.0
    for b in range(B):
        tokens = objective.projection(view.grid[b].flatten(0, 1))
        for part, image, place in ((own[b], b, mix.moves[b, 0]), (1 - own[b], int(mix.partner[b]), mix.moves[b, 1])):
            d = 1 - F.cosine_similarity(tokens, goals[image][place.flatten()], dim=-1)
            total = total + (part.flatten() * d).sum()
    torch.testing.assert_close(objective(view, et.Batch(x))["token"], total / (B * 16))


def test_the_teacher_sees_images_before_they_are_mixed_and_says_so_if_it_cannot():
    seen = []

    class Watching(Teacher):
        def forward(self, x):
            seen.append(x.clone())
            return super().forward(x)

    torch.manual_seed(0)
    model = et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=3))
    objective = et.FeatureDistillation(Watching(), model)
    step = et.TokenStep(model, {"features": objective}, mixer=et.CutMix()).train()
    batch = et.Batch(images())
    result = step(batch)
    assert torch.equal(seen[0], batch.images)
    assert set(result) == {"loss", "features/token", "output"}
    mixed = step.mixed(batch)
    with pytest.raises(et.EverytokenError, match="before_mixing"):
        objective(model(mixed.images, mixed.mix), mixed)


def store_of(features, folder, top_k=CHANNELS):
    names = [f"{i}.jpg" for i in range(len(features))]
    meta = StoreMeta(grid=tuple(features.shape[1:3]), top_k=top_k, num_classes=CHANNELS, annotator={"name": "tokens"})
    with et.MapWriter(folder, names, meta) as writer:
        writer.write({n: et.ScoreMap.from_logits(t, top_k) for n, t in zip(names, features, strict=True)})
        return writer.finalize(), names


def test_stored_features_are_sampled_at_the_placement_as_those_of_the_cropped_image(tmp_path):
    features = Teacher((8, 8))(images()).detach()
    maps, names = store_of(features, tmp_path / "features")
    objective = make(maps)
    assert objective.requires == {"maps"}
    assert objective.teacher is None
    # the upper right quarter, mirrored: columns 7, 6, 5, 4 of rows 0 to 3
    placement = torch.tensor([[[-0.5, 0.0, 1.0], [0.0, 0.5, 0.0]]]).expand(B, 2, 3)
    records = collate_maps([maps[name] for name in names], maps.num_classes)
    view = student()
    got = objective(view, et.Batch(images(), maps=records, placement=placement))["token"]
    wanted = slow(objective, view, features[:, :4, 4:].flip(2).half().float())
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(et.EverytokenError, match="the best 2 of 6 classes"):
        make(store_of(features, tmp_path / "scores", top_k=2)[0])


def test_an_image_without_stored_features_does_not_count(tmp_path):
    maps, names = store_of(Teacher()(images()).detach(), tmp_path)
    objective, view = make(maps), student()
    whole = torch.eye(2, 3).expand(B, 2, 3)
    some = collate_maps([maps[names[0]], None, maps[names[2]], None], maps.num_classes)
    got = objective(view, et.Batch(images(), maps=some, placement=whole))["token"]
    rows = [0, 2]
    few = et.TokenView(view.logits[rows], view.grid[rows])
    full = collate_maps([maps[names[i]] for i in rows], maps.num_classes)
    torch.testing.assert_close(got, objective(few, et.Batch(images()[rows], maps=full, placement=whole[rows]))["token"])


def test_any_timm_model_teaches_at_a_size_and_normalisation_of_its_own():
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=5)
    objective = et.FeatureDistillation(network, dim=DIM, size=(64, 64))
    assert objective.projection.out_features == network.num_features
    resized = F.interpolate(images(), (64, 64), mode="bilinear", antialias=True)
    wanted = network(resized) is not None and network.eval().forward_features(resized).movedim(1, -1)
    torch.testing.assert_close(objective.before_mixing(et.Batch(images())).teacher_tokens, wanted.detach())
    other = FrozenTeacher(Teacher(), ((0.5,) * 3, (0.5,) * 3), ((0.0,) * 3, (1.0,) * 3))
    torch.testing.assert_close(other.tokens(images()), other.model(images() * 0.5 + 0.5))


def test_the_teacher_is_neither_trained_nor_saved_nor_copied_and_evaluation_does_not_ask_it():
    objective = make()
    assert [name for name, _ in objective.named_parameters()] == ["projection.weight", "projection.bias"]
    assert list(objective.state_dict()) == ["projection.weight", "projection.bias"]
    assert copy.deepcopy(objective).teacher is objective.teacher
    objective.eval()
    result = objective(student(), et.Batch(images()))
    assert set(result) == {"loss"}
    assert result["loss"] == 0


def test_a_recipe_gives_it_the_teacher_and_cannot_name_parts_of_the_network():
    model = et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=3))
    teacher = FrozenTeacher(Teacher(), ((0.5,) * 3, (0.5,) * 3), ((0.5,) * 3, (0.5,) * 3))
    built = build_objectives({"feature_distillation": {"weight": 0.5}}, model, teacher=teacher)
    assert list(built) == ["hard", "feature_distillation"]
    assert built["feature_distillation"].teacher is teacher
    for setting in ("dim", "teacher", "model"):
        with pytest.raises(et.EverytokenError, match=f"no setting '{setting}'"):
            build_objectives({"feature_distillation": {setting: 3}}, model, teacher=teacher)
    with pytest.raises(et.EverytokenError, match="teacher: resnet50"):
        build_objectives({"feature_distillation": {}}, model)


def test_features_are_sampled_through_rotations_as_by_hand():
    features = torch.randn(1, 6, 6, 3, generator=torch.Generator().manual_seed(0))
    quarter = torch.tensor([[[0.0, -1.0, 1.0], [1.0, 0.0, 0.0]]])  # (x, y) of the input is (1 - y, x) of the image
    turned, weight = sample_features(features, (6, 6), quarter)
    torch.testing.assert_close(turned[0], torch.rot90(features[0], 1, (0, 1)), atol=1e-5, rtol=1e-5)
    assert np.allclose(weight, 1)
