import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import (
    CompactTarget,
    blend,
    compact_cross_entropy,
    from_scores,
    mix_with_truth,
    participating,
    sample_maps,
)
from everytoken.keyed import StepKey
from everytoken.mixing.methods import CutMix, MixToken
from everytoken.mixing.mix import apply_to_tokens, mix_image_target
from everytoken.models import TokenView
from everytoken.objectives.distillation import Distillation, OnlineTokenLabeling
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.registry import OBJECTIVES, find_objective
from everytoken.objectives.token_labeling import ReLabel, TokenLabeling
from tests.objectives.builders import a_mix, score_maps

B, GRID, K = 4, (6, 4), 9


def a_batch(mix=None):
    placement = torch.tensor([[[0.6, 0, 0.1], [0, 0.5, 0.3]]] * B)
    labels = torch.tensor([0, 3, 8, 3])
    return Batch(torch.zeros(B, 3, 48, 32), labels, placement, score_maps(B, 5, 4, K), mix=mix)


def a_view(classes=K, token_classes=K, seed=1, distill=False):
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        logits=torch.randn(B, classes, generator=g).requires_grad_(),
        token_logits=torch.randn(B, *GRID, token_classes, generator=g).requires_grad_() if token_classes else None,
        grid=torch.randn(B, *GRID, 5, generator=g),
        distill_logits=torch.randn(B, classes, generator=g) if distill else None,
    )


def draw(mixer):
    return a_mix(mixer, B, (48, 32), GRID)


def targets(batch, smoothing=0.1):
    maps = batch.maps
    sampled = sample_maps(maps, batch.placement, GRID)
    image = from_scores(sampled.image, maps.classes, K, sampled.image_weight).smooth(smoothing)
    return image, from_scores(sampled.tokens, maps.classes, K, sampled.weight).smooth(smoothing)


def test_every_mode_of_supervision_has_a_name():
    names = {"hard", "relabel", "token_labeling", "online_token", "distillation", "drloc", "tl_align", "transmix"}
    names |= {"feature_distillation"}
    assert set(OBJECTIVES) == names
    assert all(find_objective(name).name == name for name in OBJECTIVES)


def test_hard_labels_are_torchs_cross_entropy():
    batch, view = a_batch(), a_view()
    got = HardLabels()(view, batch)
    torch.testing.assert_close(got["class"], F.cross_entropy(view.logits, batch.labels, label_smoothing=0.1))


