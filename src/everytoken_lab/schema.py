"""One way to check what comes from outside: recipes, `--set`, checkpoints, COCO json, class files, weights' metadata.

    options = schema.parse(TrainOptions, values, "recipe small_96.yaml")

pydantic does the checking, and what it finds is said in one sentence that names the file, the setting and the value.
Our own dataclasses refuse names that they do not have; TypedDicts, for foreign formats, ignore them. Nothing is
guessed: "yes" is not a bool, "5" is not a number, true is not 1; a whole number passes for a float and a list for a
tuple. Text that is not Unicode (as in names of files that are not UTF-8) is spelt with backslashes.

And one way out for text that came from outside: `say` prints it, `shown` is what people see of it.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import read_bytes

T = TypeVar("T")
_LONGEST = 60  # characters of a wrong value that are repeated in a message
_MOST_YAML = 1_000_000  # bytes: as much as a recipe will ever have, and read in seconds
_ADDRESS = re.compile(r"""\b([A-Za-z][\w+.-]*://)(?:[^\s/'"<>]*@)?([^\s?#'"<>]*)((?:[?#][^\s'"<>]*)?)""")
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class SchemaError(EverytokenError):
    """Something from outside does not have the form that it should have; the message names the place and the value."""


def parse(kind: type[T], value: Any, where: str) -> T:
    """Plain data as a dataclass, TypedDict or type hint; else a `SchemaError` that names `where` and the value."""
    try:
        text = json.dumps(value, allow_nan=True)
        if "\\ud" in text:
            text = json.dumps(texts(json.loads(text), printable))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"{where}: holds a value that is not plain data ({error}).") from error
    if re.search(r"\d{19}", text):  # numbers that no machine integer holds

        def check(digits: str) -> None:
            if len(digits) > 20 or abs(int(digits)) >= 2**63:
                raise SchemaError(f"{where}: {digits[:_LONGEST]} is too large a number.")

        json.loads(text, parse_int=check)
    return parse_json(text.encode(), kind, where)


def printable(text: str) -> str:
    """The same text if it is Unicode; else with what is not (bytes of a file's name) spelt as in ``caf\\xe9``."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raw = text.encode("utf-8", "surrogatepass")
    return raw.decode("utf-8", "backslashreplace")


def shown(text: str) -> str:
    """What people see of a text: addresses without user, password and query; no signs that steer a terminal."""
    return _STEERING.sub(lambda sign: f"\\u{ord(sign[0]):04x}", _ADDRESS.sub(_public, printable(text)))


def one_line(path: str | Path) -> str:
    """A file's name in one line, as people see it."""
    return shown(str(path)).replace("\n", "\\n")


def say(text: object = "", file: TextIO | None = None) -> None:
    """Print `shown` text. Nothing else prints, but for the tables and bars of rich."""
    print(shown(str(text)), file=file, flush=True)


def without_secrets(text: str) -> str:
    """The text with addresses (s3://, https://) that have no user, password and query."""
    return _ADDRESS.sub(_public, text)


def _public(address: re.Match[str]) -> str:
    """Without a query; in other addresses than those of the web, ? may also stand for any letter."""
    web = address[1].lower().startswith("http")
    return address[1] + address[2] + ("" if web or "=" in address[3] else address[3])


def counted(number: int, one: str, many: str = "") -> str:
    """1, "image" -> "1 image"; 1200, "image" -> "1,200 images"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def texts(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with all of its texts changed."""
    if isinstance(value, dict):
        return {change(name) if isinstance(name, str) else name: texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def from_keywords(kind: type[T], keywords: Mapping[str, Any], where: str) -> T:
    """Options from the keywords of a Python call or of a command."""
    import pydantic

    hints, values = typing.get_type_hints(kind, include_extras=True), {}
    for name, value in keywords.items():
        if name not in hints:
            raise SchemaError(f"{where} has no option {name!r}.{did_you_mean(name, hints)}")
        try:
            values[name] = pydantic.TypeAdapter(hints[name]).validate_python(value)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise SchemaError(_explain(kind, {name: value}, {**first, "loc": (name, *first["loc"])})) from error
    return kind(**values)


def read_json(path: Path, kind: type[T]) -> T:
    """A JSON file as `kind`. A large file is read once: no Python objects are made of what `kind` leaves out."""
    try:
        text = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise SchemaError(f"{path}: cannot be read ({error.strerror}).") from error
    return parse_json(text, kind, str(path))


def parse_json(text: bytes, kind: type[T], where: str) -> T:
    """JSON text as `kind`; `where`: what to call it in messages."""
    import pydantic

    try:
        checked: T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]
        return checked
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise SchemaError(f"{where}: not valid JSON ({first['ctx']['error']}).") from error
        raise SchemaError(f"{where}: {_explain(kind, json.loads(text), first)}") from error


def read_yaml(text: str | bytes, where: str) -> Any:
    """YAML as plain data. Numbers such as 1e-3 are numbers here, which YAML 1.1 takes for text; no Python objects, and
    no aliases, with which a short text can stand for any amount of data."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=self.peek_event().start_mark)
            return super().compose_node(parent, index)

    if len(text) > _MOST_YAML:
        raise SchemaError(f"{where}: has {len(text):,} characters, more than {_MOST_YAML:,}.")

    number = re.compile(
        r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    )
    Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    for first in "-+0123456789.":
        Loader.yaml_implicit_resolvers.setdefault(first, []).append(("tag:yaml.org,2002:float", number))
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return yaml.load(text, Loader)
    except UnicodeDecodeError as error:
        raise SchemaError(f"{where}: not UTF-8 text.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise SchemaError(f"{where}: not valid YAML{line} ({what}).") from error


def to_yaml(value: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads: what occurs twice is written twice."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(dict(value), Dumper=Dumper, sort_keys=False, allow_unicode=True)


@cache
def _adapter(kind: Any) -> Any:
    import pydantic

    _forbid_unknown_names(kind)
    return pydantic.TypeAdapter(kind)


def _forbid_unknown_names(kind: Any) -> None:
    """pydantic ignores names that a dataclass does not have, unless the class says otherwise; so do those inside it."""
    for inner in typing.get_args(kind):
        _forbid_unknown_names(inner)
    if dataclasses.is_dataclass(kind) and "__pydantic_config__" not in vars(kind):
        setattr(kind, "__pydantic_config__", {"extra": "forbid"})  # noqa: B010  (mypy knows no such attribute)
        for hint in typing.get_type_hints(kind).values():
            _forbid_unknown_names(hint)


def _explain(kind: Any, value: Any, error: Mapping[str, Any]) -> str:
    """One problem of pydantic's in our words."""
    missing = error["type"] in ("missing", "missing_argument")
    path: list[str | int] = []
    for part in error["loc"]:  # which also names branches of unions; those are no place in the value
        if part in (range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()):
            path, value = [*path, part], value[part]
    if missing:
        path.append(error["loc"][-1])
    name = ".".join(map(str, path)) or "the whole"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) and len(path) == 1 else []
        return f"there is no setting {name!r}.{did_you_mean(str(path[-1]), known)}"
    if missing:
        return f"{name!r} is missing."
    found = repr(error.get("input"))
    found = found if len(found) <= _LONGEST else found[:_LONGEST] + "..."
    message = str(error["msg"]).replace("Input should be ", "").removeprefix("Value error, ")
    return f"{name} is {found}, but should be {message[0].lower()}{message[1:]}."
