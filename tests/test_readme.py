"""The loop in README.md, run as it stands but for its sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from everytoken import keyed
from everytoken.data.datasets import open_dataset
from everytoken.maps import MapWriter, ScoreMap, StoreMeta

README = Path(__file__).parents[1] / "README.md"
SMALLER = {
    "deit_tiny_patch16_224": "test_vit",
    "TrainTransform(224)": "TrainTransform(160)",
    "64, train": "4, train",
    "workers=4": "workers=0",
    "range(100)": "range(2)",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Photos of two classes and their maps, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = keyed.generator(0, name, number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    data = open_dataset("photos", "train", val_split=0.1)
    one = ScoreMap(
        np.full((3, 3, 2), 1, np.float16),
        np.array([0, 1], np.uint32) * np.ones((3, 3, 1), np.uint32),
        (32, 24),
        (0.0, 0.0, 1.0, 1.0),
    )
    with MapWriter("maps", data.keys(), StoreMeta((3, 3), 2, data.class_names)) as writer:
        writer.write(dict.fromkeys(data.keys(), one))
        writer.finalize()
    return tmp_path


def test_the_loop_of_the_readme_runs_and_leaves_a_plain_timm_model(here):
    code = README.read_text().split("```python\n")[1].split("```")[0]
    for large, small in SMALLER.items():
        assert large in code
        code = code.replace(large, small)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    config = timm.create_model("deit_tiny_patch16_224").pretrained_cfg
    assert (names["view"].mean, names["view"].std) == (config["mean"], config["std"])
    assert names["images"].min() < 0  # normalised
    plain = timm.create_model("test_vit", num_classes=2)
    plain.load_state_dict(torch.load("plain_timm_model.pt", weights_only=True))
