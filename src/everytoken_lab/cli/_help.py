"""The text of `--help`, from the dataclass of a command: examples first, then what it does, then its options.

Options stand under the titles of their groups, with a default where it says something. A command with many options
names the ones that most people need in `COMMON`; `--help-all` prints the others, too.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

import tyro

_LEFT = 28  # columns of the flags
_WORDS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: of the flag, without dashes; of a positional argument, what stands for it in the usage.
        flags: as they are typed, such as ("-b", "--batch-size"); empty for a positional argument.
        value: what stands for its value; empty for a switch.
        help: what it does.
        group: title of its group; empty if it has none.
        default: its value if it is not given.
        required: whether it has to be given.
    """

    name: str
    flags: tuple[str, ...]
    value: str
    help: str
    group: str
    default: Any
    required: bool

    @property
    def heading(self) -> str:
        """-b, --batch-size N; a switch that is on, or left open, shows that it can be turned off."""
        if not self.flags:
            return self.name
        flags = ", ".join(self.flags)
        if not self.value and self.default is not False:
            flags = flags.replace("--", "--[no-]")
        return f"{flags} {self.value}".rstrip()

    @property
    def text(self) -> str:
        """What it does, and its default if that is not plain from the words."""
        silent = self.required or self.default in (None, "", False, ()) or self.default == []
        if self.default == 0 and not isinstance(self.default, bool):
            silent = self.required or any(word in self.help for word in ("0: ", "0 l", "(0"))
        if silent:
            return self.help
        return f"{self.help} (default: {_shown(self.default)})"


def _shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def options_of(config: type, default: Any = None) -> Iterator[Option]:
    """The options of a dataclass and of the groups in it, in the order of their fields.

    Args:
        default: an instance that has the defaults, if they are not the dataclass's own.
    """
    for field in dataclasses.fields(config):
        kind, settings = _unwrap(_hints(config)[field.name])
        if tyro.conf.Suppress in settings:
            continue
        value = _default(field) if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(kind):
            title = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
            group = typing.cast(type, kind)
            yield from (dataclasses.replace(option, group=title) for option in options_of(group, value))
            continue
        name, word = field.name.replace("_", "-"), ""
        aliases: list[str] = []
        for setting in settings:
            name = getattr(setting, "name", None) or name
            word = getattr(setting, "metavar", None) or word
            aliases += getattr(setting, "aliases", None) or []
        required = value is dataclasses.MISSING
        value = None if required else value
        text = docs_of(config).get(field.name, "")
        if tyro.conf.Positional in settings:
            yield Option(word or name.upper(), (), word, text, "", value, required)
        else:
            flags = tuple(sorted([*aliases, f"--{name}"], key=len))
            yield Option(name, flags, word or _word(kind, name), text, "", value, required)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _hints(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config, include_extras=True)


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these; tyro's markers are among them."""
    if typing.get_origin(hint) is typing.Annotated:
        kind, *settings = typing.get_args(hint)
        return kind, tuple(settings)
    return hint, ()


def _word(kind: Any, name: str) -> str:
    """What stands for a value of this type."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (Union, types.UnionType):
        return _word(next(a for a in arguments if a is not type(None)), name)
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(str(a) for a in arguments if a) + "}"
    if typing.get_origin(kind) is tuple:
        one = _word(_unwrap(arguments[0])[0], name)
        return f"{one} ..." if arguments[-1] is Ellipsis else " ".join([one] * len(arguments))
    if kind is bool:
        return ""
    return _WORDS.get(kind, name.rsplit("-", 1)[-1].upper())


@cache
def docs_of(config: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those that it inherits from."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name, value = statement.target.id, getattr(following, "value", None)
                if isinstance(following, ast.Expr) and isinstance(value, ast.Constant):
                    docs[name] = " ".join(str(value.value).split())
    return docs


def usage(config: type, prog: str) -> str:
    """everytoken eval MODEL [DATA] [OPTIONS]."""
    options = list(options_of(config))
    words = [option.name for option in options if not option.flags]
    needed = [option.heading.split(", ")[-1] for option in options if option.flags and option.required]
    optional = any(option.flags and not option.required for option in options)
    return " ".join([prog, *words, *needed, *(["[OPTIONS]"] if optional else [])])


def examples(config: type) -> list[str]:
    """The lines under "Examples:" of the docstring."""
    _, _, block = (inspect.getdoc(config) or "").partition("Examples:\n")
    return [line.strip() for line in block.split("\n\n")[0].splitlines()]


def help_text(config: type, prog: str, default: Any = None, everything: bool = True, width: int = 0) -> str:
    """What `--help` prints, or `--help-all` if `everything` is asked for.

    Args:
        default: an instance that has the defaults, if they are not the dataclass's own.
        width: in columns; 0: of the terminal, at most 120.
    """
    width = width or min(120, shutil.get_terminal_size().columns)
    lines = [f"usage: {usage(config, prog)}", "", *(f"  {line}" for line in examples(config)), ""]
    block = "Examples:\n" + "\n".join(f"    {line}" for line in examples(config))
    for paragraph in (inspect.getdoc(config) or "").replace(block, "").split("\n\n"):
        if paragraph.strip():
            lines += [*textwrap.wrap(" ".join(paragraph.split()), width), ""]
    common = getattr(config, "COMMON", ())
    groups: dict[str, list[Option]] = {}
    hidden = 0
    for option in options_of(config, default):
        if everything or not common or option.required or not option.flags or option.name in common:
            groups.setdefault(option.group if option.flags else "\n", []).append(option)
        else:
            hidden += 1
    for title in sorted(groups, key=lambda title: (title != "\n", title != "")):  # arguments, options, groups
        lines += textwrap.wrap(title.strip() or ("Options" if title == "" and len(groups) > 1 else ""), width)
        for option in groups[title]:
            lines += _entry(option, width)
        lines.append("")
    if hidden:
        lines.append(f"`{prog} --help-all` shows {hidden} more options.")
    if any(not option.value and option.flags for group in groups.values() for option in group):
        lines.append("A switch that a recipe or a default turned on is turned off by --no-NAME." if common else "")
    return "\n".join(lines).rstrip()


def _entry(option: Option, width: int) -> list[str]:
    text = textwrap.wrap(option.text, width - _LEFT, break_on_hyphens=False)
    heading = f"  {option.heading}"
    if len(heading) > _LEFT - 2:
        return [heading, *(" " * _LEFT + line for line in text)]
    first, *more = text or [""]
    return [f"{heading:<{_LEFT}}{first}".rstrip(), *(" " * _LEFT + line for line in more)]
