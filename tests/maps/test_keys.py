"""Keys: what may be one, and how they are found."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken.maps.format import StoreError, encode_keys

part = st.text(st.characters(exclude_characters="/\\:\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda text: text not in (".", "..")
)
# bytes that are no UTF-8 come out of os.listdir like this
odd_part = (
    st.binary(min_size=1, max_size=4)
    .map(lambda b: "x" + b.decode("utf-8", "surrogateescape"))
    .filter(lambda text: not set(text) & set("/\\:\0"))
)
any_key = st.lists(part | odd_part, min_size=1, max_size=4).map("/".join)


def store(folder, keys, shard_size=4) -> Maps:
    """A store whose maps have the number of their key as their width."""
    maps = {
        key: ScoreMap(np.zeros((1, 1, 1), np.float16), np.zeros((1, 1, 1), int), (i, 0)) for i, key in enumerate(keys)
    }
    with MapWriter(folder, maps, StoreMeta((1, 1), 1, ["thing"]), shard_size) as writer:
        writer.write(maps)
        return writer.finalize()


@settings(max_examples=25, deadline=None)
@given(st.sets(any_key, min_size=1, max_size=20), any_key)
def test_every_key_is_found_at_its_place_and_no_other_is(tmp_path_factory, keys, stranger):
    keys = list(keys)
    made = store(tmp_path_factory.mktemp("keys"), keys)
    in_order = sorted(keys, key=lambda key: key.encode("utf-8", "surrogateescape"))
    assert list(made) == in_order
    assert [made.key(i) for i in range(len(keys))] == in_order
    assert [made[key].size[0] for key in keys] == list(range(len(keys)))
    assert (stranger in made) == (stranger in keys)


def test_keys_with_equal_hashes_are_told_apart(tmp_path):
    first = ["c50963c80102", "c08e446fef82", "5e5716b4eaae"]
    second = ["d3f504638284", "c4d28b8d98be", "74c201e507d5"]
    assert [zlib.crc32(key.encode()) for key in first] == [zlib.crc32(key.encode()) for key in second]
    made = store(tmp_path / "both", [*first, *second])
    assert [made[key].size[0] for key in [*first, *second]] == [0, 1, 2, 3, 4, 5]
    half = store(tmp_path / "half", first)
    assert [key in half for key in [*first, *second]] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "./a", "a/../b", "a\0b", "..", "\ud800.jpg", "..\\a",
                                 "\\\\host\\a", "C:\\a", "c:/a", 7, None])  # fmt: skip
def test_what_is_no_relative_path_is_refused(key):
    with pytest.raises(StoreError, match="key"):
        encode_keys([key])


def test_a_backslash_may_be_part_of_a_name_and_no_key_may_occur_twice():
    assert encode_keys(["train\\cat\\1.jpg"]) == [b"train\\cat\\1.jpg"]
    with pytest.raises(StoreError, match=r"'b/c\.jpg' occurs twice"):
        encode_keys(["a", "b/c.jpg", "z", "b/c.jpg"])
