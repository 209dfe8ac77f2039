"""What the writer accepts, refuses and explains."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from everytoken.maps import Maps, MapWriter, ScoreMap
from everytoken.maps.format import StoreError, StoreMismatchError, list_shards
from everytoken.maps.writer import default_shard_size
from tests.maps import fill_store as filling


def test_shards_are_split_between_processes_without_gap_or_overlap(tmp_path):
    with MapWriter(tmp_path / "s", filling.keys(40), filling.META, 4) as writer:
        for world in (1, 2, 3, 16):
            parts = [writer.pending_shards(rank, world) for rank in range(world)]
            assert sorted(shard for part in parts for shard in part) == list(range(10))


def test_other_settings_or_images_are_refused_and_the_difference_is_told(tmp_path):
    folder, keys = tmp_path / "s", filling.keys(20)
    filling.fill(folder, n=20)
    other = replace(filling.META, resize_mode="center", annotator={"name": "test", "size": [96, 96], "amp": True})
    with pytest.raises(StoreMismatchError) as error:
        MapWriter(folder, keys, other, 16)
    for words in (
        "resize_mode: squash in the store, center now",
        "annotator.amp: none in the store, True now",
    ):
        assert words in str(error.value)
    with pytest.raises(StoreMismatchError, match="shard size: 8 in the store, 16 now"):
        MapWriter(folder, keys, filling.META, 16)
    with pytest.raises(StoreMismatchError, match="images: 20 in the store, 21 now"):
        MapWriter(folder, [keys[0], *keys[2:], "new/a.jpg", "new/b.jpg"], filling.META)
    MapWriter(folder, keys[::-1], filling.META).close()  # the order does not matter


def test_another_annotator_is_one_difference_and_no_list_of_hashes(tmp_path):
    folder, keys = tmp_path / "s", filling.keys(20)
    made = {"name": "timm:a", "weights_sha256": "0" * 64, "input": {"size": [64, 64], "mean": [0.5, 0.5, 0.5]}}
    mine = replace(filling.META, annotator=made)
    with MapWriter(folder, keys, mine, 8) as writer:
        writer.write({key: filling.make_map(key) for key in writer.shard_keys(0)})
    with pytest.raises(StoreMismatchError) as error:
        MapWriter(folder, keys, replace(mine, annotator={"name": "fit", "fit": {"folds": 2}}))
    assert str(error.value).splitlines()[1:-1] == ["  annotator: timm:a in the store, fit now"]
    with pytest.raises(StoreMismatchError, match=r"annotator\.weights_sha256: 0000.* in the store, 1111"):
        MapWriter(folder, keys, replace(mine, annotator={**made, "weights_sha256": "1" * 64}))


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "cat.jpg").touch()
    with pytest.raises(StoreError, match=r"not empty and not a store .*'cat\.jpg'"):
        MapWriter(tmp_path, filling.keys(3), filling.META)
    with pytest.raises(StoreError, match="is a file"):
        MapWriter(tmp_path / "cat.jpg", filling.keys(3), filling.META)
    assert [p.name for p in tmp_path.iterdir()] == ["cat.jpg"]


def test_a_deleted_shard_of_a_finished_store_is_made_again(content, reference, folder):
    list_shards(folder)[2].unlink()
    with MapWriter(folder, filling.keys(40), filling.META) as writer:
        assert writer.pending_shards() == [2]
    filling.fill(folder)
    assert content(folder) == reference


def test_skipped_images_are_tried_again_on_request(content, folder, tmp_path):
    with MapWriter(folder, filling.keys(40), filling.META) as writer:
        assert writer.pending_shards() == []
    with MapWriter(folder, filling.keys(40), filling.META, retry_skipped=True) as writer:
        pending = writer.pending_shards()
        assert 0 < len(pending) < 5
        writer.write({key: filling.make_map(key) for key in writer.pending_keys()})
        writer.finalize()
    store = Maps(folder)
    assert len(store) == 40
    with MapWriter(tmp_path / "t", filling.keys(40), filling.META, 8) as writer:
        writer.write({key: filling.make_map(key) for key in writer.pending_keys()})
        writer.finalize()
    assert content(folder) == content(tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scores": np.full((3, 4, 2), np.nan)}, "not finite"),
        ({"scores": np.full((3, 4, 2), 1e6)}, "not finite"),
        ({"scores": np.broadcast_to([1.0, 2.0], (3, 4, 2))}, "descending"),
        ({"classes": np.broadcast_to([1, 11], (3, 4, 2))}, r"outside 0\.\.10"),
        ({"classes": np.broadcast_to([1, -1], (3, 4, 2))}, r"outside 0\.\.10"),
        ({"classes": np.broadcast_to([1, 1], (3, 4, 2))}, "twice in one cell"),
        ({"area": (0, 0, 0, 1)}, "area"),
        ({"area": (0, 0, np.nan, 1)}, "area"),
        ({"size": (-1, 5)}, "size"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused_by_name(tmp_path, change, complaint):
    good = filling.make_map("a.jpg")
    bad = ScoreMap(**{name: getattr(good, name) for name in ("scores", "classes", "size", "area")} | change)
    both = [[getattr(one, name) for one in (good, bad)] for name in ("scores", "classes", "size", "area")]
    with (
        MapWriter(tmp_path / "s", ["a.jpg", "b.jpg"], filling.META) as writer,
        pytest.raises(StoreError, match=rf"(?s)'b\.jpg'.*{complaint}"),
    ):
        writer.put([0, 1], *both)


def test_misuse_of_the_writer_is_explained(tmp_path):
    one = filling.make_map("a")
    with pytest.raises(StoreError, match="no images"):
        MapWriter(tmp_path / "s", [], filling.META)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        MapWriter(tmp_path / "s", ["a"], filling.META, rank=2, world=2)
    with MapWriter(tmp_path / "s", ["a", "b", "c"], filling.META, 2) as writer:
        with pytest.raises(ValueError, match="shape"):
            writer.put([0], one.scores[None, :2], one.classes[None], [one.size], [one.area])
        with pytest.raises(ValueError, match="integers"):
            writer.put([0], one.scores[None], one.classes[None] * 1.0, [one.size], [one.area])
        with pytest.raises(StoreError, match="'d'"):
            writer.write({"d": one})
        writer.skip(0, "x")
        with pytest.raises(StoreError, match="twice"):
            writer.skip(0, "x")
        writer.write({"c": one})
        with pytest.raises(StoreError, match="already done"):
            writer.write({"c": one})


def test_the_default_shard_size_keeps_shards_few_and_small():
    assert default_shard_size(10) == 64
    assert default_shard_size(1_281_167) == 3072
    for total in (1, 64, 3000, 20_000, 786_432):
        assert -(-total // default_shard_size(total)) <= 256


def test_a_damaged_shard_or_that_of_another_store_under_its_name_is_made_again(content, reference, folder, tmp_path):
    other = replace(filling.META, annotator={"name": "another"})
    with MapWriter(tmp_path / "other", filling.keys(40), other, 8) as writer:
        writer.write({key: filling.make_record(key) for key in writer.shard_keys(1)})
    (_, second, third, *_) = list_shards(folder)
    shutil.copy(tmp_path / "other" / second.name, second)
    third.write_bytes(third.read_bytes()[:-1])
    with MapWriter(folder, filling.keys(40), filling.META) as writer:
        assert writer.pending_shards() == [1, 2]
    filling.fill(folder)
    assert content(folder) == reference
