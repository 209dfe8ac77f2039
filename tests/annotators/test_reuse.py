"""`annotate --reuse`: maps of an older store are copied, new images are looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken_lab.annotators.annotator import build_annotator
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.annotators.options import AnnotateOptions
from everytoken_lab.data.datasets import open_dataset

QUICK = AnnotateOptions(batch_size=3, workers=0, shard_size=5, class_map="order")


def test_new_images_are_looked_at_and_old_maps_are_copied(photos, network, tmp_path, content):
    late = [photos / "red" / sorted(p.name for p in (photos / "red").iterdir())[0],
            photos / "blue" / sorted(p.name for p in (photos / "blue").iterdir())[-1]]  # fmt: skip
    kept = [path.read_bytes() for path in late]
    for path in late:
        path.unlink()
    fill_store(open_dataset(photos), tmp_path / "old", network, QUICK)
    for path, bytes_ in zip(late, kept, strict=True):
        path.write_bytes(bytes_)
    seen = []
    own = network.score
    network.score = lambda images, indices: seen.extend(indices) or own(images, indices)
    data = open_dataset(photos)
    told = []
    reuse = replace(QUICK, reuse=str(tmp_path / "old"))
    outcome = fill_store(data, tmp_path / "new", network, reuse, progress=lambda *at: told.append(at))
    assert sorted(Path(data.key(i)).name for i in seen[1:]) == sorted(p.name for p in late)  # first: a probe
    assert (outcome.copied, outcome.done) == (10, 2)
    assert told[0] == (10, 12)
    assert told[-1] == (12, 12)
    network.score = own
    fill_store(data, tmp_path / "whole", network, replace(QUICK, batch_size=1))
    fill_store(data, tmp_path / "one by one", network, replace(QUICK, batch_size=1, reuse=str(tmp_path / "whole")))
    assert content(tmp_path / "one by one") == content(tmp_path / "whole")
    new, whole = Maps(tmp_path / "new", check=True), Maps(tmp_path / "whole")
    assert list(new) == list(whole)
    for key, one in new.items():
        np.testing.assert_allclose(one.scores, whole[key].scores, rtol=1e-2, atol=1e-2)


def test_maps_of_another_annotator_are_not_reused_and_nothing_is_begun(data, network, weights, tmp_path):
    fill_store(data, tmp_path / "old", network, QUICK)
    larger = build_annotator("timm:test_resnet", (96, 96), str(weights("test_resnet")))
    with pytest.raises(EverytokenError, match="made in another way"):
        fill_store(data, tmp_path / "new", larger, replace(QUICK, reuse=str(tmp_path / "old")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(EverytokenError, match="another output folder"):
        fill_store(data, tmp_path / "old", network, replace(QUICK, reuse=str(tmp_path / "old")))
