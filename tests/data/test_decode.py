"""Odd images: handled as documented, or refused by name."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from everytoken import keyed
from everytoken.errors import EverytokenError
from everytoken_lab.data.archives import ArchiveReader
from everytoken_lab.data.augment import AugmentOptions, EvalTransform, TrainTransform
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.data.decode import ImageError, Picture, read_header, to_rgb

from .conftest import encode, photo

SIZE = (60, 40)


def views(data):
    """Both transforms work on it and give the right shape."""
    train, _ = TrainTransform(32)(Picture(data), keyed.generator(1))
    evaluated, _ = EvalTransform(32)(Picture(data))
    assert train.shape == evaluated.shape == (32, 32, 3)
    assert train.dtype == evaluated.dtype == np.uint8
    return evaluated


def test_grey_one_bit_palette_and_cmyk_become_rgb():
    image = photo()
    for mode, kind in (("L", "PNG"), ("L", "JPEG"), ("1", "PNG"), ("P", "GIF"), ("P", "PNG"), ("CMYK", "JPEG")):
        changed = image.convert(mode)
        upright = Picture(encode(changed, kind)).upright()
        assert upright.mode == "RGB"
        want = np.asarray(changed.convert("RGB")).astype(int)
        assert np.abs(np.asarray(upright) - want).mean() < 6, (mode, kind)  # JPEG is lossy
        views(encode(changed, kind))


def test_transparency_is_composited_over_white_also_of_palettes_and_grey_images():
    clear = Image.new("RGBA", SIZE, (200, 0, 0, 0))
    clear.paste((0, 0, 200, 255), (0, 0, 30, 40))
    data = encode(clear, "PNG")
    pixels = np.asarray(Picture(data).upright())
    assert tuple(pixels[20, 50]) == (255, 255, 255)
    assert tuple(pixels[20, 10]) == (0, 0, 200)
    views(data)
    palette = Image.new("P", SIZE, 0)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.paste(1, (0, 0, 30, 40))
    pixels = np.asarray(Picture(encode(palette, "PNG", transparency=0)).upright())
    assert tuple(pixels[20, 50]) == (255, 255, 255)
    assert tuple(pixels[20, 10]) == (200, 0, 0)
    grey = Image.new("LA", SIZE, (50, 0))
    assert (np.asarray(Picture(encode(grey, "PNG")).upright()) == 255).all()


def test_sixteen_bit_grey_is_scaled_not_clipped():
    ramp = np.linspace(0, 65535, 60 * 40).reshape(40, 60).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(Picture(encode(Image.fromarray(ramp), kind)).upright())
        assert np.abs(pixels[..., 0] - ramp / 257.0).max() <= 0.5
        views(encode(Image.fromarray(ramp), kind))


def test_floats_and_wide_integers_are_refused_by_name_even_if_a_crop_would_pass():
    for array in (np.ones((40, 60), np.float32), np.pad(np.ones((39, 60), np.int32), ((1, 0), (0, 0))) * 70000):
        data = encode(Image.fromarray(array), "TIFF")
        with pytest.raises(ImageError, match=r"strange\.tif.*Convert"):
            Picture(data, "strange.tif").upright()
        with pytest.raises(ImageError, match=r"strange\.tif"):
            Picture(data, "strange.tif").region((0, 0, 4, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_rotation_is_applied(orientation, kind):
    image = photo()
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = encode(image, kind, exif=tags)
    want = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    picture = Picture(data)
    assert picture.size == want.size
    assert np.array_equal(np.asarray(picture.upright()), np.asarray(want))


def test_heic_photos_are_read_with_the_extra_heif(tmp_path, monkeypatch):
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener(thumbnails=False)
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20] = (250, 10, 10)  # the upper half is red
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.fromarray(pixels).save(tmp_path / folder / "photo.HEIC", quality=95)
    monkeypatch.delitem(Image.OPEN, "HEIF")  # to be registered again
    data = open_dataset(tmp_path)
    assert list(data.keys()) == ["a/photo.HEIC", "b/photo.HEIC"]
    upright = np.asarray(data.picture(0).upright()).astype(int)
    assert np.abs(upright - pixels).mean() < 5
    (tmp_path / "b/photo.HEIC").write_bytes((tmp_path / "b/photo.HEIC").read_bytes()[:200])
    with pytest.raises(ImageError, match=r"b/photo\.HEIC"):
        data.picture(1).upright()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_no_reason_to_refuse_the_pixels():
    data = encode(photo(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff garbage")
    assert Picture(data).size == SIZE
    views(data)


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "green", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        red = np.asarray(Picture(data).upright()).reshape(-1, 3).mean(0)
        assert red[0] > 240
        assert red[1] < 15
        views(data)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_tiny_and_thin_images_work(size, kind):
    data = encode(Image.new("RGB", size, (10, 200, 30)), kind)
    assert np.abs(views(data).astype(int) - (10, 200, 30)).max() < 8


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP"])
def test_truncated_files_are_refused_by_name_at_any_length(kind):
    data = encode(photo((200, 160)), kind)
    for part in (0, 1, 10, len(data) // 4, len(data) // 2, len(data) * 3 // 4, len(data) - 40):
        with pytest.raises(ImageError, match="holiday"):
            Picture(data[:part], "holiday").upright()


def test_garbage_empty_and_missing_files_are_refused_by_name(tmp_path):
    for data, why in ((b"", "empty"), (b"hello" * 100, "not an image"), (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "x.png")):
        with pytest.raises(ImageError, match=r"x\.png") as caught:
            Picture(data, "x.png").upright()
        assert why in str(caught.value)
    with pytest.raises(ImageError, match="No such file"):
        Picture(tmp_path / "none.jpg", "none.jpg")
    with pytest.raises(ImageError, match="cannot be read"):
        Picture(tmp_path, "folder")


def test_flipped_bytes_never_raise_anything_but_an_image_error():
    rng = keyed.generator(5, "flips")
    refused = []
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", *(["AVIF"] if features.check("avif") else [])):
        whole = encode(photo(), kind)
        for _ in range(60 if kind == "AVIF" else 25):  # AVIF raises RuntimeError, but seldom
            data = bytearray(whole)
            for at in rng.integers(0, len(data), 4):
                data[at] = rng.integers(256)
            try:
                picture = Picture(bytes(data), "broken")
                if picture.size[0] * picture.size[1] < 10**6:
                    picture.upright()
            except ImageError as error:  # anything else fails the test
                refused.append(str(error))
    assert len(refused) > 20
    assert all(message.startswith("broken: ") for message in refused)


def test_decompression_bombs_are_refused_before_they_are_decoded(monkeypatch):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (14_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        with pytest.raises(ImageError, match=r"bomb\.png.*smaller copy"):
            Picture(bomb, "bomb.png")
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "100")
    with pytest.raises(ImageError, match="limit of 100"):
        Picture(encode(photo(), "PNG"))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_part_of_a_jpeg_equals_the_part_of_the_whole(options, mode):
    image = photo((210, 170)).convert(mode)
    data = encode(image, "JPEG", **options)
    whole = np.asarray(to_rgb(Image.open(io.BytesIO(data))))
    picture = Picture(data)
    for box in ((0, 0, 210, 170), (3, 5, 100, 90), (50, 169, 210, 170), (0, 0, 210, 1)):
        x0, y0, x1, y1 = box
        assert np.array_equal(picture.region(box), whole[y0:y1, x0:x1])
    if picture.reduction(4) == 4:
        draft = Image.open(io.BytesIO(data))
        draft.draft(None, (210 // 4, 170 // 4))
        smaller = np.asarray(to_rgb(draft))
        assert np.array_equal(picture.region((8, 12, 208, 100), 4), smaller[3:25, 2:52])
    assert picture.reduction(4) == (1 if mode == "CMYK" else 4)
    assert np.array_equal(np.asarray(picture.upright()), whole)


def test_unusual_jpegs_have_pillows_pixels():
    """Whoever decodes them: comments, profiles, several images in one file, bytes after the end, harmless damage."""
    image = photo((37, 53))
    plain = encode(image, "JPEG")
    sos = plain.index(b"\xff\xda")
    for data in (
        encode(image, "JPEG", comment=b"hello"),
        encode(image, "JPEG", icc_profile=b"x" * 70_000),
        encode(image, "JPEG", subsampling=1, restart_marker_blocks=2),
        encode(image, "MPO", save_all=True, append_images=[image]),
        plain + b"something after the end",
        plain[:2] + b"\xff\xff\xff" + plain[2:],  # fill bytes before a marker are allowed
        plain[:sos] + b"\xff\xff" + plain[sos:],
        plain[:sos] + b"\0\0" + plain[sos:],  # a warning of libjpeg's
    ):
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        picture = Picture(data)
        assert picture.size == image.size
        assert np.array_equal(np.asarray(picture.upright()), want)
        assert picture.region((4, 8, 36, 48), 4).shape == (10, 8, 3)


def test_fill_bytes_that_hide_a_second_header_are_read_or_refused_but_not_believed():
    """A parser that steps over FF FF wrongly would take the size of the first header and the pixels of the second."""
    small, large = encode(photo((16, 16)), "JPEG"), encode(photo((200, 160)), "JPEG")
    at, end = (small.index(b"\xff\xc0"), small.index(b"\xff\xc4"))
    for data in (
        large[:2] + b"\xff" + small[at:end] + large[2:],
        large[:2] + b"\xff\xff" + small[at:end] + large[2:],
        large[:2] + b"\xff\xfe\0\x15\xff" + small[at:end] + large[2:],
    ):
        with contextlib.suppress(ImageError):
            picture = Picture(data, "crafted.jpg")
            assert np.asarray(picture.upright()).shape[1::-1] == picture.size
            assert picture.region((0, 0, 8, 8), 2).shape == (4, 4, 3)


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (8, 3), (9, 17), (33, 20), (5, 300)])
def test_a_reduced_jpeg_has_the_pixels_of_pillows_draft_at_every_odd_size(size):
    data = encode(photo(size), "JPEG")
    for limit in (2, 4, 8):
        picture = Picture(data)
        step = picture.reduction(limit)
        assert step in (1, limit)
        width, height = (-(-side // step) for side in size)
        pixels = picture.region((0, 0, width * step, height * step), step)
        draft = Image.open(io.BytesIO(data))
        if step > 1:
            draft.draft(None, (max(size[0] // step, 1), max(size[1] // step, 1)))
        if draft.size == (width, height):  # draft never makes a side smaller than asked for
            assert np.array_equal(pixels, np.asarray(draft.convert("RGB")))
        assert pixels.shape == (height, width, 3)


def test_a_jpeg_that_breaks_in_the_middle_is_refused_and_not_half_used():
    data = bytearray(encode(photo((200, 160)), "JPEG", progressive=True))
    at = data.rindex(b"\xff\xc4")  # the last of its Huffman tables
    data[at + 5 : at + 21] = b"\xff" * 16
    for box in ((0, 0, 200, 40), (0, 0, 200, 160)):
        with pytest.raises(ImageError, match=r"broken\.jpg"):
            Picture(bytes(data), "broken.jpg").region(box)


def test_views_of_an_image_in_memory_leave_it_unchanged():
    image = photo((32, 32))
    before = image.copy()
    transform = TrainTransform(32, AugmentOptions(scale=(1.0, 1.0), ratio=(1.0, 1.0), aa="", reprob=1.0))
    for key in range(20):
        transform(image, keyed.generator(key))
    assert np.array_equal(np.asarray(image), np.asarray(before))


def test_an_image_in_memory_is_a_picture_as_well():
    image = photo()
    assert np.array_equal(Picture(image).region((5, 6, 20, 30)), np.asarray(image)[6:30, 5:20])
    assert Picture(image).reduction(8) == 1


def test_an_eps_file_called_jpg_is_refused_and_starts_no_ghostscript(tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(ImageError, match="known format"):
        EvalTransform(32)(Picture(data))
    with pytest.raises(ImageError, match="known format"):
        read_header(tmp_path / "x.jpg", "x.jpg")
    assert not (tmp_path / "started").exists()


def test_a_jpeg_that_is_too_short_for_its_pixels_is_refused(monkeypatch):
    """libjpeg would fill what is missing with grey."""
    data = bytearray(encode(photo(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 4000, 4000)
    with pytest.raises(ImageError, match=r"liar\.jpg.*cannot hold a JPEG image of 4000 x 4000"):
        Picture(bytes(data), "liar.jpg")
    blank = encode(Image.new("L", (4000, 4000)), "JPEG", quality=1)  # as short as an honest one can be
    assert Picture(blank).upright().size == (4000, 4000)


def test_the_limit_of_pixels_can_be_set_for_all_processes(monkeypatch, tmp_path):
    data = encode(photo((40, 30)), "PNG")
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "1e3")
    with pytest.raises(ImageError, match=r"40 x 30 pixels are more than the limit of 1000.*EVERYTOKEN_MAX_PIXELS"):
        Picture(data)
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ImageError, match="limit of 1000"):
        read_header(tmp_path / "a.png", "a.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/a.bmp", encode(photo((40, 30)), "BMP"))
    reader = ArchiveReader([tmp_path / "a.zip"])
    assert len(reader.read(0)) == 3654
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "900")
    with pytest.raises(ImageError, match=r"a\.bmp: unpacks to 3,654 bytes.*EVERYTOKEN_MAX_PIXELS"):
        reader.read(0)
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "many")
    with pytest.raises(EverytokenError, match="'many'"):
        Picture(data)


def test_a_zip_member_unpacks_to_what_its_directory_says_and_no_more(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/a.bmp", bytes(100_000))
    raw = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(raw.replace(struct.pack("<I", 100_000), struct.pack("<I", 50)))
    with pytest.raises(ImageError, match="damaged"):
        ArchiveReader([tmp_path / "a.zip"]).read(0)
