"""torchvision's data sets."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from everytoken import keyed
from everytoken_lab.data.datasets import DataError, open_dataset


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
    refuse("cannot be opened in(.|\n)*download", f"torchvision:CIFAR10:{tmp_path}")
    refuse("name the folder that holds it: torchvision:CIFAR10:FOLDER", f"torchvision:CIFAR10:{tmp_path}")
    assert len(open_dataset(f"torchvision:MNIST:{tmp_path}", "val")) == 3
    refuse("not divided into splits", f"torchvision:EuroSAT:{tmp_path}", "val")
    refuse("its own class names", f"torchvision:MNIST:{tmp_path}", class_list=["a"])
