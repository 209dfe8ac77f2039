"""COCO json, masks, views and batches: decoded as pycocotools decodes, placed where the pixels are, errors by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from everytoken.errors import EverytokenError
from everytoken_lab.data.datasets import DataError
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.data.loader import Request
from everytoken_lab.dense.common import TargetSet
from everytoken_lab.dense.detect import CocoOptions, DetectAugment
from everytoken_lab.dense.detect.data import (
    DetectTransform,
    InstanceSet,
    ObjectReader,
    check,
    compress,
    decode,
    divided,
    open_instances,
    random_crop,
    through,
)

from .conftest import make_objects, run_lengths

coco = pytest.importorskip("pycocotools.mask")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_objects(tmp_path_factory.mktemp("objects"), {"train": 4, "val": 2})


def open_changed(data: Path, tmp_path: Path, edit) -> InstanceSet:
    """The validation part with something changed in its json; images stay where they are."""
    content = json.loads((data / "val" / "instances.json").read_text())
    edit(content)
    (tmp_path / "changed.json").write_text(json.dumps(content))
    return InstanceSet(tmp_path / "changed.json", data / "val" / "images")


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_run_lengths_go_down_the_columns_and_are_measured_as_pycocotools_reads_them(chance):
    mask = (np.random.default_rng(3).random((33, 47)) < chance).astype(np.uint8)
    plain, packed = {"size": [33, 47], "counts": run_lengths(mask)}, compress(mask)
    for runs in (plain, packed):
        assert check(runs, (47, 33), "here") == runs
        assert (decode(runs, (47, 33)) == mask).all()
    assert coco.frPyObjects(plain, 33, 47)["counts"] == packed["counts"].encode()
    with pytest.raises(ImageError, match="run lengths"):
        check({**packed, "counts": packed["counts"] + "1"}, (47, 33), "here")


def test_masks_follow_a_mirrored_and_resized_view_like_the_pixels():
    points = np.array([[10.0, 8.0], [50.0, 10.0], [40.0, 40.0], [12.0, 30.0]])
    polygon = [points.reshape(-1).tolist()]
    whole = decode(polygon, (64, 48))
    as_runs = {"size": [48, 64], "counts": run_lengths(whole)}
    matrix = np.array([[-0.5, 0.0, 64.0], [0.0, 0.5, 0.0]])  # twice as large, mirrored
    expected = np.kron(whole, np.ones((2, 2), np.uint8))[:, ::-1]
    assert (through(as_runs, (64, 48), matrix, (96, 128)) == expected).all()
    moved = through(polygon, (64, 48), matrix, (96, 128)).astype(bool)
    both = expected.astype(bool)
    assert (moved & both).sum() / (moved | both).sum() > 0.94


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ({"size": [3, 4], "counts": [12]}, "here: its mask is 4 x 3 pixels and its image is 8 x 6"),
        ({"size": [6, 8], "counts": [40, 7]}, "add up to 47 pixels and its image has 48"),
        ([[1, 2, 3, 4, 5, 6, 7]], "this one has 7 numbers"),
        ("mask.png", "list of polygons or run lengths"),
    ],
)
def test_segmentations_that_cannot_be_used_are_named(segmentation, message):
    with pytest.raises(ImageError, match=message):
        check(segmentation, (8, 6), "here")
    assert check([[1, 2, 3, 4]], (8, 6), "here") is None  # two corners enclose nothing


# -- the json ---------------------------------------------------------------------------------------------------------


def test_a_coco_file_is_read_with_its_categories_and_empty_images(data):
    found = open_instances(str(data), "val")
    assert found.class_names == ["disc", "square"]
    assert len(found) == 2
    assert [len(found.objects(i)) for i in range(2)] == [2, 0]
    assert [o.label for o in found.objects(0)] == [0, 1]
    content = json.loads((data / "val" / "instances.json").read_text())
    x, y, w, h = content["annotations"][0]["bbox"]
    assert found.objects(0)[0].box == [x, y, x + w, y + h]
    assert found.objects(0)[1].segmentation["size"] == [64, 96]


def test_layouts_are_found(data, tmp_path):
    content = (data / "val" / "instances.json").read_text()
    for split in ("train2017", "val2017"):
        (tmp_path / "coco" / split).mkdir(parents=True)
        for image in (data / "val" / "images").iterdir():
            (tmp_path / "coco" / split / image.name).write_bytes(image.read_bytes())
    (tmp_path / "coco" / "annotations").mkdir()
    for name in ("instances_train2017", "instances_val2017", "captions_val2017"):
        (tmp_path / "coco" / "annotations" / f"{name}.json").write_text(content)
    assert open_instances(str(tmp_path / "coco"), "val").root.name == "val2017"
    assert open_instances(str(tmp_path / "coco"), "train").root.name == "train2017"
    assert divided(str(tmp_path / "coco"), CocoOptions())
    file = str(data / "train" / "instances.json")
    assert len(open_instances(file, "all")) == 4
    assert not divided(file, CocoOptions())
    parts = [open_instances(file, split, CocoOptions(val_split=0.5)) for split in ("train", "val")]
    assert sorted(k for p in parts for k in p.keys()) == ["0.png", "1.png", "2.png", "3.png"]  # noqa: SIM118
    for split in ("all", "test"):
        with pytest.raises(DataError, match=f"has no COCO json for '{split}': .*annotations"):
            open_instances(str(data / "val" / "images"), split)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["annotations"][1].update(category_id=99), r"annotation 2 is of category 99, none of the 2"),
        (lambda c: c["annotations"][1].update(image_id=5), r"annotation 2 is of image 5, which is not among the 2"),
        (lambda c: c["images"][0].update(file_name="gone.png"), r"changed.json lists the image 'gone.png', which is"),
        (lambda c: c["annotations"][1]["segmentation"].update(size=[5, 5]), r"annotation 2: its mask is 5 x 5 pixels"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2]), r"annotations\.0\.bbox is \[1, 2\]"),
        (lambda c: c["images"][1].update(id=100), "two images have the id 100"),
        (lambda c: c["categories"].append(c["categories"][0]), "two categories have the id 3"),
        (lambda c: c.pop("categories"), "'categories' is missing"),
        (lambda c: c["images"][0].update(file_name="../0.png"), r"image 100 names the file '\.\./0\.png'"),
        (lambda c: c["images"][0].update(file_name="/etc/passwd"), "names the file '/etc/passwd'"),
        (lambda c: c["images"][0].update(file_name="C:\\a.png"), "names the file"),
        (lambda c: c["images"][0].update(file_name="é" * 300), "lists the image 'é+', which is not in"),
        (lambda c: c["images"][0].update(width=0), r"images\.0\.width is 0"),
        (lambda c: c["images"][0].pop("height"), r"images\.0\.height' is missing"),
        (lambda c: c["annotations"][0].update(bbox="all"), r"annotations\.0\.bbox is 'all'"),
        (lambda c: c["annotations"][1]["segmentation"].update(counts=""), r"annotation 2: its run lengths are damaged"),
        (lambda c: c["annotations"][1]["segmentation"].update(counts=[]), r"annotation 2: its run lengths add up to 0"),
        (lambda c: c["annotations"][1]["segmentation"].update(counts=[-1, 6145]), "annotation 2: its run lengths"),
        (lambda c: c["annotations"][0].update(segmentation=[[1, 1, 5e9, 1, 5, 5]]), "annotation 1: a polygon is"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data, tmp_path, edit, message):
    with pytest.raises(EverytokenError, match=message):
        open_changed(data, tmp_path, edit)


def replacements(content: object, path: tuple = ()) -> list[tuple]:
    """Where something can be dropped or replaced in plain data."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for key, value in items for place in replacements(value, (*path, key)))]


