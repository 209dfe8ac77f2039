"""Write the reference: the API from its docstrings, the commands from their parsers, the recipes from their headers."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import everytoken
import everytoken_lab
from everytoken import functional
from everytoken_lab import cli
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.engine.options import AutoOptions, TrainOptions, header, recipe_names, recipe_text
from everytoken_lab.evaluation import EvalOptions, ExportOptions, PredictOptions
from everytoken_lab.explanation import ExplainOptions
from everytoken_lab.reports import ReportOptions

OPTIONS: dict[str, tuple[type, ...]] = {  # what the functions of everytoken_lab take as keyword arguments
    "train": (AutoOptions, TrainOptions),
    "annotate": (AnnotateOptions,),
    "evaluate": (EvalOptions,),
    "predict": (PredictOptions,),
    "export": (ExportOptions,),
    "explain": (ExplainOptions,),
    "report": (ReportOptions,),
}
GROUPS = {  # title: packages that the names come from
    "Models": ("models",),
    "Objectives": ("objectives", "step", "timm_task"),
    "Mixing": ("mixing",),
    "Score maps and batches": ("maps", "data", "functional"),
    "Errors": ("errors",),
}
RECIPES = {  # title: beginnings of names; the first that fits
    "Small data": ("small_",),
    "Fine-tuning": ("finetune", "transfer_"),
    "Segmentation": ("segment_",),
    "Detection": ("detect_",),
    "ImageNet, from scratch": ("",),
}


def write(folder: Path) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "commands").mkdir(parents=True)
    (folder / "api.rst").write_text(api(), encoding="utf-8")
    (folder / "functional.rst").write_text(functions(), encoding="utf-8")
    (folder / "recipes.md").write_text(recipes(), encoding="utf-8")
    (folder / "commands.md").write_text(commands(), encoding="utf-8")
    for name, what in cli.COMMANDS.items():
        text = "\n".join(command_page(name, what))
        (folder / "commands" / f"{name}.md").write_text(text, encoding="utf-8")


# --- the API


def api() -> str:
    """The stable names, by what they are for."""
    names = [name for name in everytoken.__all__ if name != "__version__"]
    lines = [_title("Python API"), _rst(everytoken.__doc__), ""]
    for title, packages in GROUPS.items():
        lines += [_title(title, "-")]
        for name in list(names):
            home = getattr(everytoken, name).__module__.removeprefix("everytoken.")
            if any(home == package or home.startswith(f"{package}.") for package in packages):
                names.remove(name)
                lines += _documented("everytoken", name)
    lines += [_title("Commands as functions: everytoken_lab", "-")]
    for name in everytoken_lab.__all__:
        lines += _documented("everytoken_lab", name)
        lines += [line for kind in OPTIONS.get(name, ()) for line in _options_of(name, kind)]
    if names:
        raise ValueError(f"docs/make_reference.py puts these names into no group: {names}")
    return "\n".join(lines)


def functions() -> str:
    """Every function and class of everytoken.functional, by module."""
    lines = [_title("everytoken.functional"), _rst(functional.__doc__), ""]
    for info in pkgutil.iter_modules(functional.__path__):
        path = f"everytoken.functional.{info.name}"
        module = vars(importlib.import_module(path))
        names = [
            name for name, value in module.items() if getattr(value, "__module__", None) == path and name[0] != "_"
        ]
        lines += [_title(info.name, "-")]
        lines += [line for name in names for line in _documented(path, name)]
    return "\n".join(lines)


def _documented(module: str, name: str) -> list[str]:
    kind = "class" if inspect.isclass(getattr(importlib.import_module(module), name)) else "function"
    members = ["   :members:", "   :undoc-members:"] if kind == "class" else []
    return [f".. auto{kind}:: {module}.{name}", *members, ""]


def _options_of(name: str, kind: type) -> list[str]:
    """A list of the keyword arguments that a dataclass of options stands for: name, default, docstring."""
    lines = [f"**Options of** ``{name}``", ""]
    for option, default, doc in _fields(kind):
        lines += [f"``{option}`` = ``{default!r}``", textwrap.indent(" ".join(doc.split()), "    "), ""]
    return lines


def _fields(kind: type) -> Iterator[tuple[str, Any, str]]:
    """Fields of a dataclass and of the groups in it, without those that only recipes set."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for line, after in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
                docs[line.target.id] = ast.literal_eval(after.value)  # type: ignore[union-attr]
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _fields(hints[field.name])
        elif field.name in docs and field.name not in ("data", "maps", "recipe"):  # arguments of their own
            missing = field.default is dataclasses.MISSING
            default = field.default if not missing else field.default_factory()  # type: ignore[misc]
            yield field.name, default, docs[field.name]


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


