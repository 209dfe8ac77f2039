"""The filters of the corruptions against slow, obvious versions."""

import math

import numpy as np
import pytest
from scipy import ndimage

from everytoken_lab.robust import corruptions, filters


def picture(height=37, width=45, seed=0):
    return np.random.default_rng(seed).random((height, width, 3)).astype(np.float32)


def test_convolution_is_a_correlation_with_mirrored_borders():
    x, kernel = picture(), np.random.default_rng(1).random((7, 11))
    wanted = np.stack([ndimage.correlate(x[..., c], kernel, mode="mirror") for c in range(3)], -1)
    assert np.abs(filters.convolve(x, kernel) - wanted).max() < 1e-4


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
    assert np.abs(filters.motion_blur(x, radius, sigma, angle) - wanted).max() < 1e-5


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.31, 2.5, 4.0])
def test_zoom_is_scipys_zoom_of_the_centre(factor):
    x = picture(40, 40)
    inner = math.ceil(40 / factor)
    top = (40 - inner) // 2
    large = ndimage.zoom(x[top : top + inner, top : top + inner], (factor, factor, 1), order=1)
    cut = (large.shape[0] - 40) // 2
    wanted = large[cut : cut + 40, cut : cut + 40]
    assert np.abs(filters.zoom_mean(x, [factor]) - wanted).max() < 1e-4


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
