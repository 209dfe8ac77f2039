import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import roi_align

from everytoken.functional import SampledMaps, collate_maps, plan_sampling, sample_maps, spread
from tests.functional import make

fractions = st.floats(0.02, 0.98)


def roi_crop(maps, boxes, grid):
    """torchvision's RoIAlign of the spread maps, in double precision; boxes [B, 4] fractions of the image."""
    dense = spread(maps).permute(0, 3, 1, 2).double()
    h, w = maps.size
    scale = torch.tensor([w, h, w, h])
    rois = torch.cat([torch.arange(len(boxes))[:, None], boxes * scale], dim=1).double()
    return roi_align(dense, rois, grid, 1.0, -1, aligned=True).permute(0, 2, 3, 1).float()


def same(a: SampledMaps, b: SampledMaps, tolerance=1e-5):
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7), st.integers(1, 7))
def test_a_crop_equals_torchvisions_roi_align(seed, h, w, rows, columns):
    rng = np.random.default_rng(seed)
    B = int(rng.integers(1, 4))
    corners = np.sort(rng.random((B, 2, 2)), axis=1)  # [B, (low, high), (x, y)]
    boxes = torch.tensor(corners.reshape(B, 4), dtype=torch.float32)
    scores = torch.tensor(rng.normal(0, 3, (B, h, w, 2)), dtype=torch.float32)
    maps = collate_maps(
        [make.plain(s.numpy(), np.broadcast_to(np.arange(2), (h, w, 2))) for s in scores], num_classes=2
    )
    placement = make.crops(boxes)
    got = sample_maps(maps, placement, (rows, columns))
    # float32 placements hold the box's width, not its far edge: compare with the box they really say
    said = torch.cat(
        [placement[:, :, 2], placement[:, :, 2].double() + placement.diagonal(dim1=1, dim2=2).double()], dim=1
    )
    torch.testing.assert_close(got.tokens, roi_crop(maps, said, (rows, columns)), rtol=0, atol=1e-5)
    torch.testing.assert_close(got.image, roi_crop(maps, said, (1, 1))[:, 0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(got.weight, torch.ones(B, rows, columns), rtol=0, atol=1e-5)
    torch.testing.assert_close(got.image_weight, torch.ones(B), rtol=0, atol=1e-5)


def chain(draw_numbers):
    """A chain of crop, flip, rotate, shear, translate on an image of some aspect ratio."""
    x, y, size, angle, shear, move, aspect, flips = draw_numbers
    placement = make.crop(x * (1 - size), y * (1 - size), x * (1 - size) + size, y * (1 - size) + size, *flips)
    for step in (
        make.about_centre(make.rotation(angle), aspect),
        make.about_centre([[1, shear], [0, 1]], aspect),
        np.array([[1, 0, move], [0, 1, -move / 2]]),
    ):
        placement = make.then(placement, step)
    return placement


chains = st.tuples(
    fractions,
    fractions,
    st.floats(0.1, 1),
    st.sampled_from([0.0, 90.0]) | st.floats(-60, 60),
    st.just(0.0) | st.floats(-0.5, 0.5),
    st.just(0.0) | st.floats(-0.4, 0.4),
    st.floats(0.4, 2.5),
    st.tuples(st.booleans(), st.booleans()),
)


def coordinate_map(h, w, area):
    """A map whose class 0 scores the x and whose class 1 scores the y of each cell's centre, in image fractions."""
    x = area[0] + (np.arange(w) + 0.5) / w * (area[2] - area[0])
    y = area[1] + (np.arange(h) + 0.5) / h * (area[3] - area[1])
    scores = np.stack(np.broadcast_arrays(x[None, :], y[:, None]), axis=-1).astype(np.float32)
    return make.plain(scores, np.broadcast_to(np.arange(2), (h, w, 2)), area)


areas = st.sampled_from([(0.0, 0.0, 1.0, 1.0), (0.2, 0.0, 0.8, 1.0), (-0.25, 0.0, 1.25, 1.0)])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(chains, areas, st.integers(2, 12), st.integers(2, 12), st.integers(1, 8), st.integers(1, 8))
def test_a_map_of_its_own_coordinates_comes_back_as_the_tokens_centres(numbers, area, h, w, rows, columns):
    placement = chain(numbers)
    got = sample_maps(collate_maps([coordinate_map(h, w, area)], 2), make.batch([placement]), (rows, columns))
    centre = np.stack(np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows), axis=-1)
    truth = centre @ placement[:, :2].T + placement[:, 2]
    # a token counts when its four corners lie among cell centres: no border is involved
    reach = np.abs(placement[:, :2] / [columns, rows]).sum(1) / 2
    half = np.array([(area[2] - area[0]) / w, (area[3] - area[1]) / h]) / 2
    low = np.maximum(np.array(area[:2]) + half, 0) + reach
    high = np.minimum(np.array(area[2:]) - half, 1) - reach
    inner = ((truth >= low) & (truth <= high)).all(-1)
    found = got.tokens[0, :, :, :2].numpy()
    assert np.abs(found - truth)[inner].max(initial=0) < 1e-3
    assert (got.weight[0].numpy()[inner] > 1 - 1e-4).all()
    # a token wholly beyond the edge has no label
    beyond = (truth < np.maximum(area[:2], 0) - reach - 1e-6) | (truth > np.minimum(area[2:], 1) + reach + 1e-6)
    assert (got.weight[0].numpy()[beyond.any(-1)] == 0).all()


def slowly(scores, placement, grid, area=(0.0, 0.0, 1.0, 1.0)):
    """Averages of bilinear samples through any affine, one number at a time. scores [h, w] -> [H, W]."""
    h, w = scores.shape
    H, W = grid
    scale = np.array([w / (area[2] - area[0]), h / (area[3] - area[1])])
    sides = np.linalg.norm(placement[:, :2] * scale[:, None], axis=0)
    nx, ny = max(1, math.ceil(sides[0] / W - 1e-5)), max(1, math.ceil(sides[1] / H - 1e-5))
    out = np.zeros(grid)
    for r in range(H):
        for c in range(W):
            values = []
            for j in range(ny):
                for i in range(nx):
                    p = placement @ [(c + (i + 0.5) / nx) / W, (r + (j + 0.5) / ny) / H, 1]
                    if (p < np.maximum(area[:2], 0)).any() or (p > np.minimum(area[2:], 1)).any():
                        continue
                    x, y = np.clip((p - area[:2]) * scale - 0.5, 0, [w - 1, h - 1])
                    x0, y0 = int(x), int(y)
                    x1, y1 = min(x0 + 1, w - 1), min(y0 + 1, h - 1)
                    top = scores[y0, x0] * (1 - x + x0) + scores[y0, x1] * (x - x0)
                    low = scores[y1, x0] * (1 - x + x0) + scores[y1, x1] * (x - x0)
                    values.append(top * (1 - y + y0) + low * (y - y0))
            out[r, c] = np.mean(values) if values else np.nan
    return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    chains, st.floats(5, 60) | st.floats(-60, -5), areas, st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 8)
)
def test_any_affine_equals_sampling_one_point_at_a_time(numbers, angle, area, seed, h, w):
    rng = np.random.default_rng(seed)
    placement = chain((*numbers[:3], angle, *numbers[4:])).astype(np.float32).astype(np.float64)
    scores = rng.normal(size=(h, w, 1)).astype(np.float32)
    maps = collate_maps([make.plain(scores, np.zeros((h, w, 1), np.int64), area)], 1)
    for grid, got in zip(((3, 4), (1, 1)), sampled_one_class(maps, make.batch([placement]), (3, 4)), strict=True):
        expected = slowly(scores[:, :, 0], placement, grid, np.float32(area).astype(np.float64))
        there = ~np.isnan(expected)
        np.testing.assert_allclose(got[there], expected[there], atol=1e-4)


