"""Decoding: any image file to upright 8-bit RGB, or a refusal that names the file and the reason.

What happens to unusual images (`docs/data.md` has the table): EXIF rotation is applied; grey, palette, CMYK and 1-bit
become RGB; transparency is composited over a colour (white by default) or dropped; 16-bit grey is scaled to 8 bits
(Pillow alone would clip it to white); of an animation the first frame is taken. Truncated and corrupt files, float
pixels and decompression bombs raise `ImageError`. Nothing is ever replaced by something else. One thing cannot be seen:
damage within a JPEG's compressed data over which libjpeg steps with a warning, because Pillow does not pass it on.

A `Picture` is lazy: opening reads the header only. The pixels are decoded when it is known which part is wanted. Then
- a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the crop allows it (DCT scaling inside libjpeg);
- of a JPEG only the rows down to the bottom of the wanted part are decoded (on average 16 % of a random crop's image
  lies below it; the entropy decoding, which scaling cannot save, stops too);
- mode conversion is done on the wanted part only.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from everytoken.data.pixels import view
from everytoken.errors import EverytokenError

Alpha = Literal["white", "black", "drop"]
Box = tuple[int, int, int, int]

# What Pillow may open. Without a list it tries all its formats by content, and one of them (EPS) starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "TGA", "AVIF")
MAX_PIXELS = 178_956_970  # Pillow's own limit for an error; a 13,000 x 13,000 image passes
_EXIF_ORIENTATION = 0x0112
_END = b"\xff\xd9"  # the last two bytes of a JPEG
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
    except OSError as error:
        kind = "is truncated" if "truncated" in str(error) else "is corrupt"
        raise ImageError(f"{where}: the image {kind} ({error}).") from error
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, struct.error) as error:
        raise ImageError(f"{where}: the image is corrupt ({type(error).__name__}: {error}).") from error
    except (zlib.error, MemoryError) as error:
        raise ImageError(f"{where}: the image cannot be decoded ({type(error).__name__}: {error}).") from error


class Picture:
    """An image whose header is read and whose pixels are not.

    Attributes:
        size: (width, height) of the upright image, in pixels.
        to_raw: float64 [2, 3], upright pixel position -> stored pixel position (identity without EXIF rotation).
        where: what to call it in messages.
    """

    def __init__(
        self,
        source: bytes | str | Path | Image.Image,
        where: str = "image",
        *,
        alpha: Alpha = "white",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.where = where
        self.alpha = alpha
        self._jpeg: tuple[bytes, str, tuple] | None = None  # file, mode and the decoder's arguments
        self._image: Image.Image | None = None
        with _naming(where):
            if isinstance(source, Image.Image):
                self._data, self._image = b"", source
            else:
                self._data = Path(source).read_bytes() if isinstance(source, (str, Path)) else source
                if not self._data:
                    raise ImageError(f"{where}: the file is empty.")
            size = _plain_jpeg(self._data)
            if size is not None:
                self._jpeg = (self._data, "RGB", ("RGB", ""))
            width, height = size or self.image.size
            _check_pixels((width, height), where, max_pixels)
            orientation = 1
            if size is None:
                if self.image.format == "TIFF":
                    self.image.load()  # Pillow turns a TIFF upright by itself, but only then tells so
                    width, height = self.image.size
                orientation = _orientation(self.image)
            turn = _ORIENTATIONS[orientation]
        self.raw_size, self.orientation = (width, height), orientation
        self.turned = turn is not _ORIENTATIONS[1]
        self.to_raw = np.array([[u, v, w * width + h * height] for u, v, w, h in turn], dtype=np.float64)
        self.size = (height, width) if turn[0][0] == 0 else (width, height)

    @property
    def image(self) -> Image.Image:
        """The stored image as Pillow opens it."""
        if self._image is None:
            with _naming(self.where):
                self._image = image = Image.open(io.BytesIO(self._data), formats=FORMATS)
                tile = image.tile[0] if len(image.tile) == 1 else None
                # Only a JPEG that ends with its end marker is decoded in part: it is known not to be truncated.
                if tile and image.format == "JPEG" and tile[0] == "jpeg" and self._data[-2:] == _END:
                    self._jpeg = (self._data, image.mode, tuple(tile[3] or ()))
        return self._image

    def reduction(self, limit: float) -> int:
        """The largest of 8, 4, 2, 1 that is at most `limit` and by which this image can be decoded smaller."""
        return 1 if self._jpeg is None or limit < 2 else next(s for s in (8, 4, 2) if s <= limit)

    def region(self, box: Box, reduce: int = 1) -> np.ndarray:
        """Decode a part of the stored (not yet upright) image.

        Args:
            box: (x0, y0, x1, y1) in stored pixels, inside the image (up to the next multiple of `reduce`).
            reduce: a value that `reduction` returned; the box's edges are multiples of it.

        Returns:
            uint8 [(y1 - y0) / reduce, (x1 - x0) / reduce, 3], perhaps a view of a larger image: read it, do not write.
        """
        x0, y0, x1, y1 = (edge // reduce for edge in box)
        with _naming(self.where):
            image = self._rows(y1, reduce)
            if image.mode in ("I", "F"):  # judged by all its pixels, so that no crop of it passes by luck
                image = to_rgb(image, self.alpha, self.where)
            whole = to_rgb(image, self.alpha, self.where) if image.mode == "RGB" else None
            if whole is image:  # no conversion: look at the wanted part of Pillow's memory
                return view(image)[y0:y1, x0:x1]
            return view(to_rgb(image.crop((x0, y0, x1, y1)), self.alpha, self.where))

    def _rows(self, rows: int, reduce: int) -> Image.Image:
        """The stored image, reduced, down to `rows` at least.

        A JPEG decoder that gets a shorter image to fill fills it, and then complains that the file has more rows: the
        ValueError below. Should the complaint have another cause, then the last row was not written and still has the
        marker colour; in that case everything is decoded again, strictly. The width stays whole, because the decoder's
        row buffer depends on it.
        """
        width, height = ((edge + reduce - 1) // reduce for edge in self.raw_size)
        if self._jpeg is not None and (reduce > 1 or rows < height):
            data, mode, args = self._jpeg
            marker = (1, 254, 3, 2)[: len(mode)] if len(mode) > 1 else 1
            made = Image.new(mode, (width, rows), None)
            made.paste(marker, (0, rows - 1, width, rows))
            with suppress(ValueError):
                made.frombytes(data, "jpeg", (*args, reduce, 0))
            if made.crop((0, rows - 1, width, rows)).getcolors(1) != [(width, marker)]:
                return made
        self.image.load()
        return self.image.reduce(reduce) if reduce > 1 else self.image

    def upright(self) -> Image.Image:
        """The whole image, upright, as RGB."""
        with _naming(self.where):
            self.image.load()
            made = to_rgb(self.image, self.alpha, self.where)
        if self.turned:
            made = Image.fromarray(np.ascontiguousarray(turn_upright(np.asarray(made), self.orientation)))
        return made


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


def _plain_jpeg(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a whole JPEG with three 8-bit channels and without EXIF, XMP or further images; else None.

    For these, which most photos in data sets are, everything that opening finds out is known after a few microseconds.
    """
    if data[:3] != b"\xff\xd8\xff" or data[-2:] != _END:
        return None
    at, size = 2, None
    while at + 10 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xDA:  # the pixels begin
            return size
        if marker == 0xE1 or (marker == 0xE2 and data[at + 4 : at + 8] == b"MPF\0"):
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            precision, height, width, channels = struct.unpack_from(">BHHB", data, at + 4)
            if precision != 8 or channels != 3 or not width or not height:
                return None
            size = (width, height)
        if marker < 0xC0 or 0xD0 <= marker <= 0xD9:  # fill bytes and the like: leave it to Pillow
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


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


def to_rgb(image: Image.Image, alpha: Alpha = "white", where: str = "image") -> Image.Image:
    """8-bit RGB of a loaded image in any of Pillow's modes.

    Args:
        image: loaded.
        alpha: composite transparency over `"white"` or `"black"`, or `"drop"` it (what `convert("RGB")` does).
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
    if alpha != "drop" and (mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info):
        layer = image.convert("RGBA")
        background = Image.new("RGBA", layer.size, alpha)
        return Image.alpha_composite(background, layer).convert("RGB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "palette images with transparency should be RGBA": dropped on purpose
        return image.convert("RGB")