def test_no_damage_of_a_file_gives_anything_but_a_message_of_ours(data, tmp_path):
    original = (data / "val" / "instances.json").read_text()
    rng = np.random.default_rng(0)
    values = [None, -1, 0, 1.5, 10**30, float("nan"), True, "", "x", "../x", [], [[]], {}]
    values.append({"counts": "", "size": [64, 96]})
    places = replacements(json.loads(original))[1:]
    opened = 0
    for _ in range(200):
        content = json.loads(original)
        *path, last = places[int(rng.integers(len(places)))]
        inner = content
        for key in path:
            inner = inner[key]
        if rng.random() < 0.3:
            del inner[last]
        else:
            inner[last] = values[int(rng.integers(len(values)))]
        (tmp_path / "damaged.json").write_text(json.dumps(content))
        try:
            found = InstanceSet(tmp_path / "damaged.json", data / "val" / "images")
            found.as_coco(range(len(found)), masks=True)
        except EverytokenError:
            continue
        opened += 1
    assert 10 < opened < 190
    for text in (b"", b"{", b"\xff\xfe{}", b"[1]", b'{"images": 3}', original.encode()[:-40]):
        (tmp_path / "damaged.json").write_bytes(text)
        with pytest.raises(EverytokenError, match=r"damaged\.json"):
            InstanceSet(tmp_path / "damaged.json", data / "val" / "images")


