"""Pillow images as arrays and back, without copies.

Pillow keeps an RGB pixel in four bytes. Its usual way to NumPy packs them into three, through a byte string; for a
photo that takes half as long as resizing it. Here an array looks at Pillow's own memory instead, through the Arrow
interface that Pillow offers since 11.2: uint8 [h, w, 3] whose pixels are four bytes apart. Where that is not possible
(older Pillow, or an image in several blocks of memory, which happens above 16 MB) the array is an ordinary copy. Both
kinds are accepted everywhere in this room.
"""

from __future__ import annotations

import ctypes

import numpy as np
from PIL import Image


class _ArrowArray(ctypes.Structure):
    """The Arrow C data interface; only `buffers` and `children` are read."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Memory:
    """Memory that belongs to something else, which is kept alive; NumPy makes an array of it."""

    def __init__(
        self, keep: object, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, kind: str = "|u1"
    ) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "version": 3, "typestr": kind, "shape": shape, "strides": strides, "data": (address, False),
        }  # fmt: skip


def view(image: Image.Image) -> np.ndarray:
    """The pixels of a loaded RGB image, uint8 [h, w, 3], writeable, on the image's own memory if that is possible."""
    width, height = image.size
    try:
        _, capsule = image.__arrow_c_array__()  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, ValueError):
        return np.array(image)
    array = _ArrowArray.from_address(_pointer(capsule, b"arrow_array"))
    if array.n_children != 1 or array.offset != 0 or array.length != width * height:
        return np.array(image)
    address = array.children[0].contents.buffers[1]
    return np.asarray(_Memory((capsule, image), address, (height, width, 3), (4 * width, 4, 1)))


def full(pixels: np.ndarray) -> np.ndarray:
    """The same memory with all its bytes: uint8 [h, w, 3 or 4]. Declared writeable, as torch warns about others."""
    height, width, _ = pixels.shape
    step = pixels.strides[1]
    if step == 3 and pixels.flags.writeable:
        return pixels
    return np.asarray(_Memory(pixels, pixels.ctypes.data, (height, width, step), pixels.strides))


def turn(pixels: np.ndarray, transpose: bool, down: bool, across: bool) -> np.ndarray:
    """Exchange rows and columns, then reverse the order of the rows (`down`) and columns (`across`). A copy."""
    height, width, _ = pixels.shape
    if pixels.strides[1] == 4:  # whole pixels as 32-bit words move several times faster than bytes
        pixels = np.asarray(_Memory(pixels, pixels.ctypes.data, (height, width), pixels.strides[:2], "<u4"))
    if transpose:
        pixels = pixels.swapaxes(0, 1)
    pixels = np.ascontiguousarray(pixels[:: -1 if down else 1, :: -1 if across else 1])
    if pixels.ndim == 2:
        pixels = pixels.view(np.uint8).reshape(*pixels.shape, 4)[..., :3]
    return pixels


def to_image(pixels: np.ndarray) -> Image.Image:
    """A Pillow image with a copy of the pixels, uint8 [h, w, 3]."""
    height, width = pixels.shape[:2]
    if pixels.strides == (4 * width, 4, 1):
        four = np.asarray(_Memory(pixels, pixels.ctypes.data, (height * width * 4,), None))
        return Image.frombytes("RGB", (width, height), four.data, "raw", "RGBX")
    return Image.fromarray(np.ascontiguousarray(pixels))