def sampled_one_class(maps, placement, grid):
    got = sample_maps(maps, placement, grid)
    return got.tokens[0, :, :, 0].numpy(), got.image[:, :1].numpy()


def test_a_token_on_the_edge_weighs_its_labelled_part():
    maps = collate_maps([make.plain(np.full((4, 4, 1), 5.0, np.float32), np.zeros((4, 4, 1), np.int64))], 1)
    got = sample_maps(maps, make.batch([make.crop(-0.3, -0.1, 0.7, 0.9)]), (1, 2))
    torch.testing.assert_close(got.weight, torch.tensor([[[0.2 / 0.5 * 0.9, 0.9]]]))
    torch.testing.assert_close(got.tokens[0, 0, :, 0], torch.tensor([5.0, 5.0]))
    # the same with a hair of rotation, measured with points
    turned = make.then(make.crop(-0.3, -0.1, 0.7, 0.9), make.about_centre(make.rotation(0.5)))
    got = sample_maps(maps, make.batch([turned]), (1, 2))
    torch.testing.assert_close(got.weight, torch.tensor([[[0.36, 0.9]]]), atol=0.15, rtol=0)


def test_a_map_of_the_centre_crop_has_no_label_outside_it():
    area = (0.25, 0.0, 0.75, 1.0)
    maps = collate_maps([make.plain(np.full((4, 4, 1), 5.0, np.float32), np.zeros((4, 4, 1), np.int64), area)], 1)
    for placement in (make.crop(0, 0, 1, 1), make.about_centre(make.rotation(0.01))):
        got = sample_maps(maps, make.batch([placement]), (4, 4))
        assert (got.weight[0, :, [0, 3]] == 0).all()
        assert (got.weight[0, :, [1, 2]] > 0.99).all()
        torch.testing.assert_close(got.image_weight, torch.tensor([0.5]))


