"""Several stores become one."""

from dataclasses import replace

import numpy as np
import pytest

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, ScoreMap, Skipped, StoreMeta, merge_maps, verify
from everytoken_lab.cli import main

META = StoreMeta((3, 4), 2, tuple(f"class {i}" for i in range(9)), annotator={"name": "timm:some", "size": [64, 64]})
KEYS = [f"{folder}/{i}.jpg" for folder in "ab" for i in range(150)]


def score_map(key, more=0.0):
    rng = np.random.default_rng(list(key.encode()))
    classes = np.stack([rng.permutation(9)[:2] for _ in range(12)]).reshape(3, 4, 2).astype(np.uint16)
    return ScoreMap(np.sort(rng.normal(3 + more, 1, (3, 4, 2)))[..., ::-1].astype(np.float16), classes, (40, 36))


def fill(path, keys=KEYS, meta=META, shards=None, skip=(), more=0.0):
    """A store of some keys; with `shards`, these of its shards only."""
    with MapWriter(path, keys, meta, shard_size=40) as writer:
        for shard in writer.pending_shards() if shards is None else shards:
            for key in writer.shard_keys(shard):
                writer.write({key: Skipped("torn") if key in skip else score_map(key, more)})
        if shards is None:
            writer.finalize()
    return path


def test_parts_of_one_job_become_the_store_of_one_machine_byte_for_byte(tmp_path, content):
    whole = fill(tmp_path / "whole", skip=("a/7.jpg",))
    one = fill(tmp_path / "one", shards=(0, 2, 4, 6), skip=("a/7.jpg",))
    two = fill(tmp_path / "two", shards=(1, 3, 5, 7), skip=("a/7.jpg",))
    with pytest.raises(EverytokenError, match=r"140 images are annotated in none of the stores \(for example 'a/"):
        merge_maps([one, fill(tmp_path / "three", shards=(0, 2), skip=("a/7.jpg",))], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    told = []
    merge_maps([one, two], tmp_path / "out", lambda done, total: told.append((done, total)))
    assert content(tmp_path / "out") == content(whole)
    assert told[-1] == (300, 300)
    assert verify(tmp_path / "out").ok


def test_stores_of_different_images_are_merged_by_command_and_a_killed_merge_continues(tmp_path, monkeypatch, capsys):
    a = fill(tmp_path / "a", [key for key in KEYS if key < "b"], skip=("a/0.jpg", "a/1.jpg"))
    b = fill(tmp_path / "b", [key for key in KEYS if key > "a/14"], skip=("b/3.jpg",))  # a part of a, too
    words = ["maps", "merge", str(a), str(b), "--out", str(tmp_path / "out")]
    write, calls = MapWriter.write, []

    def killed(self, records):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(write(self, records))

    monkeypatch.setattr(MapWriter, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_maps([a, b], tmp_path / "out")
    monkeypatch.setattr(MapWriter, "write", write)
    assert main(words) == 0
    assert "297 maps" in capsys.readouterr().out
    out = Maps(tmp_path / "out")
    assert list(out) == [key for key in sorted(KEYS) if key not in ("a/0.jpg", "a/1.jpg", "b/3.jpg")]
    assert all(np.array_equal(out[key].scores, score_map(key).scores) for key in ("a/2.jpg", "a/99.jpg", "b/149.jpg"))
    assert out.skipped["b/3.jpg"] == "torn"
    assert main(words) == 0  # and once more, with nothing to do


def test_an_image_that_one_store_skipped_gets_the_map_of_another(tmp_path):
    some = KEYS[:50]
    torn, fine = fill(tmp_path / "torn", some, skip=some[:2]), fill(tmp_path / "fine", some, skip=some[1:3])
    out = merge_maps([torn, fine], tmp_path / "out")
    assert list(out.skipped) == [some[1]]
    assert len(out) == 49


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotator": {"name": "timm:other"}}, "annotator: timm:some in .*one, timm:other in .*two"),
        ({"annotator": {"name": "timm:some", "size": [96, 96]}}, r"size: \[64, 64\] in .*one, \[96, 96\] in .*two"),
        ({"class_names": tuple(f"kind {i}" for i in range(9))}, "class 0 in .*one, kind 0 in .*two"),
        ({"grid": (3, 5)}, r"grid: \[3, 4\] in .*one, \[3, 5\] in .*two"),
    ],
)
def test_stores_that_were_made_in_another_way_are_refused_before_anything_is_written(tmp_path, change, message):
    one = fill(tmp_path / "one", KEYS[:3])
    with MapWriter(tmp_path / "two", KEYS[5:8], replace(META, **change)):
        pass
    with pytest.raises(EverytokenError, match=rf"two cannot be merged with .*one(.|\n)*{message}"):
        merge_maps([one, tmp_path / "two"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_explained(tmp_path):
    one = fill(tmp_path / "one", KEYS[:3])
    other = fill(tmp_path / "other", KEYS[2:5], more=1.0)
    with pytest.raises(EverytokenError, match=r"different maps of 'a/2\.jpg'"):
        merge_maps([one, other], tmp_path / "out")
    for sources, message in (([one], "two stores or more"), ([one, one], "named twice")):
        with pytest.raises(EverytokenError, match=message):
            merge_maps(sources, tmp_path / "out")
    with pytest.raises(EverytokenError, match="is one of the stores to be merged"):
        merge_maps([one, other], one)
    with pytest.raises(EverytokenError, match="there is no store at"):
        merge_maps([one, tmp_path / "gone"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
