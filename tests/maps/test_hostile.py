"""Damaged and crafted stores: whatever is wrong is an error of ours that names it, and nothing is written outside."""

import errno
import json
import mmap
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, format, verify
from everytoken.maps.format import StoreDamagedError, list_shards
from tests.maps import fill_store as filling


def test_no_flipped_bit_is_read_as_a_map(folder):
    """As training reads: by key and by number, with a fresh store."""
    chance, silent = random.Random(5), []
    keys = [key for key in filling.keys(40) if "0." not in key.split("_")[-1]]
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        for _ in range(20):
            changed, bit = bytearray(raw), chance.randrange(len(raw) * 8)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                maps = Maps(folder)
                maps_by_key = {key: maps[key] for key in keys}
                keys_by_number = [maps.key(i) for i in range(len(maps)) if maps.read(i)]
                wrong = [key for key in keys if maps_by_key[key] != filling.make_map(key)]
                silent += [path.name] * bool(wrong or sorted(keys_by_number) != sorted(keys))
            except EverytokenError:
                pass
            path.write_bytes(raw)
    assert silent == []


def test_shards_in_each_others_place_are_noticed(folder):
    first, second = list_shards(folder)[:2]
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    with pytest.raises(StoreDamagedError, match=r"shard-00000-of-00005"):
        Maps(folder).read(0)


@pytest.mark.parametrize("area", [(0, 0, np.nan, 1), (0, 0, np.inf, 1), (0.5, 0, 0.5, 1)])
def test_an_impossible_area_is_named_although_its_checksum_is_right(tmp_path, monkeypatch, area):
    monkeypatch.setattr("everytoken.maps.writer.check_maps", lambda keys, classes, shape, *arrays: dict(
        zip(("scores", "classes", "size", "area"), map(np.asarray, arrays), strict=True)))  # fmt: skip
    with MapWriter(tmp_path / "s", ["a.jpg"], filling.META) as writer:
        one = filling.make_map("a.jpg")
        writer.put([0], [one.scores], [one.classes], [one.size], [area])
        writer.finalize()
    with pytest.raises(StoreDamagedError, match=r"a\.jpg"):
        Maps(tmp_path / "s")["a.jpg"]


EVIL = ["../evil.jpg", "/tmp/evil.jpg", "a/../../evil.jpg", "..\\evil.jpg", "\\\\host\\evil.jpg", "C:\\evil.jpg"]


@pytest.mark.parametrize("evil", EVIL)
def test_a_key_that_leads_out_of_the_folder_is_refused_and_reported(tmp_path, monkeypatch, evil):
    with monkeypatch.context() as patch:
        patch.setattr(format, "stays_inside", lambda key: True)
        with MapWriter(tmp_path / "in/s", [evil, "good/1.jpg"], filling.META) as writer:
            writer.write({key: filling.make_map(key) for key in (evil, "good/1.jpg")})
            writer.finalize()
    maps = Maps(tmp_path / "in/s")
    assert maps["good/1.jpg"] == filling.make_map("good/1.jpg")
    for read in (list, lambda maps: [maps.key(i) for i in range(2)], lambda maps: dict(maps.items())):
        with pytest.raises(StoreDamagedError, match="evil"):
            read(maps)
    (problem,) = verify(tmp_path / "in/s").problems
    assert problem.keys == (evil,)


ODD = [None, True, -1, 0, 1, 2**70, 1.5, 1e300, "", "x", [], [1], [0, 0], [10**9, 10**9], {}, {"a": 1}, [[1]]]


def rewritten(path: Path, change) -> None:
    """A shard whose header was changed by `change`, and sealed again."""
    raw = path.read_bytes()
    end = int.from_bytes(raw[:8], "little") + 8
    content = json.loads(raw[8:end])
    change(content)
    layout = {
        name: (next(k for k, v in format._DTYPES.items() if v == entry["dtype"]), tuple(entry["shape"]))
        for name, entry in content.items()
        if name != "__metadata__"
    }
    metadata = {k: v for k, v in content["__metadata__"].items() if k != "sha256"}
    path.write_bytes(format.make_header(metadata, layout) + raw[end:])


