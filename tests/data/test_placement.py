from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from everytoken.data import placement as pl
from everytoken.errors import EverytokenError

coordinate = st.floats(-2, 2)
points = st.lists(st.tuples(coordinate, coordinate), min_size=1, max_size=5)
sizes = st.tuples(st.integers(1, 4000), st.integers(1, 4000))


@st.composite
def placements(draw):
    kind = draw(st.sampled_from(["box", "hflip", "vflip", "rotate", "pixels"]))
    if kind == "box":
        x0, y0 = draw(coordinate), draw(coordinate)
        return pl.from_box(x0, y0, x0 + draw(st.floats(0.05, 2)), y0 + draw(st.floats(0.05, 2)))
    if kind == "hflip":
        return pl.hflip()
    if kind == "vflip":
        return pl.vflip()
    size = draw(st.tuples(st.integers(50, 400), st.integers(50, 400)))
    if kind == "rotate":
        return pl.rotation(draw(st.floats(-180, 180)), size)
    shear, shift = draw(st.floats(-0.5, 0.5)), draw(st.floats(-100, 100))
    return pl.from_pixels([1, shear, shift, 0, 1, -shift], size, size)


@given(placements(), placements(), placements(), points)
def test_composition_is_associative_and_means_one_step_after_the_other(a, b, c, p):
    left, right = pl.compose(pl.compose(a, b), c), pl.compose(a, pl.compose(b, c))
    assert np.allclose(left, right, atol=1e-9)
    assert np.allclose(pl.compose(a, b, c), left, atol=1e-9)
    assert np.allclose(pl.apply(left, p), pl.apply(a, pl.apply(b, pl.apply(c, p))), atol=1e-8)


@given(placements(), placements(), points)
def test_an_inverse_undoes_its_placement_on_both_sides(a, b, p):
    both = pl.compose(a, b)
    back = pl.invert(both)
    assert np.allclose(pl.apply(back, pl.apply(both, p)), p, atol=1e-6)
    assert np.allclose(pl.compose(back, both), pl.identity(), atol=1e-6)
    assert np.allclose(pl.invert(both), pl.compose(pl.invert(b), pl.invert(a)), atol=1e-5)


@given(placements())
def test_flips_are_their_own_inverse_and_composing_with_the_identity_changes_nothing(a):
    assert np.array_equal(pl.compose(pl.hflip(), pl.hflip()), pl.identity())
    assert np.array_equal(pl.compose(pl.vflip(), pl.vflip()), pl.identity())
    assert np.allclose(pl.compose(a, pl.identity()), a)
    assert np.allclose(pl.compose(pl.identity(), a), a)
    assert np.array_equal(pl.compose(), pl.identity())


@given(placements(), sizes, sizes)
def test_pixels_and_fractions_are_two_ways_to_write_one_map(a, out_size, in_size):
    assert np.allclose(pl.from_pixels(pl.to_pixels(a, out_size, in_size), out_size, in_size), a, rtol=1e-9, atol=1e-12)


def test_the_corners_of_a_crop_are_the_corners_of_the_networks_input():
    crop = pl.from_box(0.2, 0.1, 0.6, 0.9)
    assert np.allclose(pl.apply(crop, [(0, 0), (1, 1), (0.5, 0.5)]), [(0.2, 0.1), (0.6, 0.9), (0.4, 0.5)])
    assert np.allclose(pl.apply(pl.compose(crop, pl.hflip()), (0, 0)), (0.6, 0.1))
    assert pl.box(pl.compose(crop, pl.hflip(), pl.vflip())) == pytest.approx((0.2, 0.1, 0.6, 0.9))


def test_rotation_turns_as_pillow_does_also_on_a_wide_image():
    image = Image.new("RGB", (90, 40))
    image.paste((255, 255, 255), (60, 10, 64, 14))
    turned = np.asarray(image.rotate(25, resample=Image.Resampling.BICUBIC))[..., 0].astype(float)
    y, x = np.mgrid[:40, :90] + 0.5
    seen = np.array([(x * turned).sum(), (y * turned).sum()]) / turned.sum()
    want = pl.apply(pl.invert(pl.rotation(25, (90, 40))), (62 / 90, 12 / 40)) * (90, 40)
    assert np.allclose(seen, want, atol=0.1)


@given(placements(), placements())
def test_axis_aligned_means_that_rows_stay_rows(a, b):
    both = pl.compose(a, b)
    row = pl.apply(both, [(0, 0.5), (1, 0.5)])
    column = pl.apply(both, [(0.5, 0), (0.5, 1)])
    off = max(abs(row[0, 1] - row[1, 1]), abs(column[0, 0] - column[1, 0]))
    assume(off < 1e-12 or off > 1e-6)
    assert pl.is_axis_aligned(both) == (off < 1e-6)
    assert not pl.is_axis_aligned(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))  # a transposition


def test_an_empty_crop_and_a_flat_placement_are_refused_by_value():
    with pytest.raises(ValueError, match=r"0\.5, 0\.1, 0\.5"):
        pl.from_box(0.5, 0.1, 0.5, 0.9)
    with pytest.raises(EverytokenError, match="cannot be inverted"):
        pl.invert(np.zeros((2, 3)))


def test_matrices_of_opencv_kornia_and_albumentations_are_placements():
    """Their matrices say where a pixel of the input goes; pixels are known by the indices of their centres."""
    size = (40, 30)  # width, height
    mirror = [[-1, 0, size[0] - 1], [0, 1, 0], [0, 0, 1]]  # kornia's RandomHorizontalFlip
    np.testing.assert_allclose(pl.from_matrix(mirror, size, size), pl.hflip(), atol=1e-12)
    crop = [[1, 0, -10], [0, 1, -5]]  # a crop of 20 x 10 pixels at (10, 5)
    wanted = pl.from_box(10 / 40, 5 / 30, 30 / 40, 15 / 30)
    np.testing.assert_allclose(pl.from_matrix(crop, (20, 10), size), wanted, atol=1e-12)
    forward = np.array([[0.8, -0.3, 4.0], [0.2, 1.1, -2.0]])
    affine, out = pl.from_matrix(forward, (24, 18), size), forward[:, :2] @ [7, 11] + forward[:, 2]
    seen = pl.apply(affine, [(out[0] + 0.5) / 24, (out[1] + 0.5) / 18])
    np.testing.assert_allclose(seen, [7.5 / 40, 11.5 / 30], atol=1e-12)
