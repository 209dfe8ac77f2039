"""Each corruption and each filter against its definition; sizes, severities, the same image for the same key."""

import colorsys
import io
import math

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from everytoken import keyed
from everytoken_lab.robust import corruptions
from everytoken_lab.robust.corruptions import CORRUPTIONS, corrupt


def scene(height=224, width=224):
    """A smooth scene with a few sharp shapes."""
    rng = np.random.default_rng(0)
    base = corruptions.gaussian(rng.random((height, width, 3)).astype(np.float32), 6)
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


@pytest.mark.parametrize(
    ("severity", "deviation", "photons", "amount"),
    [(1, 0.08, 60, 0.03), (2, 0.12, 25, 0.06), (3, 0.18, 12, 0.09), (4, 0.26, 5, 0.17), (5, 0.38, 3, 0.27)],
)
def test_noise_has_the_published_moments(severity, deviation, photons, amount):
    grey, value = np.full((224, 224, 3), 128, np.uint8), 128 / 255
    image = grey.astype(np.float32) / 255
    assert corruptions.gaussian_noise(image, severity, dice(1), 1.0).std() == pytest.approx(deviation, rel=0.02)
    shots = corruptions.shot_noise(image, severity, dice(1), 1.0)
    assert shots.mean() == pytest.approx(value, rel=0.02)
    assert shots.var() == pytest.approx(value / photons, rel=0.05)
    hit = corrupt(grey, "impulse_noise", severity, dice(0))
    parts = [(hit == level).mean() for level in (255, 0, 128)]
    assert parts[:2] == pytest.approx([amount / 2] * 2, rel=0.06)
    assert parts[2] == pytest.approx(1 - amount, rel=0.02)


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


def test_zoom_blur_fog_and_frost_are_sums():
    image = scene(60, 60).astype(np.float32) / 255
    zoomed = sum(corruptions.zoom_mean(image, [1 + 0.02 * i]) for i in range(11))
    assert np.abs(corruptions.zoom_blur(image, 3, dice(0), 1.0) - (image + zoomed) / 12).max() < 1e-5  # once more: by 1
    top, cloud = image.max(), corruptions.plasma(64, 1.7, dice(0))[:60, :60, None]
    assert np.abs(corruptions.fog(image, 3, dice(0), 1.0) - (image + 2.5 * cloud) * top / (top + 2.5)).max() < 1e-5
    rng = dice(0)
    texture = corruptions.drawn_frost(60, 60, int(rng.integers(5)))
    y, x = (int(rng.integers(side - 59)) for side in texture.shape[:2])
    wanted = 0.7 * image + 0.7 * texture[y : y + 60, x : x + 60]
    assert np.abs(corruptions.frost(image, 3, dice(0), 1.0) - wanted).max() < 1e-5


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


# Filters, and what is drawn, against slow, obvious versions


def picture(height=37, width=45, seed=0):
    return np.random.default_rng(seed).random((height, width, 3)).astype(np.float32)


def test_convolution_is_a_correlation_with_mirrored_borders():
    x, kernel = picture(), np.random.default_rng(1).random((7, 11))
    wanted = np.stack([ndimage.correlate(x[..., c], kernel, mode="mirror") for c in range(3)], -1)
    assert np.abs(corruptions.convolve(x, kernel) - wanted).max() < 1e-4


def test_motion_blur_is_half_a_gaussian_along_a_line():
    x, radius, sigma, angle = picture(), 4, 2.5, 33.0
    weights = np.array([math.exp(-i * i / (2 * sigma**2)) for i in range(2 * radius + 1)])
    weights /= weights.sum()
    wanted = np.zeros_like(x)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            for i, weight in enumerate(weights):
                y = row + math.ceil(i * math.sin(math.radians(angle)) - 0.5)
                z = column + math.ceil(i * math.cos(math.radians(angle)) - 0.5)
                wanted[row, column] += weight * x[min(max(y, 0), 36), min(max(z, 0), 44)]
    assert np.abs(corruptions.line_blur(x, radius, sigma, angle) - wanted).max() < 1e-5


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.31, 2.5, 4.0])
def test_zoom_is_scipys_zoom_of_the_centre(factor):
    x = picture(40, 40)
    inner = math.ceil(40 / factor)
    top = (40 - inner) // 2
    large = ndimage.zoom(x[top : top + inner, top : top + inner], (factor, factor, 1), order=1)
    cut = (large.shape[0] - 40) // 2
    wanted = large[cut : cut + 40, cut : cut + 40]
    assert np.abs(corruptions.zoom_mean(x, [factor]) - wanted).max() < 1e-4


def test_the_disk_is_a_smoothed_mean_over_a_circle():
    kernel = corruptions.disk(4, 0.5)
    assert kernel.shape == (17, 17)
    assert kernel.sum() == pytest.approx(1, abs=1e-5)
    flat = np.array([[x * x + y * y <= 16 for x in range(-8, 9)] for y in range(-8, 9)], float)
    taps = np.exp(-0.5 * (np.arange(-1, 2) / 0.5) ** 2)
    taps /= taps.sum()
    wanted = ndimage.correlate(flat / flat.sum(), np.outer(taps, taps), mode="mirror")
    assert np.abs(kernel - wanted).max() < 1e-6
    assert corruptions.disk(10, 0.5).shape == (21, 21)


@pytest.mark.parametrize(("height", "width", "reach"), [(20, 27, 1), (31, 24, 4), (6, 5, 4)])
def test_glass_copies_pixels_in_the_published_order(height, width, reach):
    got = corruptions.shuffle_sources(height, width, reach, np.random.default_rng(5))
    inner = (max(0, height - 2 * reach), max(0, width - 2 * reach))
    moves = np.random.default_rng(5).integers(-reach, reach, (2, *inner)) if min(inner) else None
    x = np.arange(height * width).reshape(height, width)
    for row in range(height - reach, reach, -1):
        for column in range(width - reach, reach, -1):
            dy, dx = moves[:, row - reach - 1, column - reach - 1]
            x[row, column] = x[row + dy, column + dx]
    assert np.array_equal(got.reshape(height, width), x)


def test_plasma_is_diamond_and_square_on_a_torus():
    size, decay = 16, 1.7
    rng = np.random.default_rng(2)
    field, step, wobble = {(0, 0): 0.0}, size, 100.0
    while step >= 2:
        half, count = step // 2, size // step
        for kind, corners in (
            ((half, half), ((-half, -half), (-half, half), (half, -half), (half, half))),
            ((0, half), ((0, -half), (0, half), (-half, 0), (half, 0))),
            ((half, 0), ((0, -half), (0, half), (-half, 0), (half, 0))),
        ):
            noise = wobble * rng.uniform(-wobble, wobble, (count, count))
            for i in range(count):
                for j in range(count):
                    y, x = i * step + kind[0], j * step + kind[1]
                    near = [field[(y + dy) % size, (x + dx) % size] for dy, dx in corners]
                    field[y, x] = sum(near) / 4 + noise[i, j]
        step, wobble = half, wobble / decay
    wanted = np.array([[field[y, x] for x in range(size)] for y in range(size)])
    wanted = (wanted - wanted.min()) / np.ptp(wanted)
    assert np.abs(corruptions.plasma(size, decay, np.random.default_rng(2)) - wanted).max() < 1e-6