def test_degenerate_objects_are_counted_and_left_out_and_crowds_are_not_trained_on(data, tmp_path):
    def edit(content):
        first, second = content["annotations"]
        second["iscrowd"] = 1
        wrong = ({"bbox": [5, 5, 0, 9]}, {"bbox": [500, 5, 9, 9]}, {"segmentation": [[1, 1, 5, 5]]})
        content["annotations"] += [{**first, **change, "id": 50 + k} for k, change in enumerate(wrong)]

    found = open_changed(data, tmp_path, edit)
    assert [o.id for o in found.objects(0)] == [1, 2]
    assert "3 annotations" in found.notes[0]
    assert "(50, 51, 52)" in found.notes[0]
    assert [o.id for o in found.trained(0)] == [1]
    truth = found.as_coco([0, 1], masks=True)
    assert [(a["iscrowd"], a["category_id"]) for a in truth["annotations"]] == [(0, 3), (1, 7)]
    assert len(truth["images"]) == 2


# -- views and batches ------------------------------------------------------------------------------------------------


def views(data, epoch: int, order, crop: float = 0.0, masks: bool = True):
    found = open_instances(str(data), "train")
    samples = ObjectReader(found, DetectTransform(DetectAugment((48, 64, 80), 110, crop=crop)), 3, masks)
    return samples.__getitems__([Request(epoch, i, 0) for i in order])


@pytest.mark.parametrize("crop", [0.0, 1.0])
def test_boxes_and_masks_lie_on_the_objects_in_every_view(data, crop):
    flips, shown_sizes = set(), set()
    for epoch in range(6):
        batch = views(data, epoch, [0, 1, 2, 3], crop)
        for image, one in zip(batch.images, batch.targets, strict=True):
            flips.add(bool(one.matrix[0, 0] < 0))
            red, blue = image[0].numpy().astype(int), image[2].numpy().astype(int)
            for label, mask, box in zip(one.labels.tolist(), one.masks.bool().numpy(), one.boxes.tolist(), strict=True):
                shown = red - blue > 60 if label == 1 else blue - red > 60  # discs are red and squares blue
                x0, y0, x1, y1 = box
                rows, columns = np.nonzero(mask)
                if min(x1 - x0, y1 - y0) < 5:  # nearly cut off
                    continue
                assert (shown & mask).sum() / (shown | mask).sum() > (0.8 if crop else 0.85)
                edges = np.array([columns.min() - x0, rows.min() - y0, x1 - columns.max() - 1, y1 - rows.max() - 1])
                assert edges.min() > -1.6
                assert crop or edges.max() < 1.6  # the box of a disc that is cut stays as high as it was
        shown_sizes |= {one.size for one in batch.targets}
        if not crop:
            assert [len(one.boxes) for one in batch.targets] == [2, 2, 2, 0]
            assert {min(one.size) for one in batch.targets} <= {48, 64, 73}  # 80 would make the long side 120
    assert flips == {True, False}
    assert len(shown_sizes) > (8 if crop else 2)