def test_hard_labels_are_mixed_by_area():
    mix = draw(CutMix())
    batch, view = a_batch(mix), a_view()
    y = F.one_hot(batch.labels, K) * 0.9 + 0.1 / K
    mixed = mix.ratio[:, None] * y + (1 - mix.ratio[:, None]) * y.flip(0)
    expected = -(mixed * view.logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(HardLabels()(view, batch)["class"], expected)


def test_token_labeling_is_the_papers_loss():
    batch, view = a_batch(), a_view()
    image, tokens = targets(batch)
    got = TokenLabeling()(view, batch)
    label = F.cross_entropy(view.logits, batch.labels, label_smoothing=0.1)
    torch.testing.assert_close(got["class"], label)  # y^cls of equation 3
    torch.testing.assert_close(got["token"], 0.5 * compact_cross_entropy(view.token_logits, tokens))
    machine = TokenLabeling(class_target="machine")(view, batch)["class"]
    torch.testing.assert_close(machine, compact_cross_entropy(view.logits, image))
    torch.testing.assert_close(ReLabel()(view, batch)["class"], machine)
    only = TokenLabeling(class_term=False, beta=1.0)(view, batch)
    assert set(only) == {"loss", "token"}
    torch.testing.assert_close(only["token"], got["token"] * 2)


def test_ready_made_targets_take_the_place_of_maps():
    batch, view = a_batch(), a_view()
    image, tokens = targets(batch)
    ready = replace(batch, maps=None, placement=None, token_target=tokens, class_target=image)
    objective = TokenLabeling(class_target="machine")
    for name, term in objective(view, batch).items():
        torch.testing.assert_close(objective(view, ready)[name], term)


def slow_dense(logits, soft, weight=None):
    """Σ w · -Σ_c t_c log p_c / Σ w, in float64, token by token."""
    rows = -(soft.double() * logits.double().log_softmax(-1)).sum(-1)
    weight = torch.ones_like(rows) if weight is None else weight.double()
    return ((rows * weight).sum() / weight.sum()).float()


def soft_labels(seed=5):
    return torch.randn(B, *GRID, K, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)


def test_any_dense_targets_of_any_network_are_learnt_as_by_soft_cross_entropy():
    view, soft, labels = a_view(), soft_labels(), torch.tensor([0, 3, 8, 3])
    got = TokenLabeling()(view.logits, view.token_logits, labels=labels, token_labels=soft)
    torch.testing.assert_close(got["token"], 0.5 * slow_dense(view.token_logits, soft))
    torch.testing.assert_close(got["class"], F.cross_entropy(view.logits, labels, label_smoothing=0.1))
    assert TokenLabeling()(view, labels=labels, token_labels=soft) == got
    assert TokenLabeling()(view, Batch(torch.zeros(B, 3, 8, 8), labels), token_labels=soft) == got
    alone = TokenLabeling()(view.logits, view.token_logits, token_labels=soft)
    assert set(alone) == {"loss", "token"}
    assert alone["loss"] == alone["token"] == got["token"]
    got["loss"].backward()
    assert view.token_logits.grad is not None


def test_dense_targets_are_what_the_same_targets_are_from_maps():
    batch, view = a_batch(), a_view()
    _, tokens = targets(batch)
    weightless = replace(tokens, weight=torch.ones_like(tokens.weight))
    by_maps = TokenLabeling()(view, replace(batch, token_target=weightless))
    dense = TokenLabeling()(view, labels=batch.labels, token_labels=tokens.dense())
    torch.testing.assert_close(dense, by_maps)


@pytest.mark.parametrize("mixer", [CutMix(), CutMix(mode="elem"), MixToken(mode="elem"), MixToken()])
def test_dense_targets_are_mixed_as_the_tokens_are(mixer):
    mix, view, soft, labels = draw(mixer), a_view(), soft_labels(), torch.tensor([0, 3, 8, 3])
    own = torch.ones(B, *GRID, 1) if mix.unmixes else mix.at(GRID).expand(B, *GRID)[..., None]
    got = TokenLabeling()(view.logits, view.token_logits, labels=labels, token_labels=soft, mix=mix)
    mixed = own * soft + (1 - own) * soft[mix.partner]
    torch.testing.assert_close(got["token"], 0.5 * slow_dense(view.token_logits, mixed))
    by_area = HardLabels()(view, Batch(torch.zeros(B, 3, 8, 8), labels, mix=mix))["class"]
    torch.testing.assert_close(got["class"], by_area)
    seen = TokenView(view.logits, view.grid, token_logits=view.token_logits, mix=mix)
    assert TokenLabeling()(seen, labels=labels, token_labels=soft) == got


def test_classes_of_tokens_are_smoothed_and_minus_one_is_none():
    view, classes = a_view(), torch.randint(-1, K, (B, *GRID), generator=torch.Generator().manual_seed(0))
    assert (classes == -1).any()
    got = TokenLabeling()(view.logits, view.token_logits, token_labels=classes)["token"]
    flat = view.token_logits.flatten(0, 2)
    wanted = F.cross_entropy(flat, classes.flatten(), ignore_index=-1, label_smoothing=0.1)
    torch.testing.assert_close(got, 0.5 * wanted)


def test_dense_targets_that_do_not_fit_are_named_by_both_shapes():
    view, objective = a_view(), TokenLabeling()
    for wrong in (soft_labels()[:, :3], soft_labels()[..., :5], torch.zeros(B, 2, 2, dtype=torch.long)):
        shapes = rf"{re.escape(str(list(wrong.shape)))} do not fit token logits \[4, 6, 4, 9\]"
        with pytest.raises(ValueError, match=shapes):
            objective(view.logits, view.token_logits, token_labels=wrong)
    for wrong in (-soft_labels(), soft_labels() / 0):
        with pytest.raises(ValueError, match="below 0 or not finite"):
            objective(view.logits, view.token_logits, token_labels=wrong)
    with pytest.raises(ValueError, match=r"torch.int64 \[2, 3\]"):
        CompactTarget.from_dense(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"weights \[2\] do not fit"):
        CompactTarget.from_dense(torch.rand(2, 5, 3), torch.ones(2))


def test_dense_targets_are_what_they_were():
    soft, weight = soft_labels().double(), torch.rand(B, *GRID)
    target = CompactTarget.from_dense(soft, weight)
    assert torch.equal(target.dense(), soft)
    assert target.shape == (B, *GRID)
    assert torch.equal(target.weight.float(), weight)
    assert CompactTarget.from_dense(soft.half()).mass.dtype == torch.float32


def test_only_the_tokens_with_the_surest_labels_count():
    view, soft = a_view(), soft_labels()
    got = TokenLabeling(select=0.25)(view.logits, view.token_logits, token_labels=soft)["token"]
    surest = soft.amax(-1).flatten(1)
    kept = (surest >= surest.sort(1, descending=True).values[:, 5:6]).view(B, *GRID)  # 6 of 24 tokens
    assert (kept.flatten(1).sum(1) == 6).all()
    torch.testing.assert_close(got, 0.5 * slow_dense(view.token_logits, soft, kept.float()))
    mix = draw(CutMix(mode="elem"))  # selected where the labels are, then mixed
    got = TokenLabeling(select=0.25)(view.logits, view.token_logits, token_labels=soft, mix=mix)["token"]
    own = mix.at(GRID).expand(B, *GRID)
    parts = own * kept, (1 - own) * kept[mix.partner]
    rows = [-(s * view.token_logits.log_softmax(-1)).sum(-1) for s in (soft, soft[mix.partner])]
    wanted = sum((p * r).sum() for p, r in zip(parts, rows, strict=True)) / sum(p.sum() for p in parts)
    torch.testing.assert_close(got, 0.5 * wanted)
    with pytest.raises(EverytokenError, match=r"in \(0, 1\], got 0"):
        TokenLabeling(select=0)(view.logits, view.token_logits, token_labels=soft)


def test_tokens_without_a_label_are_selected_last():
    soft = torch.eye(K)[torch.zeros(2, 2, 2, dtype=torch.long)] * 0.5 + 0.5 / K
    weight = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]] * 2)
    soft[:, 1, 0] = 1 / K
    chosen = CompactTarget.from_dense(soft, weight).most_confident(0.25)
    assert chosen.flatten(1).tolist() == [[0, 0, 1, 0]] * 2


