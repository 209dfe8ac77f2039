"""Decoding: any image file to upright 8-bit RGB, or an error that names the file and the reason.

Pillow reads the header, with a list of allowed formats. Grey and RGB pixels of JPEG files are decoded by simplejpeg
(libjpeg-turbo, straight into NumPy; at 1/2, 1/4 or 1/8 of their size where the crop allows it). All others, and what
simplejpeg refuses, are decoded by Pillow, which passes over harmless damage and raises on truncated files; the pixels
of both are the same.

`docs/data.md` has the table of what happens to unusual images. Images of more than `MAX_PIXELS` (or of as many as the
environment variable `EVERYTOKEN_MAX_PIXELS` allows) and JPEG files too short for the pixels that they promise raise
`ImageError` before any memory is taken.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from everytoken.errors import EverytokenError
from everytoken.files import NotAFileError, check_regular, read_bytes

# What Pillow may open. Without a list it tries all its formats by content, and one of them (EPS) starts Ghostscript.
HEIF = find_spec("pillow_heif") is not None
"""Whether HEIC photos can be read: with the extra `heif`."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "TGA", "AVIF", *(("HEIF",) if HEIF else ()))
MAX_PIXELS = 89_478_485  # 9,459 x 9,459; above it Pillow warns of decompression bombs
LIMIT_VARIABLE = "EVERYTOKEN_MAX_PIXELS"
_PIXELS_PER_BYTE = 512  # of a JPEG file, at most: each block of 8 x 8 pixels takes a bit or more
_EXIF_ORIENTATION = 0x0112
_SMALLEST = 8  # pixels of a side from which on the eighths that libjpeg can scale by all give different sizes
# upright pixel position (u, v) -> stored pixel position, for each EXIF orientation; W, H are those of the stored image.
# Rows: (coefficient of u, of v, of W, of H) for x and for y.
_ORIENTATIONS: dict[int, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    1: ((1, 0, 0, 0), (0, 1, 0, 0)),
    2: ((-1, 0, 1, 0), (0, 1, 0, 0)),
    3: ((-1, 0, 1, 0), (0, -1, 0, 1)),
    4: ((1, 0, 0, 0), (0, -1, 0, 1)),
    5: ((0, 1, 0, 0), (1, 0, 0, 0)),
    6: ((0, 1, 0, 0), (-1, 0, 0, 1)),
    7: ((0, -1, 1, 0), (-1, 0, 0, 1)),
    8: ((0, -1, 1, 0), (1, 0, 0, 0)),
}

_DAMAGED: tuple[type[Exception], ...] = (  # what Pillow raises about damaged files; RuntimeError: AVIF
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, MemoryError),
    *(struct.error, zlib.error),
)
_SMALLER = f"Make a smaller copy, or raise the limit if you trust the file ({LIMIT_VARIABLE})."


class ImageError(EverytokenError):
    """One image cannot be used; the message names it and says why."""


