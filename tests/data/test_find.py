"""Finding the samples of a data set, from every kind of thing a user may type."""

from __future__ import annotations

import io
import logging
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from everytoken import keyed
from everytoken_lab.data import tree
from everytoken_lab.data.datasets import DataError, Strings, open_dataset, open_splits, split_off
from everytoken_lab.data.decode import ImageError
from everytoken_lab.data.tree import list_files

from .conftest import jpeg, tar_of


def put(root, *names):
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i * 20))
    return root


TREE = ("train/cat/1.jpg", "train/cat/deep/er/2.JPEG", "train/dog/a.b.c.png", "train/dog/x.jpg", "val/dog/1.jpg")


def in_folder(tmp_path, names=TREE):
    return put(tmp_path / "data", *names)


def in_zip(tmp_path, compression=zipfile.ZIP_STORED, prefix="", names=TREE):
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for i, name in enumerate(names):
            archive.writestr(prefix + name, jpeg(i * 20))
        archive.writestr("__MACOSX/train/cat/._1.jpg", b"no image")
    return path


def in_tar(tmp_path, names=TREE, file="data.tar"):
    path = tmp_path / file
    path.write_bytes(tar_of((f"./{name}", jpeg(i * 20)) for i, name in enumerate(names)))
    return path


@pytest.mark.parametrize(
    "make",
    [
        in_folder,
        in_zip,
        lambda p: in_zip(p, zipfile.ZIP_DEFLATED),
        lambda p: in_zip(p, prefix="wrapped/"),
        lambda p: in_zip(p).parent,
        in_tar,
    ],
)
def test_folders_zips_and_tars_of_the_same_tree_are_the_same_data_set(tmp_path, make):
    data = open_dataset(make(tmp_path))
    assert list(data.keys()) == ["cat/1.jpg", "cat/deep/er/2.JPEG", "dog/a.b.c.png", "dog/x.jpg"]
    assert data.class_names == ["cat", "dog"]
    assert [data.label(i) for i in range(4)] == data.labels.tolist() == [0, 0, 1, 1]
    assert data.open_bytes(1) == jpeg(20)
    assert data.load(2).size == (12, 10)
    val = open_dataset(make(tmp_path), "val")
    assert (val.class_names, val.labels.tolist()) == (data.class_names, [1])  # the training images number the classes
    again = pickle.loads(pickle.dumps(data))
    assert again.open_bytes(3) == data.open_bytes(3)
    some = data.subset([3, 1]).subset([1])
    assert (some.key(0), some.label(0), some.open_bytes(0)) == ("cat/deep/er/2.JPEG", 0, jpeg(20))
    assert "2.JPEG" in some.where(0)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_folder_with_one_archive_per_split(tmp_path, kind):
    for split, names in (("train", ["cat/1.jpg", "dog/2.jpg"]), ("val", ["dog/3.jpg"])):
        inner = [f"{split}/{name}" for name in names]
        if kind == "tar":
            in_tar(tmp_path, inner, f"{split}.tar")
        else:
            with zipfile.ZipFile(tmp_path / f"{split}.zip", "w") as archive:
                for name in inner:
                    archive.writestr(name, jpeg())
    assert list(open_dataset(tmp_path).keys()) == ["cat/1.jpg", "dog/2.jpg"]
    val = open_dataset(tmp_path, "val")
    assert list(val.keys()) == ["dog/3.jpg"]
    assert val.label(0) == 1  # the class numbers are the training images', not those of val alone


@pytest.mark.parametrize("name", ["val", "valid", "Validation", "test"])
def test_the_validation_folder_may_have_its_usual_names(tmp_path, name):
    put(tmp_path, "Train/a/1.jpg", f"{name}/a/2.jpg")
    assert list(open_dataset(tmp_path, "val").keys()) == ["a/2.jpg"]
    for folder in (tmp_path, tmp_path / "Train"):  # keys are the same, however the split is named
        assert list(open_dataset(folder).keys()) == ["a/1.jpg"]


def test_a_class_may_be_called_train(tmp_path):
    put(tmp_path, "bus/1.jpg", "train/1.jpg", "tram/1.jpg")
    assert open_dataset(tmp_path).class_names == ["bus", "train", "tram"]


def test_unicode_dots_spaces_upper_case_and_hidden_files(tmp_path):
    put(tmp_path, "Ägypten 1/été.v2.JPG", "b.c/图.Png", "b.c/.hidden.jpg", ".git/x.jpg", "b.c/._y.jpg")
    put(tmp_path, "b.c/.ipynb_checkpoints/z.jpg")
    (tmp_path / "b.c" / "notes.txt").write_text("no image")
    data = open_dataset(tmp_path)
    assert list(data.keys()) == ["b.c/图.Png", "Ägypten 1/été.v2.JPG"]
    assert data.class_names == ["b.c", "Ägypten 1"]
    data.load(0)


