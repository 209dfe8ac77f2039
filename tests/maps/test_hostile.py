"""Damaged and crafted stores: whatever is wrong is an error of ours that names it, and nothing is written outside."""

from __future__ import annotations

import errno
import random
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, format, verify
from everytoken.maps.errors import StoreDamagedError
from everytoken.maps.format import INDEX, KEYS, MANIFEST, shard_name
from everytoken_lab.maps.released import ExportOptions, export_released


@pytest.fixture
def folder(filling, tmp_path) -> Path:
    filling.fill(tmp_path / "s")
    return tmp_path / "s"


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_no_flipped_bit_is_read_as_a_map(folder, filling):
    """As training reads: by key and by number, with a fresh store."""
    chance, silent = random.Random(5), []
    keys = [key for key in filling.keys(40) if "0." not in key.split("_")[-1]]
    for path in sorted(folder.iterdir()):
        if path.name in ("runs.jsonl", "skipped.csv"):
            continue
        raw = path.read_bytes()
        for _ in range(20):
            flip(path, chance.randrange(len(raw) * 8))
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
    first, second = folder / shard_name(0), folder / shard_name(1)
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    with pytest.raises(StoreDamagedError, match=r"shard-00000\.npy"):
        Maps(folder).read(0)


def test_a_damaged_index_is_called_damaged(folder):
    key = Maps(folder).key(5)
    index = np.load(folder / INDEX)
    place = int(np.flatnonzero(index[0] == zlib.crc32(key.encode()))[0])
    for row, value in ((1, 4_000_000_000), (0, index[0, place] ^ 1)):
        changed = index.copy()
        changed[row, place] = value
        np.save(folder / INDEX, changed)
        with pytest.raises(StoreDamagedError, match=r"index\.npy"):
            Maps(folder)[key]


@pytest.mark.parametrize("area", [(0, 0, np.nan, 1), (0, 0, np.inf, 1), (0.5, 0, 0.5, 1)])
def test_an_impossible_area_is_named_although_its_checksum_is_right(folder, filling, area):
    path = folder / shard_name(0)
    records = np.load(path)
    records["area"][1] = area
    key = sorted(filling.keys(40))[1]
    records["crc32"][1] = zlib.crc32(records[1:2].view(np.uint8)[4:].tobytes(), zlib.crc32(key.encode()))
    np.save(path, records)
    for check in (True, False):
        with pytest.raises(StoreDamagedError, match=r"größe"):
            Maps(folder, check=check)[key]


EVIL = ["../evil.jpg", "/tmp/evil.jpg", "a/../../evil.jpg", "..\\evil.jpg", "\\\\host\\evil.jpg", "C:\\evil.jpg"]


@pytest.mark.parametrize("evil", EVIL)
def test_a_key_that_leads_out_of_the_folder_is_refused_and_reported(filling, tmp_path, monkeypatch, evil):
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
    with pytest.raises(StoreDamagedError, match="evil"):
        export_released(ExportOptions(tmp_path / "in/s", tmp_path / "in/pt"))
    assert not list(tmp_path.rglob("*.pt"))
    (problem,) = verify(tmp_path / "in/s").problems
    assert problem.file == KEYS
    assert problem.keys == (evil,)


ODD = [None, True, -1, 0, 1, 2**70, 1.5, float("1e300"), "", "x", [], [1], [0, 0], [10**9, 10**9], {}, {"a": 1}, [[1]]]


def test_no_manifest_makes_a_traceback(folder):
    content = files.unseal(folder / MANIFEST)
    entry = content["shards"][0]
    changes = [{name: value} for name in content for value in ODD]
    changes += [{"shards": [entry | {name: value}, *content["shards"][1:]]} for name in entry for value in ODD]
    changes += [{"shards": content["shards"][:-1]}, {"checksums": {"../../x": "0" * 64} | content["checksums"]}]
    accepted, errors = [], []
    for change in changes:
        (folder / MANIFEST).write_bytes(files.seal(content | change))
        try:
            maps = Maps(folder)
            list(maps), maps.skipped, repr(maps)
            accepted.append(next(iter(change)))
        except EverytokenError as error:
            errors.append(str(error))
    assert all(str(folder) in error for error in errors)
    # what is free or follows from the rest may be anything; a value may be the right one by chance
    free = {"annotator", "class_names_sha256", "maps", "skipped", "seal", "shards"}
    assert set(accepted) <= free | {name for name in content if content[name] in ODD}


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x03\x00\xff\xff\xff\x7f{"])
def test_arrays_that_are_no_arrays_are_damage(folder, raw):
    for name in (KEYS, INDEX, shard_name(0)):
        shutil.copytree(folder, folder.parent / "t")
        (folder.parent / "t" / name).write_bytes(raw)
        with pytest.raises(StoreDamagedError, match=name):
            Maps(folder.parent / "t").read(0)
        shutil.rmtree(folder.parent / "t")


def test_running_out_of_file_handles_is_not_called_damage(folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    maps = Maps(folder)
    key = maps.key(0)
    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(files.FileError, match="Too many open files") as caught:
        maps[key]
    assert not isinstance(caught.value, files.DamagedError)


MANY_SHARDS = """
import sys
from everytoken.maps import Maps
maps = Maps(sys.argv[1])
print(sum(maps[key].size[0] for key in [*maps, *maps]))
"""


def test_a_store_of_more_shards_than_file_handles_can_be_read(tmp_path, filling):
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


def test_an_unreadable_manifest_or_shard_is_a_sentence(folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(files.FileError, match=r"manifest\.json.*Permission denied"):
            Maps(folder)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256_of", refuse)
        with pytest.raises(files.FileError, match="Permission denied"):
            verify(folder)


def test_names_that_are_not_utf8_come_back(tmp_path, filling):
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
