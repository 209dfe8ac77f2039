"""The training view has timm's distribution, its parts mean what timm's mean; the evaluation view equals timm's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from timm.data import auto_augment as timm_aa
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import ColorJitter

from everytoken import keyed
from everytoken.data import randaugment
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import AugmentOptions, EvalTransform, TrainTransform, erase, random_crop

from .conftest import photo

STRINGS = [
    "rand-m9-mstd0.5-inc1",
    "rand-n3-m9-mstd0.5-inc1",
    "rand-m7-n4-p0.7-mstd1-mmax12",
    "rand-m5-mstd101-inc1",
    "rand-m9-tweights",
    "rand-m9-t3a-n1-p1",
    "rand-m9-t3aw-mstd0.5",
    "rand",
]


@pytest.mark.parametrize("text", STRINGS)
def test_a_string_means_what_it_means_to_timm(text):
    hparams = {"translate_const": 100, "img_mean": (124, 116, 104)}
    theirs, ours = timm_aa.rand_augment_transform(text, hparams), randaugment.parse(text)
    assert [op.name for op in theirs.ops] == list(ours.names)
    assert theirs.num_layers == ours.count
    if theirs.choice_weights is None:
        assert ours.weights is None
    else:
        assert np.allclose(theirs.choice_weights, ours.weights)
    for op in theirs.ops:
        assert (op.prob, op.magnitude, op.magnitude_std) == (ours.prob, ours.magnitude, ours.std)
        assert (op.magnitude_max or 10) == ours.top


@pytest.mark.parametrize("sign", [1, -1])
def test_each_magnitude_gives_the_arguments_that_timm_gives(sign, monkeypatch):
    monkeypatch.setattr(timm_aa, "_randomly_negate", lambda value: sign * value)
    for name, ours in randaugment.LEVELS.items():
        theirs = timm_aa.LEVEL_TO_ARG[name] or (lambda level, hparams: ())
        for level in np.linspace(0, 10, 41).tolist():
            assert ours(level, sign) == pytest.approx(theirs(level, {})), (name, level)


def test_the_drawn_steps_have_timms_frequencies_and_magnitudes():
    policy = randaugment.parse("rand-m9-mstd0.5-inc1")
    steps = [step for i in range(6000) for step in policy.draw(keyed.generator(0, i))]
    assert len(steps) / 6000 == pytest.approx(2 * 0.5, abs=0.03)
    names = [name for name, _ in steps]
    for name in policy.names:
        assert names.count(name) / len(names) == pytest.approx(1 / 15, abs=0.012)
    turns = np.array([values[0] for name, values in steps if name == "Rotate"])
    assert (turns > 0).mean() == pytest.approx(0.5, abs=0.08)
    random.seed(0)
    levels = [min(10, max(0, random.gauss(9, 0.5))) * 3 for _ in range(6000)]
    assert np.abs(turns).mean() == pytest.approx(np.mean(levels), abs=0.2)
    assert np.abs(turns).std() == pytest.approx(np.std(levels), abs=0.2)
    assert np.abs(turns).max() <= 30


def test_weighted_sets_are_drawn_without_replacement_by_weight():
    policy = randaugment.parse("rand-m9-p1-t3aw-n2")
    drawn = [[name for name, _ in policy.draw(keyed.generator(0, i))] for i in range(3000)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    first = [pair[0] for pair in drawn]
    assert first.count("Desaturate") / 3000 == pytest.approx(6 / 33, abs=0.03)


@pytest.mark.parametrize("name", [n for n in randaugment.LEVELS if n in randaugment.GEOMETRIC])
@pytest.mark.parametrize("sign", [1, -1])
def test_geometric_steps_are_pillows_transforms(name, sign):
    image = photo((80, 50))
    (value,) = randaugment.LEVELS[name](7.0, sign)
    theirs = timm_aa.NAME_TO_OP[name](image, value, resample=Image.Resampling.BILINEAR, fillcolor=(1, 2, 3))
    m = randaugment.matrix((name, (value,)), image.size)
    ours = image.transform(
        image.size, Image.Transform.AFFINE, m.ravel().tolist(), Image.Resampling.BILINEAR, fillcolor=(1, 2, 3)
    )
    assert np.abs(np.asarray(theirs).astype(int) - np.asarray(ours)).mean() < 0.05


@pytest.mark.parametrize("name", [n for n in randaugment.LEVELS if n not in randaugment.GEOMETRIC])
@pytest.mark.parametrize("level", [0.0, 3.3, 9.0])
def test_colour_steps_are_timms(name, level):
    image = photo((80, 50))
    arguments = randaugment.LEVELS[name](level, 1)
    ours = np.asarray(randaugment.recolour(image, (name, arguments))).astype(int)
    if name.startswith("Posterize") and arguments == (0,):  # Pillow 13 refuses what was black before
        assert (ours == 0).all()
        return
    theirs = np.asarray(timm_aa.NAME_TO_OP[name](image, *arguments))
    assert np.abs(ours - theirs).max() <= (1 if name.startswith("Sharpness") else 0)


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 1.9])
def test_sharpness_equals_pillows_to_one_level_borders_included(factor):
    noise = Image.fromarray(keyed.generator(0, "n").integers(0, 256, (30, 20, 3), dtype=np.uint8))
    theirs = np.asarray(ImageEnhance.Sharpness(noise).enhance(factor)).astype(int)
    assert np.abs(np.asarray(randaugment.sharpness(noise, factor)) - theirs).max() <= 1
    thin = noise.crop((0, 0, 2, 30))
    assert randaugment.sharpness(thin, factor).size == (2, 30)


def test_colour_jitter_draws_torchvisions_ranges_in_random_order():
    for strength in (0.4, 2.0):
        reference = ColorJitter(strength, strength, strength)
        drawn = [randaugment.jitter(strength, keyed.generator(1, i)) for i in range(800)]
        for name, limits in (
            ("Brightness", reference.brightness),
            ("Contrast", reference.contrast),
            ("Color", reference.saturation),
        ):
            values = [dict(d)[name][0] for d in drawn]
            assert min(values) == pytest.approx(limits[0], abs=0.02)
            assert max(values) == pytest.approx(limits[1], abs=0.02)
        assert len({tuple(name for name, _ in d) for d in drawn}) == 6


@pytest.mark.parametrize("size", [(640, 480), (100, 400), (2000, 90), (7, 7)])
def test_crops_have_timms_distribution(size):
    image = Image.new("L", size)
    random.seed(1)
    limits = ((0.08, 1.0), (3 / 4, 4 / 3))
    theirs = np.array([RandomResizedCropAndInterpolation.get_params(image, *limits) for _ in range(3000)], float)
    theirs = theirs[:, [1, 0, 3, 2]]  # left, top, width, height
    ours = np.array([random_crop(size, *limits, keyed.generator(0, i)) for i in range(3000)], float)
    scale = np.array([size[0], size[1]] * 2)
    for statistic in (np.mean, np.std, lambda a, axis: np.quantile(a, 0.1, axis=axis)):
        assert np.abs(statistic(theirs / scale, axis=0) - statistic(ours / scale, axis=0)).max() < 0.03
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    assert (ours[:, 2:] >= 1).all()


def test_erasing_has_timms_distribution():
    random.seed(2)
    reference = RandomErasing(0.6, mode="const", max_count=3, device="cpu")
    theirs, ours = [], []
    for i in range(1500):
        theirs.append((reference(torch.ones(3, 40, 60)) == 0)[0].float().mean().item())
        pixels = np.full((40, 60, 3), 255, np.uint8)
        erase(pixels, keyed.generator(0, i), prob=0.6, mode="const", count=3, mean=(0.1, 0.1, 0.1), std=(1, 1, 1))
        ours.append((pixels[..., 0] != 255).mean())
    assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.012)
    assert np.std(ours) == pytest.approx(np.std(theirs), abs=0.012)
    assert np.mean(np.array(ours) == 0) == pytest.approx(0.4, abs=0.04)


def test_erased_pixels_have_the_noise_that_normalises_to_a_unit_normal():
    pixels = np.zeros((200, 200, 3), np.uint8)
    mean, std = (0.5, 0.4, 0.6), (0.1, 0.12, 0.08)
    erase(pixels, keyed.generator(4), prob=1.0, mode="pixel", count=1, mean=mean, std=std)
    rows, columns = pixels.any((1, 2)), pixels.any((0, 2))  # of the rectangle: its noise has no zeros
    assert 0 < rows.sum() < 200
    assert 0 < columns.sum() < 200
    patch = (pixels[rows][:, columns] / 255 - mean) / std
    assert np.abs(patch.mean((0, 1))).max() < 0.1
    assert np.abs(patch.std((0, 1)) - 1).max() < 0.1
    one = np.zeros((200, 200, 3), np.uint8)
    erase(one, keyed.generator(4), prob=1.0, mode="rand", count=1, mean=mean, std=std)
    assert len(np.unique(one[rows][:, columns].reshape(-1, 3), axis=0)) == 1
    assert np.array_equal(one.any(2), pixels.any(2))


def test_the_same_key_gives_the_same_view_another_key_another_and_no_global_generator_is_touched():
    transform = TrainTransform(48, AugmentOptions(reprob=1.0))
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    views = [transform(photo((90, 70)), keyed.generator(7, key)) for key in (1, *range(1, 10))]
    assert np.array_equal(views[0][0], views[1][0])
    assert np.array_equal(views[0][1], views[1][1])
    assert not np.array_equal(views[0][0], views[2][0])
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_probabilities_of_flips_are_kept():
    image = Image.new("RGB", (40, 40))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    options = AugmentOptions(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.25, vflip=0.6, aa="", reprob=0.0)
    corners = [TrainTransform(16, options)(image, keyed.generator(0, i))[0] for i in range(800)]
    assert np.mean([c[:, :8].mean() < c[:, 8:].mean() for c in corners]) == pytest.approx(0.25, abs=0.05)
    assert np.mean([c[:8].mean() < c[8:].mean() for c in corners]) == pytest.approx(0.6, abs=0.05)


def test_colour_jitter_is_off_with_randaugment_and_on_without_as_in_timm():
    for aa, jitter in (("rand-m9", 0.0), ("rand-m9-t3a", 0.4), ("", 0.4)):
        assert TrainTransform(32, AugmentOptions(aa=aa, color_jitter=0.4)).jitter == jitter


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("scale", (0.5, 0.2)), ("scale", (0.0, 1.0)), ("ratio", (0.0, 1.0)), ("hflip", 1.5), ("recount", 0)),
        *(("remode", "noise"), ("train_interpolation", "lanczos"), ("interpolation", "cubic"), ("crop_pct", 1.5)),
        *(("aa", text) for text in ("original", "augmix-m5", "rand-x3", "rand-m9-tnone", "rand-m9-p3", "rand-mstd")),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(EverytokenError, match=field):
        TrainTransform(32, AugmentOptions(**{field: value}))


@pytest.mark.parametrize(("field", "value"), [("interpolation", "random"), ("crop_pct", 0.0), ("crop_mode", "centre")])
def test_a_view_that_does_not_exist_is_refused(field, value):
    with pytest.raises(EverytokenError, match=f"{field} '?{value}"):
        EvalTransform(**{field: value})


def test_the_crop_of_the_view_is_the_crop_that_the_placement_says():
    options = AugmentOptions(hflip=0.0, aa="", reprob=0.0)
    for i in range(100):
        _, placement = TrainTransform(24, options)(photo((100, 80)), keyed.generator(0, i))
        x, y, w, h = random_crop((100, 80), options.scale, options.ratio, keyed.generator(0, i))
        assert np.allclose(placement, [[w / 100, 0, x / 100], [0, h / 80, y / 80]])


# The evaluation view


def noise(size, key=0):
    return Image.fromarray(keyed.generator(key, "noise").integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(320, 240), (187, 250), (101, 37), (20, 200), (96, 96), (1, 1), (5, 4)])
@pytest.mark.parametrize("out", [96, (48, 80)])
@pytest.mark.parametrize("crop_pct", [0.9, 1.0])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_the_evaluation_view_equals_timms(size, out, crop_pct, mode):
    image = noise(size)
    for filter in ("bicubic", "bilinear"):
        theirs = create_transform(
            out, is_training=False, interpolation=filter, crop_pct=crop_pct, crop_mode=mode, use_prefetcher=True
        )(image)
        ours, _ = EvalTransform(out, crop_pct, mode, filter)(image)
        theirs = theirs.permute(1, 2, 0).numpy()
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)


def test_the_evaluation_view_of_a_photo_at_224_equals_timms():
    theirs = create_transform(224, is_training=False, interpolation="bicubic", use_prefetcher=True)(noise((640, 480)))
    ours, _ = EvalTransform()(noise((640, 480)))
    assert np.array_equal(ours, theirs.permute(1, 2, 0).numpy())


def test_a_very_long_image_is_not_resized_as_a_whole():
    pixels, placement = EvalTransform(64)(Image.new("RGB", (2, 40_000), (10, 20, 30)))
    assert (pixels == (10, 20, 30)).all()
    assert placement[1, 0] == 0
    assert placement[1, 1] < 1e-4


def test_the_placement_of_a_centre_crop_is_the_centre_with_the_right_aspect():
    _, placement = EvalTransform(224, 0.875)(noise((512, 256)))
    assert np.allclose(placement, [[0.4375, 0, 0.28125], [0, 0.875, 0.0625]])
    _, placement = EvalTransform(224, 1.0, "squash")(noise((512, 256)))
    assert np.allclose(placement, [[1, 0, 0], [0, 1, 0]])
    _, placement = EvalTransform(224, 1.0, "border")(noise((512, 256)))
    assert np.allclose(placement, [[1, 0, 0], [0, 2, -0.5]])