def test_a_file_name_that_is_not_unicode_works(tmp_path):
    folder = os.fsencode(tmp_path) + b"/a"
    os.mkdir(folder)
    try:
        with open(folder + b"/\xff\xfe.jpg", "wb") as file:
            file.write(jpeg())
    except OSError:
        pytest.skip("this file system wants Unicode names")
    data = open_dataset(tmp_path)
    assert data.load(0).size == (12, 10)


def test_links_are_followed_but_not_round_in_a_circle(tmp_path):
    put(tmp_path / "real", "1.jpg", "2.jpg")
    (tmp_path / "data").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "data" / "a")
    os.symlink(tmp_path / "data", tmp_path / "real" / "loop")
    os.symlink(tmp_path / "nowhere.jpg", tmp_path / "real" / "3.jpg")
    data = open_dataset(tmp_path / "data")
    assert list(data.keys()) == ["a/1.jpg", "a/2.jpg", "a/3.jpg"]
    with pytest.raises(ImageError, match=r"3\.jpg"):
        data.load(2)


def test_without_labels_a_flat_folder_will_do(tmp_path):
    put(tmp_path, "1.jpg", "sub/2.jpg")
    data = open_dataset(tmp_path, "all", labelled=False)
    assert list(data.keys()) == ["1.jpg", "sub/2.jpg"]
    assert data.labels.tolist() == [-1, -1]
    assert data.class_names == []


def test_a_class_list_gives_the_order_and_may_name_classes_without_images(tmp_path):
    put(tmp_path, "b/1.jpg", "a/1.jpg")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("b\nzebra\na\n\n")
    data = open_dataset(tmp_path, class_list=tmp_path / "list.txt")
    assert data.class_names == ["b", "zebra", "a"]
    assert dict(zip(data.keys(), data.labels.tolist(), strict=True)) == {"a/1.jpg": 2, "b/1.jpg": 0}


def test_images_outside_the_class_folders_are_left_out_with_a_warning(tmp_path, caplog):
    put(tmp_path, "cover.jpg", "a/1.jpg")
    with caplog.at_level(logging.WARNING):
        assert len(open_dataset(tmp_path)) == 1
    assert "1 image outside" in caplog.text


@pytest.mark.parametrize("make", [in_folder, in_zip])
def test_photos_that_cannot_be_read_are_counted_and_the_way_out_is_named(tmp_path, caplog, make):
    names = ("cat/1.jpg", "cat/2.JXL", "dog/3.cr2", "dog/4.jpg")
    photos = make(tmp_path, names=names)
    data = open_dataset(photos)
    assert list(data.keys()) == ["cat/1.jpg", "dog/4.jpg"]
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "2 files such as cat/2.JXL" in told
    assert "magick mogrify" in told
    if make is in_folder:
        caplog.clear()
        assert tree.gather_images([str(photos / "cat")])[1] == ["1.jpg"]
        assert "1 files such as 2.JXL" in caplog.text


def refuse(message, *args, **kwargs):
    with pytest.raises(DataError, match=message):
        open_dataset(*args, **kwargs)


def test_mistakes_are_explained(tmp_path):
    refuse("There is no file or folder", tmp_path / "nothing")
    refuse("holds no images", tmp_path)
    put(tmp_path / "flat", "1.jpg")
    refuse("no class folders", tmp_path / "flat")
    refuse("is a file", tmp_path / "flat" / "1.jpg")
    put(tmp_path / "few", "a/1.jpg", "b/1.jpg")
    (tmp_path / "few" / "c").mkdir()
    refuse("folder 'c' holds no images", tmp_path / "few")
    refuse(r"no images for val.*val_split", tmp_path / "flat", "val")
    put(tmp_path / "odd", "train/cat/1.jpg", "val/cta/1.jpg")
    refuse(r"class 'cta' is not one of the 1 classes of .*train. Did you mean 'cat'", tmp_path / "odd", "val")
    refuse("validation images of its own", tmp_path / "odd", val_split=0.5)
    refuse("divided into splits", tmp_path / "odd", "all")
    put(tmp_path / "half", "val/cat/1.jpg")
    refuse("no train/ folder", tmp_path / "half")
    refuse("between 0 and 1", tmp_path / "few" / "a", val_split=1.5, labelled=False)
    refuse("class 'b' is not one", put(tmp_path / "x", "a/1.jpg", "b/1.jpg"), class_list=["a"])
    refuse("occur twice: a", tmp_path / "x", class_list=["a", "b", "a"])
    refuse("no file", tmp_path / "x", class_list=tmp_path / "list.txt")
    refuse("has one class only", put(tmp_path / "one", "a/1.jpg"), "val", val_split=0.1)
    refuse("no class has two images", put(tmp_path / "two", "a/1.jpg", "b/1.jpg"), "val", val_split=1e-9)