@pytest.mark.parametrize("mixer", [CutMix(), CutMix(mode="elem"), MixToken(mode="elem"), MixToken()])
def test_token_targets_are_mixed_where_outputs_stay_mixed_and_the_class_target_always(mixer):
    mix = draw(mixer)
    assert mix.unmixes == (mixer == MixToken())
    batch, view = a_batch(mix), a_view()
    image, tokens = targets(batch)
    got = TokenLabeling(class_target="machine")(view, batch)
    own = torch.ones(B, *GRID) if mix.unmixes else mix.at(GRID).expand(B, *GRID)
    expected = compact_cross_entropy(view.token_logits, blend(tokens, own, tokens[mix.partner], 1 - own))
    torch.testing.assert_close(got["token"], 0.5 * expected)
    torch.testing.assert_close(got["class"], compact_cross_entropy(view.logits, mix_image_target(image, mix)))
    assert mix.unmixes or (own < 1).any()


def test_the_truth_can_be_blended_into_the_class_target():
    batch, view = a_batch(), a_view()
    image, _ = targets(batch)
    for rho in (None, 0.3):
        expected = compact_cross_entropy(view.logits, mix_with_truth(image, batch.labels, rho, 0.1))
        got = TokenLabeling(class_target="both", rho=rho)(view, batch)["class"]
        torch.testing.assert_close(got, expected)


def test_the_token_head_may_speak_other_classes_than_the_class_head():
    batch, view = a_batch(), a_view(classes=9, token_classes=K)
    view.logits = torch.randn(B, 20)  # the data set has 20 classes, the annotator 9
    got = TokenLabeling(class_target="truth")(view, batch)
    torch.testing.assert_close(got["class"], F.cross_entropy(view.logits, batch.labels, label_smoothing=0.1))
    with pytest.raises(EverytokenError, match=r"20 outputs.* 9 classes.*class_target='truth'"):
        TokenLabeling(class_target="machine")(view, batch)
    with pytest.raises(EverytokenError, match="class_map"):
        ReLabel()(view, batch)


