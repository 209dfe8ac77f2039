"""Recipes: flat YAML files of option names, plus `objectives` and `mixing`. Unknown keys are errors with suggestions.

model: lvvit_s
batch_size: 128
lr_base: 1.0e-3
objectives:
  token_labeling: {beta: 0.5}
mixing:
  mixtoken: {alpha: 1.0}
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from everytoken.errors import did_you_mean
from everytoken.files import read_bytes
from everytoken.objectives import registry
from everytoken_lab import schema
from everytoken_lab.schema import SchemaError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_DICTS = ("objectives", "mixing", "model_kwargs")


def recipe_names() -> list[str]:
    """Names of the recipes that are shipped."""
    folder = resources.files("everytoken_lab") / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def read_recipe(name: str, trust_code: bool = False) -> dict[str, Any]:
    """The content of a shipped recipe, or of a YAML file of your own (a path that ends in .yaml).

    Args:
        trust_code: whether it may name objectives by import paths, which are imported then.
    """
    values = parse_recipe(recipe_text(name), name)
    if not trust_code:
        registry.refuse_code(values, name)
    return values


def recipe_text(name: str) -> str:
    """The text of a shipped recipe or of a file."""
    if name.endswith((".yaml", ".yml")):
        try:
            return read_bytes(name).decode("utf-8")
        except FileNotFoundError as error:
            raise SchemaError(f"there is no recipe file {name}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"the recipe file {name} cannot be read: {error}") from error
    if name not in recipe_names():
        hint = f"{did_you_mean(name, recipe_names())} `everytoken recipes` lists them; your own ends in .yaml"
        raise SchemaError(f"there is no recipe {name!r}.{hint}")
    return (resources.files("everytoken_lab") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """YAML text -> names and values."""
    content = schema.read_yaml(text, where)
    return schema.parse(dict[str, Any], {} if content is None else content, where)


def header(name: str) -> str:
    """The comment block on top of a shipped recipe: cost, result, source, and whether it was run."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines())
    return "\n".join(line.lstrip("# ") for line in lines)


def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _flat_form(kind: type) -> tuple[type, dict[str, str]]:
    """A dataclass of all options of `kind` without their groups, and the group of each option ("": none)."""
    types: dict[str, Any] = {}
    home: dict[str, str] = {}
    for name, hint in _hints(kind).items():
        group = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        inside = _hints(group) if dataclasses.is_dataclass(group) else {name: hint}
        types |= inside
        home |= dict.fromkeys(inside, name if dataclasses.is_dataclass(group) else "")
    return dataclasses.make_dataclass("Settings", types.items()), home


def apply(options: T, values: Mapping[str, Any], where: str) -> T:
    """A copy of `options` with flat `values` put into the group that owns each name; types and ranges are checked."""
    form, home = _flat_form(type(options))
    for key in values:
        if key not in home:
            raise SchemaError(f"{where}: there is no option {key!r}.{did_you_mean(key, home)}")
    values = {key: {} if value is None and key in _DICTS else value for key, value in values.items()}
    for key in ("objectives", "mixing"):
        if isinstance(inner := values.get(key), Mapping):  # `hard:` without settings is `hard: {}`
            values[key] = {name: {} if fields is None else fields for name, fields in inner.items()}
    for key, value in flat_names(values).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SchemaError(f"{where}: {key} is {value}, which is not a number to train with.")
    checked: Any = schema.parse(form, {**flat(options), **values}, where)
    new: dict[str, Any] = {name: getattr(checked, name) for name, group in home.items() if not group}
    for group in set(home.values()) - {""}:
        inside = {name: getattr(checked, name) for name in home if home[name] == group}
        new[group] = dataclasses.replace(getattr(options, group), **inside)
    return dataclasses.replace(options, **new)


def check_settings(kind: type, settings: Mapping[str, Any], where: str) -> None:
    """Raise if a value does not fit the type that the constructor of `kind` says for it; unknown names pass."""
    hints: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
    else:  # settings may pass through `**settings` to a base class
        for base in reversed(kind.__mro__[:-1]):
            hints |= typing.get_type_hints(vars(base).get("__init__", object))
    typed = {name: value for name, value in settings.items() if name in hints}
    schema.parse(dataclasses.make_dataclass("Settings", [(name, hints[name]) for name in typed]), typed, where)


def flat(options: Any) -> dict[str, Any]:
    """The reverse of `apply`: all options as one flat dict of plain values."""
    values: dict[str, Any] = {}
    for name, value in vars(options).items():
        plain = list(value) if isinstance(value, tuple) else value
        values |= flat(value) if dataclasses.is_dataclass(value) else {name: plain}
    return values


def flat_names(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values under names such as `objectives.token_labeling.beta`."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name, nested = f"{before}{key}", isinstance(value, Mapping) and value
        out |= flat_names(value, f"{name}.") if nested else {name: value}
    return out


def overrides(assignments: Iterable[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """`objectives.drloc.weight=0.1` -> nested values, merged into what `base` holds for that name.

    A value is YAML: numbers, true, [1, 2], {a: b}; `null` removes the entry.
    """
    values: dict[str, Any] = {}
    for text in assignments:
        path, sign, raw = text.partition("=")
        if not sign:
            raise SchemaError(f"{text!r} should be NAME=VALUE, for example objectives.drloc.weight=0.1")
        value = schema.read_yaml(raw, text)
        first, *rest = path.split(".")
        if not rest:
            values[first] = value
            continue
        if first not in _DICTS:
            raise SchemaError(f"{text}: only {', '.join(_DICTS)} have inner names.{did_you_mean(first, _DICTS)}")
        node = values.setdefault(first, copy.deepcopy(dict(base.get(first) or {})))
        for name in rest[:-1]:
            node[name] = {} if node.get(name) is None else node[name]
            if not isinstance(node[name], dict):
                raise SchemaError(f"{text}: {name} is {node[name]!r} and has no inner names")
            node = node[name]
        if value is None:
            node.pop(rest[-1], None)
        else:
            node[rest[-1]] = value
    return values