def test_archives_that_cannot_be_read_at_random_are_refused_with_the_way_out(tmp_path):
    plain = in_tar(tmp_path)
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(plain, "x.tar")
    refuse("is compressed.*Decompress", tmp_path / "data.tar.gz")
    (tmp_path / "broken.zip").write_bytes(b"PK nonsense")
    refuse("cannot be read as a zip or tar", tmp_path / "broken.zip")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a/1.jpg", jpeg())
    refuse("other than deflate", tmp_path / "packed.zip")


def test_a_damaged_or_truncated_archive_member_is_an_error_about_that_member(tmp_path):
    path = in_zip(tmp_path)
    data = open_dataset(path)
    raw = bytearray(path.read_bytes())
    at = raw.index(jpeg(20))
    raw[at + 100] ^= 255
    path.write_bytes(raw)
    with pytest.raises(ImageError, match=r"data\.zip!train/cat/deep/er/2\.JPEG.*checksum"):
        data.picture(1)
    assert data.load(0).size == (12, 10)
    tar = in_tar(tmp_path)
    data = open_dataset(tar)
    with open(tar, "r+b") as file:
        file.truncate(700)
    with pytest.raises(ImageError, match="truncated"):
        data.load(3)


def test_the_validation_split_is_stratified_deterministic_and_complete(tmp_path):
    put(tmp_path, *(f"{c}/{i}.jpg" for c in "abc" for i in range(60)))
    parts = {split: open_dataset(tmp_path, split, val_split=0.2, seed=3) for split in ("train", "val")}
    train, val = (set(parts[s].keys()) for s in ("train", "val"))
    assert not train & val
    assert train | val == set(open_dataset(tmp_path).keys())
    assert all(4 <= count <= 22 for count in np.bincount(parts["val"].labels))
    assert set(open_dataset(tmp_path, "val", val_split=0.2, seed=3).keys()) == val
    assert set(open_dataset(tmp_path, "val", val_split=0.2, seed=4).keys()) != val
    put(tmp_path, *(f"{c}/new{i}.jpg" for c in "abcd" for i in range(40)))
    later = set(open_dataset(tmp_path, "val", val_split=0.2, seed=3).keys())
    assert {key for key in later if "new" not in key} == val  # no image changed sides


class Labelled:
    """Images by their labels alone."""

    def __init__(self, labels):
        self.labels = np.array(labels)

    def keys(self):
        return [f"{i}.jpg" for i in range(len(self.labels))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.floats(0.01, 0.99), st.integers(0, 100))
def test_each_class_of_two_or_more_images_is_in_both_parts(labels, fraction, seed):
    train, val = split_off(Labelled(labels), fraction, seed)
    assert sorted([*train, *val]) == list(range(len(labels)))
    for label in set(labels):
        if labels.count(label) > 1:
            assert label in np.array(labels)[train]
            assert label in np.array(labels)[val]


def test_the_image_nearest_to_the_limit_changes_sides_when_chance_leaves_a_part_empty():
    data = Labelled([0] * 5)
    draws = [keyed.uniform(3, "val-split", key) for key in data.keys()]  # noqa: SIM118
    _, val = split_off(data, 1e-6, 3)
    assert val.tolist() == [int(np.argmin(draws))]
    train, _ = split_off(data, 1 - 1e-6, 3)
    assert train.tolist() == [int(np.argmax(draws))]


def test_every_class_of_multi_label_images_is_trained_and_validated_as_far_as_its_labels_allow():
    rng = np.random.default_rng(0)
    labels = (rng.random((60, 12)) < np.linspace(0.03, 0.4, 12)).astype(np.uint8)
    train, val = split_off(Labelled(labels), 0.1, 0)
    several = labels.sum(0) >= 2
    assert len(train) + len(val) == 60
    assert (labels[train].sum(0) > 0)[several].all()
    assert (labels[val].sum(0) > 0)[several].all()
    bound = np.array([[1, 1], [1, 0], [0, 0]], np.uint8)  # the only image of the second class is not given away
    train, _ = split_off(Labelled(bound), 0.01, 0)
    assert 0 in train


def test_both_splits_of_one_folder_are_read_in_one_walk(tmp_path, monkeypatch):
    put(tmp_path, *(f"{c}/{i}.jpg" for c in "ab" for i in range(20)))
    walks = []
    monkeypatch.setattr(tree, "list_files", lambda *args: walks.append(args) or list_files(*args))
    train, val = open_splits(tmp_path, 0.3)
    assert len(walks) == 1
    for data, split in ((train, "train"), (val, "val")):
        assert list(data.keys()) == list(open_dataset(tmp_path, split, val_split=0.3).keys())
    put(tmp_path / "own", "train/a/1.jpg", "train/b/2.jpg", "val/b/3.jpg")
    train, val = open_splits(tmp_path / "own")
    assert (len(train), val.labels.tolist()) == (2, [1])