def test_a_class_map_lets_an_annotator_label_images_in_the_data_sets_classes():
    batch, view = a_batch(), a_view()
    view.logits = torch.randn(B, 3)
    table = [0, 0, 0, 1, 1, 1, -1, -1, -1]  # class 2 of the data set is unknown to the annotator
    got = ReLabel(class_map=table, smoothing=0)(view, batch)["class"]
    sampled = sample_maps(batch.maps, batch.placement, GRID)
    dense = torch.zeros(B, 3)
    for b in range(B):
        for group in range(2):
            dense[b, group] = max(
                s.item()
                for s, c in zip(sampled.image[b], batch.maps.classes[b].tolist(), strict=True)
                if c >= 0 and table[c] == group
            )
    expected = -(dense.softmax(-1) * view.logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(got, expected)
    with pytest.raises(EverytokenError, match="2 entries"):
        ReLabel(class_map=[0, 1])(view, batch)


def test_a_token_head_of_another_size_than_the_maps_is_refused():
    with pytest.raises(EverytokenError, match="token_classes=9"):
        TokenLabeling()(a_view(token_classes=5), a_batch())
    with pytest.raises(EverytokenError, match="needs a token head"):
        TokenLabeling()(a_view(token_classes=0), a_batch())
    with pytest.raises(EverytokenError, match="needs score maps"):
        TokenLabeling()(a_view(), replace(a_batch(), maps=None))


def test_participation_is_keyed_by_seed_and_step():
    batch, view = a_batch(), a_view()
    half = TokenLabeling(participation=0.5)
    one = half(view, replace(batch, key=StepKey(seed=1, step=5)))["token"]
    torch.testing.assert_close(one, half(view, replace(batch, key=StepKey(seed=1, step=5)))["token"])
    assert one != half(view, replace(batch, key=StepKey(seed=1, step=6)))["token"]
    mask = participating(
        torch.Size((B, *GRID)), 0.5, StepKey(seed=1, step=5).torch_generator("participation", "cpu"), "cpu"
    )
    _, tokens = targets(batch)
    expected = compact_cross_entropy(view.token_logits, tokens, weight=tokens.weight * mask)
    torch.testing.assert_close(one, 0.5 * expected)


def test_the_released_setting_blends_all_tokens_under_cutmix_with_one_ratio():
    batch, view = a_batch(draw(CutMix())), a_view()
    plain = TokenLabeling(released=True)(view, replace(batch, mix=None))["token"]
    swapped = replace(batch, mix=None, maps=batch.maps.apply(lambda t: t.flip(0)), placement=batch.placement.flip(0))
    other = TokenLabeling(released=True)(view, swapped)["token"]
    ratio = batch.mix.ratio[0]
    got = TokenLabeling(released=True)(view, batch)["token"]
    torch.testing.assert_close(got, ratio * plain + (1 - ratio) * other)


def test_the_released_setting_changes_both_crop_and_smoothing():
    batch, view = a_batch(), a_view()
    maps = batch.maps
    sampled = sample_maps(maps, batch.placement, GRID, released=True)
    tokens = from_scores(sampled.tokens, maps.classes, K).smooth(0.1, released=True)
    got = TokenLabeling(released=True)(view, batch.plan(GRID))["token"]
    torch.testing.assert_close(got, compact_cross_entropy(view.token_logits, tokens))


def a_teacher(seed=5, grid=GRID):
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(logits=torch.randn(B, K, generator=g), token_logits=torch.randn(B, *grid, K, generator=g))


def soft(student, teacher):
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)


def test_online_tokens_follow_the_teachers_tokens():
    batch, view, teacher = a_batch(), a_view(), a_teacher()
    got = OnlineTokenLabeling()(view, replace(batch, teacher=teacher))
    torch.testing.assert_close(got["token"], 0.5 * soft(view.token_logits, teacher.token_logits).mean())
    torch.testing.assert_close(got["class"], HardLabels()(view, batch)["class"])  # y^cls of equation 3
    machine = OnlineTokenLabeling(class_target="teacher")(view, replace(batch, teacher=teacher))
    torch.testing.assert_close(machine["class"], soft(view.logits, teacher.logits).mean())
    assert set(OnlineTokenLabeling(class_target="none")(view, replace(batch, teacher=teacher))) == {"loss", "token"}


def test_a_teacher_on_another_grid_is_resampled():
    batch, view, fine = a_batch(), a_view(), a_teacher(grid=(12, 8))
    got = OnlineTokenLabeling()(view, replace(batch, teacher=fine))
    label = fine.token_logits.view(B, 6, 2, 4, 2, K).mean((2, 4))
    torch.testing.assert_close(got["token"], 0.5 * soft(view.token_logits, label).mean())
    coarse = a_teacher(grid=(1, 1))
    got = OnlineTokenLabeling()(view, replace(batch, teacher=coarse))
    expected = soft(view.token_logits, coarse.token_logits.expand(B, *GRID, K))
    torch.testing.assert_close(got["token"], 0.5 * expected.mean())