def test_no_metadata_makes_a_traceback(folder):
    path = list_shards(folder)[0]
    raw = path.read_bytes()
    store = json.loads(json.loads(raw[8 : int.from_bytes(raw[:8], "little") + 8])["__metadata__"]["store"])
    changes = [{name: value} for name in store for value in ODD]
    changes += [{"meta": store["meta"] | {name: value}} for name in store["meta"] for value in ODD]
    texts = [json.dumps(store | change, sort_keys=True) for change in changes]
    entries = [("store", text) for text in [*texts, "", "[]", "{", "[" * 100_000]]
    entries += [("skipped", text) for text in ("", "{}", "[1]", "[[1, 2]]", '[["../x", "y"]]', "[" * 100_000)]
    entries += [("shard", text) for text in ("", "x", "-1", "1", "00", "9" * 5000)]
    accepted = []
    for name, text in entries:
        rewritten(path, lambda content, entry=(name, text): content["__metadata__"].update([entry]))
        try:
            maps = Maps(folder)
            list(maps), maps.skipped, repr(maps), verify(folder)
            accepted.append(text)
        except EverytokenError as error:
            accepted += [] if str(folder) in str(error) else [str(error)]
        path.write_bytes(raw)
    assert set(accepted) <= {json.dumps(store, sort_keys=True)}  # a value may be the right one
    rewritten(path, lambda content: content["__metadata__"].update(version="99"))
    with pytest.raises(files.FileError, match="version 99"):
        Maps(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_what_is_no_shard_is_a_sentence(folder, raw):
    list_shards(folder)[0].write_bytes(raw)
    with pytest.raises(StoreDamagedError, match="shard-00000-of-00005"):
        Maps(folder)
    assert not verify(folder).ok


@pytest.mark.parametrize("tensor", ["area", "key_offsets", "size", "crc32", "classes", "scores", "keys"])
@pytest.mark.parametrize("change", [
    lambda e: e.update(shape=[10**15, *e["shape"][1:]]), lambda e: e.update(shape=[-1, *e["shape"][1:]]),
    lambda e: e.update(shape=[]), lambda e: e.update(dtype="U8"), lambda e: e.update(dtype="F64"),
])  # fmt: skip
def test_wrong_shapes_and_types_are_a_sentence(folder, tensor, change):
    path = list_shards(folder)[0]
    before = path.read_bytes()
    rewritten(path, lambda content: change(content[tensor]))
    if path.read_bytes() != before:
        with pytest.raises(StoreDamagedError, match="shard-00000-of-00005"):
            Maps(folder)


def test_offsets_beyond_the_file_or_upon_each_other_are_a_sentence(folder):
    path = list_shards(folder)[0]
    raw = path.read_bytes()
    end = int.from_bytes(raw[:8], "little") + 8
    for offsets in ([0, 10**12], [10**12, 10**13], [0, 8], [-8, 0]):
        content = json.loads(raw[8:end])
        content["scores"]["data_offsets"] = offsets
        text = json.dumps(content, separators=(",", ":")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
        with pytest.raises(StoreDamagedError, match="shard-00000-of-00005"):
            Maps(folder)


def test_key_offsets_that_are_not_in_order_are_a_sentence(folder):
    path = list_shards(folder)[0]
    raw = bytearray(path.read_bytes())
    count = json.loads(raw[8 : int.from_bytes(raw[:8], "little") + 8])["crc32"]["shape"][0]
    at = int.from_bytes(raw[:8], "little") + 8 + count * 32
    raw[at + 8 : at + 16] = (2**63).to_bytes(8, "little")
    path.write_bytes(raw)
    with pytest.raises(StoreDamagedError, match="shard-00000-of-00005"):
        Maps(folder)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_shard_that_is_no_plain_file_is_a_sentence(folder, kind):
    path = list_shards(folder)[1]
    path.rename(folder.parent / "shard")
    if kind == "link":
        path.symlink_to(folder.parent / "shard")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(EverytokenError, match="shard-00001-of-00005"):
        Maps(folder)
    assert not verify(folder).ok


def test_running_out_of_file_handles_is_not_called_damage(folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    maps = Maps(folder)
    key = maps.key(0)
    maps._shards.clear()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(files.FileError, match="Too many open files") as caught:
        maps[key]
    assert not isinstance(caught.value, files.DamagedError)


MANY_SHARDS = """
import sys
from everytoken.maps import Maps
maps = Maps(sys.argv[1])
print(sum(maps[key].size[0] for key in [*maps, *maps]))
"""


def test_a_store_of_more_shards_than_file_handles_can_be_read(tmp_path):
    meta = filling.StoreMeta((9, 9), 5, num_classes=11)
    records = {key: filling.make_map(key, (9, 9), 5) for key in filling.keys(90)}
    with MapWriter(tmp_path / "s", records, meta, 3) as writer:  # 30 shards that are large enough to be mapped
        writer.write(records)
        writer.finalize()

    def few_handles() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    words = [sys.executable, "-c", MANY_SHARDS, str(tmp_path / "s")]
    ran = subprocess.run(words, preexec_fn=few_handles, capture_output=True, text=True)
    assert ran.stdout == f"{2 * 90 * 640}\n", ran.stderr


def test_names_that_are_not_utf8_come_back(tmp_path):
    odd = "caf\udce9/1.jpg"
    meta = filling.StoreMeta((3, 4), 2, ["caf\udce9", *map(str, range(10))], annotator={"name": "x\udcff"})
    with MapWriter(tmp_path / "s", [odd, "b.jpg"], meta) as writer:
        writer.write({odd: filling.make_map(odd), "b.jpg": filling.Skipped(f"is {odd}")})
        writer.finalize()
    maps = Maps(tmp_path / "s")
    assert maps[odd] == filling.make_map(odd)
    assert maps.class_names[0] == "caf\udce9"
    assert maps.skipped == {"b.jpg": f"is {odd}"}
    assert verify(tmp_path / "s").ok
