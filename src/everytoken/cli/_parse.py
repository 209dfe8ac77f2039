"""Options from dataclasses: flags and their help through tyro, and suggestions for flags that do not exist."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")

ELSEWHERE = {  # what other programs call our flags
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
RENAMED = {
    "checkpoint": "weights",
    "compare-checkpoint": "compare-weights",
    "from": "weights",
    "initial-checkpoint": "weights",
    "teacher-checkpoint": "teacher-weights",
}
"""Old names of flags, which work and say what they are called now; `--pretrained` is `--weights timm`."""
TIMM = {"aug-repeats": "repeat-augment", "validation-batch-size": "val-batch-size"}
"""timm's names of flags, which work too."""
_MIXING = {
    "mixup": "Mixing is a setting with inner names: --set 'mixing.mixup={alpha: 0.8}'",
    "cutmix": "Mixing is a setting with inner names: --set 'mixing.cutmix={alpha: 1.0}'",
    "mixup-prob": "Every way of mixing has its own: --set mixing.cutmix.prob=0.5",
    "mixup-switch-prob": "Ways of mixing take turns by their odds: --set mixing.cutmix.odds=2",
    "mixup-mode": "Every way of mixing has its own: --set mixing.cutmix.mode=pair",
}
REMOVED = {f"{command} --{flag}": way for command in ("train", "finetune") for flag, way in _MIXING.items()}
"""Flags that are not there, as "command --flag" or "--flag" -> the way to do it."""


def parse(config: type[T], prog: str, argv: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass `config` from `argv`; its field docstrings are the help.

    Args:
        default: the values that flags override, say from a recipe.

    Wrong flags exit with code 2 and a suggestion.
    """
    argv = current_flags(config, argv)
    # tyro leaves out sections such as "Examples:" when it reads a docstring itself
    settings: dict[str, Any] = {"prog": prog, "args": list(argv), "description": inspect.getdoc(config) or ""}
    if default is not None:
        settings["default"] = default
    try:
        return tyro.cli(config, **settings, console_outputs=False)
    except SystemExit as stop:
        if stop.code:
            _explain_unknown(prog, argv, set(flags(config)))
    return tyro.cli(config, **settings)  # prints the help, or what is wrong


def current_flags(config: type, argv: Sequence[str]) -> list[str]:
    """The words with flags by the names that they have now; a line on stderr for each old one."""
    known, words = set(flags(config)), []
    for i, word in enumerate(argv):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in known:
            words.append(word)
        elif name in ("pretrained", "no-pretrained") and {"weights", "recipe"} <= known:
            off = name.startswith("no-") or value == "False" or argv[i + 1 : i + 2] == ["False"]
            words.append(f"--weights={'' if off else 'timm'}")
            _tell_renamed(word, "--weights ''" if off else "--weights timm")
        elif TIMM.get(name) in known:
            words.append(f"--{TIMM[name]}{equals}{value}")
        elif RENAMED.get(name) in known:
            words.append(f"--{RENAMED[name]}{equals}{value}")
            _tell_renamed(f"--{name}", f"--{RENAMED[name]}")
        else:
            words.append(word)
    return words


def _tell_renamed(old: str, new: str) -> None:
    print(f"note: {old} is called {new} now", file=sys.stderr)


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


def flags(config: type) -> Iterator[str]:
    """Names of a dataclass's long flags, without their dashes; groups of options and aliases are looked into."""
    plain, annotated = typing.get_type_hints(config), typing.get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        kind = plain[field.name]
        if dataclasses.is_dataclass(kind):
            yield from flags(typing.cast(type, kind))
            continue
        name = field.name.replace("_", "-")
        for extra in getattr(annotated[field.name], "__metadata__", ()):
            name = getattr(extra, "name", None) or name
            yield from (alias[2:] for alias in getattr(extra, "aliases", None) or () if alias.startswith("--"))
        yield from (name, f"no-{name}") if kind is bool else (name,)


def _explain_unknown(prog: str, argv: Sequence[str], known: set[str]) -> None:
    """Say which flags do not exist and exit; return if all do."""
    words = [word[2:].split("=")[0].replace("_", "-") for word in argv if word.startswith("--") and len(word) > 2]
    unknown = [word for word in dict.fromkeys(words) if word not in known | {"help"}]
    if not unknown:
        return
    for word in unknown:
        gone = REMOVED.get(f"{prog.removeprefix('everytoken ')} --{word}") or REMOVED.get(f"--{word}")
        names = " or ".join(f"--{name}" for name in _nearest(word, known))
        hint = f" {gone}." if gone else f" Did you mean {names}?" if names else ""
        print(f"{prog}: there is no option --{word}.{hint}", file=sys.stderr)
    print(f"`{prog} --help` lists all options.", file=sys.stderr)
    raise SystemExit(2)


def _nearest(word: str, known: set[str]) -> list[str]:
    """The flags that were perhaps meant, the likeliest first; also by the names that they have elsewhere."""
    names = {other: name for other, name in ELSEWHERE.items() if name in known} | {name: name for name in known}
    close = difflib.get_close_matches(word, names, n=6, cutoff=0.6)
    longer = sorted((name for name in names if name.startswith(f"{word}-")), key=len)
    return list(dict.fromkeys(names[name] for name in [*close, *longer]))[:3]
