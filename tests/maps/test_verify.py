"""A flipped bit is found wherever it is."""

from __future__ import annotations

import random

import pytest

from everytoken.maps import Maps, MapWriter, verify
from everytoken.maps.errors import StoreError
from everytoken.maps.format import shard_header, shard_name
from everytoken.maps.score_map import HEAD


def flip(path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


@pytest.fixture
def folder(filling, tmp_path):
    filling.fill(tmp_path / "s")
    return tmp_path / "s"


def test_an_intact_store_has_no_problems_and_is_counted(folder):
    steps = []
    verdict = verify(folder, lambda done, total: steps.append((done, total)))
    assert verdict.ok
    assert verdict.complete
    assert (verdict.images, verdict.maps, verdict.skipped) == (40, 36, 4)
    assert steps[-1] == (verdict.bytes, verdict.bytes)
    assert steps == sorted(steps)


def test_a_flipped_bit_in_any_file_is_found(folder):
    chance = random.Random(3)
    for path in sorted(folder.iterdir()):
        if path.name == "runs.jsonl":
            continue
        raw = path.read_bytes()
        for _ in range(12):
            flip(path, chance.randrange(len(raw) * 8))
            verdict = verify(folder)
            assert not verdict.ok
            assert [problem.file for problem in verdict.problems] == [path.name]
            path.write_bytes(raw)
    assert verify(folder).ok


def test_a_flipped_bit_in_a_record_names_its_image_only(folder):
    chance, manifest = random.Random(4), Maps(folder).manifest
    keys = sorted([*Maps(folder), *Maps(folder).skipped])
    start = len(shard_header(manifest.record, 8))
    for _ in range(60):
        shard, place = chance.randrange(5), chance.randrange(8)
        path = folder / shard_name(shard)
        raw = path.read_bytes()
        flip(path, (start + place * manifest.record.itemsize) * 8 + chance.randrange(manifest.record.itemsize * 8))
        problems = verify(folder).problems
        assert [problem.keys for problem in problems] == [(keys[shard * 8 + place],)]
        assert keys[shard * 8 + place] in str(problems[0])
        path.write_bytes(raw)


def test_every_field_of_a_record_is_covered(folder):
    manifest = Maps(folder).manifest
    path, start = folder / shard_name(0), len(shard_header(manifest.record, 8))
    places = {name: manifest.record.fields[name][1] for name in manifest.record.names}
    assert places["classes"] == HEAD.size
    for name, offset in places.items():
        raw = path.read_bytes()
        flip(path, (start + offset) * 8)
        assert len(verify(folder).problems[0].keys) == 1, name
        path.write_bytes(raw)


def test_a_damaged_key_is_named(folder):
    raw = (folder / "keys.npy").read_bytes()
    at = raw.index("größe_0007".encode())
    flip(folder / "keys.npy", at * 8)
    (problem,) = verify(folder).problems
    assert problem.file == "keys.npy"
    assert len(problem.keys) == 1
    assert "0007" in problem.keys[0]


def test_swapped_records_are_noticed_although_each_is_intact(folder):
    manifest = Maps(folder).manifest
    path, size, start = folder / shard_name(0), manifest.record.itemsize, len(shard_header(manifest.record, 8))
    raw = path.read_bytes()
    first, second = raw[start + size : start + 2 * size], raw[start + 2 * size : start + 3 * size]
    path.write_bytes(raw[: start + size] + second + first + raw[start + 3 * size :])
    assert len(verify(folder).problems[0].keys) == 2


def test_truncated_missing_and_exchanged_files_are_named(folder):
    path = folder / shard_name(3)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    (problem,) = verify(folder).problems
    assert problem.file == path.name
    assert len(problem.keys) == 8
    assert "bytes instead of" in str(problem)
    path.unlink()
    (problem,) = verify(folder).problems
    assert "missing" in str(problem)
    assert "and 3 more" in str(problem)
    path.write_bytes((folder / shard_name(2)).read_bytes())
    assert len(verify(folder).problems[0].keys) == 8
    path.write_bytes(raw)
    (folder / "offsets.npy").unlink()
    (problem,) = verify(folder).problems
    assert str(problem) == "offsets.npy: is missing"


def test_damage_to_keys_and_a_shard_together_is_reported_for_both(folder):
    (folder / "index.npy").write_bytes(b"")
    flip(folder / shard_name(0), 8 * 400)
    assert [problem.file for problem in verify(folder).problems] == ["index.npy", shard_name(0)]


def test_an_unfinished_store_is_verified_as_far_as_it_goes(filling, tmp_path):
    with MapWriter(tmp_path / "s", filling.keys(40), filling.META, 8) as writer:
        for shard in (0, 2):
            writer.write({key: filling.make_record(key) for key in writer.shard_keys(shard)})
    verdict = verify(tmp_path / "s")
    assert verdict.ok
    assert not verdict.complete
    assert verdict.maps + verdict.skipped == 16
    flip(tmp_path / "s/shard-00002.json", 100)
    (problem,) = verify(tmp_path / "s").problems
    assert problem.file == "shard-00002.json"


def test_a_folder_that_is_no_store_is_an_error(tmp_path):
    with pytest.raises(StoreError):
        verify(tmp_path)