def _rst(doc: str | None) -> str:
    """A module's docstring, without its first line."""
    lines = inspect.cleandoc(doc or "").splitlines()
    prepare_docstring(None, "module", "", None, None, lines)
    return "\n".join(lines)


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show indented code as code: after a paragraph, and under "Example:" where there is no prompt."""
    done: list[str] = []
    for i, line in enumerate(lines):
        after = next((other for other in lines[i + 1 :] if other), "")
        indented = after.startswith("    ")
        if line in ("Example:", "Examples:") and indented and not after.lstrip().startswith((">>>", "- ")):
            done += [f"{line}:", ""]
            continue
        paragraph = line and not line.startswith(" ") and i + 1 < len(lines) and not lines[i + 1]
        done.append(line)
        if paragraph and indented and not line.endswith("::"):
            done += ["", "::"]
    lines[:] = done


# --- the commands


def commands() -> str:
    """The page above the pages of the commands."""
    lines = ["# Commands", ""]
    for title, group in cli.GROUPS.items():
        rows = [f"| [`everytoken {name}`](commands/{name}.md) | {_markdown(what)} |" for name, what in group.items()]
        lines += [f"| {title} | |", "|---|---|", *rows, ""]
    toc = ["```{toctree}", ":hidden:", *(f"commands/{name}" for name in cli.COMMANDS), "```"]
    return "\n".join([*lines, *toc, ""])


def command_page(name: str, what: str) -> Iterator[str]:
    """A command, or the commands that it has."""
    yield f"# everytoken {name}\n"
    yield f"{_markdown(what[0].upper() + what[1:])}.\n"
    for words in cli.options_of_commands():
        if words.split()[0] == name:
            yield f"## everytoken {words}\n" if words != name else ""
            yield f"```text\n{help_of(words)}\n```\n"


def help_of(words: str) -> str:
    """What `everytoken WORDS --help` prints, 100 columns wide."""
    text = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1")
    with width, contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([*words.split(), "--help"])
    return text.getvalue().strip()


def _markdown(text: str) -> str:
    """Plain text: what Markdown would take for its own is escaped, code in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([\\*_<>\[\]|{}$~#])", r"\\\1", part) for i, part in enumerate(parts))


# --- the recipes


def recipes() -> str:
    """All recipes in full, with what their headers say."""
    names = recipe_names()
    lines = [
        "# Recipes",
        "",
        "A recipe is a YAML file that names model, data handling, objectives and schedule. `everytoken train DATA",
        "--recipe NAME` uses it, a flag overrides one of its values, and `everytoken recipes NAME > mine.yaml` makes a",
        "copy to edit.",
        'What a header calls "expected" is the paper\'s number unless it says that it was run by us.',
        "",
    ]
    for title, beginnings in RECIPES.items():
        chosen = [name for name in names if name.startswith(beginnings)]
        names = [name for name in names if name not in chosen]
        lines += [f"## {title}", ""]
        for name in chosen:
            settings = recipe_text(name).split("\n\n", 1)[-1].strip()
            head = "\n".join(f"- {_markdown(line.lstrip('# '))}" for line in header(name).splitlines())
            lines += [f"### {name}", "", head, "", "```yaml", settings, "```", ""]
    return "\n".join(lines)