def pixel_limit() -> int:
    """The largest image that is decoded, in pixels. From the environment, so that worker processes know it, too."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = int(float(text or MAX_PIXELS))
    except (ValueError, OverflowError):
        limit = 0
    if limit < 1:
        raise EverytokenError(f"{LIMIT_VARIABLE} is {text!r}; it is a number of pixels, such as 400e6.")
    return limit


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """Turn what Pillow raises about a file into an `ImageError` about that file."""
    try:
        yield
    except (FileNotFoundError, PermissionError, NotAFileError) as error:
        raise ImageError(f"{where}: cannot be read ({error.strerror}).") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise ImageError(f"{where}: not an image of a known format ({kinds}), or its header is damaged.") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{where}: the image is too large ({error}). {_SMALLER}") from error
    except _DAMAGED as error:
        raise ImageError(f"{where}: the image is truncated or corrupt ({type(error).__name__}: {error}).") from error


class Picture:
    """An image whose header is read and whose pixels are not yet decoded.

    Args:
        source: the bytes of an image file, its path, or a Pillow image.
        where: what to call it in messages.

    Attributes:
        size: (width, height) of the upright image, in pixels.
        raw_size: (width, height) as stored, before EXIF rotation.
        orientation: of EXIF, 1 to 8.
        to_raw: float64 [2, 3], upright pixel position -> stored pixel position (identity without EXIF rotation).
    """

    def __init__(self, source: bytes | str | Path | Image.Image, where: str = "image") -> None:
        self.where = where
        self._data = b""
        with naming_errors(where):
            if isinstance(source, Image.Image):
                self.image = source
                _check_pixels(source.size, where)
            else:
                self._data = read_bytes(source) if isinstance(source, (str, Path)) else source
                self.image = open_image(io.BytesIO(self._data), where)
            self.orientation = _orientation(self.image)
        width, height = self.raw_size = self.image.size
        self._jpeg = bool(self._data) and self.image.format in ("JPEG", "MPO") and self.image.mode in ("RGB", "L")
        turn = _ORIENTATIONS[self.orientation]
        self.to_raw = np.array([[u, v, w * width + h * height] for u, v, w, h in turn], dtype=np.float64)
        self.size = (height, width) if turn[0][0] == 0 else (width, height)

    def reduction(self, limit: float) -> int:
        """The largest of 8, 4, 2, 1 that is at most `limit` and by which this image can be decoded smaller."""
        if not self._jpeg or limit < 2 or max(self.raw_size) < _SMALLEST:
            return 1
        return next(step for step in (8, 4, 2) if step <= limit)

    def region(self, box: tuple[int, int, int, int], reduce: int = 1) -> np.ndarray:
        """Decode a part of the stored (not yet upright) image.

        Args:
            box: (x0, y0, x1, y1) in stored pixels, inside the image (up to the next multiple of `reduce`).
            reduce: a value that `reduction` returned; the box's edges are multiples of it.

        Returns:
            uint8 [(y1 - y0) / reduce, (x1 - x0) / reduce, 3], perhaps a view of a larger array.
        """
        x0, y0, x1, y1 = (edge // reduce for edge in box)
        if self._jpeg and (pixels := self._decode_jpeg(reduce)) is not None:
            return pixels[y0:y1, x0:x1]
        with naming_errors(self.where):
            image = self.image
            image.load()
            if reduce > 1:
                image = image.reduce(reduce)
            if image.mode in ("I", "F"):  # by all its pixels, so that the answer does not depend on the crop
                image = to_rgb(image, self.where)
            if (x0, y0, x1, y1) != (0, 0, *image.size):
                image = image.crop((x0, y0, x1, y1))
            return np.array(to_rgb(image, self.where))

    def _decode_jpeg(self, reduce: int) -> np.ndarray | None:
        """The stored image, uint8 [h, w, 3] with h, w = raw_size / reduce, rounded up; None if the file has a fault."""
        width, height = (-(-side // reduce) for side in self.raw_size)
        try:
            if simplejpeg.decode_jpeg_header(self._data)[1::-1] != self.raw_size:
                return None  # two readers of one header disagree; do not even try
            return simplejpeg.decode_jpeg(self._data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return None  # also for harmless damage: Pillow decides

    def upright(self) -> Image.Image:
        """The whole image, upright, as RGB."""
        pixels = self.region((0, 0, *self.raw_size))
        if self.orientation != 1:
            pixels = np.ascontiguousarray(turn_upright(pixels, self.orientation))
        return Image.fromarray(pixels)


def turn_upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """An array [H, W, C] in the stored order of rows and columns -> the upright one, for an EXIF orientation 1 to 8."""
    (a, b, _, _), (d, e, _, _) = _ORIENTATIONS[orientation]
    if a == 0:
        stored = stored.transpose(1, 0, 2)
    # along u the stored coordinate is x (coefficient a) or y (coefficient d); likewise along v
    return stored[:: -1 if b + e < 0 else 1, :: -1 if a + d < 0 else 1]


def open_image(source: Path | io.BytesIO, where: str) -> Image.Image:
    """An image file whose header is read; of the formats, and of the size, that are allowed."""
    limit = pixel_limit()
    if Image.MAX_IMAGE_PIXELS is not None and limit > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = limit  # somebody wants larger ones
    with naming_errors(where), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit decides
        if not isinstance(source, io.BytesIO):
            check_regular(source)
        size = len(source.getbuffer()) if isinstance(source, io.BytesIO) else source.stat().st_size
        if not size:
            raise ImageError(f"{where}: the file is empty.")
        if HEIF and "HEIF" not in Image.OPEN:
            import pillow_heif

            pillow_heif.register_heif_opener(thumbnails=False)
        image = Image.open(source, formats=FORMATS)
        _check_pixels(image.size, where)
        if image.format in ("JPEG", "MPO") and image.width * image.height > size * _PIXELS_PER_BYTE:
            raise ImageError(
                f"{where}: the file is truncated, or its header is wrong: {size} bytes cannot hold a JPEG image of "
                f"{image.width} x {image.height} pixels."
            )
        if image.format == "TIFF":
            image.load()  # Pillow turns a TIFF upright by itself, but only then says so
        return image


def read_header(path: Path, where: str) -> tuple[tuple[int, int], int]:
    """((width, height) as stored, EXIF orientation) of an image file, of which the header alone is read."""
    with open_image(path, where) as image, naming_errors(where):
        return image.size, _orientation(image)


def _check_pixels(size: tuple[int, int], where: str) -> None:
    limit = pixel_limit()
    if size[0] * size[1] > limit:
        raise ImageError(f"{where}: {size[0]} x {size[1]} pixels are more than the limit of {limit}. {_SMALLER}")


def _orientation(image: Image.Image) -> int:
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # Pillow raises many kinds on damaged EXIF; the pixels may be fine
        return 1
    return value if value in _ORIENTATIONS else 1


def to_rgb(image: Image.Image, where: str = "image") -> Image.Image:
    """8-bit RGB of a loaded image in any of Pillow's modes; transparency is composited over white."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode in ("F", "I"):
        low, high = (float(v) for v in image.getextrema())  # type: ignore[arg-type]
        if mode == "F" or low < 0 or high > 65535:
            kind = "floats" if mode == "F" else "32-bit integers"
            raise ImageError(
                f"{where}: the pixels are {kind} between {low:g} and {high:g}. "
                "Convert the image to 8 or 16 bits first; the right scale is not known here."
            )
    if mode == "I" or mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
