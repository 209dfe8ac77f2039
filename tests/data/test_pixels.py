"""Arrays on Pillow's memory behave like copies, except that they are none."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from PIL import Image

from everytoken import keyed
from everytoken.data import pixels


def noise(width=23, height=17):
    return Image.fromarray(keyed.generator(0, "p").integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_a_view_shows_the_images_own_memory():
    image = noise()
    seen = pixels.view(image)
    assert np.array_equal(seen, np.asarray(image))
    seen[3, 4] = (1, 2, 3)
    if hasattr(image, "__arrow_c_array__"):
        assert image.getpixel((4, 3)) == (1, 2, 3)


def test_a_view_outlives_its_image():
    seen = pixels.view(noise(300, 200))
    want = seen.copy()
    gc.collect()
    junk = [noise(300, 200) for _ in range(5)]
    assert np.array_equal(seen, want)
    assert len(junk) == 5


def test_without_pillows_arrow_interface_a_copy_does(monkeypatch):
    monkeypatch.delattr(Image.Image, "__arrow_c_array__", raising=False)
    image = noise()
    seen = pixels.view(image)
    assert seen.strides[1] == 3
    assert np.array_equal(seen, np.asarray(image))
    assert seen.flags.writeable


def test_an_image_of_several_memory_blocks_is_copied():
    image = Image.new("RGB", (3000, 2000), (5, 6, 7))
    seen = pixels.view(image)
    assert seen.shape == (2000, 3000, 3)
    assert (seen[-1, -1] == (5, 6, 7)).all()


@pytest.mark.parametrize("kind", ["view", "copy", "part"])
def test_arrays_of_both_kinds_become_images_again(kind):
    image = noise()
    array = pixels.view(image)
    array = {"view": array, "copy": array.copy(), "part": array[2:9, 3:11]}[kind]
    back = pixels.to_image(array)
    assert np.array_equal(np.asarray(back), array)
    pixels.view(back)[:] = 0
    assert array.any()  # it was a copy


@pytest.mark.parametrize("kind", ["view", "copy", "part"])
@pytest.mark.parametrize(("transpose", "down", "across"), itertools.product([False, True], repeat=3))
def test_turning_moves_whole_pixels(kind, transpose, down, across):
    array = pixels.view(noise())
    array = {"view": array, "copy": array.copy(), "part": array[2:9, 3:11]}[kind]
    want = array.transpose(1, 0, 2) if transpose else array
    want = want[::-1] if down else want
    want = want[:, ::-1] if across else want
    made = pixels.turn(array, transpose, down, across)
    assert np.array_equal(made, want)


def test_all_bytes_of_a_read_only_array_are_lent_to_torch_without_a_copy():
    array = np.frombuffer(bytes(range(60)), dtype=np.uint8).reshape(4, 5, 3)
    lent = pixels.full(array)
    assert lent.flags.writeable
    assert lent.ctypes.data == array.ctypes.data
    four = pixels.full(pixels.view(noise()))
    assert four.shape[2] in (3, 4)
