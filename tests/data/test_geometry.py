"""Pixels and placement move together."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment

from everytoken import keyed
from everytoken.data import placement as pl
from everytoken.data.randaugment import GEOMETRIC, RandAugment
from everytoken_lab.data.augment import AugmentOptions, EvalTransform, TrainTransform, mean_colour
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.warp import render, resize

BLACK = {"mean": (0.0, 0.0, 0.0)}  # the fill colour, so that the mark is the only light


def marked(size, centre, side, exif=1):
    """A black JPEG, stored with an EXIF orientation, that shows a bright square around `centre` when upright."""
    image = Image.new("RGB", size)
    x, y = centre
    box = tuple(round(v) for v in (x - side / 2, y - side / 2, x + side / 2, y + side / 2))
    image.paste((255, 255, 255), box)
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that undoes each orientation
    if exif != 1:
        image = image.transpose(Image.Transpose(back[exif]))
    tags = Image.Exif()
    tags[0x0112] = exif
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, exif=tags)
    return file.getvalue(), box


def light(pixels):
    """Where the light is: its centre in pixels, and how much there is."""
    value = np.where(pixels > 60, pixels, 0).astype(float).mean(-1)
    total = value.sum()
    if total == 0:
        return None, 0.0
    y, x = np.mgrid[: value.shape[0], : value.shape[1]] + 0.5
    return np.array([(x * value).sum(), (y * value).sum()]) / total, total


def agree(pixels, placement, box, source_size):
    """The mark is where the placement says, or nowhere if the placement says so."""
    height, width = pixels.shape[:2]
    x0, y0, x1, y1 = box
    corners = np.array([(x0, y0), (x1, y0), (x0, y1), (x1, y1)], dtype=float) / source_size
    seen = pl.apply(pl.invert(placement), corners)
    where, amount = light(pixels)
    margin = 2 / np.array([width, height])
    if (seen > margin).all() and (seen < 1 - margin).all():
        want = seen.mean(0) * (width, height)
        assert amount > 0
        assert np.abs(where - want).max() < 1.0
    elif (seen.max(0) < -margin).any() or (seen.min(0) > 1 + margin).any():
        assert amount == 0


@settings(max_examples=120, deadline=None)
@given(
    size=st.tuples(st.integers(60, 500), st.integers(60, 500)),
    at=st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)),
    out=st.sampled_from([(64, 64), (48, 96), (112, 80)]),
    exif=st.integers(1, 8),
    count=st.integers(0, 4),
    filter=st.sampled_from(["bilinear", "bicubic"]),
    flips=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])),
    key=st.integers(0, 10**6),
)
def test_pixels_and_placement_move_together(size, at, out, exif, count, filter, flips, key):
    side = max(6, min(size) // 6)
    data, box = marked(size, (at[0] * size[0], at[1] * size[1]), side, exif)
    options = AugmentOptions(
        scale=(0.3, 1.0), hflip=flips[0], vflip=flips[1], aa="", reprob=0.0, train_interpolation=filter
    )
    transform = TrainTransform(out, options, **BLACK)
    transform.policy = RandAugment(GEOMETRIC, None, count=count, prob=1.0, magnitude=9, std=0.5)
    picture = Picture(data)
    assert picture.size == size
    pixels, placement = transform(picture, keyed.generator(0, key))
    assert pixels.shape == (*out, 3)
    agree(pixels, placement, box, size)


@pytest.mark.parametrize("shape", [(2400, 1500), (1501, 2399), (3001, 603)])
@pytest.mark.parametrize("exif", [1, 3, 6])
@pytest.mark.parametrize("count", [0, 2])
def test_a_photo_that_is_decoded_smaller_keeps_its_placement(shape, exif, count):
    data, box = marked(shape, (shape[0] * 0.6, shape[1] * 0.45), 120, exif)
    transform = TrainTransform(96, AugmentOptions(scale=(0.5, 1.0), aa="", reprob=0.0), **BLACK)
    transform.policy = RandAugment(GEOMETRIC, None, count=count, prob=1.0, magnitude=5)
    for key in range(6):
        picture = Picture(data)
        assert picture.reduction(4.2) == 4
        pixels, placement = transform(picture, keyed.generator(1, key))
        agree(pixels, placement, box, shape)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(300, 120), (120, 300), (97, 101), (30, 20)])
@pytest.mark.parametrize("out", [64, (48, 80)])
@pytest.mark.parametrize("exif", [1, 6, 7])
def test_the_evaluation_view_has_a_placement_too(mode, size, out, exif):
    data, box = marked(size, (size[0] * 0.55, size[1] * 0.4), max(6, min(size) // 5), exif)
    pixels, placement = EvalTransform(out, crop_mode=mode, **BLACK)(Picture(data))
    agree(pixels, placement, box, size)


def test_real_content_from_beyond_the_crop_is_shown_and_fill_only_beyond_the_image():
    image = Image.new("RGB", (200, 100), (0, 200, 0))
    crop = np.array([[0.5, 0.0, 100.0], [0.0, 0.5, 25.0]])  # the crop ends at x = 150
    shifted = pl.compose(crop, np.array([[1.0, 0.0, 80.0], [0.0, 1.0, 0.0]]))  # now from 140 to 190
    pixels, _ = render(Picture(image), shifted, (100, 100), bicubic=False, fill=(9, 9, 9))
    assert (pixels == (0, 200, 0)).all()
    beyond = pl.compose(crop, np.array([[1.0, 0.0, 150.0], [0.0, 1.0, 0.0]]))  # from 175 to 225
    pixels, _ = render(Picture(image), beyond, (100, 100), bicubic=False, fill=(9, 9, 9))
    assert (pixels[:, :48] == (0, 200, 0)).all()
    assert (pixels[:, 52:] == (9, 9, 9)).all()
    far = pl.compose(crop, np.array([[1.0, 0.0, 500.0], [0.0, 1.0, 0.0]]))
    pixels, _ = render(Picture(image), far, (100, 100), bicubic=True, fill=(9, 9, 9))
    assert (pixels == (9, 9, 9)).all()


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("degrees", [10, 30, 45])
def test_a_rotated_view_inside_an_image_is_the_same_whether_the_rest_of_the_image_is_there_or_not(bicubic, degrees):
    """Only the visible part is reduced and sampled; its cut edges must not show."""
    flat = Image.new("RGB", (400, 400), (0, 200, 0))
    for side, offset in itertools.product((10, 100), (0.0, 0.2, 0.4, 0.6, 0.8)):
        crop = np.array([[side / 50, 0.0, 150 + offset], [0.0, side / 50, 141 - offset]])
        turned = pl.compose(crop, pl.to_pixels(pl.rotation(degrees, (50, 50)), (50, 50), (50, 50)))
        pixels, _ = render(Picture(flat), turned, (50, 50), bicubic=bicubic, fill=(9, 9, 9))
        assert (pixels == (0, 200, 0)).all()


@pytest.mark.parametrize("shift", [0.0, 0.4, -0.45, 1.3])
@pytest.mark.parametrize("exif", [1, 2, 6])
def test_the_matrix_that_comes_back_is_the_one_that_was_used(shift, exif):
    data, _ = marked((16, 12), (8, 6), 4, exif)
    wanted = np.array([[12 / 64, 0.0, 2.0 + shift], [0.0, 8 / 64, 2.0 - shift]])
    pixels, used = render(Picture(data), wanted, (64, 64), bicubic=False, fill=(0, 0, 0))
    assert np.abs(used - wanted).max() < 0.501
    where, _ = light(pixels)
    (a, _, c), (_, e, f) = used.tolist()
    assert where == pytest.approx(((8 - c) / a, (6 - f) / e), abs=0.3)


def test_steps_are_done_in_the_order_drawn_on_the_cropped_and_flipped_image():
    image = smooth_noise(keyed.generator(8, "photo"), (128, 96)).resize((128, 96))
    whole = {"scale": (1.0, 1.0), "ratio": (4 / 3, 4 / 3)}
    transform = TrainTransform(64, AugmentOptions(hflip=1.0, aa="", reprob=0.0, train_interpolation="bicubic", **whole))
    drawn = [("Rotate", (25.0,)), ("ShearX", (0.3,)), ("TranslateYRel", (0.1,))]
    transform.policy = SimpleNamespace(draw=lambda rng: drawn)
    ours, _ = transform(image, keyed.generator(0))
    steps = image.resize((64, 64), Image.Resampling.BICUBIC).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    options = {"resample": Image.Resampling.BICUBIC, "fillcolor": mean_colour(transform.mean)}
    for name, value in (("rotate", 25.0), ("shear_x", 0.3), ("translate_y_rel", 0.1)):
        steps = getattr(auto_augment, name)(steps, value, **dict(options))
    inner = slice(12, 40)
    assert np.abs(ours.astype(int) - np.asarray(steps))[inner, inner].mean() < 8  # a wrong order gives 50


def smooth_noise(rng, size):
    small = rng.integers(0, 256, (size[1] // 6, size[0] // 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("size", [(31, 200), (640, 480), (1300, 20), (1, 1), (2, 700)])
def test_resizing_equals_pillows_to_one_grey_level(bicubic, size):
    image = Image.fromarray(keyed.generator(0, "noise").integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    ours = resize(np.array(image), (56, 72), bicubic).astype(int)
    filter = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    difference = np.abs(ours - np.asarray(image.resize((72, 56), filter)))
    if bicubic and (size[0] < 72) != (size[1] < 56) and size != (1300, 20):  # the passes' order shows on white noise
        assert (difference > 1).mean() < 0.03
        assert difference.max() < 10
    else:
        assert difference.max() <= 1


@pytest.mark.parametrize("bicubic", [False, True])
def test_one_fused_warp_is_as_near_to_the_truth_as_resizing_and_then_rotating(bicubic):
    out, big = 64, 512
    image = smooth_noise(keyed.generator(3, "photo"), (400, 300))
    crop = np.array([[240 / out, 0.0, 80.0], [0.0, 180 / out, 60.0]])
    turn = pl.to_pixels(pl.rotation(20, (out, out)), (out, out), (out, out))
    fine = pl.compose(crop, turn, np.array([[out / big, 0.0, 0.0], [0.0, out / big, 0.0]]))
    truth = image.transform((big, big), Image.Transform.AFFINE, fine.ravel().tolist(), Image.Resampling.BICUBIC)
    truth = np.asarray(truth.resize((out, out), Image.Resampling.BOX)).astype(float)
    ours, _ = render(Picture(image), pl.compose(crop, turn), (out, out), bicubic=bicubic, fill=(0, 0, 0))
    filter = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    steps = image.crop((80, 60, 320, 240)).resize((out, out), filter).rotate(20, filter)
    inner = slice(16, 48)
    error_ours = np.abs(ours - truth)[inner, inner].mean()
    error_steps = np.abs(np.asarray(steps) - truth)[inner, inner].mean()
    assert error_ours < error_steps * (0.8 if bicubic else 1.03)
