"""The code of docs/store.md runs as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PAGE = Path(__file__).parents[2] / "docs/store.md"


@pytest.mark.skipif(not PAGE.exists(), reason="no docs beside the tests")
def test_maps_of_an_own_network_are_written_and_read_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = ["cat/1.jpg", "cat/2.jpg", "dog/broken.jpg"]
    for key in keys:
        (tmp_path / "photos" / key).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20)).save(tmp_path / "photos" / key)
    (tmp_path / "photos/dog/broken.jpg").write_bytes(b"nothing")
    logits = np.random.default_rng(0).normal(size=(4, 4, 5))
    given = {
        "class_names": ["cat", "dog", "cow", "hen", "pig"],
        "keys": keys,
        "load": Image.open,
        "network": lambda image: logits,
    }
    writing, reading = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(writing, given)
    exec(reading, given)
    assert len(given["maps"]) == 2
    assert list(given["maps"].skipped) == ["dog/broken.jpg"]
    assert given["score_map"].size == (30, 20)
    assert np.array_equal(given["score_map"].classes[..., 0], logits.argmax(-1))
