"""Attacks on models whose answer is known, and what must hold for every model."""

import pytest
import torch
from torch import nn

from everytoken_lab.robust import attacks
from everytoken_lab.robust.attacks import AttackBatch, boundary, checkpoints, distance, dlr, reach_plane, rivals

SMALL = {"steps": 25, "queries": 300, "targets": 3}
TINY = {"steps": 8, "queries": 30, "targets": 2}


def attack(model, images, labels, keys, parts, eps):
    return attacks.run(AttackBatch(model, images, labels, keys, eps), parts)


def linear(classes=4, side=4, seed=0, scale=1.0):
    """A linear classifier whose images lie well inside 0..1, so that the box does not matter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, classes)).requires_grad_(False)
    images = 0.35 + 0.3 * torch.rand(12, 3, side, side)
    model[1].weight.mul_(scale)
    model[1].bias.copy_(-(images.flatten(1) @ model[1].weight.T).mean(0))  # all classes occur
    return model, images, model(images).argmax(1), [str(i) for i in range(12)]


def exact_distance(model, images, labels):
    """To the nearest boundary: the smallest over classes of gap / L1 norm of the difference of weights."""
    z, w = model(images), model[1].weight
    far = torch.full((len(images),), torch.inf)
    for i, y in enumerate(labels.tolist()):
        for c in range(w.shape[0]):
            if c != y:
                d = w[y] - w[c]
                far[i] = min(far[i], float((z[i, y] - z[i, c]) / d.abs().sum()))
    return far


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, 5)).requires_grad_(False)
    images = torch.rand(10, 3, 6, 6)
    return model, images, model(images).argmax(1), [f"image-{i}" for i in range(10)]


def test_fab_finds_the_exact_distance_of_a_linear_model():
    model, images, labels, _ = linear()
    batch = AttackBatch(model, images, labels, [""] * len(images), 0.0)  # no change is small enough to stop
    far = torch.stack([boundary(batch, target, steps=60)[1] for target in rivals(batch, 3).unbind(1)]).amin(0)
    exact = exact_distance(model, images, labels)
    assert far == pytest.approx(exact, rel=0.01)  # it overshoots a little, on purpose
    assert (far >= exact * (1 - 1e-4)).all()


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t", "autoattack"])
def test_a_linear_model_breaks_exactly_beyond_its_distance(name):
    model, images, labels, keys = linear(classes=2 if name == "apgd-ce" else 4)
    far = exact_distance(model, images, labels)
    for eps in far.sort().values[[3, 8]].tolist():
        eps *= 1.02
        out = attack(model, images, labels, keys, attacks.chosen(name, **SMALL), eps)
        broken = torch.tensor([by != "" for by in out.by])
        assert not broken[far > eps].any()  # impossible
        assert broken[far < eps * 0.97].all()


def test_square_breaks_a_linear_model_with_ample_eps():
    model, images, labels, keys = linear(classes=2)
    eps = 2 * float(exact_distance(model, images, labels).max())
    out = attack(model, images, labels, keys, attacks.chosen("square", **SMALL), eps)
    assert sum(by == "square" for by in out.by) >= 9


def test_accuracy_never_rises_with_eps_and_the_ensemble_is_at_least_as_strong(network):
    model, images, labels, keys = (part if isinstance(part, nn.Module) else part[:5] for part in network)
    unit = 0.004
    last = set()
    for eps in (unit, 8 * unit):
        broken = {}
        for name in ("autoattack", *attacks.chosen("autoattack")):
            out = attack(model, images, labels, keys, attacks.chosen(name, **TINY), eps)
            broken[name] = {i for i, by in enumerate(out.by) if by}
            assert float(out.distance.max()) <= eps * (1 + 1e-4)
            assert out.images.min() >= 0
            assert out.images.max() <= 1
            wrong = model(out.images).argmax(1) != labels
            assert wrong.tolist() == [bool(by) for by in out.by]
        assert all(alone <= broken["autoattack"] for alone in broken.values())
        assert last <= broken["autoattack"]
        last = broken["autoattack"]
    assert last


def test_what_happens_to_an_image_does_not_depend_on_its_batch(network):
    model, images, labels, keys = (m.double() if isinstance(m, torch.Tensor) and m.is_floating_point() else m
                                   for m in network)  # fmt: skip
    model = model.double()
    parts = attacks.chosen("autoattack", **SMALL)
    whole = attack(model, images, labels, keys, parts, 0.02)
    pick = torch.tensor([7, 2, 5])
    some = attack(model, images[pick], labels[pick], [keys[i] for i in pick], parts, 0.02)
    model.float()
    assert [whole.by[i] for i in pick] == some.by
    assert whole.images[pick] == pytest.approx(some.images, abs=1e-6)


def test_the_projection_to_a_plane_in_the_box_is_the_smallest_change():
    torch.manual_seed(3)
    points, normal = torch.rand(200, 6).double(), torch.randn(200, 6).double()
    normal[:50, 0] = 0
    excess = torch.randn(200).double() * 2
    change = reach_plane(points, normal, excess)
    moved = points + change
    assert moved.min() >= -1e-9
    assert moved.max() <= 1 + 1e-9
    room = (normal * excess.sign()[:, None]).clamp(min=0) * points - (normal * excess.sign()[:, None]).clamp(max=0) * (
        1 - points
    )
    possible = room.sum(1) >= excess.abs()
    assert 40 < int(possible.sum()) < 200
    fallen = -(normal * change).sum(1)
    assert fallen[possible] == pytest.approx(excess[possible], abs=1e-9)
    assert fallen[~possible].abs() == pytest.approx(room.sum(1)[~possible], abs=1e-9)  # as far as the box lets
    # no smaller change does it
    for i in torch.nonzero(possible)[:8, 0].tolist():
        size = float(distance(change[i].view(1, 1, 1, -1))) * 0.98
        sign = float(excess[i].sign())
        best = (points[i] - size * (normal[i] * sign).sign()).clamp(0, 1)
        assert -sign * float(normal[i] @ (best - points[i])) < abs(float(excess[i])) + 1e-6


def test_the_ratio_loss_ignores_shift_and_scale_and_is_positive_when_the_target_wins():
    torch.manual_seed(0)
    z, y = torch.randn(20, 6).double(), torch.randint(0, 6, (20,))
    t = (y + torch.randint(1, 6, (20,))) % 6
    assert dlr(3 * z + 7, y, t) == pytest.approx(dlr(z, y, t))
    rows = torch.arange(20)
    assert ((dlr(z, y, t) > 0) == (z[rows, t] > z[rows, y])).all()
    z1 = torch.tensor([[4.0, 3.0, 1.0, 0.0, -2.0]])
    assert float(dlr(z1, torch.tensor([0]), torch.tensor([2]))) == pytest.approx(-3 / 3.5)


def test_schedules_are_the_papers():
    assert sorted(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    queries = (0, 10, 11, 51, 201, 501, 4001)
    assert [attacks.area(q, 5000) for q in queries] == [0.8 / 2**k for k in (0, 0, 1, 2, 3, 4, 7)]


def test_square_gets_through_where_gradients_are_hidden():
    def stepped(x):
        flat = torch.round(x.flatten(1) * 255) / 255  # the gradient of rounding is zero
        return torch.stack([flat.mean(1), 1 - flat.mean(1)], 1) * 10

    images, labels = 0.5 + 0.02 * torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    for name, by in (("apgd-ce", ""), ("autoattack", "square")):
        assert set(attack(stepped, images, labels, list("abcd"), attacks.chosen(name, **SMALL), 0.05).by) == {by}
