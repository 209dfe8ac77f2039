"""Options from dataclasses: tyro reads the words and prints the help; what is wrong with them is said in a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from everytoken.errors import EverytokenError, did_you_mean

try:
    from tyro._errors import on_parse_error  # has no public name yet; without it, tyro prints its own message
except ImportError:
    on_parse_error = None  # type: ignore[assignment]

T = TypeVar("T")
_SOURCES = (
    "A run folder, a weights file, an exported folder or .onnx file, timm:NAME (pretrained weights), "
    "hf-hub:USER/NAME or registry:efficientnet_lite0."
)
Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=_SOURCES)]
_KINDS = {"INT": "an integer", "FLOAT": "a number"}


def parse(config: type[T], prog: str, argv: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass `config` from `argv`; the docstrings of its fields are the help.

    Args:
        default: the values that flags override, say from a recipe.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    words = _spelled_out(config, argv)

    def explain(event: Any) -> None:
        with contextlib.suppress(AttributeError):  # an event of another version of tyro, which then prints its message
            raise EverytokenError(f"{_sentence(config, words, event)} `{prog} --help` explains it.")

    with contextlib.nullcontext() if on_parse_error is None else on_parse_error(explain):
        return tyro.cli(config, prog=prog, args=words, description=_description(config), **settings)


def options_of(command: Callable[..., Any]) -> type:
    """The dataclass that a command takes."""
    kind: type = next(iter(typing.get_type_hints(command).values()))
    return kind


def call(command: Callable[[Any], int | None], argv: list[str], prog: str) -> int | None:
    """Call a command with its options."""
    config: Any = options_of(command)
    return command(config.read(argv, prog) if hasattr(config, "read") else parse(config, prog, argv))


def examples(config: type) -> list[str]:
    """The lines under "Examples:" of the docstring."""
    _, _, block = (inspect.getdoc(config) or "").partition("Examples:\n")
    return [line.strip() for line in block.split("\n\n")[0].splitlines()]


def _description(config: type) -> str:
    """The docstring, examples first; tyro keeps the line breaks before indented lines only."""
    wrap = partial(textwrap.fill, width=min(100, shutil.get_terminal_size().columns), subsequent_indent="  ")
    blocks = sorted((inspect.getdoc(config) or "").split("\n\n"), key=lambda block: not block.startswith("Examples:"))
    return "\n\n".join(block if block.startswith("Examples:") else wrap(block) for block in blocks)


def _sentence(config: type, words: Sequence[str], event: Any) -> str:
    """What is wrong with the words, and the way out."""
    known = {f"--{name}" for name, _ in _options(config)}
    for flag in (word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")):
        if not {flag, flag.replace("--no-", "--", 1)} & known:
            return f"unrecognized option {flag}.{did_you_mean(flag, known)}"
    problem = type(event).__name__
    if problem == "UnrecognizedArgs":
        return f"unrecognized: {' '.join(event.tokens)}."
    if problem == "MissingArgs":
        missing = " and ".join(_name(item.arg) for item in event.missing_arguments)
        return f"{missing} must be given, as in: {examples(config)[0]}."
    if problem == "InvalidChoice":
        return f"{_name(event.argument)} must be one of {', '.join(event.choices)}, got {event.value!r}."
    if problem == "BadValue":
        return f"{_name(event.argument)} needs a value."
    if problem == "InstantiationFailure" and event.argument is not None:
        kind = _KINDS.get(str(event.argument.lowered.metavar).split()[0].strip("[{}]"))
        value = event.message.rpartition(": ")[2]
        return f"{_name(event.argument)} " + (
            f"must be {kind}, got {value}." if kind else f"is wrong: {event.message}."
        )
    return "the options cannot be read."


def _name(argument: Any) -> str:
    """--batch-size; of a positional argument, what stands for it in the usage."""
    lowered = argument.lowered
    return str(lowered.metavar).split()[0] if argument.is_positional() else str(max(lowered.name_or_flags, key=len))


def _options(config: type) -> Iterator[tuple[str, Any]]:
    """(name as it is typed, type) of each option of a dataclass and of the groups in it."""
    for name, hint in typing.get_type_hints(config, include_extras=True).items():
        kind, *settings = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind))
        elif tyro.conf.Positional not in settings and tyro.conf.Suppress not in settings:
            yield next((s.name for s in settings if getattr(s, "name", None)), name.replace("_", "-")), kind


def _spelled_out(config: type, argv: Sequence[str]) -> list[str]:
    """--flip is --flip True and --no-flip is --flip False, for options of the type `bool | None`."""
    left_open = {name for name, kind in _options(config) if kind == bool | None}
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name = word.removeprefix("--").removeprefix("no-").replace("_", "-")
        switch = word.startswith("--") and name in left_open and following not in ("True", "False", "None")
        words += [f"--{name}", str(not word.startswith("--no-"))] if switch else [word]
    return words


def given_options(argv: Sequence[str]) -> set[str]:
    """Names of the options whose flags are among the words."""
    names = {"data", *(long for short, long in (("-b", "batch_size"), ("-j", "workers")) if short in argv)}
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            names |= {name, name.removeprefix("no_")}
    return names


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind`, as `options`, which inherits them, has them."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}


def check_source(source: str) -> None:
    """Answer at once where there is no such run or weights file, before torch is imported."""
    if ":" not in source and not Path(source).expanduser().exists():
        raise EverytokenError(f"there is no run folder or weights file at {source}")