def test_half_of_the_views_are_crops_as_in_swin():
    """Of an image with a short side of 400, 500 or 600, crops have 384 to 600 pixels of each side, anywhere."""
    transform, places = DetectTransform(DetectAugment()), []
    for draws in np.random.default_rng(0).random((300, 5)).tolist():
        x, y, width, height = random_crop((640, 480), *draws)
        short = (400, 500, 600)[int(3 * draws[0])]
        scale = (round(640 * short / 480) / 640, short / 480)
        whole = [v * scale[k % 2] for k, v in enumerate((x, y, width, height))]
        assert whole == pytest.approx([round(v) for v in whole], abs=1e-6)  # pixels of the resized image
        for side, length, s in zip(whole[2:], (640, 480), scale, strict=True):
            assert 384 <= round(side) <= min(600, round(length * s))
        places += [x / max(640 - width, 1), y / max(480 - height, 1)]
    assert min(places) < 0.01
    assert 0.99 < max(places) < 1 + 1e-6
    picture = Picture(Image.new("RGB", (320, 240)))
    shapes = [transform(picture, np.random.default_rng(k))[0].shape for k in range(60)]
    assert 15 < sum(abs(width / height - 4 / 3) < 0.005 for height, width, _ in shapes) < 45


def test_a_view_depends_on_seed_epoch_and_image_alone(data):
    one = views(data, 2, [0, 1, 2])
    other = views(data, 2, [2])
    h, w = other.targets[0].size
    assert one.targets[2].size == (h, w)
    assert torch.equal(one.images[2, :, :h, :w], other.images[0])
    assert torch.equal(one.targets[2].boxes, other.targets[0].boxes)
    assert any(views(data, e, [2]).targets[0].size != (h, w) for e in (3, 4, 5, 6))


def test_batches_without_objects_and_without_masks_are_fine(data):
    batch = views(data, 0, [3])
    assert batch.targets[0].boxes.shape == (0, 4)
    assert batch.targets[0].masks.shape[0] == 0
    assert views(data, 0, [0, 3], masks=False).targets[0].masks is None
    photos = TargetSet(data / "train" / "images", ["0.png"], [])
    view = DetectTransform(DetectAugment((48,), 100))
    assert not len(ObjectReader(photos, view, None).__getitems__([Request(0, 0, 0)]).targets[0].boxes)


def test_an_image_of_another_size_than_its_annotations_is_named_or_skipped(data, tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(2):
        Image.new("RGB", (96, 64) if i else (64, 96)).save(tmp_path / "images" / f"{i}.png")
    found = InstanceSet(data / "val" / "instances.json", tmp_path / "images")
    view = DetectTransform(DetectAugment((48,), 100))
    with pytest.raises(ImageError, match=r"0.png is 64 x 96 pixels, and .*instances.json says 96 x 64"):
        ObjectReader(found, view, None).__getitems__([Request(0, 0, 0)])
    batch = ObjectReader(found, view, None, skip=True).__getitems__([Request(0, 0, 0), Request(0, 1, 0)])
    assert len(batch) == 1
    assert batch.skipped[0][0] == "0.png"


def test_an_annotation_without_mask_says_how_to_train_without(data, tmp_path):
    found = open_changed(data, tmp_path, lambda c: c["annotations"][0].pop("segmentation"))
    view = DetectTransform(DetectAugment((48,), 100))
    with pytest.raises(ImageError, match=r"annotation 1 has no segmentation"):
        ObjectReader(found, view, None, masks=True).__getitems__([Request(0, 0, 0)])
    assert len(ObjectReader(found, view, None).__getitems__([Request(0, 0, 0)]).targets[0].boxes) == 2
