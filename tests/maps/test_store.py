"""What is written is what is read, and errors say what to do."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, ScoreMap, Skipped, StoreMeta, map_area, verify
from everytoken.maps.format import StoreDamagedError, StoreError, StoreUnfinishedError, UnknownKeyError, list_shards
from tests.maps import fill_store as filling


@st.composite
def stores(draw):
    h, w, num_classes = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 7, 65535, 70000]))
    top_k = draw(st.integers(1, min(num_classes, 3)))
    finite = st.floats(-65504, 65504, width=16)
    maps = {}
    for i in range(draw(st.integers(1, 5))):
        scores = draw(hnp.arrays(np.float16, (h, w, top_k), elements=finite))
        scores = -np.sort(-scores, axis=-1)
        first = draw(hnp.arrays(np.int64, (h, w, 1), elements=st.integers(0, num_classes - 1)))
        classes = (first + np.arange(top_k)) % num_classes
        x0, y0 = draw(st.floats(-2, 0.5)), draw(st.floats(-2, 0.5))
        area = (x0, y0, x0 + draw(st.floats(0.125, 3)), y0 + draw(st.floats(0.125, 3)))
        size = (draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1)))
        maps[f"{draw(st.integers(0, 9))}/{i}"] = ScoreMap(scores, classes, size, area)
    return StoreMeta((h, w), top_k, num_classes=num_classes), maps, draw(st.integers(1, 4))


@settings(max_examples=25, deadline=None)
@given(stores())
def test_reading_gives_back_exactly_what_was_written(tmp_path_factory, case):
    meta, maps, shard_size = case
    folder = tmp_path_factory.mktemp("store") / "s"
    with MapWriter(folder, maps, meta, shard_size) as writer:
        writer.write(maps)
        writer.finalize()
    store = Maps(folder)
    assert list(store) == sorted(maps)
    for i, key in enumerate(store):
        found = store[key]
        assert found == maps[key]
        assert store.read(i) == found
        assert store.key(i) == key
        assert found.scores.tobytes() == maps[key].scores.tobytes()  # the sign of zero too
        assert found.classes.dtype == (np.uint16 if meta.num_classes <= 65535 else np.uint32)
        assert found.scores.flags.writeable
        assert found.scores.flags.aligned
        assert found.classes.flags.aligned


def test_batches_across_shard_borders_make_the_same_store_as_single_records(content, reference, tmp_path):
    with MapWriter(tmp_path / "s", reversed(filling.keys(40)), filling.META, 8) as writer:
        batch = []

        def flush():
            maps = [filling.make_map(writer.key(position)) for position in batch]
            fields = [[getattr(m, name) for m in maps] for name in ("scores", "classes", "size", "area")]
            writer.put(batch, *fields)
            batch.clear()

        for position in range(40):
            if isinstance(filling.make_record(writer.key(position)), Skipped):
                writer.skip(position, "cannot be read")
            else:
                batch.append(position)
            if len(batch) == 13 or position == 39:
                flush()
        writer.finalize()
    assert content(tmp_path / "s") == reference


def test_a_skipped_image_is_counted_and_listed_and_not_in_the_store(folder):
    store = Maps(folder)
    bad = [key for key in filling.keys(40) if isinstance(filling.make_record(key), Skipped)]
    good = sorted(set(filling.keys(40)) - set(bad))
    assert len(store) == 36
    assert list(store) == good
    assert list(store.keys()) == good
    assert bad[0] not in store
    assert good[0] in store
    assert [store.key(i) for i in range(36)] == good
    assert all(store.read(i) == filling.make_map(good[i]) for i in range(36))
    assert store.skipped == dict.fromkeys(bad, "cannot be read")
    with pytest.raises(UnknownKeyError, match=r"skipped \(cannot be read\)"):
        store[bad[0]]
    with pytest.raises(IndexError):
        store.read(36)


def test_an_unknown_key_is_named_beside_one_that_there_is(folder):
    store = Maps(folder)
    with pytest.raises(KeyError) as error:
        store["/somewhere/" + store.key(3)]
    assert isinstance(error.value, EverytokenError)
    assert str(folder) in str(error.value)
    assert f"such as {store.key(0)!r}" in str(error.value)
    assert store.get("no such key") is None
    assert 7 not in store


def checksum_of_all(maps: Maps) -> int:
    return sum(int(maps.read(i).classes.sum()) for i in range(len(maps)))


def test_a_store_goes_to_spawned_workers_at_little_cost(folder):
    maps = Maps(folder)
    key = maps.key(0)
    maps[key]  # something is mapped now, and must not be pickled
    raw = pickle.dumps(maps)
    assert len(raw) < 5000
    again = pickle.loads(raw)
    assert again[key] == maps[key]
    assert len(again) == len(maps)
    assert pickle.loads(pickle.dumps(maps[key])) == maps[key]
    code = "import pickle, sys; maps = pickle.load(sys.stdin.buffer); print(len(maps), maps)"
    spawned = subprocess.run([sys.executable, "-c", code], input=raw, capture_output=True, check=True)
    assert spawned.stdout.decode() == f"{len(maps)} {maps!r}\n"


def test_many_threads_read_the_same_maps(tmp_path, monkeypatch):
    from everytoken.maps import store as store_module

    monkeypatch.setattr(store_module, "_MAX_OPEN", 3)
    filling.fill(tmp_path / "s", shard_size=4)
    maps = Maps(tmp_path / "s")
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(checksum_of_all, [maps] * 24))
    assert set(sums) == {checksum_of_all(Maps(tmp_path / "s"))}
    assert len(maps._shards) < 3 + 8  # each thread may add one to a full table


def test_a_store_tells_what_it_is(folder):
    maps = Maps(folder)
    assert (maps.num_classes, maps.class_names, maps.grid, maps.top_k) == (11, [], (3, 4), 2)
    for fact in (str(folder), "36 maps", "3x4", "11 classes"):
        assert fact in repr(maps)


def test_a_map_is_made_of_dense_logits(tmp_path):
    logits = np.random.default_rng(0).normal(size=(3, 4, 11)).astype(np.float32)
    score_map = ScoreMap.from_logits(logits, 2, (640, 480))
    assert np.array_equal(score_map.classes[..., 0], logits.argmax(-1))
    assert np.array_equal(score_map.scores, np.sort(logits, axis=-1)[..., :-3:-1].astype(np.float16))
    with MapWriter(tmp_path / "s", ["a.jpg"], filling.META) as writer:
        writer.write({"a.jpg": score_map})
        writer.finalize()
    assert Maps(tmp_path / "s")["a.jpg"] == score_map
    with pytest.raises(ValueError, match=r"\[11, 3\]"):
        ScoreMap.from_logits(np.zeros((11, 3)))


def test_a_truncated_or_missing_shard_is_an_error_that_names_it(folder):
    path, whole = list_shards(folder)[1], list_shards(folder)[1].read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(StoreDamagedError, match=r"shard-00001-of-00005\.safetensors is damaged"):
        Maps(folder)
    path.write_bytes(whole)
    store = Maps(folder)
    path.unlink()
    with pytest.raises(StoreDamagedError, match=r"shard-00001-of-00005\.safetensors is damaged: it is missing"):
        store.read(9)


def test_an_unfinished_store_says_how_far_it_is_and_opens_on_request(tmp_path):
    records = {key: filling.make_record(key) for key in filling.keys(40)}
    with MapWriter(tmp_path / "s", records, filling.META, 8) as writer:
        with pytest.raises(StoreError, match="no finished shards"):
            Maps(tmp_path / "s")
        for shard in (0, 3):
            writer.write({key: records[key] for key in writer.shard_keys(shard)})
        with pytest.raises(StoreUnfinishedError, match="3 of 5 shards are not written"):
            writer.finalize()
    with pytest.raises(StoreUnfinishedError, match=r"2 of 5 shards are there.*same command"):
        Maps(tmp_path / "s")
    store = Maps(tmp_path / "s", partial=True)
    assert len(store) == 16 - len(store.skipped) == len(list(store))
    assert all(store[key] == records[key] for key in store)
    with pytest.raises(UnknownKeyError, match="not finished"):
        store[sorted(records)[20]]


def test_reading_a_store_does_not_import_torch(folder, tmp_path):
    code = (
        "import sys, everytoken; before = 'torch' in sys.modules\n"
        "from everytoken.maps import Maps, MapWriter, verify\n"
        f"Maps({str(tmp_path / 's')!r}).read(0); verify({str(tmp_path / 's')!r})\n"
        "print(before or 'torch' not in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


@pytest.mark.parametrize(
    ("mode", "size", "more", "expected"),
    [
        ("squash", (0, 0), {}, (0, 0, 1, 1)),
        ("center", (200, 100), {}, (0.25, 0, 0.75, 1)),
        ("center", (100, 400), {}, (0, 0.375, 1, 0.625)),
        ("center", (200, 100), {"aspect": 2}, (0, 0, 1, 1)),
        ("center", (100, 100), {"crop": 0.5}, (0.25, 0.25, 0.75, 0.75)),
        ("letterbox", (200, 100), {}, (0, -0.5, 1, 1.5)),
        ("letterbox", (100, 400), {}, (-1.5, 0, 2.5, 1)),
        ("letterbox", (100, 100), {"aspect": 2}, (-0.5, 0, 1.5, 1)),
    ],
)
def test_the_area_of_a_map_follows_from_the_resize_mode(mode, size, more, expected):
    assert map_area(mode, size, **more) == pytest.approx(expected)
    with pytest.raises(ValueError, match="size"):
        map_area("center", (0, 0))
    with pytest.raises(ValueError, match="stretch"):
        map_area("stretch", (1, 1))


def test_shards_are_safetensors_files_that_anybody_can_open(folder):
    from safetensors import safe_open
    from safetensors.numpy import load_file

    maps, path = Maps(folder), list_shards(folder)[0]
    tensors = load_file(path)
    assert tensors["scores"].shape == (len(tensors["crc32"]), 3, 4, 2)
    assert np.array_equal(tensors["classes"][0], maps.read(0).classes)
    assert tuple(tensors["area"][0]) == maps.read(0).area
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == "everytoken-maps"


def test_what_is_no_store_is_explained(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        Maps(tmp_path / "nowhere")
    for opening in (Maps, verify):
        with pytest.raises(StoreError, match="no finished shards"):
            opening(tmp_path)


def test_a_store_whose_images_were_all_skipped_is_a_store_without_maps(tmp_path):
    with MapWriter(tmp_path / "s", ["a.jpg", "b.jpg"], filling.META) as writer:
        writer.write({"a.jpg": Skipped("torn"), "b.jpg": Skipped("torn")})
        store = writer.finalize()
    assert (len(store), list(store), store.complete) == (0, [], True)
    with pytest.raises(UnknownKeyError, match="skipped"):
        store["a.jpg"]
    with pytest.raises(UnknownKeyError, match="has no map"):
        store["c.jpg"]
