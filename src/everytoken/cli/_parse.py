"""Typed configuration from dataclasses: flags through tyro, files through YAML, one rule for unknown keys."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TypeVar

import tyro

T = TypeVar("T")


def parse(config: type[T], prog: str, argv: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass ``config`` from ``argv``; its field docstrings are the help.

    ``default`` (say, from a recipe) gives the values that flags override. Wrong flags exit with code 2
    and a suggestion.
    """
    # tyro leaves out sections such as "Examples:" when it reads a docstring itself
    about = inspect.getdoc(config) or ""
    if default is not None:
        return tyro.cli(config, prog=prog, args=list(argv), description=about, default=default)
    return tyro.cli(config, prog=prog, args=list(argv), description=about)
