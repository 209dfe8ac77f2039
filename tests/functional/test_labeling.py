import numpy as np
import pytest
import torch

from everytoken.functional import collate_maps, from_scores, label_tokens, plan_sampling, sample_maps, sampling
from tests.functional import make


def some(n=6, seed=0):
    maps = make.maps(np.random.default_rng(seed), n=n)
    kinds = [
        make.crop(0.1, 0, 0.8, 0.9),
        make.about_centre(make.rotation(25)),
        make.crop(-0.2, 0.1, 0.7, 1.0, hflip=True),
    ]
    return maps, make.batch([kinds[i % 3] for i in range(n)])


def equal(a, b):
    torch.testing.assert_close(a.dense(), b.dense(), rtol=0, atol=1e-6)
    torch.testing.assert_close(a.weight, b.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 700, 10**9])
@pytest.mark.parametrize("how", [{}, {"smoothing": 0.1}, {"temperature": 2.0}, {"top_k": 3, "smoothing": 0.2}])
def test_one_call_equals_sampling_then_softmax_then_smoothing(monkeypatch, chunk, how):
    maps, placement = some()
    sampled = sample_maps(maps, placement, (3, 4))
    monkeypatch.setattr(sampling, "CPU_CHUNK", chunk)
    got = label_tokens(maps, placement, (3, 4), **how)
    rest = {name: value for name, value in how.items() if name != "smoothing"}
    equal(
        got.tokens,
        from_scores(sampled.tokens, maps.classes, 20, sampled.weight, **rest).smooth(how.get("smoothing", 0)),
    )
    equal(
        got.image,
        from_scores(sampled.image, maps.classes, 20, sampled.image_weight, **rest).smooth(how.get("smoothing", 0)),
    )
    torch.testing.assert_close(got.image_logits, sampled.image)


def test_one_call_in_the_released_way():
    maps = make.maps(np.random.default_rng(1), n=2, h=6, w=6)
    placement = make.batch([make.crop(0.1, 0.3, 0.5, 1.0)] * 2)
    sampled = sample_maps(maps, placement, (3, 3), released=True)
    got = label_tokens(maps, placement, (3, 3), smoothing=0.1, released=True)
    equal(got.tokens, from_scores(sampled.tokens, maps.classes, 20).smooth(0.1, released=True))
    equal(got.image, from_scores(sampled.image, maps.classes, 20).smooth(0.1, released=True))


def test_maps_that_name_every_class_and_maps_that_are_missing():
    rng = np.random.default_rng(2)
    records = [make.record(rng, num_classes=5, words=5), None, make.record(rng, num_classes=5, words=4)]
    maps = collate_maps(records, 5)
    for turn in (0, 20):
        placement = make.batch([make.about_centre(make.rotation(turn))] * 3)
        sampled = sample_maps(maps, placement, (3, 4))
        got = label_tokens(maps, placement, (3, 4), smoothing=0.1)
        equal(got.tokens, from_scores(sampled.tokens, maps.classes, 5, sampled.weight).smooth(0.1))
        equal(got.image, from_scores(sampled.image, maps.classes, 5, sampled.image_weight).smooth(0.1))
        assert (got.tokens.weight[1] == 0).all()


def test_scores_beyond_what_exp_can_hold_stay_finite():
    classes, scores = np.arange(36).reshape(6, 6, 1), np.full((6, 6, 1), 200.0, np.float32)
    maps = collate_maps([make.plain(scores, classes)], 40)
    got = label_tokens(maps, make.batch([make.crop(0.0, 0.0, 0.3, 0.3)]), (2, 2))
    assert got.tokens.top_class()[0, 0, 0] == 0
    assert got.tokens.mass.isfinite().all()


def test_labeling_leaves_the_maps_alone_and_compiles():
    maps, placement = some(n=3)
    before = [t.clone() for t in (maps.scores, maps.local, maps.classes, placement)]
    first = label_tokens(maps, placement, (3, 4), smoothing=0.1)
    plan = plan_sampling(placement, maps.area, maps.size, (3, 4))
    compiled = torch.compile(
        lambda m, p: label_tokens(m, p, (3, 4), plan, smoothing=0.1).tokens, fullgraph=True, backend="aot_eager"
    )
    equal(first.tokens, compiled(maps, placement))
    for old, now in zip(before, (maps.scores, maps.local, maps.classes, placement), strict=True):
        assert torch.equal(old, now)


def test_labels_stay_in_single_precision_under_autocast():
    maps, placement = some()
    expected = label_tokens(maps, placement, (3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = label_tokens(maps, placement, (3, 4))
        best = got.tokens.top_class()
    torch.testing.assert_close(got.image_logits, expected.image_logits, rtol=0, atol=1e-6)
    equal(got.tokens, expected.tokens)
    assert torch.equal(best, expected.tokens.top_class())


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="the batch is empty"):
        label_tokens(collate_maps([], 20), torch.zeros(0, 2, 3), (3, 4))
    with pytest.raises(ValueError, match="the batch is empty"):
        sample_maps(collate_maps([], 20), torch.zeros(0, 2, 3), (3, 4))
