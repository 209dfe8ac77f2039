"""What comes from outside is checked in one place; a wrong value is one sentence with the place and the value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from typing_extensions import TypedDict

from everytoken_lab import schema


@dataclass(frozen=True)
class Inner:
    lr: float = 1.0
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    count: int = 3
    pair: tuple[float, float] = (1.0, 2.0)
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


class Foreign(TypedDict):
    id: int


def test_plain_data_becomes_the_dataclass():
    made = schema.parse(Outer, {"count": 4, "pair": [1, 2], "inner": {"lr": 2}, "more": {"x": {"y": [1]}}}, "f.yaml")
    assert made == Outer(4, (1.0, 2.0), {"x": {"y": [1]}}, Inner(2.0))
    assert isinstance(made.pair[0], float)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"count": "5"}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.5}, "count"),
        ({"pair": [1]}, "pair"),
        ({"pair": "ab"}, "pair"),
        ({"inner": {"lr": "x"}}, "inner.lr"),
        ({"inner": {"kind": "c"}}, "inner.kind"),
        ({"inner": {"kin": "a"}}, "inner.kin"),
        ({"more": {"a": 3}}, "more.a"),
        ({"cont": 1}, "'count'"),
        ([1], "the whole"),
        ({"count": {1, 2}}, "plain data"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(value, name):
    with pytest.raises(schema.SchemaError) as caught:
        schema.parse(Outer, value, "f.yaml")
    assert str(caught.value).startswith("f.yaml: ")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_branches_of_a_union_are_no_part_of_the_place():
    for kind, value, place in ((int | Literal["all"], 2.5, "pairs is 2.5"), (int | list[int], ["x"], "pairs is ['x']")):
        with pytest.raises(schema.SchemaError) as caught:
            schema.parse(dict[str, kind], {"pairs": value}, "f.yaml")
        assert str(caught.value).startswith(f"f.yaml: {place}")


def test_foreign_formats_may_have_further_names_but_not_lack_any():
    assert schema.parse(list[Foreign], [{"id": 1, "name": "x"}], "coco.json")[0]["id"] == 1
    with pytest.raises(schema.SchemaError, match=r"0\.id"):
        schema.parse(list[Foreign], [{"name": "x"}], "coco.json")


@pytest.mark.parametrize("text", [b"\xff\xfe{", b"{", b"", b"[" * 100_000])
def test_files_that_are_not_json_are_named(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(schema.SchemaError, match=r"a\.json"):
        schema.read_json(tmp_path / "a.json", Outer)
    with pytest.raises(schema.SchemaError, match="cannot be read"):
        schema.read_json(tmp_path / "b.json", Outer)


def test_yaml_numbers_are_numbers_and_python_objects_are_refused():
    assert schema.read_yaml("{a: 1e-3, b: 5, c: -2E4, d: yes, e: text}", "r.yaml") == {
        "a": 0.001, "b": 5, "c": -20000.0, "d": True, "e": "text",
    }  # fmt: skip
    for text in ("!!python/object/apply:os.system ['true']", "a: [", b"\xff\xfe", "a: b: c"):
        with pytest.raises(schema.SchemaError, match=r"r\.yaml"):
            schema.read_yaml(text, "r.yaml")
    json.dumps(schema.read_yaml("a: {b: [1, 2]}", "r.yaml"))


def test_text_that_is_not_unicode_is_spelt_with_backslashes():
    """A class folder may have a name in Latin-1; its model must open all the same."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert schema.parse(list[str], [name, "\U0001f600", "\ud800"], "x") == ["caf\\xe9", "\U0001f600", "\\xed\\xa0\\x80"]


def test_numbers_that_no_machine_integer_holds_are_refused():
    with pytest.raises(schema.SchemaError, match="too large"):
        schema.parse(dict[str, float], {"beta": 10**20}, "x")
    assert schema.parse(dict[str, str], {"a": "1" * 30, "b": f"number {10**30} of many"}, "x")
    assert schema.parse(list[float], [0.12345678901234567890123, 1e300], "x")
