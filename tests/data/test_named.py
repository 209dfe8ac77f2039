"""Data sets that go by a name: torchvision's and Hugging Face's."""

from __future__ import annotations

import io
import pickle
import sys

import numpy as np
import pytest
from PIL import Image

from everytoken import keyed
from everytoken.errors import MissingExtraError
from everytoken_lab.data.datasets import DataError, open_dataset
from everytoken_lab.data.decode import ImageError


def jpeg(value=0, size=(12, 10)):
    file = io.BytesIO()
    Image.new("RGB", size, (value % 256, 100, 50)).save(file, "JPEG", quality=95)
    return file.getvalue()


def refuse(message, *args, **kwargs):
    with pytest.raises(DataError, match=message):
        open_dataset(*args, **kwargs)


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
    refuse("is not in.*download", f"torchvision:CIFAR10:{tmp_path}")
    refuse("name the folder that holds it: torchvision:CIFAR10:FOLDER", f"torchvision:CIFAR10:{tmp_path}")
    assert len(open_dataset(f"torchvision:MNIST:{tmp_path}", "val")) == 3
    refuse("not divided into splits", f"torchvision:EuroSAT:{tmp_path}", "val")
    refuse("its own class names", f"torchvision:MNIST:{tmp_path}", class_list=["a"])


class FakeHub:
    """As much of the `datasets` library as is used."""

    class Image:
        def __init__(self, decode=True):
            self.decode = decode

    class ClassLabel:
        def __init__(self, names):
            self.names = names

    class Value:
        pass

    class Split:
        def __init__(self, hub, rows, features):
            self.hub, self.rows, self.features = hub, rows, features

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, at):
            if isinstance(at, str):
                return [row[at] for row in self.rows]
            row = dict(self.rows[at])
            for column, feature in self.features.items():
                if isinstance(feature, FakeHub.Image) and feature.decode:
                    row[column] = Image.open(io.BytesIO(row[column]["bytes"]))
            return row

        def cast_column(self, column, feature):
            return FakeHub.Split(self.hub, self.rows, {**self.features, column: feature})

    def load_dataset(self, name, config=None):
        if name != "owner/animals":
            raise ValueError(f"no data set {name} on the hub")
        features = {"photo": FakeHub.Image(), "id": FakeHub.Value(), "kind": FakeHub.ClassLabel(["cat", "dog"])}
        rows = [{"photo": {"bytes": jpeg(i), "path": None}, "id": i, "kind": i % 2} for i in range(6)]
        rows[4] = {"photo": {"bytes": b"broken", "path": None}, "id": 4, "kind": 0}
        parts = {"train": FakeHub.Split(self, rows, features), "test": FakeHub.Split(self, rows[:2], features)}
        return parts["train"] if config == "flat" else parts


def test_hugging_face_data_sets_open_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub())
    data = open_dataset("hf:owner/animals")
    assert data.class_names == ["cat", "dog"]
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.open_bytes(3) == jpeg(3)
    assert data.load(3).size == (12, 10)
    assert data.key(3) == "train/00000003"
    some = data.subset([5, 3])
    assert (some.key(1), some.open_bytes(1)) == ("train/00000003", jpeg(3))
    with pytest.raises(ImageError, match="hf:owner/animals, train image 4"):
        data.load(4)
    assert open_dataset("hf:owner/animals", "val").key(1) == "test/00000001"
    assert len(open_dataset("hf:owner/animals:flat")) == 6
    refuse("cannot be opened: no data set owner/plants", "hf:owner/plants")
    refuse("not divided into splits", "hf:owner/animals:flat", "val")


def test_hugging_face_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"\.\[hf\]"):
        open_dataset("hf:owner/animals")


def test_the_real_hugging_face_library_agrees_with_the_code(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": jpeg(i), "path": None} for i in range(3)], "label": [0, 1, 0]}
    try:
        made = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    except Exception as error:
        pytest.skip(f"the installed datasets and pyarrow do not fit each other: {error}")
    made.save_to_disk(tmp_path / "d")
    data = open_dataset(f"hf:{tmp_path / 'd'}")
    assert data.labels.tolist() == [0, 1, 0]
    assert data.open_bytes(2) == jpeg(2)
