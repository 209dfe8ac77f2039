"""Decoding: any image file to upright 8-bit RGB, or an error that names the file and the reason.

Pillow reads the header, with a list of allowed formats. Grey and RGB pixels of JPEG files are decoded by simplejpeg
(libjpeg-turbo, straight into NumPy; at 1/2, 1/4 or 1/8 of their size where the crop allows it), all others by Pillow.
What simplejpeg refuses gets a second chance with Pillow, which passes over harmless damage and raises on truncated
files; the pixels of both are the same.

What happens to unusual images (`docs/data.md` has the table): EXIF rotation is applied; grey, palette, CMYK and 1-bit
become RGB; transparency is composited over white; 16-bit grey is scaled to 8 bits (Pillow alone would clip it to
white); of an animation the first frame is taken. Truncated and corrupt files, float pixels and decompression bombs
raise `ImageError`. Nothing is ever replaced by something else.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from everytoken.errors import EverytokenError

Box = tuple[int, int, int, int]

# What Pillow may open. Without a list it tries all its formats by content, and one of them (EPS) starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "TGA", "AVIF")
MAX_PIXELS = 178_956_970  # Pillow's own limit for an error; a 13,000 x 13,000 image passes
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


class ImageError(EverytokenError):
    """One image cannot be used; the message names it and says why."""


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn what Pillow raises about a file into an `ImageError` about that file."""
    try:
        yield
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{where}: the file is not there.") from error
    except (PermissionError, IsADirectoryError) as error:
        raise ImageError(f"{where}: cannot be read ({error.strerror}).") from error
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise ImageError(f"{where}: not an image of a known format ({kinds}), or its header is damaged.") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{where}: the image is too large ({error}). Make a smaller copy of it.") from error
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError) as error:
        raise ImageError(f"{where}: the image is truncated or corrupt ({type(error).__name__}: {error}).") from error
    except (RuntimeError, MemoryError, struct.error, zlib.error) as error:  # RuntimeError: AVIF
        raise ImageError(f"{where}: the image cannot be decoded ({type(error).__name__}: {error}).") from error


class Picture:
    """An image whose header is read and whose pixels are not yet decoded.

    Args:
        source: the bytes of an image file, its path, or a Pillow image.
        where: what to call it in messages.
        max_pixels: larger images are refused before they are decoded.

    Attributes:
        size: (width, height) of the upright image, in pixels.
        raw_size: (width, height) as stored, before EXIF rotation.
        orientation: EXIF orientation, 1 to 8.
        image: the stored image as Pillow opened it.
        to_raw: float64 [2, 3], upright pixel position -> stored pixel position (identity without EXIF rotation).
        where: what to call it in messages.
    """

    def __init__(
        self, source: bytes | str | Path | Image.Image, where: str = "image", *, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.where = where
        self._data = b""
        with _naming(where):
            if isinstance(source, Image.Image):
                self.image = source
            else:
                self._data = Path(source).read_bytes() if isinstance(source, (str, Path)) else source
                if not self._data:
                    raise ImageError(f"{where}: the file is empty.")
                self.image = Image.open(io.BytesIO(self._data), formats=FORMATS)
            _check_pixels(self.image.size, where, max_pixels)
            if self.image.format == "TIFF":
                self.image.load()  # Pillow turns a TIFF upright by itself, but only then says so
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

    def region(self, box: Box, reduce: int = 1) -> np.ndarray:
        """Decode a part of the stored (not yet upright) image.

        Args:
            box: (x0, y0, x1, y1) in stored pixels, inside the image (up to the next multiple of `reduce`).
            reduce: a value that `reduction` returned; the box's edges are multiples of it.

        Returns:
            uint8 [(y1 - y0) / reduce, (x1 - x0) / reduce, 3], perhaps a view of a larger array.
        """
        x0, y0, x1, y1 = (edge // reduce for edge in box)
        if self._jpeg:
            pixels = self._decode_jpeg(reduce)
            if pixels is not None:
                return pixels[y0:y1, x0:x1]
        with _naming(self.where):
            image = self.image
            image.load()
            if reduce > 1:
                image = image.reduce(reduce)
            if image.mode in ("I", "F"):  # judged by all its pixels, so that no crop of it passes by luck
                image = to_rgb(image, self.where)
            return np.array(to_rgb(image.crop((x0, y0, x1, y1)), self.where))

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


def read_header(path: Path, where: str, max_pixels: int = MAX_PIXELS) -> tuple[tuple[int, int], int]:
    """((width, height) as stored, EXIF orientation) of an image file, of which the header alone is read.

    Refuses what `Picture` refuses at opening, with the same words.
    """
    with _naming(where), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below decides
        with Image.open(path, formats=FORMATS) as image:
            if image.format == "TIFF":
                image.load()  # as in Picture
            size, orientation = image.size, _orientation(image)
        _check_pixels(size, where, max_pixels)
    return size, orientation


def _check_pixels(size: tuple[int, int], where: str, max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise ImageError(
            f"{where}: {size[0]} x {size[1]} pixels are more than the limit of {max_pixels}. "
            "Make a smaller copy, or raise max_pixels if you trust the file."
        )


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
    """8-bit RGB of a loaded image in any of Pillow's modes; transparency is composited over white.

    Args:
        image: loaded.
        where: what to call it in messages.
    """
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