def test_packed_strings_are_a_list_of_strings():
    texts = ["", "a", "ü/日.jpg", b"\xff".decode("utf-8", "surrogateescape"), "last"]
    packed = Strings(texts)
    assert list(packed) == texts
    assert packed[-1] == "last"
    assert len(packed) == 5
    with pytest.raises(IndexError):
        packed[5]


def test_torchvision_data_sets_open_by_name(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = keyed.generator(0, "digits")
    for part, n in (("train", 6), ("t10k", 3)):
        images, labels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)
        head = np.array([0x803, n, 28, 28], dtype=">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([0x801, n], dtype=">i4").tobytes() + labels.tobytes())
    train = open_dataset(f"torchvision:mnist:{tmp_path}")
    assert len(train) == 6
    assert len(open_dataset(f"torchvision:MNIST:{tmp_path}", "val")) == 3
    assert train.class_names[3] == "3 - three"
    assert train.key(2) == "train/00000002"
    assert train.load(2).size == (28, 28)
    assert train.picture(2).size == (28, 28)
    assert Image.open(io.BytesIO(train.open_bytes(2))).size == (28, 28)
    pickle.loads(pickle.dumps(train)).load(0)
    held = open_dataset(f"torchvision:MNIST:{tmp_path}", "val", val_split=0.4)
    assert 0 < len(held) < 6
    some = train.subset([5, 2])
    assert (some.key(1), some.label(1)) == ("train/00000002", train.label(2))
    assert some.open_bytes(1) == train.open_bytes(2)
    refuse("Did you mean 'MNIST'", f"torchvision:MINST:{tmp_path}")
    refuse("cannot be opened in(.|\n)*download", f"torchvision:CIFAR10:{tmp_path}")
    refuse("name the folder that holds it: torchvision:CIFAR10:FOLDER", f"torchvision:CIFAR10:{tmp_path}")
    assert len(open_dataset(f"torchvision:MNIST:{tmp_path}", "val")) == 3
    refuse("not divided into splits", f"torchvision:EuroSAT:{tmp_path}", "val")
    refuse("its own class names", f"torchvision:MNIST:{tmp_path}", class_list=["a"])


def test_webdataset_shards_by_pattern_and_by_folder(tmp_path):
    for n in range(3):
        samples = []
        for i in range(4):
            name = f"{n:02d}{i:04d}"
            samples += [(f"{name}.jpg", jpeg(n * 4 + i)), (f"{name}.cls", str((n + i) % 3).encode())]
        (tmp_path / f"train-{n:03d}.tar").write_bytes(tar_of(samples))
    (tmp_path / "val-000.tar").write_bytes(tar_of([("v1.seg.png", jpeg()), ("v1.jpg", jpeg(7)), ("v1.cls", b"1")][1:]))
    for spec in (tmp_path, str(tmp_path / "train-{000..002}.tar"), str(tmp_path / "*.tar")):
        data = open_dataset(spec)
        assert len(data) == 12
        assert data.key(5) == "010001.jpg"
        assert data.label(5) == 2
        assert data.open_bytes(5) == jpeg(5)
        assert data.class_names == ["0", "1", "2"]
    val = open_dataset(tmp_path, "val")
    assert val.labels.tolist() == [1]
    assert val.class_names == ["0", "1", "2"]
    named = open_dataset(tmp_path, class_list=["ant", "bee", "cow"])
    assert named.class_names[named.label(5)] == "cow"


def test_mistakes_in_shards_are_explained(tmp_path):
    one = [("1.jpg", jpeg()), ("1.cls", b"0")]
    (tmp_path / "a.tar").write_bytes(tar_of(one))
    (tmp_path / "b.tar").write_bytes(tar_of(one))
    refuse(r"two samples have the name '1\.jpg'", str(tmp_path / "{a,b}.tar"))
    (tmp_path / "c.tar").write_bytes(tar_of([*one, ("2.jpg", jpeg())]))
    refuse(r"2\.jpg has no label", tmp_path / "c.tar")
    (tmp_path / "d.tar").write_bytes(tar_of([*one, ("2.jpg", jpeg()), ("2.cls", b"dog")]))
    refuse("label 'dog' is no number", tmp_path / "d.tar")
    (tmp_path / "e.tar").write_bytes(tar_of([("1.jpg", jpeg()), ("1.cls", b"3")]))
    refuse("'number 3' is not one of the 1 classes", tmp_path / "e.tar", class_list=["only"])
    (tmp_path / "g.tar").write_bytes(tar_of([("1.jpg", jpeg()), ("1.cls", b"-1")]))
    refuse("label '-1' is no number", tmp_path / "g.tar")
