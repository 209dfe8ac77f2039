"""Small images as files, and tar archives of them."""

import io
import tarfile
from collections.abc import Iterable

import numpy as np
from PIL import Image

from everytoken import keyed


def encode(image: Image.Image, kind: str, **options) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(value: int = 0) -> bytes:
    """A JPEG file of 12 x 10 pixels of one colour."""
    return encode(Image.new("RGB", (12, 10), (value % 256, 100, 50)), "JPEG", quality=95)


def photo(size: tuple[int, int] = (60, 40), key: int = 0) -> Image.Image:
    """Smooth noise."""
    noise = keyed.generator(key, "photo").integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar archive of (name, content)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()
