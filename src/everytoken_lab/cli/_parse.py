"""Options from dataclasses: tyro reads the flags, `_help` explains them, and what is wrong is said in a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from everytoken_lab.cli._help import examples, help_text, options_of, usage

T = TypeVar("T")


def parse(config: type[T], prog: str, argv: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass `config` from `argv`; its field docstrings are the help.

    Args:
        default: the values that flags override, say from a recipe.

    Wrong flags exit with code 2 and a suggestion.
    """
    asked = {"-h", "--help", "--help-all"} & set(argv)
    if asked:
        print(help_text(config, prog, default, everything="--help-all" in asked))
        raise SystemExit(0)
    settings: dict[str, Any] = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return tyro.cli(config, prog=prog, args=_spelled_out(config, argv), **settings)
    except SystemExit:
        _explain_unknown(prog, argv, set(flags(config)))
        print(f"{prog}: {_sentence(config, prog, said.getvalue())}", file=sys.stderr)
        raise SystemExit(2) from None


def _spelled_out(config: type, argv: Sequence[str]) -> list[str]:
    """--flip is --flip True and --no-flip is --flip False, for switches that may also be left open (None)."""
    left_open = {option.name for option in options_of(config) if not option.value and option.default is None}
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name = word.removeprefix("--").removeprefix("no-").replace("_", "-")
        if word.startswith("--") and name in left_open and following not in ("True", "False", "None"):
            words += [f"--{name}", str(not word.startswith("--no-"))]
        else:
            words.append(word)
    return words


def _sentence(config: type, prog: str, text: str) -> str:
    """What tyro says in a box, as a sentence with the way out."""
    sections: list[list[str]] = [[]]  # a title, what is wrong, help
    for line in (raw.strip("│ ") for raw in text.splitlines()):
        if re.match("[-─╭╰]{8}|[╭╰]─", line):
            sections.append([])
        elif line:
            sections[-1].append(line)
    sections = [lines for lines in sections if lines] or [[""]]
    lines = sections[1] if len(sections) > 1 and len(sections[0]) == 1 else sections[0]
    if lines[0].startswith("Missing from"):
        starts = {line.partition(" ")[0].rstrip(",") for line in lines}
        names = {option.flags[-1] if option.flags else option.name.split()[0]: option for option in options_of(config)}
        missing = [name for name, option in names.items() if option.required and name in starts]
        is_are = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {is_are} missing, as in: {examples(config)[0]}"
    words = " ".join(lines).removeprefix("Error parsing ")
    words = re.sub(r"^Unrecognized options: (.*)$", r"there is no place for \1", words)
    words = re.sub(
        r"^invalid choice (.*) for argument '(\S+)'. Expected one of \((.*?),?\)\.?$", r"\2 is \1; it can be \3", words
    )
    words = re.sub(r"^Missing value for argument '(\S+)'.*$", r"\1 needs a value", words)
    words = re.sub(r"^(\S+): invalid literal for int.*: '(.*)'$", r"\1 is '\2', which is no whole number", words)
    words = re.sub(r"^(\S+): could not convert string to float: '(.*)'$", r"\1 is '\2', which is no number", words)
    return f"{words.rstrip('.')}. Usage: {usage(config, prog)}; `{prog} --help` explains it."


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
    """Names of a dataclass's long flags, without their dashes; switches also have no-NAME."""
    for option in options_of(config):
        for flag in option.flags:
            if flag.startswith("--"):
                yield flag[2:]
                if not option.value:
                    yield f"no-{flag[2:]}"


def _explain_unknown(prog: str, argv: Sequence[str], known: set[str]) -> None:
    """Say which flags do not exist and exit; return if all do."""
    words = [word[2:].split("=")[0].replace("_", "-") for word in argv if word.startswith("--") and len(word) > 2]
    unknown = [word for word in dict.fromkeys(words) if word not in known | {"help", "help-all"}]
    if not unknown:
        return
    for word in unknown:
        names = " or ".join(f"--{name}" for name in _nearest(word, known))
        hint = f" Did you mean {names}?" if names else ""
        print(f"{prog}: there is no option --{word}.{hint}", file=sys.stderr)
    print(f"`{prog} --help` lists all options.", file=sys.stderr)
    raise SystemExit(2)


def _nearest(word: str, known: set[str]) -> list[str]:
    """The flags that were perhaps meant, the likeliest first."""
    close = difflib.get_close_matches(word, known, n=6, cutoff=0.6)
    longer = sorted((name for name in known if name.startswith(f"{word}-")), key=len)
    return list(dict.fromkeys([*close, *longer]))[:3]
