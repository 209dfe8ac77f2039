"""Relevance of a model that was trained to find something lies on what it finds."""

import pytest
import torch

from everytoken_lab.explanation.saliency import relevance

from .conftest import planted, tiny_vit, train


def mass_inside(maps, mask):
    return (maps * mask).sum((1, 2)) / maps.sum((1, 2))


def points_inside(maps, mask):
    best = maps.flatten(1).argmax(1, keepdim=True)
    return mask.flatten(1).gather(1, best)[:, 0] > 0


@pytest.fixture(scope="module")
def shown():
    return planted(24, seed=1000)


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
