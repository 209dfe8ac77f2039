"""Images with masks: layouts, named errors, and views in which pixels and mask agree."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from everytoken.data import placement as pl
from everytoken.data.placement import sample_mask
from everytoken.errors import EverytokenError
from everytoken.keyed import generator
from everytoken_lab.data.datasets import DataError
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.data.loader import BadImages, Loader
from everytoken_lab.dense.common import resized
from everytoken_lab.dense.segment import MaskOptions, SegmentAugment
from everytoken_lab.dense.segment.data import MaskReader, SegmentTransform, distort, divided, open_masks, read_classes

from .conftest import make_shapes


def save(path: Path, values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(values, np.uint8)).save(path)


def picture(path: Path, size=(6, 4), value=9) -> None:
    save(path, np.full((size[1], size[0], 3), value))


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_a_pair_of_folders_with_a_class_file(tmp_path):
    make_shapes(tmp_path, train=3, val=2)
    train, val = open_masks(str(tmp_path), "train"), open_masks(str(tmp_path), "val")
    assert (len(train), len(val), train.class_names) == (3, 2, ["ground", "disc", "square"])
    assert train.key(0) == "images/train/0.png"
    mask = train.mask(0, train.picture(0).size)
    assert mask.dtype == np.int16
    assert (mask[0] == -1).all()  # 255 is ignored
    stored = np.asarray(Image.open(tmp_path / "masks/train/0.png"))
    assert (mask[1:] == stored[1:]).all()
    assert len(open_masks(str(tmp_path), "all")) == 5


def test_without_a_validation_part_images_are_held_out_by_name_and_those_for_testing_are_never_trained_on(tmp_path):
    for folder, splits in (("whole", {"": 30}), ("parts", {"train": 20, "test": 10})):
        for split, count in splits.items():
            for i in range(count):
                picture(tmp_path / folder / "images" / split / f"{i}.png")
                save(tmp_path / folder / "masks" / split / f"{i}.png", np.zeros((4, 6)))
        (tmp_path / folder / "classes.txt").write_text("one\ntwo")
    options, whole, parts = MaskOptions(val_split=0.3), str(tmp_path / "whole"), str(tmp_path / "parts")
    train, val = (set(open_masks(whole, s, options).keys()) for s in ("train", "val"))
    assert not train & val
    assert len(train | val) == 30
    assert 3 <= len(val) <= 15
    assert not divided(whole)
    train, val, test = (set(open_masks(parts, s).keys()) for s in ("train", "val", "test"))
    assert not train & val
    assert len(train | val) == 20
    assert len(test) == 10
    assert not any("/test/" in key for key in train | val)


def test_ade20k_reduces_the_zero_label(tmp_path):
    for split in ("training", "validation"):
        picture(tmp_path / "images" / split / "x.jpg")
        save(tmp_path / "annotations" / split / "x.png", [[0, 1, 2, 3, 1, 0]] * 4)
    head = "Idx\tRatio\tTrain\tVal\tName\n"
    rows = "1\t.1\t5\t5\twall\n2\t.1\t5\t5\tbuilding, edifice\n3\t.1\t1\t1\tsky\n"
    (tmp_path / "objectInfo150.txt").write_text(head + rows)
    data = open_masks(str(tmp_path), "train")
    assert data.class_names == ["wall", "building, edifice", "sky"]
    assert data.mask(0)[0].tolist() == [-1, 0, 1, 2, 0, -1]
    (tmp_path / "four.txt").write_text("\ufeffother\nwall\nbuilding\nsky", encoding="utf-8")  # a byte order mark first
    kept = open_masks(str(tmp_path), "train", MaskOptions(reduce_zero_label=False, classes=str(tmp_path / "four.txt")))
    assert kept.class_names == ["other", "wall", "building", "sky"]
    assert kept.mask(0)[0].tolist() == [0, 1, 2, 3, 1, 0]


# -- named errors -----------------------------------------------------------------------------------------------------


def test_a_missing_mask_a_wrong_size_and_an_unknown_value_are_named(tmp_path):
    make_shapes(tmp_path, train=2, val=1)
    (tmp_path / "masks/train/1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 images .* have no mask, such as 1\.png: .*masks/train/1\.png"):
        open_masks(str(tmp_path), "train")
    save(tmp_path / "masks/train/1.png", np.zeros((20, 30)))
    save(tmp_path / "masks/train/0.png", np.full((48, 56), 3))
    data = open_masks(str(tmp_path), "train")
    with pytest.raises(ImageError, match=r"images/train/1\.png is 56 x 48 pixels, and .*1\.png says 30 x 20"):
        data.mask(1, data.picture(1).size)
    with pytest.raises(ImageError, match=r"0\.png: value 3 \(first at x 0, y 0; 2688 pixels.* 0 to 2"):
        data.mask(0, data.picture(0).size)
    save(tmp_path / "masks/train/0.png", np.zeros((48, 56, 3)))
    with pytest.raises(ImageError, match=r"one channel.*mode RGB"):
        data.mask(0)
    assert (open_masks(str(tmp_path), "train", MaskOptions(ignore_index=(255, 3))).table[3]) == -1


def test_wrong_folders_and_class_files_are_named(tmp_path):
    def refused(match, folder="", split="train", **options):
        with pytest.raises(DataError, match=match):
            open_masks(str(tmp_path / folder), split, MaskOptions(**options))

    refused("is not a folder", "none")
    refused("has no folders images/ and masks/")
    picture(tmp_path / "images" / "a.png")
    save(tmp_path / "masks" / "a.png", np.zeros((4, 6)))
    refused(r"no class file \(classes\.txt, classes\.json\)")
    (tmp_path / "classes.txt").write_text("a\nb")
    refused("no 'test' part", split="test")
    refused(r"ignored value 1 .* is the class 'b'", ignore_index=(1,))
    refused(r"ignored value 70000 .* is not in 0 to 255", ignore_index=(70000,))
    assert read_classes(tmp_path / "classes.txt", 1) == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.txt", b""),
        ("classes.txt", b"caf\xe9\n"),
        ("classes.json", b"{"),
        ("classes.json", b"[]"),
        ("classes.json", b'{"sky": "0"}'),
        ("classes.json", b'{"0": 1}'),
        ("classes.json", b'{"70000": "sky"}'),
        ("classes.json", b'{"-1": "sky"}'),
        ("classes.json", b'"sky"'),
        ("objectInfo150.txt", b"Idx\tRatio\n1\t.1\n"),
        ("objectInfo150.txt", b"Idx\tName\none\twall\n"),
    ],
)
def test_damaged_class_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EverytokenError, match=name):
        read_classes(tmp_path / name)


def test_bad_masks_are_skipped_when_asked(tmp_path):
    make_shapes(tmp_path, train=4, val=1)
    save(tmp_path / "masks/train/2.png", np.full((48, 56), 9))
    data = open_masks(str(tmp_path), "train")
    samples = MaskReader(data, SegmentTransform(SegmentAugment(crop_size=16)), skip=True)
    loader = Loader(samples, batch_size=4, train=True, bad_images=BadImages("skip", quota=0.5))
    (batch,) = loader.epoch(0)
    assert len(batch) == 3
    assert "images/train/2.png" in loader.bad_images.seen


# -- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_masks_are_sampled_at_the_pixel_that_each_centre_falls_on(seed):
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 9, (7, 11)).astype(np.int16)
    placement = pl.compose(pl.from_box(-0.1, 0.2, 0.9, 1.3), pl.hflip())
    if seed % 2:
        placement = pl.compose(placement, pl.rotation(20 * seed, (13, 8)))
    out = sample_mask(mask, placement, (8, 13), -1)
    for v in range(8):
        for u in range(13):
            x, y = pl.apply(placement, ((u + 0.5) / 13, (v + 0.5) / 8))
            inside = 0 <= x < 1 and 0 <= y < 1
            assert out[v, u] == (mask[int(y * 7), int(x * 11)] if inside else -1), (u, v)


def test_pixels_and_mask_show_the_same_thing_in_every_view():
    """Each class has its own flat colour, so the mask can be read off the pixels, away from edges."""
    rows, columns = np.mgrid[:90, :120]
    mask = ((rows // 30) + (columns // 40)).astype(np.int16)  # 0..4
    colours = np.array([[250, 0, 0], [0, 250, 0], [0, 0, 250], [250, 250, 0], [0, 250, 250]], np.uint8)
    source = Picture(Image.fromarray(colours[mask]))
    options = SegmentAugment(crop_size=64, resize=64, photometric=False, cat_max_ratio=1.0)
    flips = 0
    for k in range(40):
        pixels, seen, placement = SegmentTransform(options, (9, 9, 9))(source, mask, generator(0, k))
        flips += placement[0, 0] < 0
        flat = np.abs(pixels.astype(int)[:, :, None] - colours).sum(-1)
        read = np.where(flat.min(-1) < 30, flat.argmin(-1), -2)
        read[(pixels == 9).all(-1)] = -1
        sure = read != -2
        assert sure.mean() > 0.8
        assert (read[sure] == seen[sure]).mean() > 0.995
    assert 10 < flips < 30


def test_scales_lie_between_half_and_twice_and_small_images_are_filled():
    mask = np.zeros((50, 100), np.int16)
    source = Picture(Image.new("RGB", (100, 50), (200, 0, 0)))
    sizes = []
    for k in range(60):
        options = SegmentAugment(crop_size=32, resize=32, hflip=0.0)
        pixels, seen, placement = SegmentTransform(options, (1, 2, 3))(source, mask, generator(1, k))
        scale = 32 / (placement[1, 1] * 50) * 50 / 32  # of the short side
        sizes.append(scale)
        outside = seen == -1
        assert outside.any() == (scale < 0.99)
        assert (pixels[outside] == (1, 2, 3)).all()  # also after the colours were distorted
    assert 0.45 < min(sizes) < 0.7
    assert 1.7 < max(sizes) < 2.1
    assert resized((100, 50), 32, 128) == (64, 32)
    assert resized((1000, 50), 32, 128) == (128, 6)  # the long side is bounded


def test_crops_with_one_class_are_avoided_when_there_are_others():
    mask = np.zeros((64, 256), np.int16)
    mask[:, 120:138] = 1
    source = Picture(Image.new("RGB", (256, 64)))

    def varied(ratio: float) -> int:
        options = SegmentAugment(crop_size=64, scale=(1.0, 1.0), cat_max_ratio=ratio, photometric=False)
        views = [SegmentTransform(options)(source, mask, generator(2, k))[1] for k in range(40)]
        return sum(len(np.unique(v)) > 1 for v in views)

    assert varied(1.0) < 28
    assert varied(0.75) > 33


def test_photometric_distortion_changes_colours_within_its_limits():
    grey = np.full((4, 4, 3), 100, np.uint8)
    values = [int(distort(grey, generator(3, k))[0, 0, 0]) for k in range(200)]
    assert 30 <= min(values) < 60  # (100 - 32) * 0.5 = 34
    assert 170 < max(values) <= 200  # (100 + 32) * 1.5 = 198
    assert 20 < values.count(100) < 120  # each step is left out half of the time
    red = np.zeros((2, 2, 3), np.uint8)
    red[..., 0] = 200
    hues = [distort(red, generator(4, k))[0, 0].tolist() for k in range(200)]
    assert any(g > 40 and b < 10 for _, g, b in hues)
    assert any(b > 40 and g < 10 for _, g, b in hues)
    assert not any(g > r or b > r for r, g, b in hues)  # less than 60 degrees


def test_a_view_depends_on_seed_epoch_and_key_alone(tmp_path):
    data = open_masks(str(make_shapes(tmp_path, train=6, val=1)), "train")
    samples = MaskReader(data, SegmentTransform(SegmentAugment(crop_size=24)), seed=5)
    runs = []
    for workers in (0, 2):
        loader = Loader(samples, batch_size=2, train=True, seed=5, workers=workers)
        runs.append([*loader.epoch(3)])
        loader.close()
    for a, b in zip(*runs, strict=True):
        assert a.keys == b.keys
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)
    (late,) = list(Loader(samples, batch_size=2, train=True, seed=5).epoch(3, start=2))
    assert torch.equal(late.images, runs[0][2].images)
    assert not torch.equal(next(iter(Loader(samples, batch_size=2, train=True, seed=5))).images, runs[0][0].images)


def test_evaluation_sees_whole_images_at_their_own_size(tmp_path):
    data = open_masks(str(make_shapes(tmp_path, train=1, val=2, size=(40, 60))), "val")
    batches = list(Loader(MaskReader(data), batch_size=1, train=False))
    assert [tuple(b.images.shape) for b in batches] == [(1, 3, 60, 40)] * 2
    assert batches[1].targets.shape == (1, 60, 40)