def test_a_teacher_that_saw_clean_images_answers_for_both_partners():
    mix, teacher, view = draw(MixToken(mode="elem")), a_teacher(), a_view()
    batch = a_batch(mix)
    got = OnlineTokenLabeling(class_target="teacher")(view, replace(batch, teacher=teacher))
    shown = apply_to_tokens(teacher.token_logits, mix)
    torch.testing.assert_close(got["token"], 0.5 * soft(view.token_logits, shown).mean())
    p, r = teacher.logits.softmax(-1), mix.ratio[:, None]
    mixed = r * p + (1 - r) * p.flip(0)
    torch.testing.assert_close(got["class"], -(mixed * view.logits.log_softmax(-1)).sum(-1).mean())
    # un-mixed tokens, and pixels that the teacher saw mixed, meet the teacher's answer as it is
    for kind in (MixToken(), CutMix()):
        got = OnlineTokenLabeling()(view, replace(a_batch(draw(kind)), teacher=teacher))
        torch.testing.assert_close(got["token"], 0.5 * soft(view.token_logits, teacher.token_logits).mean())


def test_distillation_goes_through_the_token_that_is_named():
    batch, view = replace(a_batch(), teacher=a_teacher()), a_view(distill=True)
    best = batch.teacher.logits.argmax(-1)
    hard = Distillation(kind="hard")(view, batch)["class"]
    torch.testing.assert_close(hard, F.cross_entropy(view.logits, best))
    other = Distillation(kind="hard", through="distillation")(view, batch)["class"]
    torch.testing.assert_close(other, F.cross_entropy(view.distill_logits, best))
    soft_one = Distillation(kind="soft")(view, batch)["class"]
    expected = F.kl_div(
        (view.logits / 3).log_softmax(-1), (batch.teacher.logits / 3).softmax(-1), reduction="batchmean"
    )
    torch.testing.assert_close(soft_one, expected * 9)
    with pytest.raises(EverytokenError, match="distillation token"):
        Distillation(through="distillation")(a_view(), batch)
    with pytest.raises(EverytokenError, match="needs a teacher"):
        Distillation()(view, replace(batch, teacher=None))


def test_hard_distillation_of_mixed_tokens_counts_both_partners():
    mix = draw(MixToken())
    batch, view = replace(a_batch(mix), teacher=a_teacher()), a_view()
    best = batch.teacher.logits.argmax(-1)
    rows = [F.cross_entropy(view.logits, y, reduction="none") for y in (best, best.flip(0))]
    expected = (mix.ratio * rows[0] + (1 - mix.ratio) * rows[1]).mean()
    torch.testing.assert_close(Distillation()(view, batch)["class"], expected)


def test_the_loss_is_the_weighted_sum_of_the_terms():
    batch, view = a_batch(), a_view()
    result = TokenLabeling(weight=2.0)(view, batch)
    torch.testing.assert_close(result["loss"], 2 * (result["class"] + result["token"]))
    result["loss"].backward()
    assert view.token_logits.grad.abs().sum() > 0


def test_objectives_say_what_they_need():
    assert HardLabels().requires == {"labels"}
    assert ReLabel().requires == {"maps"}
    assert TokenLabeling(class_target="machine").requires == {"maps", "token_logits"}
    assert TokenLabeling().requires == {"maps", "token_logits", "labels"}
    assert TokenLabeling(class_target="truth", class_term=False).requires == {"maps", "token_logits"}
    assert OnlineTokenLabeling().requires == {"teacher", "token_logits", "labels"}
    assert OnlineTokenLabeling(class_target="teacher").requires == {"teacher", "token_logits"}
    assert Distillation(through="distillation").requires == {"teacher", "distill_logits"}


def test_a_planned_batch_moves_as_a_whole_and_gives_the_same_loss():
    batch, view = a_batch(draw(CutMix())), a_view()
    planned = batch.plan(GRID)
    assert planned.sampling is not None
    for name, term in TokenLabeling()(view, batch).items():
        torch.testing.assert_close(TokenLabeling()(view, planned)[name], term)
    moved = planned.to("meta")
    assert moved.images.device.type == moved.maps.scores.device.type == moved.mix.mask.device.type == "meta"
    assert moved.sampling == planned.sampling
    assert len(moved) == B


def test_wrong_settings_are_named():
    with pytest.raises(EverytokenError, match="class_target"):
        TokenLabeling(class_target="mine")
    with pytest.raises(EverytokenError, match=r"kind is 'medium'.*'soft', 'hard'"):
        Distillation(kind="medium")
    with pytest.raises(EverytokenError, match="through is 'patches'"):
        Distillation(through="patches")
    with pytest.raises(EverytokenError, match="needs class labels"):
        HardLabels()(a_view(), replace(a_batch(), labels=None))


def test_the_class_target_of_the_maps_is_not_made_a_second_time(monkeypatch):
    monkeypatch.setattr("everytoken.objectives.token_labeling.from_scores", None)  # calling it would fail
    TokenLabeling()(a_view(), a_batch())
