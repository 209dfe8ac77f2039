"""Each corruption against its definition; sizes, severities, and the same image for the same key."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image

from everytoken import keyed
from everytoken_lab.robust import corruptions, filters
from everytoken_lab.robust.corruptions import CORRUPTIONS, corrupt


def scene(height=224, width=224):
    """A smooth scene with a few sharp shapes."""
    rng = np.random.default_rng(0)
    base = filters.gaussian(rng.random((height, width, 3)).astype(np.float32), 6)
    base = (base - base.min()) / np.ptp(base)
    base[height // 4 : height // 2, width // 3 : 2 * width // 3] = (0.9, 0.3, 0.2)
    return (base * 255).astype(np.uint8)


def dice(*key):
    return keyed.generator(0, "test", *key)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", [(32, 32), (50, 31), (96, 160)])
def test_every_corruption_works_at_any_size_and_depends_on_the_key_alone(name, size):
    x = scene(*size)
    before = x.copy()
    first, again, other = (corrupt(x, name, 3, dice(k)) for k in (1, 1, 2))
    assert first.shape == x.shape
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert np.array_equal(x, before)
    assert not np.array_equal(first, x)
    fixed = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    assert np.array_equal(first, other) == (name in fixed)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"elastic_transform", "frost", "snow"}))
def test_a_higher_severity_is_farther_from_the_image(name):
    x = scene()
    far = [np.abs(corrupt(x, name, s, dice(0)).astype(float) - x).mean() for s in (1, 3, 5)]
    assert far[0] < far[1] < far[2]


def test_noise_has_the_published_moments():
    x = np.full((224, 224, 3), 128, np.uint8)
    value = 128 / 255
    for severity in range(1, 6):
        got = noise_of("gaussian_noise", x, severity)
        assert got.std() == pytest.approx((0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1], rel=0.02)
        got = noise_of("shot_noise", x, severity)
        photons = (60, 25, 12, 5, 3)[severity - 1]
        assert got.mean() == pytest.approx(value, rel=0.02)
        assert got.var() == pytest.approx(value / photons, rel=0.05)
        hit = corrupt(x, "impulse_noise", severity, dice(0))
        amount = (0.03, 0.06, 0.09, 0.17, 0.27)[severity - 1]
        assert (hit == 255).mean() == pytest.approx(amount / 2, rel=0.06)
        assert (hit == 0).mean() == pytest.approx(amount / 2, rel=0.06)
        assert (hit == 128).mean() == pytest.approx(1 - amount, rel=0.02)


def noise_of(name, x, severity):
    """Before clipping."""
    return CORRUPTIONS[name](x.astype(np.float32) / 255, severity, dice(severity), 1.0)


def test_brightness_is_the_value_of_hsv():
    colours = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    colours[0] = [[0, 0, 0], [9, 9, 9], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 1]]
    image = colours.astype(np.float32) / 255
    for severity in range(1, 6):
        bright = corruptions.brightness(image, severity, dice(0), 1.0)
        for y in range(6):
            for x in range(6):
                h, s, v = colorsys.rgb_to_hsv(*map(float, image[y, x]))
                wanted = colorsys.hsv_to_rgb(h, s, min(v + 0.1 * severity, 1))
                assert bright[y, x] == pytest.approx(wanted, abs=1e-5)


def test_contrast_pixelate_and_jpeg_are_one_line_each():
    x = scene(64, 48)
    image = x / 255
    mean = image.mean((0, 1))
    wanted = np.uint8(np.clip((image - mean) * 0.2 + mean, 0, 1) * 255)
    assert np.abs(corrupt(x, "contrast", 3, dice(0)).astype(int) - wanted).max() <= 1
    small = Image.fromarray(x).resize((int(48 * 0.4), int(64 * 0.4)), Image.Resampling.BOX)
    assert np.array_equal(corrupt(x, "pixelate", 3, dice(0)), np.asarray(small.resize((48, 64), Image.Resampling.BOX)))
    file = io.BytesIO()
    Image.fromarray(x).save(file, "JPEG", quality=15)
    assert np.array_equal(corrupt(x, "jpeg_compression", 3, dice(0)), np.asarray(Image.open(file)))


def test_zoom_blur_is_a_mean_in_which_the_image_counts_twice():
    image = scene(60, 60).astype(np.float32) / 255
    factors = [1 + 0.02 * i for i in range(11)]
    wanted = (image + sum(filters.zoom_mean(image, [f]) for f in factors)) / 12
    assert np.abs(corruptions.zoom_blur(image, 3, dice(0), 1.0) - wanted).max() < 1e-5


def test_fog_adds_plasma_and_keeps_the_brightest_value():
    image = scene(60, 50).astype(np.float32) / 255
    top = image.max()
    wanted = (image + 2.5 * corruptions.plasma(64, 1.7, dice(0))[:60, :50, None]) * top / (top + 2.5)
    assert np.abs(corruptions.fog(image, 3, dice(0), 1.0) - wanted).max() < 1e-5


def test_frost_adds_a_random_piece_of_a_drawn_texture():
    x, rng = scene(40, 40), dice(0)
    texture = corruptions.drawn_frost(40, 40, int(rng.integers(5)))
    top, left = (int(rng.integers(side - 39)) for side in texture.shape[:2])
    wanted = np.clip(0.7 * x / 255 + 0.7 * texture[top : top + 40, left : left + 40], 0, 1) * 255
    assert np.abs(corrupt(x, "frost", 3, dice(0)) - wanted).max() <= 1


def test_drawn_frost_is_as_bright_as_the_published_photographs():
    textures = np.stack([corruptions.drawn_frost(128, 128, number) for number in range(5)])
    assert textures.mean() == pytest.approx(0.64, abs=0.01)
    assert textures.std() == pytest.approx(0.13, abs=0.01)


def test_snow_whitens_and_adds_flakes_that_are_symmetric():
    image = np.full((224, 224, 3), 0.2, np.float32)
    got = corruptions.snow(image, 3, dice(0), 1.0)
    whitened = 0.7 * 0.2 + 0.3 * max(0.2, 0.2 * 1.5 + 0.5)
    assert got.min() == pytest.approx(whitened, abs=1e-4)  # where there is no flake
    flakes = got - whitened
    assert np.abs(flakes - flakes[::-1, ::-1]).max() < 1e-5
    assert flakes.max() > 0.1


def test_the_elastic_transform_moves_a_little_and_its_affine_part_takes_points_back():
    before = np.array([[150.0, 150], [150, 70], [70, 70]])
    after = before + np.array([[3.0, -2], [1, 5], [-4, 0]])
    matrix = corruptions.inverse_affine(before, after)
    assert matrix @ np.concatenate([after, np.ones((3, 1))], 1).T == pytest.approx(before.T)
    rows, columns = np.mgrid[:224, :224]
    ramp = np.stack([rows, columns, rows + columns], -1).astype(np.float32) / 500
    moved = corruptions.elastic_transform(ramp, 4, dice(0), 1.0)
    inside = np.abs(moved - ramp)[40:-40, 40:-40] * 500
    assert 0.5 < inside[..., 0].mean() < 15
    assert inside.max() < 60
