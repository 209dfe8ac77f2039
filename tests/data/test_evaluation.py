"""The evaluation view equals timm's, pixel for pixel."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform

from everytoken import keyed
from everytoken_lab.data.augment import EvalTransform


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
