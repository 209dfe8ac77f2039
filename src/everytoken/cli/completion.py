"""`everytoken completion`: a script that completes commands and options in the shell."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import tyro

from everytoken.cli._parse import parse


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands, options and their choices. The shell has to read it at every start.

    Examples:
        everytoken completion bash > ~/.local/share/bash-completion/completions/everytoken
        everytoken completion zsh > ~/.zfunc/_everytoken
        everytoken completion fish > ~/.config/fish/completions/everytoken.fish

    For zsh, `fpath+=~/.zfunc` has to stand before `compinit` in ~/.zshrc. Open a new shell afterwards.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash, zsh or fish."""


OPTIONS = Completion
_FILES = {  # where there is nothing to propose, such as for DATA, shells are to propose files
    "\ncomplete -F ": "\ncomplete -o default -F ",
    'if [[ "$completions" == "__TYRO': 'if [[ -z "$completions" || "$completions" == "__TYRO',
    "complete --no-files ": "complete ",
}


def main(argv: list[str], prog: str) -> None:
    """Parse, print."""
    shell = parse(Completion, prog, argv).shell
    script = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(script):
        tyro.cli(_all_commands(), prog="everytoken", args=["--tyro-write-completion", shell, "-"])
    text = script.getvalue()
    for old, new in _FILES.items():
        text = text.replace(old, new)
    print(text, end="")


def _all_commands() -> Any:
    """One type for all commands, of which tyro makes the script."""
    from everytoken.cli import options_of_commands

    inner: dict[str, Any] = {}
    nested: dict[str, dict[str, type]] = {}
    for name, config in options_of_commands().items():
        first, _, second = name.partition(" ")
        if second:
            nested.setdefault(first, {})[second] = config
        else:
            inner[first] = config
    for name, configs in nested.items():
        inner[name] = dataclasses.make_dataclass(name.title(), [("command", _one_of(configs))])
    return _one_of(inner)


def _one_of(configs: Mapping[str, Any]) -> Any:
    kinds = (Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)] for name, kind in configs.items())
    return Annotated[reduce(or_, kinds), tyro.conf.OmitArgPrefixes]
