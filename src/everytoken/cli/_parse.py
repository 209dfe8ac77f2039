"""Options from dataclasses: flags and their help through tyro, and suggestions for flags that do not exist."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")

_ALSO = {  # what others call our flags
    "arch": "model",
    "batch": "batch-size",
    "gpu": "device",
    "image-size": "img-size",
    "learning-rate": "lr",
    "num-epochs": "epochs",
    "num-workers": "workers",
    "optimizer": "opt",
    "optim": "opt",
    "out": "output",
    "out-dir": "output",
    "output": "out",
    "output-dir": "output",
    "resolution": "img-size",
    "scheduler": "sched",
}


def parse(config: type[T], prog: str, argv: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass ``config`` from ``argv``; its field docstrings are the help.

    ``default`` (say, from a recipe) gives the values that flags override. Wrong flags exit with code 2
    and a suggestion.
    """
    # tyro leaves out sections such as "Examples:" when it reads a docstring itself
    given: dict[str, Any] = {"prog": prog, "args": list(argv), "description": inspect.getdoc(config) or ""}
    if default is not None:
        given["default"] = default
    try:
        return tyro.cli(config, **given, console_outputs=False)
    except SystemExit as stop:
        if stop.code:
            _explain_unknown(prog, argv, set(flags(config)))
    return tyro.cli(config, **given)  # prints the help, or what is wrong


def flags(config: type) -> Iterator[str]:
    """Names of a dataclass's long flags, without their dashes; groups of options are looked into."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from flags(typing.cast(type, kind))
        else:
            name = field.name.replace("_", "-")
            yield from (name, f"no-{name}") if kind is bool else (name,)


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The flags that were perhaps meant, the likeliest first; also by the names that they have elsewhere."""
    names = {name: name for name in known}
    names = {other: name for other, name in _ALSO.items() if name in names} | names
    found = difflib.get_close_matches(word, names, n=2 * count, cutoff=0.6)
    longer = sorted((name for name in names if name.startswith(f"{word}-")), key=len)
    return list(dict.fromkeys(names[name] for name in [*found, *longer]))[:count]


def _explain_unknown(prog: str, argv: Sequence[str], known: set[str]) -> None:
    """Say which flags do not exist and exit; return if all do."""
    words = [word[2:].split("=")[0].replace("_", "-") for word in argv if word.startswith("--") and len(word) > 2]
    unknown = [word for word in dict.fromkeys(words) if word not in known | {"help"}]
    if not unknown:
        return
    for word in unknown:
        near = " or ".join(f"--{name}" for name in nearest(word, known))
        hint = f" Did you mean {near}?" if near else ""
        print(f"{prog}: there is no option --{word}.{hint}", file=sys.stderr)
    print(f"`{prog} --help` lists all options.", file=sys.stderr)
    raise SystemExit(2)