def test_a_nearly_straight_rotation_equals_the_crop():
    rng = np.random.default_rng(5)
    maps = make.maps(rng, n=1, h=9, w=7)
    straight = make.crop(0.1, 0.2, 0.7, 0.8)
    turned = make.then(straight, make.about_centre(make.rotation(1e-3)))
    plan = plan_sampling(make.batch([turned]), maps.area, maps.size, (5, 4))
    assert plan.affine
    assert not plan.crops
    same(sample_maps(maps, make.batch([straight]), (5, 4)), sample_maps(maps, make.batch([turned]), (5, 4)), 1e-3)


def test_a_batch_of_both_kinds_equals_its_images_one_by_one():
    rng = np.random.default_rng(6)
    maps = make.maps(rng, n=4)
    placements = [
        make.crop(0, 0, 0.5, 0.5),
        make.about_centre(make.rotation(30)),
        make.crop(0.2, 0.1, 1.0, 0.9, hflip=True),
        make.about_centre([[1, 0.3], [0, 1]], 1.5),
    ]
    together = sample_maps(maps, make.batch(placements), (3, 3))
    for i, placement in enumerate(placements):
        one = maps.apply(lambda t, i=i: t[i : i + 1])
        alone = sample_maps(one, make.batch([placement]), (3, 3))
        same(SampledMaps(*(part[i : i + 1] for part in together)), alone, 1e-6)


def test_half_precision_scores_are_averaged_in_single_precision():
    maps = make.maps(np.random.default_rng(9), n=2, dtype="f2")
    assert maps.scores.dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sample_maps(maps, make.batch([make.crop(0, 0, 0.7, 1)] * 2), (3, 3))
    boxes = torch.tensor([[0, 0, 0.7, 1.0]] * 2)
    assert got.tokens.dtype == torch.float32
    torch.testing.assert_close(got.tokens, roi_crop(maps, boxes, (3, 3)), rtol=0, atol=1e-5)


def test_a_plan_serves_the_image_label_and_is_remade_for_another_grid():
    rng = np.random.default_rng(11)
    maps = make.maps(rng, n=2, h=9, w=8)
    for turn in (0, 15):
        placement = make.batch([make.then(make.crop(0.05, 0.1, 0.9, 1), make.about_centre(make.rotation(turn)))] * 2)
        plan = plan_sampling(placement, maps.area, maps.size, (7, 7))
        for grid in ((1, 1), (2, 3)):
            same(sample_maps(maps, placement, grid), sample_maps(maps, placement, grid, plan), 1e-6)


def test_a_placement_of_the_wrong_shape_is_named():
    maps = make.maps(np.random.default_rng(0), n=2)
    with pytest.raises(ValueError, match=r"\[2, 2, 3\], got \[1, 2, 3\]"):
        sample_maps(maps, make.batch([make.crop(0, 0, 1, 1)]), (2, 2))
