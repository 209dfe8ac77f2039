"""Relevance of a model that was trained to find something lies on what it finds."""

import pytest
import torch

from everytoken.explanation import (
    area_under,
    deletion_curve,
    insertion_curve,
    mass_inside,
    points_inside,
    relevance,
)

from .conftest import planted, tiny_vit, train


@pytest.fixture(scope="module")
def shown():
    return planted(24, seed=1000)


def test_the_model_has_learnt_to_find_both_squares(finder, shown):
    images, labels, _ = shown
    with torch.no_grad():
        found = finder(images).topk(2)[1]
    assert (found.sort(1)[0] == labels.sort(1)[0]).float().mean() > 0.9


def test_relevance_of_each_class_lies_on_its_own_square(finder, shown):
    images, labels, mask = shown
    assert mask.mean() == 4 / 64
    maps = relevance(finder, images, labels, "attention")
    for this, other in ((0, 1), (1, 0)):
        on_it = mass_inside(maps[:, this], mask[:, this]).mean()
        assert on_it > 0.4
        assert on_it > 4 * mass_inside(maps[:, this], mask[:, other]).mean()
        assert points_inside(maps[:, this], mask[:, this]).float().mean() > 0.7


def test_grad_cam_of_a_pooled_vit_lies_on_the_square_of_the_class(shown):
    torch.manual_seed(0)
    pooled = train(tiny_vit(depth=2, global_pool="avg", class_token=False), 60)
    images, labels, mask = shown
    maps = relevance(pooled, images, labels)  # what "auto" takes
    assert torch.equal(maps, relevance(pooled, images, labels, "cam"))
    assert mass_inside(maps[:, 0], mask[:, 0]).mean() > 0.6
    assert mass_inside(maps[:, 0], mask[:, 1]).mean() < 0.06
    assert points_inside(maps[:, 0], mask[:, 0]).float().mean() > 0.9


def test_rollout_does_not_know_of_classes(finder, shown):
    images, labels, mask = shown
    maps = relevance(finder, images, labels, "rollout")
    assert torch.equal(maps[:, 0], maps[:, 1])
    assert mass_inside(maps[:, 0], mask.sum(1)).mean() > 1.5 * 8 / 64  # but it looks at squares


def test_deletion_and_insertion_by_relevance_beat_a_random_order(finder, shown):
    images, labels, _ = shown
    maps = relevance(finder, images, labels, "attention")[:, 0]
    chance = torch.rand(maps.shape, generator=torch.Generator().manual_seed(0))
    for curve, better in ((deletion_curve, -1), (insertion_curve, 1)):
        by_relevance = area_under(curve(finder, images, labels[:, 0], maps)).mean()
        by_chance = area_under(curve(finder, images, labels[:, 0], chance)).mean()
        assert better * (by_relevance - by_chance) > 0.1


def test_a_curve_begins_and_ends_with_the_whole_and_the_empty_image(finder, shown):
    images, labels, mask = shown[0], shown[1][:, 0], shown[2][:, 0]
    with torch.no_grad():
        whole = finder(images).softmax(1).gather(1, labels[:, None])[:, 0]
        empty = finder(torch.zeros_like(images)).softmax(1).gather(1, labels[:, None])[:, 0]
    blank = torch.zeros(1, 3, 1, 1)
    deleted = deletion_curve(finder, images, labels, mask, steps=4, blank=blank)
    inserted = insertion_curve(finder, images, labels, mask, steps=4, blank=blank)
    assert deleted.shape == (24, 5)
    for curve, first, last in ((deleted, whole, empty), (inserted, empty, whole)):
        torch.testing.assert_close(curve[:, 0], first)
        torch.testing.assert_close(curve[:, -1], last)


def test_deletion_takes_the_most_relevant_cells_first(finder, shown):
    images, labels, mask = shown[0], shown[1][:, 0], shown[2][:, 0]
    without = images * (1 - mask.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None])
    with torch.no_grad():
        expected = finder(without).softmax(1).gather(1, labels[:, None])[:, 0]
    curve = deletion_curve(finder, images, labels, mask, steps=16, blank=torch.zeros(1, 3, 1, 1))
    torch.testing.assert_close(curve[:, 1], expected)  # 1 of 16 steps: the 4 cells of the square


def test_the_area_under_a_line_is_its_mean():
    assert area_under(torch.tensor([0.0, 0.5, 1.0])) == 0.5
    assert area_under(torch.tensor([1.0, 0.0, 0.0])) == 0.25
