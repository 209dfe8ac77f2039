"""Recipes: flat YAML files of option names, plus `objectives` and `mixing`. Unknown keys are errors with suggestions.

model: lvvit_s
batch_size: 128
lr_base: 1.0e-3
objectives:
  token_labeling: {weight: 0.5}
mixing:
  mixtoken: {alpha: 1.0}
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from everytoken.errors import EverytokenError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_DICTS = ("objectives", "mixing", "model_kwargs")


class RecipeError(EverytokenError):
    """A recipe or an override is wrong; the message names the key."""


def recipe_names() -> list[str]:
    """Names of the recipes that are shipped."""
    folder = resources.files("everytoken.recipes")
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The content of a shipped recipe, or of a YAML file of your own (a path that ends in .yaml)."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise RecipeError(f"there is no recipe file {name}")
        text = path.read_text()
    else:
        if name not in recipe_names():
            raise RecipeError(
                f"there is no recipe {name!r}.{did_you_mean(name, recipe_names())} `everytoken recipes` lists them; "
                "your own is a path that ends in .yaml"
            )
        text = (resources.files("everytoken.recipes") / f"{name}.yaml").read_text()
    return parse_yaml(text, name)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """YAML text -> dict, with the name of the file in every error."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"{where} must be a list of `name: value` lines, not a {type(content).__name__}")
    return content


def header(name: str) -> str:
    """The comment block on top of a shipped recipe: cost, result, source, and whether it was run."""
    text = (resources.files("everytoken.recipes") / f"{name}.yaml").read_text()
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return "\n".join(lines)


def apply(options: T, values: Mapping[str, Any], where: str) -> T:
    """A copy of `options` with flat `values` put into the group that owns each name."""
    groups = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    owner: dict[str, str | None] = {name: None for name in groups if not dataclasses.is_dataclass(groups[name])}
    for group, content in groups.items():
        if dataclasses.is_dataclass(content):
            owner.update({f.name: group for f in dataclasses.fields(content)})
    if "labels" in values and "labels" not in owner:
        values = {"maps" if key == "labels" else key: value for key, value in values.items()}
    changes: dict[str | None, dict[str, Any]] = {}  # None: fields of `options` itself
    for key, value in values.items():
        if key not in owner:
            raise RecipeError(f"{where}: there is no option {key!r}.{did_you_mean(key, owner)}")
        changes.setdefault(owner[key], {})[key] = value
    top: dict[str, Any] = {}
    for name, content in changes.items():
        target = options if name is None else groups[name]
        hints = typing.get_type_hints(type(target))
        checked = {key: _fit(value, hints[key], f"{where}: {key}") for key, value in content.items()}
        top.update(checked if name is None else {name: dataclasses.replace(target, **checked)})
    return dataclasses.replace(options, **top)


def flat(options: Any) -> dict[str, Any]:
    """The reverse of `apply`: all options as one flat dict of plain values."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        if dataclasses.is_dataclass(value):
            out.update(flat(value))
        else:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def overrides(assignments: Iterable[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """`--set objectives.drloc.weight=0.1` -> nested values, merged into what `base` holds for that name.

    A value is YAML: numbers, true, [1, 2], {a: b}; `null` removes the entry.
    """
    out: dict[str, Any] = {}
    for text in assignments:
        path, sign, raw = text.partition("=")
        if not sign:
            raise RecipeError(f"--set takes NAME=VALUE, for example objectives.drloc.weight=0.1, not {text!r}")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise RecipeError(
                f"--set {text}: the value is not valid YAML ({getattr(error, 'problem', None) or error})"
            ) from error
        first, *rest = path.split(".")
        if not rest:
            out[first] = value
            continue
        if first not in _DICTS:
            raise RecipeError(f"--set {text}: only {', '.join(_DICTS)} have inner names.{did_you_mean(first, _DICTS)}")
        node = out.setdefault(first, _copy(base.get(first, {})))
        for name in rest[:-1]:
            node = node.setdefault(name, {})
        if value is None:
            node.pop(rest[-1], None)
        else:
            node[rest[-1]] = value
    return out


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _fit(value: Any, hint: Any, where: str) -> Any:
    """Check a plain value against a type hint; ints pass for floats, lists for tuples, {} and null for dicts."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _fit(value, args[0], where)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _fit(value, option, where)
            except RecipeError:
                continue
        raise RecipeError(f"{where} is {value!r}, which is none of {args}")
    if origin is Literal:
        if value not in args:
            raise RecipeError(f"{where} is {value!r}; it can be {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise RecipeError(f"{where} is {value!r}; it takes {len(args)} values")
        return tuple(_fit(v, args[0], where) for v in value)
    if origin is dict:
        if not isinstance(value, Mapping | None):
            raise RecipeError(f"{where} is {value!r}; it takes names and values")
        inner = args[1]
        return {str(k): _fit({} if v is None and get_origin(inner) is dict else v, inner, f"{where}.{k}")
                for k, v in (value or {}).items()}  # fmt: skip
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(hint, type) and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise RecipeError(f"{where} is {value!r}; it takes a value of type {hint.__name__}")
    return value
