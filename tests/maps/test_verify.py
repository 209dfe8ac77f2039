"""A flipped bit is found wherever it is."""

import random
import re

import pytest

from everytoken.maps import Maps, MapWriter, verify
from everytoken.maps.format import StoreDamagedError, list_shards
from tests.maps import fill_store as filling


def flip(path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_an_intact_store_has_no_problems_and_is_counted(folder):
    steps = []
    verdict = verify(folder, lambda done, total: steps.append((done, total)))
    assert verdict.ok
    assert verdict.complete
    assert (verdict.images, verdict.maps, verdict.skipped) == (40, 36, 4)
    assert steps[-1] == (verdict.bytes, verdict.bytes)
    assert steps == sorted(steps)


def test_a_flipped_bit_in_any_shard_is_found(folder):
    chance = random.Random(3)
    for path in list_shards(folder):
        raw = path.read_bytes()
        header = int.from_bytes(raw[:8], "little") * 8
        for bit in [chance.randrange(header) for _ in range(8)] + [chance.randrange(len(raw) * 8) for _ in range(30)]:
            flip(path, bit)
            verdict = verify(folder)
            assert {problem.file for problem in verdict.problems} == {path.name}, bit
            path.write_bytes(raw)
    assert verify(folder).ok


def test_a_flipped_bit_in_any_field_of_a_record_names_its_image_only(folder):
    path = list_shards(folder)[0]
    key = Maps(folder).key(3)
    one, raw = filling.make_map(key), path.read_bytes()
    start = int.from_bytes(raw[:8], "little") + 8
    n = len([k for k in sorted(filling.keys(40))[:8] if not isinstance(filling.make_record(k), filling.Skipped)])
    places = {
        "classes": raw.index(one.classes.tobytes()),
        "scores": raw.index(one.scores.tobytes()),
        "key": raw.rindex(key.encode()),
        "area": start + 3 * 32,
        "size": start + n * 32 + (n + 1) * 8 + 3 * 8,
        "crc32": start + n * 32 + (n + 1) * 8 + n * 8 + 3 * 4,
    }
    for name, place in places.items():
        flip(path, place * 8 + 1)
        (problem,) = verify(folder).problems
        assert len(problem.keys) == 1, name
        assert name == "key" or problem.keys == (key,), name
        if name != "key":
            with pytest.raises(StoreDamagedError, match=re.escape(key)):
                Maps(folder)[key]
        path.write_bytes(raw)


def test_swapped_records_are_noticed_although_each_is_intact(folder):
    path = list_shards(folder)[0]
    maps = Maps(folder)
    raw = path.read_bytes()
    for name in ("scores", "classes"):
        first, second = (getattr(maps.read(i), name).tobytes() for i in (1, 2))
        a, b = raw.index(first), raw.index(second)
        raw = raw[:a] + second + raw[a + len(first) : b] + first + raw[b + len(second) :]
    path.write_bytes(raw)
    assert set(verify(folder).problems[0].keys) == {maps.key(1), maps.key(2)}


def test_truncated_missing_and_exchanged_shards_are_named(folder):
    path, other = list_shards(folder)[2:4]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    (problem,) = verify(folder).problems
    assert problem.file == path.name
    path.write_bytes(other.read_bytes())
    (problem,) = verify(folder).problems
    assert problem.file == path.name
    path.unlink()
    verdict = verify(folder)
    assert (verdict.ok, verdict.complete) == (True, False)  # it will be made again


def test_an_unfinished_store_is_verified_as_far_as_it_goes(tmp_path):
    with MapWriter(tmp_path / "s", filling.keys(40), filling.META, 8) as writer:
        for shard in (0, 2):
            writer.write({key: filling.make_record(key) for key in writer.shard_keys(shard)})
    verdict = verify(tmp_path / "s")
    assert verdict.ok
    assert not verdict.complete
    assert verdict.maps + verdict.skipped == 16
