"""WebDataset shards."""

from __future__ import annotations

import io
import tarfile

import pytest
from PIL import Image

from everytoken_lab.data.datasets import DataError, open_dataset


def jpeg(value=0, size=(12, 10)):
    file = io.BytesIO()
    Image.new("RGB", size, (value % 256, 100, 50)).save(file, "JPEG", quality=95)
    return file.getvalue()


def refuse(message, *args, **kwargs):
    with pytest.raises(DataError, match=message):
        open_dataset(*args, **kwargs)


def shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_webdataset_shards_by_pattern_and_by_folder(tmp_path):
    for n in range(3):
        samples = []
        for i in range(4):
            name = f"{n:02d}{i:04d}"
            samples += [(f"{name}.jpg", jpeg(n * 4 + i)), (f"{name}.cls", str((n + i) % 3).encode())]
        shard(tmp_path / f"train-{n:03d}.tar", samples)
    shard(tmp_path / "val-000.tar", [("v1.seg.png", jpeg()), ("v1.jpg", jpeg(7)), ("v1.cls", b"1")][1:])
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
    shard(tmp_path / "a.tar", one)
    shard(tmp_path / "b.tar", one)
    refuse(r"two samples have the name '1\.jpg'", str(tmp_path / "{a,b}.tar"))
    shard(tmp_path / "c.tar", [*one, ("2.jpg", jpeg())])
    refuse(r"2\.jpg has no label", tmp_path / "c.tar")
    shard(tmp_path / "d.tar", [*one, ("2.jpg", jpeg()), ("2.cls", b"dog")])
    refuse("label 'dog' is no number", tmp_path / "d.tar")
    shard(tmp_path / "e.tar", [("1.jpg", jpeg()), ("1.cls", b"3")])
    refuse("'number 3' is not one of the 1 classes", tmp_path / "e.tar", class_list=["only"])
    shard(tmp_path / "g.tar", [("1.jpg", jpeg()), ("1.cls", b"-1")])
    refuse("label '-1' is no number", tmp_path / "g.tar")
