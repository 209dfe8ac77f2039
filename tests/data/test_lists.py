"""Lists of files and lists of classes: the data that some papers train on."""

import pytest
from PIL import Image

from everytoken_lab.classes import imagenet_classes
from everytoken_lab.data.datasets import DataError, _read_class_list, open_dataset, open_splits
from everytoken_lab.data.tree import CLASS_LISTS, dataset_path


def add(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


@pytest.fixture
def domain(tmp_path):
    """DomainNet's layout: DOMAIN/CLASS/file and two lists with label numbers beside the domain's folder."""
    lines = {"train": [], "test": []}
    for number, name in enumerate(("aircraft_carrier", "zebra")):
        for i in range(4):
            path = f"infograph/{name}/infograph_{number:03d}_{i:06d}.jpg"
            add(tmp_path / path)
            lines["test" if i == 3 else "train"].append(f"{path} {number}")
    add(tmp_path / "infograph" / "zebra" / "unlisted.jpg")
    for split, listed in lines.items():
        (tmp_path / f"infograph_{split}.txt").write_text("\n".join(reversed(listed)) + "\n")
    return tmp_path


def test_a_list_of_files_is_a_dataset_and_the_list_of_its_other_split_lies_beside_it(domain):
    train, val = open_splits(domain / "infograph_train.txt")
    assert train.class_names == val.class_names == ["aircraft_carrier", "zebra"]
    assert next(train.keys()) == "aircraft_carrier/infograph_000_000000.jpg"
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert val.labels.tolist() == [0, 1]
    assert train.load(5).size == (8, 8)
    assert list(open_dataset(domain / "infograph_test.txt", "val").keys()) == list(val.keys())


def test_a_list_without_a_split_in_its_name_is_divided_by_a_fraction(domain):
    (domain / "files.txt").write_text((domain / "infograph_train.txt").read_text())
    train, val = open_splits(domain / "files.txt", 0.3)
    assert len(train) + len(val) == 6
    with pytest.raises(DataError, match="no images for val"):
        open_dataset(domain / "files.txt", "val")
    (domain / "files.txt").write_text("../secret/a.jpg\n")
    with pytest.raises(DataError, match="relative"):
        open_dataset(domain / "files.txt")


def test_imagenet100_is_a_hundred_of_imagenets_classes():
    names = _read_class_list("imagenet100")
    assert len(names) == 100
    assert set(CLASS_LISTS) == {"imagenet100"}
    numbers = {imagenet_classes().find(name) for name in names}
    assert len(numbers) == 100
    assert None not in numbers


def test_a_subset_has_the_classes_of_its_list_alone(tmp_path):
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            add(tmp_path / "photos" / split / name / "1.png")
    (tmp_path / "two.txt").write_text("cat\nant\n")
    spec = f"subset:{tmp_path / 'two.txt'}:{tmp_path / 'photos'}"
    train, val = open_splits(spec)
    assert train.class_names == val.class_names == ["ant", "cat"]
    assert list(train.keys()) == ["ant/1.png", "cat/1.png"]
    assert dataset_path(spec) == str(tmp_path / "photos")
    (tmp_path / "two.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match="dog"):
        open_splits(spec)
    with pytest.raises(DataError, match="imagenet100"):
        open_dataset("subset:imagenet100")


def test_a_list_of_files_can_be_narrowed_to_some_classes(domain):
    (domain / "classes.txt").write_text("zebra\n")
    train, val = open_splits(f"subset:{domain / 'classes.txt'}:{domain / 'infograph_train.txt'}")
    assert (len(train), len(val), train.class_names) == (3, 1, ["zebra"])
