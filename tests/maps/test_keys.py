"""Keys are exact relative paths, found whatever they look like."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.maps.errors import StoreDamagedError, StoreError
from everytoken.maps.format import KeyTable, encode_key, encode_keys, key_files

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


def table(folder, keys) -> KeyTable:
    encoded = encode_keys(keys)
    for name, blob in key_files(encoded).items():
        (folder / name).write_bytes(blob)
    return KeyTable(folder, len(encoded))


@settings(max_examples=40, deadline=None)
@given(st.sets(any_key, max_size=40), any_key)
def test_every_key_is_found_at_its_place_and_no_other_is(tmp_path_factory, keys, stranger):
    made = table(tmp_path_factory.mktemp("keys"), keys)
    in_order = sorted(keys, key=encode_key)
    assert list(made.iterate()) == in_order
    assert [made.find(key) for key in in_order] == list(range(len(keys)))
    assert [made.key(i) for i in range(len(keys))] == in_order
    assert (made.find(stranger) >= 0) == (stranger in keys)
    assert made.damaged() == []


def test_keys_with_equal_hashes_are_told_apart(tmp_path):
    first = ["c50963c80102", "c08e446fef82", "5e5716b4eaae"]
    second = ["d3f504638284", "c4d28b8d98be", "74c201e507d5"]
    assert [zlib.crc32(key.encode()) for key in first] == [zlib.crc32(key.encode()) for key in second]
    made = table(tmp_path, [*first, *second])
    assert [made.key(made.find(key)) for key in [*first, *second]] == [*first, *second]
    (tmp_path / "half").mkdir()
    half = table(tmp_path / "half", first)
    assert [half.find(key) >= 0 for key in [*first, *second]] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "./a",
        "a/../b",
        "a\0b",
        "..",
        "\ud800.jpg",
        "..\\a",
        "\\\\host\\a",
        "C:\\a",
        "c:/a",
        7,
        None,
    ],
)
def test_what_is_no_relative_path_is_refused(key):
    with pytest.raises(StoreError, match="key"):
        encode_key(key)


def test_a_backslash_may_be_part_of_a_name():
    assert encode_key("train\\cat\\1.jpg") == b"train\\cat\\1.jpg"


def test_a_key_that_occurs_twice_is_named():
    with pytest.raises(StoreError, match=r"'b/c\.jpg' occurs twice"):
        encode_keys(["a", "b/c.jpg", "z", "b/c.jpg"])


def test_near_keys_are_found_for_other_spellings_of_a_path(tmp_path):
    made = table(tmp_path, ["n01/café.jpg", "n01/x.JPEG", "n02/y.jpg"])
    assert made.near("/data/train/n01/x.JPEG") == ["n01/x.JPEG"]
    assert made.near("n01\\x.JPEG") == ["n01/x.JPEG"]
    assert made.near("n01/cafe\u0301.jpg") == ["n01/café.jpg"]
    assert "n02/y.jpg" in made.near("n02/y.png")
    assert made.near("something else") == []


def test_key_files_that_do_not_fit_the_manifest_are_damage(tmp_path):
    table(tmp_path, ["a", "b"])
    with pytest.raises(StoreDamagedError, match="3 keys"):
        KeyTable(tmp_path, 3)
    np.save(tmp_path / "keys.npy", np.zeros((2, 2)))
    with pytest.raises(StoreDamagedError, match=r"keys\.npy"):
        KeyTable(tmp_path, 2)
    (tmp_path / "keys.npy").write_bytes(b"nonsense")
    with pytest.raises(StoreDamagedError, match=r"keys\.npy is damaged"):
        KeyTable(tmp_path, 2)
